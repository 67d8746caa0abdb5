"""Scans that change between two runs, and results that do: nothing old is taken for current."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from scanloom.core import Series, StepTimer
from scanloom.engine.prepare import OutputTarget, prepare
from scanloom.engine.steps import run_case
from scanloom.engine.workflow.selection import Scope
from scanloom.io.identity import channels_hash
from scanloom.io.read import load_volume
from support import engine_models as em
from support.commands import scanloom
from support.make_run import GOOD, Runs
from support.write_dicom import Words, noise, write_series

SLICES = 20
BLOCK = 9
"""Voxels above the threshold in each slice."""
Counts = dict[str, int]


def write_slices(folder: Path, name: str = "a study", brightest: int = GOOD[0]) -> list[Path]:
    """Write a CT in which each slice has `BLOCK` bright voxels; return its files in order."""
    stored = noise((12, 10, SLICES), brightest) % 900
    stored[3:6, 3:6] = brightest + 1024
    return write_series(folder, stored, words=Words(name=name, study=f"study of {name}"))


def add(files: list[Path], folder: Path) -> None:
    for file in files:
        shutil.copy2(file, folder)


def voxels(runs: Runs) -> list[int]:
    """Return the voxels of each case, by the table."""
    return [int(row["voxels"]) for row in runs.rows("measurements")]


def outcomes(runs: Runs) -> Counts:
    counts: Counts = {}
    for row in runs.rows("manifest"):
        name = row["reason"] or row["outcome"]
        counts[name] = counts.get(name, 0) + 1
    return counts


def files_of_cases(runs: Runs) -> int:
    cases = (json.loads(p.read_text()) for p in runs.out.glob("cases/*/case.json"))
    return sum(case["source"]["files"] for case in cases)


@pytest.mark.slow
def test_a_study_that_arrives_in_five_parts_is_made_anew_each_time(
    runs: Runs, tmp_path: Path
) -> None:
    files = write_slices(tmp_path / "scanner")
    for delivery in range(5):
        add(files[4 * delivery : 4 * delivery + 4], runs.archive)

        planned = scanloom("plan", runs.workflow, runs.archive, "--out", runs.out, "--json")
        ended = runs()

        delivered = 4 * (delivery + 1)
        assert ended.code == 0, ended.out + ended.err
        assert planned.document["plan"]["todo"] == 1
        assert ended.document["status"]["remade"] == (delivery > 0)
        assert voxels(runs) == [BLOCK * delivered]
        assert outcomes(runs) == {"used": delivered}
        assert files_of_cases(runs) == delivered
        assert scanloom("verify", runs.out).code == 0
    assert runs.started == {GOOD[0]: 5}
    before = runs.cases()
    assert runs().document["status"]["before"] == 1
    assert runs.cases() == before


@pytest.mark.thorough
def test_a_part_that_leaves_a_gap_keeps_the_older_result_and_says_so(
    runs: Runs, tmp_path: Path
) -> None:
    """Slices 1-4, then 9-12 as well, then all arrive: the second run has no new result."""
    files = write_slices(tmp_path / "scanner")
    add(files[:4], runs.archive)
    assert runs().code == 0
    [case] = runs.cases()
    add(files[8:12], runs.archive)

    gap = runs()

    assert gap.code == 65  # no case is left
    assert gap.document["status"]["reasons"] == {"SLICE_GAP": 1}
    assert outcomes(runs) == {"SLICE_GAP": 8}
    assert json.loads((runs.out / "failed" / f"{case}.json").read_text())["reason"] == "SLICE_GAP"
    assert list(runs.cases()) == [case]
    assert [row["flags"].split()[-1] for row in runs.rows("measurements")] == ["OUTDATED"]
    report = (runs.out / "report" / "index.html").read_text()
    assert "the later attempt failed (SLICE_GAP)" in report
    assert scanloom("verify", runs.out).code == 0

    add(files, runs.archive)
    whole = runs()

    assert whole.code == 0, whole.err
    assert voxels(runs) == [BLOCK * SLICES]
    assert outcomes(runs) == {"used": SLICES}
    assert not list((runs.out / "failed").iterdir())
    assert "OUTDATED" not in runs.rows("measurements")[0]["flags"]


def change_pixels(file: Path) -> None:
    """Make the bright voxels of a slice dark: same size, same UIDs, another content."""
    content = bytearray(file.read_bytes())
    bright = (GOOD[0] + 1024).to_bytes(2, "little")
    while (offset := content.find(bright, len(content) - 2 * 12 * 10)) >= 0:
        content[offset : offset + 2] = (0).to_bytes(2, "little")
    file.write_bytes(content)


@pytest.mark.slow
def test_pixels_that_changed_give_new_results(runs: Runs, tmp_path: Path) -> None:
    files = write_slices(runs.archive)
    assert runs().code == 0
    change_pixels(files[7])

    ended = runs()

    assert ended.code == 0, ended.err
    assert ended.document["status"]["remade"] == 1
    assert voxels(runs) == [BLOCK * (SLICES - 1)]


@pytest.mark.slow
def test_files_that_were_only_copied_are_not_worked_on_again(runs: Runs, tmp_path: Path) -> None:
    """Content is compared once; after that the copies are known by their times of change."""
    write_slices(runs.archive / "one")
    write_slices(runs.archive / "two", "another", GOOD[1])
    assert runs().code == 0
    started, before = runs.started, runs.cases()
    copies = tmp_path / "copies"
    shutil.copytree(runs.archive, copies, copy_function=shutil.copyfile)
    runs.archive = copies

    first, second = runs(), runs()

    assert (first.code, second.code) == (0, 0), first.err
    assert runs.started == started
    assert runs.cases().keys() == before.keys()
    compared, known = first.document["status"], second.document["status"]
    assert (compared["done"], compared["before"], compared["recalled"]) == (0, 2, 2)
    assert (known["done"], known["before"], known["recalled"]) == (0, 2, 0)
    assert (first.document["totals"]["steps"], first.document["totals"]["slowest"]) == ({}, [])


@pytest.mark.slow
def test_a_case_that_failed_is_tried_again_when_its_files_change(
    runs: Runs, tmp_path: Path
) -> None:
    files = write_slices(runs.archive)
    whole = files[3].read_bytes()
    files[3].write_bytes(whole[: len(whole) // 2 + 300])
    assert runs().code == 65  # no case
    assert sum(outcomes(runs).values()) == SLICES
    files[3].write_bytes(whole)

    ended = runs()

    assert ended.code == 0, ended.err
    assert outcomes(runs) == {"used": SLICES}
    assert not list((runs.out / "failed").iterdir())


@pytest.mark.slow
def test_series_that_fail_at_indexing_are_in_failed_status_and_report(
    runs: Runs, tmp_path: Path
) -> None:
    """They are there no longer after repair, or if the selection excludes them."""
    write_slices(runs.archive / "fine")
    broken = write_slices(runs.archive / "broken", "another", GOOD[1])
    broken[9].rename(tmp_path / "later")

    strict, ended = runs("--strict"), runs()

    assert (strict.code, ended.code) == (1, 0)  # the selected cases are done
    status = ended.document["status"]
    assert (status["cases"], status["before"], status["failed"]) == (2, 1, 1)
    [path] = (runs.out / "failed").iterdir()
    assert json.loads(path.read_text())["reason"] == "SLICE_GAP"
    assert path.stem in (runs.out / "report" / "index.html").read_text()
    assert str(runs.archive / "broken") in scanloom("where", path.stem, "--out", runs.out).out

    runs.write("modality: MR")
    runs()
    assert not list((runs.out / "failed").iterdir())

    runs.write()
    shutil.move(tmp_path / "later", broken[9])
    assert runs().code == 0
    assert not list((runs.out / "failed").iterdir())


@pytest.mark.parametrize("harm", ["cut", "gone"])
@pytest.mark.slow
def test_damage_that_verify_sees_is_seen_by_report_and_run(runs: Runs, harm: str) -> None:
    write_slices(runs.archive)
    assert runs().code == 0
    [case] = runs.cases()
    file = runs.out / "cases" / case / "segmentation.nii.gz"
    if harm == "cut":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.unlink()

    report, ended = scanloom("report", runs.out), runs()

    assert scanloom("verify", runs.out).code == 1
    for reported in (report, ended):
        assert reported.code == 1
        assert f"case {case} is damaged" in reported.err
    assert voxels(runs) == []
    assert runs("--replace").code == 0
    assert voxels(runs) == [BLOCK * SLICES]


@pytest.mark.slow
def test_a_correction_beside_a_result_is_never_destroyed_unasked(
    runs: Runs, tmp_path: Path
) -> None:
    files = write_slices(tmp_path / "scanner")
    add(files[:10], runs.archive)
    assert runs().code == 0
    [case] = runs.cases()
    mine = runs.out / "cases" / case / "segmentation_corrected.nii.gz"
    mine.write_text("hours of work")
    (mine.parent / ".DS_Store").touch()
    add(files, runs.archive)

    ended = runs()

    assert ended.code == 1
    assert ended.document["status"]["reasons"] == {"STALE": 1}
    assert mine.read_text() == "hours of work"
    mine.unlink()
    assert runs().code == 0
    assert voxels(runs) == [BLOCK * SLICES]


@pytest.mark.slow
def test_a_stray_file_that_comes_and_goes_damages_no_result(runs: Runs) -> None:
    write_slices(runs.archive)
    assert runs().code == 0
    [case] = runs.cases()
    folder = runs.out / "cases" / case
    (folder / ".DS_Store").touch()
    for file in (folder / "case.json", folder / "segmentation.nii.gz"):
        os.utime(file, (0, 0))
    assert runs().code == 0
    (folder / ".DS_Store").unlink()

    assert runs().code == 0
    assert voxels(runs) == [BLOCK * SLICES]


@pytest.mark.slow
def test_a_scan_that_is_left_out_after_it_changed_has_an_outdated_result(
    runs: Runs, tmp_path: Path
) -> None:
    """Its result is not that of the files that are there; left out as it was, it is current."""
    files = write_slices(runs.archive)
    assert runs().code == 0
    runs.write("modality: CT, min_slices: 30")

    assert runs().code == 65  # no case
    assert "OUTDATED" not in runs.rows("measurements")[0]["flags"]

    for file in files[5:]:
        file.unlink()
    for _ in range(2):
        assert runs().code == 65
        assert "OUTDATED" in runs.rows("measurements")[0]["flags"]

    runs.write()
    assert runs().code == 0
    assert voxels(runs) == [BLOCK * 5]
    assert "OUTDATED" not in runs.rows("measurements")[0]["flags"]


@pytest.mark.slow
def test_a_run_keeps_the_names_that_segment_gave(runs: Runs, tmp_path: Path) -> None:
    files = write_slices(tmp_path / "scanner")
    add(files[:10], runs.archive)
    assert runs().code == 0
    [case] = runs.cases()
    crosswalk = runs.out / "private" / "crosswalk.parquet"
    table = parquet.read_table(crosswalk)
    names = pa.array(["A-1" if case_id == case else "" for case_id in table["id"].to_pylist()])
    named = table.set_column(table.schema.get_field_index("folder"), "folder", names)
    parquet.write_table(named, crosswalk)
    (runs.out / "cases" / case).rename(runs.out / "cases" / "A-1")
    add(files, runs.archive)

    ended = runs()

    assert ended.code == 0, ended.err
    assert list(runs.cases()) == ["A-1"]
    assert voxels(runs) == [BLOCK * SLICES]
    assert runs().document["status"]["before"] == 1


def test_volume_files_that_share_an_id_and_differ_are_told(runs: Runs) -> None:
    """An id is made of samples of a file: neither of them is taken for the other."""
    values = np.full((64, 64, 64), -1000, np.int16)
    values[3:6, 3:6, 1:3] = GOOD[0]
    image = nib.Nifti1Image(values, np.eye(4))
    for name in ("one.nii", "two.nii"):
        nib.save(image, runs.archive / name)
    content = bytearray((runs.archive / "two.nii").read_bytes())
    content[len(content) // 2 + 5000] = 1
    (runs.archive / "two.nii").write_bytes(content)
    runs.write(more="policy: {modality: CT}\n")

    ended = runs()

    assert ended.code == 1
    assert outcomes(runs) == {"ID_TAKEN": 2}
    assert not (runs.out / "cases").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan.nii", "scan.hdr"])
def test_a_volume_file_that_holds_another_scan_outdates_the_result_of_the_first(
    runs: Runs, name: str
) -> None:
    def write(brightest: int) -> None:
        values = np.full((12, 10, 4), -1000, np.int16)
        values[3:6, 3:6, 1:3] = brightest
        kind = nib.Nifti1Pair if name == "scan.hdr" else nib.Nifti1Image
        nib.save(kind(values, np.eye(4)), runs.archive / name)

    runs.write(more="policy: {modality: CT}\n")
    write(GOOD[0])
    assert runs().code == 0
    [first] = runs.cases()
    write(GOOD[1])

    assert runs().code == 0

    flags = {row["case"]: row["flags"].split() for row in runs.rows("measurements")}
    assert len(flags) == 2
    assert [case for case, codes in flags.items() if "OUTDATED" in codes] == [first]


@pytest.mark.slow
def test_shards_report_current_files(runs: Runs, tmp_path: Path) -> None:
    """The status has no entries of an earlier shard about files that are gone or changed since."""
    for number in range(4):
        write_slices(runs.archive / str(number), f"study {number}", GOOD[number])
    shards = [("--shard", f"{shard}/2") for shard in (1, 2)]
    assert [runs(*options).code for options in shards] == [0, 0]
    assert outcomes(runs) == {"used": 4 * SLICES}
    of_second = {case for case in runs.cases() if Scope(shard=(2, 2)).holds(case)}
    joined = scanloom("where", *of_second, "--out", runs.out, "--json").document
    [changed, *_] = [Path(row["path"]) for row in joined["sources"]]
    gone = next(path for path in runs.archive.iterdir() if path != changed)
    shutil.rmtree(gone)
    change_pixels(min(changed.iterdir()))

    runs(*shards[0])

    assert outcomes(runs) == {"used": 2 * SLICES, "open": SLICES}
    runs(*shards[1])
    assert outcomes(runs) == {"used": 3 * SLICES}


# --- segment ------------------------------------------------------------------------------------


class Segments:
    """Segments a path by the tiny network, into one output folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.out, self._model, self._key = folder / "out", model, folder / "key"

    def __call__(self, path: Path) -> dict[str, object]:
        where = ("--out", self.out, "--key", self._key, "--json")
        ended = scanloom("segment", path, "--model", self._model, *where)
        assert ended.code == 0, ended.err
        [case] = ended.document["cases"]
        return case

    def slices(self) -> int:
        [folder] = (self.out / "cases").iterdir()
        return int(nib.load(folder / "segmentation.nii.gz").shape[2])


@pytest.mark.thorough
def test_a_folder_that_was_completed_is_segmented_anew(tmp_path: Path, model: Path) -> None:
    segment, scan = Segments(tmp_path, model), tmp_path / "scan"
    files = write_slices(tmp_path / "scanner")
    scan.mkdir()
    add(files[:10], scan)
    segment(scan)
    add(files, scan)

    case = segment(scan)

    assert (case["remade"], case["recalled"], segment.slices()) == (True, False, SLICES)
    again = segment(scan)
    assert (again["remade"], again["recalled"]) == (False, True)


@pytest.mark.thorough
def test_a_piece_of_the_same_series_elsewhere_gets_its_own_result(
    tmp_path: Path, model: Path
) -> None:
    segment, piece = Segments(tmp_path, model), tmp_path / "piece"
    files = write_slices(tmp_path / "whole")
    piece.mkdir()
    add(files[5:12], piece)
    segment(tmp_path / "whole")

    case = segment(piece)

    assert (case["remade"], segment.slices()) == (True, 7)


@pytest.mark.thorough
def test_a_volume_file_whose_middle_changed_is_segmented_anew(tmp_path: Path, model: Path) -> None:
    """The change lies between the samples of its fingerprint: its case id stays the same."""
    segment, path = Segments(tmp_path, model), tmp_path / "scan.nii"
    values = noise((64, 64, 64)) - 1024
    nib.save(nib.Nifti1Image(values, np.diag([1.0, 1.0, 2.0, 1.0])), path)
    first = segment(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 + 5000] ^= 0x40
    path.write_bytes(content)

    case = segment(path)

    assert case["case"] == first["case"]
    assert case["remade"]


def test_a_file_that_changes_while_it_is_read_gives_no_result(tmp_path: Path) -> None:
    case = replace(em.make_case(tmp_path, "scan"), source_hash="")
    [file] = case.series.files

    def touch(step: str) -> None:
        if step == "load":
            file.write_bytes(file.read_bytes())

    key = b"k" * 32
    target = OutputTarget(tmp_path / "out", key)
    (tmp_path / "weights").touch()
    models = em.threshold_models(tmp_path / "weights")
    prepared = prepare(case, [model.card for model in models], target)
    record = run_case(prepared, lambda: models, target, StepTimer(touch))

    assert record.reason is not None
    assert (record.reason.code, record.reason.retry) == ("SOURCE_CHANGED", True)
    assert not (tmp_path / "out").exists()


def test_the_order_of_channels_counts(tmp_path: Path) -> None:
    """A workflow whose channels were exchanged does not take the result of the first."""
    series = [
        em.make_case(tmp_path, name, task).series for name, task in (("a", 1000), ("b", 2000))
    ]

    assert channels_hash(series, b"k" * 32) != channels_hash(series[::-1], b"k" * 32)
    assert channels_hash(series[:1], b"k" * 32) == channels_hash(
        [Series("nifti", series[0].files)], b"k" * 32
    )


def test_an_archive_that_changed_is_unpacked_again(tmp_path: Path) -> None:
    """The archive changes within one process, such as a notebook."""
    maxima = []
    for brightest in GOOD[:2]:
        folder = tmp_path / str(brightest)
        write_slices(folder, brightest=brightest)
        with zipfile.ZipFile(tmp_path / "scan.zip", "w") as pack:
            for file in sorted(folder.iterdir()):
                pack.write(file, file.name)
        maxima.append(int(load_volume(tmp_path / "scan.zip").array.max()))

    assert maxima == [*GOOD[:2]]
