"""Tables of a run that did not come to write them, made by `report` of what it left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest

from support.commands import scanloom
from support.faults import Quick

TABLES = ("manifest.csv", "manifest.parquet", "measurements.csv", "measurements.parquet")


def run_that_died(folder: Path) -> tuple[Quick, dict[str, bytes]]:
    """Do a whole run, and take away what its end writes; return its tables."""
    quick = Quick(folder)
    quick.workflow.write_text(quick.workflow.read_text().replace("modality: MR", "modality: CT"))
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 4), np.int16), np.eye(4)), quick.scans / "2.nii")
    (quick.scans / "notes.txt").write_text("no scan")
    scanloom(*quick.words())
    tables = {name: (quick.out / name).read_bytes() for name in TABLES}
    for name in TABLES:
        (quick.out / name).unlink()
    (quick.last / "totals.json").unlink()
    return quick, tables


@pytest.fixture(scope="module")
def died(
    tmp_path_factory: pytest.TempPathFactory, warm_workers: SimpleNamespace
) -> tuple[Quick, dict[str, bytes]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scanloom.engine.worker.child_process.subprocess", warm_workers)
        return run_that_died(tmp_path_factory.mktemp("died") / "quick")


def test_who_has_no_key_gets_the_measurements_and_is_told(
    died: tuple[Quick, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, tables = died
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "none"))
    ended = scanloom("report", quick.out)
    assert ended.code == 0, ended.err
    assert "the manifest lacks the latest run: give the key" in ended.err
    assert (quick.out / "measurements.csv").read_bytes() == tables["measurements.csv"]
    assert not (quick.out / "manifest.csv").exists()


def test_who_has_the_key_gets_the_same_tables(
    died: tuple[Quick, dict[str, bytes]],
) -> None:
    quick, tables = died
    assert b"used" in tables["manifest.csv"]
    assert b"failed" in tables["manifest.csv"]

    ended = scanloom("report", quick.out)

    assert (ended.code, ended.err) == (0, "")
    assert {name: (quick.out / name).read_bytes() for name in TABLES} == tables


def test_sources_that_are_gone_change_no_more_than_the_ids_of_their_files(
    died: tuple[Quick, dict[str, bytes]],
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
