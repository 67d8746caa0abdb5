"""Files at a path: each once, nothing outside the path, and in limited time."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import pytest

from scanloom.core import ScanError
from scanloom.engine.results.export import export
from scanloom.io.index import walk
from scanloom.io.index.series import find_series
from scanloom.io.index.walk import FileEntry, list_files
from scanloom.io.output.case_folder import CaseFolder
from scanloom.io.output.json_file import write_document
from scanloom.io.output.layout import fan_out, is_output_folder
from scanloom.io.session import current_session
from scanloom.io.system import archives, unpacking
from scanloom.io.system.archives import list_members
from scanloom.io.system.unpacking import UnpackedFiles
from support.archives import nifti, series, write_dicomdir, write_zip


def names(entries: list[FileEntry], root: Path) -> dict[str, str]:
    """Return the reasons of entries by their paths below the root."""
    return {os.path.relpath(e.path, root): e.reason.code if e.reason else "" for e in entries}


def touch(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("a" * 26 if path.endswith("key.fingerprint") else path)


def test_the_order_is_that_of_names_folder_by_folder(tmp_path: Path) -> None:
    touch(tmp_path, "b/2", "b/1", "a", "b/c/3", "d/4")
    assert list(names(list_files([tmp_path]), tmp_path)) == ["a", "b/1", "b/2", "b/c/3", "d/4"]


def test_a_link_never_hides_the_real_file_and_loops_end(tmp_path: Path) -> None:
    touch(tmp_path, "z/real", "other/x")
    (tmp_path / "a").symlink_to("z/real")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "z" / "loop").symlink_to(tmp_path, target_is_directory=True)
    paths = names(list_files([tmp_path]), tmp_path)
    assert paths == {"a": "DUPLICATE_LINK", "b": "DUPLICATE_LINK", "z/real": "", "other/x": ""}
    inside = names(list_files([tmp_path / "z"]), tmp_path)
    assert inside["z/real"] == ""
    assert sorted(inside.values()).count("") == 2  # what the loop leads to is found too, once


def test_what_is_named_is_taken_even_if_it_is_a_link_or_left_out(tmp_path: Path) -> None:
    touch(tmp_path, "bids/dataset_description.json", "bids/derivatives/a", "bids/sub-1/b")
    (tmp_path / "link").symlink_to("bids/sub-1/b")
    assert names(list_files([tmp_path / "link"]), tmp_path) == {"link": ""}
    whole = names(list_files([tmp_path / "bids"]), tmp_path)
    assert whole["bids/derivatives/a"] == "LEFT_OUT"
    both = names(list_files([tmp_path / "bids", tmp_path / "bids/derivatives"]), tmp_path)
    assert both["bids/derivatives/a"] == ""
    assert both.keys() == whole.keys()


def test_a_glob_pattern_names_files_and_what_is_called_like_one_is_itself(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.dcm", "a/2.dcm", "b/3.dcm", "[ab]")
    assert list(names(list_files([tmp_path / "*" / "*.dcm"]), tmp_path)) == [
        *("a/1.dcm", "a/2.dcm", "b/3.dcm")
    ]
    assert list(names(list_files([tmp_path / "[ab]"]), tmp_path)) == ["[ab]"]
    assert len(list_files([tmp_path / "**" / "*.dcm"])) == 3
    with pytest.raises(ScanError) as caught:
        list_files([tmp_path / "*.nii"])
    assert caught.value.code == "NOT_FOUND"


OUTPUT = (
    "out/private/key.fingerprint",
    "out/review/revisions/a/1/segmentation.nii.gz",
    "out/cases/a/image.nii.gz",
    "out/.work/b.new/image.nii.gz",
    "out/runs/1/log.jsonl",
    "out/manifest.csv",
)


def test_what_scanloom_wrote_is_no_input_unless_it_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "scan", "z/private/scan", "z/cases/scan", "out/scan", *OUTPUT)
    (tmp_path / "link").symlink_to("out", target_is_directory=True)
    ours = {"scan": "", "z/private/scan": "", "z/cases/scan": "", "out/scan": ""}

    assert names(list_files([tmp_path]), tmp_path) == ours
    named = names(list_files([tmp_path, tmp_path / "out"]), tmp_path)
    assert named == {**ours, **dict.fromkeys(OUTPUT, "")}
    inside = tmp_path / "out" / "cases"
    assert names(list_files([inside]), tmp_path) == {"out/cases/a/image.nii.gz": ""}


def test_what_scanloom_wrote_is_matched_by_no_pattern_that_does_not_name_it(tmp_path: Path) -> None:
    touch(tmp_path, "scan.nii.gz", *OUTPUT)
    for pattern in ("*", "**", "**/*.nii.gz"):
        assert names(list_files([tmp_path / pattern]), tmp_path) == {"scan.nii.gz": ""}, pattern
    inside = names(list_files([tmp_path / "out/cases/*/*"]), tmp_path)
    assert inside == {"out/cases/a/image.nii.gz": ""}


def test_an_output_folder_is_no_input_of_itself(tmp_path: Path) -> None:
    touch(tmp_path, "out/scan", "out/cases/mine")
    out = tmp_path / "out"
    touch(tmp_path, "out/runs/1/log.jsonl")  # of a first run, which has just begun
    first = names(list_files([out], out=out), tmp_path)
    touch(tmp_path, *OUTPUT)

    assert first == {"out/scan": "", "out/cases/mine": ""}
    assert names(list_files([out], out=out), tmp_path) == {"out/scan": ""}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look into all folders")
def test_what_scanloom_wrote_for_somebody_else_is_no_input(tmp_path: Path) -> None:
    touch(tmp_path, "scan", "out/cases/a/case.json", *OUTPUT)
    (tmp_path / "out" / "private").chmod(0)
    paths = names(list_files([tmp_path]), tmp_path)
    (tmp_path / "out" / "private").chmod(0o700)
    assert paths == {"scan": ""}


def test_a_copy_of_results_without_what_is_private_is_no_input(tmp_path: Path) -> None:
    touch(tmp_path, "scan", "theirs/cases/1/scan", "theirs/cases/1/SHA256SUMS")
    (tmp_path / "theirs/cases/1/case.json").write_text('{"patient": 1}')
    fan_out(tmp_path / "fanned")
    for name in ("flat", "fanned"):
        with CaseFolder(tmp_path / name, "aa") as draft:
            (draft.path / "segmentation.nii.gz").write_bytes(b"labels")
            write_document(draft.path / "case.json", {"case": "aa", "recipe": "r"})
            write_document(draft.path / "timing.json", {})
            draft.publish()
        export(tmp_path / name, tmp_path / f"copy of {name}")
        shutil.rmtree(tmp_path / name)

    found = names(list_files([tmp_path]), tmp_path)

    theirs = {f"theirs/cases/1/{name}" for name in ("scan", "case.json", "SHA256SUMS")}
    assert set(found) == {"scan", *theirs}
    inside = tmp_path / "copy of flat" / "cases" / "aa"
    assert len(list_files([inside])) == 4  # by its name


def test_a_folder_that_only_looks_like_one_that_scanloom_wrote_is_searched(tmp_path: Path) -> None:
    scans = ("z/cases/1/scan", "z/private/key.fingerprint", "z/report/scan")
    touch(tmp_path, *scans)
    for text in ("", "no fingerprint", "a" * 27):
        (tmp_path / "z" / "private" / "key.fingerprint").write_text(text)
        assert names(list_files([tmp_path]), tmp_path) == dict.fromkeys(scans, ""), text
    touch(tmp_path, "z/cases/2/case.json")  # an output folder, and damaged
    assert names(list_files([tmp_path]), tmp_path) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can play another user")
def test_a_closed_private_folder_beside_cases_makes_no_output_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the folders above are closed to others
    touch(tmp_path, "archive/cases/1/scan", "archive/private/letters")
    touch(tmp_path, "out/cases/1/case.json", "out/private/key.fingerprint")
    tmp_path.chmod(0o755)
    for folder in ("archive", "out"):
        (tmp_path / folder / "private").chmod(0o700)
    os.seteuid(65534)
    try:
        are_outputs = [
            is_output_folder(folder, ["cases", "private"]) for folder in ("archive", "out")
        ]
    finally:
        os.seteuid(0)
    assert are_outputs == [False, True]


# --- DICOMDIR -------------------------------------------------------------------------------------


def test_a_dicomdir_is_followed_but_never_out_of_its_root(tmp_path: Path) -> None:
    disc = tmp_path / "disc"
    (disc / "images").mkdir(parents=True)
    paths = series(disc / "images", "slice")
    (tmp_path / "secret").write_text("x")
    (disc / "way_out").symlink_to(tmp_path, target_is_directory=True)
    inside = [("IMAGES", path.name.upper()) for path in paths]  # discs are read in small letters
    outside = [("..", "secret"), ("WAY_OUT", "SECRET"), ("images", "..", "..", "secret"), ("GONE",)]
    write_dicomdir(disc / "DICOMDIR", [*inside, *outside, (str(tmp_path / "secret"),)])

    entries = list_files([disc / "DICOMDIR"])
    codes = [entry.reason.code if entry.reason else "" for entry in entries]
    assert sorted(codes) == sorted(["NOT_AN_IMAGE", *5 * [""], *5 * ["NOT_FOUND"]])
    used = {os.path.realpath(entry.path) for entry in entries if not entry.reason}
    assert used == {str(path.resolve()) for path in paths}
    [only] = find_series(disc / "DICOMDIR")
    assert len(only.files) == 5


def test_a_damaged_dicomdir_is_refused(tmp_path: Path) -> None:
    write_dicomdir(tmp_path / "DICOMDIR", [("A", "B")])
    data = (tmp_path / "DICOMDIR").read_bytes()
    for damaged in (b"", b"no disc", data[:200], data[:-5]):
        (tmp_path / "DICOMDIR").write_bytes(damaged)
        with pytest.raises(ScanError):
            find_series(tmp_path / "DICOMDIR")


# --- zip ------------------------------------------------------------------------------------------


def test_members_of_a_zip_archive_stay_in_the_scratch_folder(tmp_path: Path) -> None:
    """Wherever their names point to, absolute and upwards ones too."""
    archive = tmp_path / "evil.zip"
    bad = ["../../up", str(tmp_path / "absolute"), "a/../../b", "..", "c\\..\\d", "/", "x" * 300]
    with zipfile.ZipFile(archive, "w") as pack:
        for name in bad[:5]:
            pack.writestr(name, "x")
    before = sorted(tmp_path.rglob("*"))
    files = [
        current_session().cache(UnpackedFiles).readable_file(entry.path)
        for entry in list_files([archive])
    ]
    assert len(set(files)) == 5
    root = files[0].parents[1]
    assert all(path.resolve().is_relative_to(root.resolve()) for path in files)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_zip_archive_that_grows_without_measure_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "bomb.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as pack:
        for n in range(4):
            pack.writestr(str(n), bytes(1 << 20))
    assert len(list_members(archive)) == 4
    for name, value in (
        ("ALWAYS_ALLOWED_BYTES", 1 << 20),
        ("MAX_UNPACKED_BYTES", 1 << 21),
        ("MAX_MEMBERS", 3),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(archives, name, value)
            archives._listed.cache_clear()
            [entry] = list_files([archive])
            assert entry.reason is not None
            assert entry.reason.code == "TOO_LARGE"


def test_a_member_that_is_larger_than_it_says_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "lies.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as pack:
        pack.writestr("a", bytes(1 << 16))
    data = archive.read_bytes()
    size = (1 << 16).to_bytes(4, "little")
    archive.write_bytes(data.replace(size, (100).to_bytes(4, "little")))
    with pytest.raises(ScanError) as caught:
        find_series(archive)
    assert caught.value.code in ("DAMAGED", "TOO_LARGE")


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "encrypted"])
def test_a_zip_archive_that_can_t_be_unpacked_is_refused(tmp_path: Path, damage: str) -> None:
    archive = tmp_path / "scans.zip"
    write_zip(archive)
    data = archive.read_bytes()
    if damage == "encrypted":  # the flag of each member
        data = data.replace(b"PK\x03\x04\x14\0\0\0", b"PK\x03\x04\x14\0\x01\0")
        data = data.replace(b"PK\x01\x02\x14\x03\x14\0\0\0", b"PK\x01\x02\x14\x03\x14\0\x01\0")
    else:
        data = {"empty": b"", "cut": data[: len(data) // 2], "text": b"no zip" * 50}[damage]
    archive.write_bytes(data)
    with pytest.raises(ScanError) as caught:
        find_series(archive)
    codes = {"encrypted": "ENCRYPTED"}
    assert caught.value.code == codes.get(damage, "DAMAGED")


def test_header_and_voxels_that_lie_apart_are_found_together_in_a_zip_archive(
    tmp_path: Path,
) -> None:
    nifti(tmp_path / "scan.hdr")
    archive = tmp_path / "pair.zip"
    with zipfile.ZipFile(archive, "w") as pack:
        for name in ("scan.hdr", "scan.img"):
            pack.write(tmp_path / name, f"far/{name}")
    [only] = find_series(archive)
    assert [path.suffix for path in only.files] == [".hdr", ".img"]


def test_a_disk_without_room_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "scans.zip"
    write_zip(archive)
    full = type("usage", (), {"free": 10})
    monkeypatch.setattr(unpacking.shutil, "disk_usage", lambda _: full)
    with pytest.raises(ScanError) as caught:
        find_series(archive)
    assert caught.value.code == "SCRATCH_FULL"


def test_a_mark_of_members_can_be_in_no_path() -> None:
    assert archives.MEMBER_SEPARATOR == "\0"
    assert walk.MEMBER_SEPARATOR is unpacking.MEMBER_SEPARATOR is archives.MEMBER_SEPARATOR
