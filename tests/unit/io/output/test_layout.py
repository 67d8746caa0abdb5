"""Where cases lie: in `cases/` itself, or in its subfolders if they are many."""

from __future__ import annotations

import os
import random
import tracemalloc
from pathlib import Path

import pytest

from scanloom.core import ScanError
from scanloom.io.output import layout as module
from scanloom.io.output.case_folder import CaseFolder
from scanloom.io.output.json_file import write_document, write_json
from scanloom.io.output.layout import (
    SUBFOLDERS,
    case_folder,
    case_parents,
    check_foreign_entries,
    fan_out,
    identity_of,
    is_fanned,
    is_output_folder,
    iter_cases,
    no_results,
    output_of,
    published_cases,
    taken_names,
)
from scanloom.io.output.private import KEY_FINGERPRINT, PRIVATE
from scanloom.io.output.work_folder import open_output
from scanloom.io.system.regular_files import refuse_links_below
from scanloom.io.system.scratch_folders import host_id, process_start_ticks

LETTERS = "abcdefghijklmnopqrstuvwxyz234567"


def publish(out: Path, name: str, text: str = "x", *, replace: bool = False) -> Path:
    with CaseFolder(out, name) as folder:
        write_document(folder.path / "case.json", {"recipe": text, "source": {"hash": "s"}})
        write_document(folder.path / "timing.json", {})
        return folder.publish(replace=replace)


def test_an_output_folder_with_cases_goes_on_in_subfolders(tmp_path: Path) -> None:
    """Those that are there stay, also when they are replaced; all are read in order of names."""
    first = publish(tmp_path, "case5")
    fan_out(tmp_path)
    second, third = publish(tmp_path, "case4"), publish(tmp_path, "case6")

    assert first == tmp_path / "cases" / "case5"
    assert second == tmp_path / "cases" / "_e4" / "case4"
    assert publish(tmp_path, "case5", "another", replace=True) == first
    assert publish(tmp_path, "case4", "another", replace=True) == second
    assert list(published_cases(tmp_path)) == [second, first, third]
    assert list(published_cases(tmp_path).names()) == ["case4", "case5", "case6"]
    assert len(published_cases(tmp_path)) == 3
    assert {output_of(folder) for folder in (first, second)} == {tmp_path}
    damaged = set[str]()
    assert list(iter_cases(tmp_path, lambda *case: case[0].name, damaged)) == [
        "case4",
        "case5",
        "case6",
    ]
    assert not damaged


def test_a_case_in_both_places_counts_once(tmp_path: Path) -> None:
    for name in ("both", "flat"):
        publish(tmp_path, name)
    fan_out(tmp_path)
    (tmp_path / "cases" / "_th" / "both").mkdir(parents=True)
    publish(tmp_path, "fanned")

    assert len(published_cases(tmp_path)) == 3


def test_without_the_file_the_cases_in_subfolders_are_still_there(tmp_path: Path) -> None:
    """Some programs do not copy files whose names begin so."""
    fan_out(tmp_path)
    old = publish(tmp_path, "old")
    (tmp_path / "cases" / SUBFOLDERS).unlink()

    assert case_folder(tmp_path, "old") == old
    assert publish(tmp_path, "new") == tmp_path / "cases" / "new"
    assert [p.name for p in published_cases(tmp_path)] == ["new", "old"]


def test_only_many_cases_are_fanned_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FANNED_ABOVE", 3)
    fan_out(tmp_path / "out", 3)
    assert not (tmp_path / "out").exists()

    for name in ("a", "b", "c"):
        publish(tmp_path / "some", name)
    fan_out(tmp_path / "some", 0)
    assert not is_fanned(tmp_path / "some")
    fan_out(tmp_path / "some", 1)
    assert is_fanned(tmp_path / "some")
    fan_out(tmp_path / "many", 4)
    assert [p.name for p in (tmp_path / "many" / "cases").iterdir()] == [SUBFOLDERS]


def test_names_are_in_the_order_of_their_characters(tmp_path: Path) -> None:
    """Of any length and script, in either place."""
    rng = random.Random(3)
    alphabet = [*LETTERS, "-", "_", "A", "é", "漢", "𐐷"]
    names = {"x" + "".join(rng.choices(alphabet, k=rng.randrange(6))) for _ in range(300)}
    for n, name in enumerate(sorted(names)):
        if n == len(names) // 2:
            fan_out(tmp_path)
        case_folder(tmp_path, name).mkdir(parents=True)
    (tmp_path / "cases" / "_zz").mkdir(exist_ok=True)
    (tmp_path / "cases" / "_zz" / "elsewhere").mkdir()  # of another subfolder: foreign
    (tmp_path / "cases" / "_zz" / "notes-zz").touch()

    folders = list(published_cases(tmp_path))

    assert [folder.name for folder in folders] == sorted(names)
    assert folders == [case_folder(tmp_path, folder.name) for folder in folders]
    assert {*taken_names(tmp_path)} == names | {"elsewhere", "notes-zz"}


@pytest.mark.parametrize("fanned", [False, True])
def test_a_name_takes_little_memory(tmp_path: Path, fanned: bool) -> None:
    """Less than the 75 bytes of a `str` alone, and in few runs."""
    rng, count = random.Random(4), 3000
    if fanned:
        fan_out(tmp_path)
    for _ in range(count):
        name = "".join(rng.choices(LETTERS, k=25)) + rng.choice("aeimquy4")
        case_folder(tmp_path, name).mkdir(parents=True)
    tracemalloc.start()
    try:
        cases = published_cases(tmp_path)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held / count < 32
    assert sum(1 for _ in cases) == count
    assert 200 < len(case_parents(tmp_path)) <= 257 if fanned else len(case_parents(tmp_path)) == 1


def test_an_output_folder_is_recognised_by_a_case_in_a_subfolder(tmp_path: Path) -> None:
    fan_out(tmp_path)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key.fingerprint").write_text("damaged")
    inside = ["cases", "private"]
    assert not is_output_folder(str(tmp_path), inside)

    publish(tmp_path, "aa")

    assert is_output_folder(str(tmp_path), inside)


def test_a_run_that_died_before_its_first_result_may_begin_again(tmp_path: Path) -> None:
    """The file, and an empty subfolder, are no foreign entries; a file in it is."""
    fan_out(tmp_path)
    (tmp_path / "cases" / "_aa").mkdir()
    check_foreign_entries(tmp_path)

    (tmp_path / "cases" / "_aa" / "letter").touch()
    with pytest.raises(ScanError, match="cases in the output folder was not written by scanloom"):
        check_foreign_entries(tmp_path)


@pytest.mark.parametrize("link", ["cases", "_aa"])
def test_no_case_is_published_through_a_link(tmp_path: Path, link: str) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    refuse_links_below(out)
    if link == "cases":
        out.mkdir()
        (out / "cases").symlink_to(elsewhere)
        with pytest.raises(OSError, match=r"symbolic link|directory"):
            fan_out(out)
    else:
        fan_out(out)
        (out / "cases" / "_aa").symlink_to(elsewhere)
        with pytest.raises(ScanError, match="OUTPUT_UNWRITABLE"):
            publish(out, "aa")
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    ("path", "held"),
    [
        ("cases/_folders", "ids"),
        ("cases/_aa/caseaa/case.json", "ids"),
        ("cases/_aa/caseaa/dicom/segmentation.dcm", "dicom"),
        ("cases/_om/dicom/case.json", "ids"),  # cases that are called like folders of files
        ("cases/_it/split/preview.png", "pixels"),
        ("cases/_it/split/split/liver.nii.gz", "shapes"),
    ],
)
def test_files_in_subfolders_hold_what_they_hold_elsewhere(path: str, held: str) -> None:
    assert identity_of(Path(path)) == held


@pytest.mark.parametrize("path", ["cases/_aa/case.json", "cases/_ab/caseaa/case.json", "."])
def test_files_in_no_case_are_not_described(path: str) -> None:
    with pytest.raises(ValueError, match="0 entries"):
        identity_of(Path(path))


def test_a_replacement_that_was_interrupted_is_finished_in_an_older_folder_too(
    tmp_path: Path,
) -> None:
    """Between its renames the case is in no place: it becomes a new one, and is there once."""
    old = publish(tmp_path, "caseaa")
    fan_out(tmp_path)
    dead = tmp_path / ".work" / f"caseaa.{'0' * 8}.1.2.{'3' * 8}.old"  # of another host
    old.rename(dead)
    os.utime(dead, (0, 0))

    open_output(tmp_path, "0123456789abcdef")

    assert case_folder(tmp_path, "caseaa") == tmp_path / "cases" / "_aa" / "caseaa"
    assert [folder.name for folder in published_cases(tmp_path)] == ["caseaa"]
    assert not list((tmp_path / ".work").iterdir())


@pytest.mark.parametrize(
    ("state", "detail"),
    [
        ("running", "there are no results in this output folder yet: a run is at work"),
        ("stopped", "there are no results in this output folder"),
    ],
)
def test_a_folder_without_results_tells_that_a_run_is_at_work(
    tmp_path: Path, state: str, detail: str
) -> None:
    (tmp_path / PRIVATE).mkdir()
    (tmp_path / PRIVATE / KEY_FINGERPRINT).write_text("a" * 26)
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    process = os.getpid()
    status = {"state": state, "host": host_id(), "process": process}
    write_json(run / "status.json", {**status, "start": process_start_ticks(process)})
    assert no_results(tmp_path).detail == detail
