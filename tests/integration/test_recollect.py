"""`report` writes the tables of a run that ended before it wrote them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import nibabel
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from pydicom import Dataset, dcmread

from scanloom.io.output.crosswalk import sources_by_folder
from support.commands import scanloom
from support.faults import QuickRun
from support.make_run import GOOD, Runs, write_study
from support.write_dicom import noise, write_series

TABLES = ("manifest.csv", "manifest.parquet", "measurements.csv", "measurements.parquet")


def run_that_died(folder: Path) -> tuple[QuickRun, dict[str, bytes]]:
    """Finish a run, and remove the files that its end writes; return its tables."""
    quick = QuickRun(folder)
    quick.workflow.write_text(quick.workflow.read_text().replace("modality: MR", "modality: CT"))
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 4), np.int16), np.eye(4)), quick.scans / "2.nii")
    (quick.scans / "notes.txt").write_text("no scan")
    scanloom(*quick.command())
    tables = {name: (quick.out / name).read_bytes() for name in TABLES}
    for name in TABLES:
        (quick.out / name).unlink()
    (quick.last / "totals.json").unlink()
    return quick, tables


@pytest.fixture(scope="module")
def died(
    tmp_path_factory: pytest.TempPathFactory, warm_workers: SimpleNamespace
) -> tuple[QuickRun, dict[str, bytes]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scanloom.engine.worker.supervisor.subprocess", warm_workers)
        return run_that_died(tmp_path_factory.mktemp("died") / "quick")


def test_without_the_key_only_measurements_are_rebuilt(
    died: tuple[QuickRun, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, tables = died
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "none"))
    ended = scanloom("report", quick.out)
    assert ended.code == 1, ended.err  # the tables are not complete
    assert "the manifest is missing or lacks the latest run: give the key" in ended.err
    assert (quick.out / "measurements.csv").read_bytes() == tables["measurements.csv"]
    assert not (quick.out / "manifest.csv").exists()


def test_with_the_key_the_same_tables_are_rebuilt(
    died: tuple[QuickRun, dict[str, bytes]],
) -> None:
    quick, tables = died
    assert b"used" in tables["manifest.csv"]
    assert b"failed" in tables["manifest.csv"]

    ended = scanloom("report", quick.out)

    assert (ended.code, ended.err) == (0, "")
    assert {name: (quick.out / name).read_bytes() for name in TABLES} == tables


@pytest.mark.parametrize("damage", ["missing", "damaged"])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_is_missing_or_damaged_is_made_anew(
    died: tuple[QuickRun, dict[str, bytes]], name: str, damage: str
) -> None:
    """The tables are written again, also after a complete run, as the test pretends."""
    quick, tables = died
    scanloom("report", quick.out)
    (quick.last / "totals.json").write_text("{}")
    try:
        (quick.out / name).unlink()
        if damage == "damaged" and name.endswith("parquet"):
            (quick.out / name).write_bytes(b"PAR1 no more")

        ended = scanloom("report", quick.out)
    finally:
        (quick.last / "totals.json").unlink()

    assert ended.code == 0, ended.err
    assert {each: (quick.out / each).read_bytes() for each in TABLES} == tables


def test_a_run_that_died_while_it_indexed_keeps_nobody_from_a_report(
    died: tuple[QuickRun, dict[str, bytes]],
) -> None:
    quick, tables = died
    newest = quick.out / "runs" / "99990101T000000-abcdef"
    newest.mkdir()
    try:
        (quick.out / "manifest.csv").unlink(missing_ok=True)
        ended = scanloom("report", quick.out)
    finally:
        newest.rmdir()

    assert ended.code == 0, ended.err
    assert {name: (quick.out / name).read_bytes() for name in TABLES} == tables


def test_sources_that_are_gone_change_no_more_than_the_ids_of_their_files(
    died: tuple[QuickRun, dict[str, bytes]],
) -> None:
    quick, tables = died
    for scan in quick.scans.iterdir():
        scan.unlink()

    assert scanloom("report", quick.out).code == 0

    now, before = (
        [line.partition(b",")[2] for line in table.splitlines()]
        for table in ((quick.out / "manifest.csv").read_bytes(), tables["manifest.csv"])
    )
    assert now == before


def write_two_echoes(folder: Path) -> None:
    def edit(k: int, header: Dataset) -> None:
        header.EchoTime = 10 * (k % 2 + 1)
        header.ImagePositionPatient[2] = 5.0 * (k // 2)

    write_series(folder, noise((12, 10, 8)) % 900, edit=edit)


def name_by_source(out: Path) -> None:
    """Rename all case folders, as if `segment --names source` had published them."""
    crosswalk = out / "private" / "crosswalk.parquet"
    table = parquet.read_table(crosswalk)
    names = {case: f"A-{n}" for n, case in enumerate(table["id"].to_pylist())}
    column = pa.array([names[case] for case in table["id"].to_pylist()])
    position = table.schema.get_field_index("folder")
    parquet.write_table(table.set_column(position, "folder", column), crosswalk)
    for folder in (out / "cases").iterdir():
        folder.rename(folder.with_name(names[folder.name]))


@pytest.mark.thorough
def test_phases_in_folders_that_are_named_by_source(runs: Runs) -> None:
    write_two_echoes(runs.archive)
    runs.write(select="modality: CT", more="policy: {phases: all}\n")
    assert runs().code == 0
    assert len(runs.cases()) == 2
    name_by_source(runs.out)
    assert runs().code == 0
    manifest = (runs.out / "manifest.csv").read_bytes()
    assert b"used" in manifest
    newest = sorted((runs.out / "runs").glob("*/"))[-1]
    (runs.out / "manifest.csv").unlink()
    (newest / "totals.json").unlink()

    assert scanloom("report", runs.out).code == 0

    assert (runs.out / "manifest.csv").read_bytes() == manifest


@pytest.mark.thorough
def test_a_volume_of_a_series_is_found_without_those_before_it(runs: Runs) -> None:
    """The first one's result was removed, as if `segment --phase 1` had made the second alone."""
    write_two_echoes(runs.archive)
    runs.write(select="modality: CT", more="policy: {phases: all}\n")
    assert runs().code == 0
    by_phase = {row.phase: name for name, row in sources_by_folder(runs.out).items()}
    first, second = by_phase["0"], by_phase["1"]
    shutil.rmtree(runs.out / "cases" / first)
    newest = sorted((runs.out / "runs").glob("*/"))[-1]
    (newest / "totals.json").unlink()

    assert scanloom("report", runs.out).code == 0
    assert {row["outcome"] for row in runs.rows("manifest")} == {"used"}

    away = runs.archive.with_name("away")
    away.mkdir()
    for path in list(runs.archive.iterdir()):
        if dcmread(path).EchoTime == 20:  # of the second volume
            path.rename(away / path.name)
    assert runs().code == 0
    flags = {row["case"]: row["flags"] for row in runs.rows("measurements")}
    assert "OUTDATED" in flags.pop(second)
    assert len(flags) == 1
    assert "OUTDATED" not in "".join(flags.values())

    for path in list(away.iterdir()):
        path.rename(runs.archive / path.name)
    runs.write(select="modality: CT")  # it is ambiguous now, which makes no result outdated
    runs()
    flags = {row["case"]: row["flags"] for row in runs.rows("measurements")}
    assert "OUTDATED" not in flags[second]


@pytest.mark.thorough
def test_a_result_of_another_version_ends_no_run(runs: Runs) -> None:
    """It is left out by name; the tables, the report and `bids` have all others."""
    for n, brightest in enumerate(GOOD[:2]):
        write_study(runs.archive, f"study {n}", brightest)
    assert scanloom("plan", runs.workflow, runs.archive, "--out", runs.out).code == 0
    assert runs().code == 0
    other, ours = runs.cases()
    theirs = [runs.out / "cases" / other / name for name in ("case.json", "timing.json")]
    for file in (*theirs, *runs.out.glob("runs/*/totals.json"), *runs.out.glob("runs/*.json")):
        file.write_text(json.dumps({**json.loads(file.read_text()), "schema": 9, "files": {}}))
    write_study(runs.archive, "study 2", GOOD[2])

    ended = runs("--bids")

    assert ended.code == 1
    assert f"case {other} is left out (NEWER_VERSION)" in ended.err
    assert ended.document["damaged"] == [other]
    named = {row["case"] for row in runs.rows("measurements")}
    assert ours in named
    assert (other in named, len(named)) == (False, 2)
    assert len(list((runs.out / "bids").glob("sub-*"))) == 2
