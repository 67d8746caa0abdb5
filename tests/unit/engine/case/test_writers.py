"""The registry of writers: names, estimate, and a writer that it does not know yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import pytest

from scanloom.core import Outputs, ScanError
from scanloom.engine.case.writers import (
    WRITERS,
    estimate_writers,
    read_back,
    write_files,
    writers_of,
)
from scanloom.io.output.case_folder import CaseContent, Writer
from scanloom.options import EXTRAS
from support import case_folders, model_cards


def names(outputs: Outputs) -> list[str]:
    return [writer.name for writer in writers_of(outputs)]


def test_optional_writers_are_those_that_outputs_can_name() -> None:
    usual = ["dicom_seg", "label_maps", "measurements", "preview"]
    assert names(Outputs()) == usual
    assert set(names(Outputs(also=tuple(EXTRAS)))) == {*usual, *EXTRAS}
    assert {writer.name for writer in WRITERS} >= EXTRAS.keys()
    assert len({writer.name for writer in WRITERS}) == len(WRITERS)


def test_the_estimate_grows_by_what_is_asked_for(tmp_path: Path) -> None:
    card = model_cards.card(model_cards.small_weights(tmp_path))
    grid = model_cards.grid((100, 80, 60))
    usual = estimate_writers(grid, [card], Outputs())
    assert estimate_writers(grid, [card], Outputs(also=("masks",))) == usual + 100 * 80 * 60


def test_a_new_writer_takes_part_by_its_entry(tmp_path: Path) -> None:
    def write(folder: Path, content: CaseContent) -> None:
        (folder / "notes.txt").write_text(content.case.id)

    def compare(folder: Path, content: CaseContent) -> None:
        if (folder / "notes.txt").read_text() != content.case.id:
            raise ValueError("other notes")

    notes = Writer("notes", lambda _: {"notes.txt"}, write, compare)
    unused = Writer("unused", lambda _: set(), write, compare)
    scan = case_folders.dicom_scan()
    content = CaseContent(case_folders.case_with(), scan, [case_folders.segmentation_of(scan)])

    with pytest.raises(ScanError, match="WRITE_MISMATCH"):
        read_back(tmp_path, content, [notes])
    write_files(tmp_path, content, [notes, unused])
    read_back(tmp_path, content, [notes, unused])
    (tmp_path / "notes.txt").write_text("another")
    with pytest.raises(ValueError, match="other notes"):
        read_back(tmp_path, content, [notes])


def test_label_maps_and_masks_say_that_they_are(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    content = CaseContent(case_folders.case_with(), scan, [case_folders.segmentation_of(scan)])
    chosen = [each for each in WRITERS if each.name in ("label_maps", "masks", "image")]
    write_files(tmp_path, content, chosen)
    read_back(tmp_path, content, chosen)
    files = {str(f.relative_to(tmp_path)): nib.load(f) for f in tmp_path.rglob("*.nii.gz")}
    assert len(files) > 2
    assert files.pop("image.nii.gz").header.get_intent()[0] == "none"
    assert {image.header.get_intent()[0] for image in files.values()} == {"label"}


def written_by(*tasks: Callable[[], object]) -> None:
    """Write a case with a writer for each task, which writes nothing."""
    scan = case_folders.dicom_scan()
    content = CaseContent(case_folders.case_with(), scan, [])
    writers = [
        Writer(str(n), lambda _: {"file"}, lambda _folder, _content, task=task: task())
        for n, task in enumerate(tasks)
    ]
    write_files(Path(), content, writers)


def test_a_writer_waits_for_the_one_whose_files_it_reads() -> None:
    order: list[str] = []

    def write_late(*_: object) -> None:
        time.sleep(0.05)
        order.append("first")

    first = Writer("first", lambda _: {"a"}, write_late)
    second = Writer("second", lambda _: {"b"}, lambda *_: order.append("second"), after="first")
    scan = case_folders.dicom_scan()
    content = CaseContent(case_folders.case_with(), scan, [])
    write_files(Path(), content, [first, second])
    assert order == ["first", "second"]


def test_a_writer_is_after_the_one_that_it_waits_for() -> None:
    names = [writer.name for writer in WRITERS]
    for n, writer in enumerate(WRITERS):
        assert not writer.after or writer.after in names[:n]


def test_writers_run_at_the_same_time() -> None:
    """Each waits for the other: one after the other, neither would end."""
    both = threading.Barrier(2, timeout=120)
    written_by(both.wait, both.wait)


def test_an_error_comes_out_when_all_writers_have_ended() -> None:
    written: list[int] = []
    failed = threading.Event()

    def full() -> None:
        failed.set()
        raise OSError(28, "no space")

    def slow() -> None:
        failed.wait(120)
        written.append(1)

    with pytest.raises(OSError, match="no space"):
        written_by(full, slow)
    assert written == [1]
