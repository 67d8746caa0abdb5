"""Scans are found by content, listed for a choice, and never guessed."""

from __future__ import annotations

import gzip
import os
import shutil
import socket
import warnings
from pathlib import Path

import nibabel
import numpy as np
import pytest
from pydicom import DataElement, Dataset, config
from pydicom.uid import ExplicitVRLittleEndian

import scanloom
from scanloom.core import Flag, ScanError, Series
from scanloom.io.index.build import build_index
from scanloom.io.index.inspection import describe_as_read
from scanloom.io.index.ranking import select_series
from scanloom.io.index.series import find_series
from scanloom.io.read import read_scan
from support.write_dicom import Coding, Words, noise, uid, write_series


def two_series(folder):
    write_series(folder / "a", noise((10, 11, 5)), words=Words(name="five"))
    write_series(folder / "b", noise((10, 11, 4)), words=Words(name="four", modality="MR"))
    return find_series(folder)


def code_of(action, *arguments, **options):
    with pytest.raises(ScanError) as caught:
        action(*arguments, **options)
    return caught.value.code


def test_files_are_known_by_content_not_by_name(tmp_path):
    for n, path in enumerate(write_series(tmp_path, noise())):
        path.rename(tmp_path / f"IM{n}")
    (tmp_path / "notes.dcm").write_text("no image at all, whatever the name says " * 10)
    (tmp_path / "empty.dcm").touch()

    [series] = find_series(tmp_path)

    assert len(series.files) == 6
    assert {path.name for path in series.files} == {f"IM{n}" for n in range(6)}


def test_files_without_preamble_are_found(tmp_path):
    for path in write_series(tmp_path, noise(), coding=Coding(syntax=ExplicitVRLittleEndian)):
        path.write_bytes(path.read_bytes()[132:])
    np.testing.assert_array_equal(scanloom.load_volume(tmp_path).array, noise() - 1024)


def test_a_file_stands_for_its_series_in_its_folder(tmp_path):
    write_series(tmp_path, noise((10, 11, 5)), words=Words(name="five"))
    for path in write_series(tmp_path / "more", noise((10, 11, 4)), words=Words(name="four")):
        path.rename(tmp_path / f"four_{path.name}")
    assert len(find_series(tmp_path)) == 2
    first = next(tmp_path.glob("four_*"))
    assert scanloom.load_volume(first).grid.shape == (10, 11, 4)
    (tmp_path / "latest").symlink_to(first)
    (tmp_path / "loop").symlink_to("loop")
    links = tmp_path / "links"
    links.mkdir()
    for number, path in enumerate([*tmp_path.glob("four_*"), first]):
        (links / f"{number}").symlink_to(path)
    for path in (first, tmp_path / "latest", links / "0"):  # a slice counts once, as in its folder
        assert [len(series.files) for series in find_series(path)] == [4]


def test_several_series_are_listed_with_what_to_type(tmp_path):
    all_series = two_series(tmp_path)
    with pytest.raises(ScanError) as caught:
        select_series(all_series)
    assert caught.value.code == "SERIES_AMBIGUOUS"
    heads, first, second, *_ = caught.value.private.splitlines()
    assert heads.split()[:5] == ["#", "name", "DICOM", "#", "modality"]
    assert first.split()[0] == "1"
    assert "CT" in first.split()
    assert second.split()[0] == "2"
    assert "MR" in second.split()
    assert "--series" in caught.value.reason.advice
    assert "Choose with `series=`" in str(caught.value)
    assert max(map(len, (heads, first, second))) <= 80


@pytest.mark.parametrize("suffix", [".dcm", ".nii", ".nii.gz", ".nrrd", ".mha", ".mgz", ""])
def test_an_empty_file_is_called_empty(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"scan{suffix}"
    path.touch()
    with pytest.raises(ScanError) as caught:
        find_series(path)
    assert (caught.value.code, caught.value.detail) == ("TRUNCATED", "the file is empty")
    if suffix not in ("", ".dcm"):
        [series] = find_series(tmp_path)
        assert describe_as_read(series).detail == "the file is empty"


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_a_path_that_is_no_file_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "scan.nii"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path(os.devnull)
    with socket.socket(socket.AF_UNIX) as opened:
        if kind == "socket":
            opened.bind(os.path.relpath(path))
        with pytest.raises(ScanError) as caught:
            find_series(path)
    assert caught.value.code == "NO_IMAGES"
    assert f"this is a {kind}, not a file or folder" in caught.value.detail


def test_a_link_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    """As in a DataLad dataset whose files were not fetched."""
    scan = tmp_path / "sub-01_T1w.nii.gz"
    scan.symlink_to(tmp_path / ".git/annex/objects/MD5E-s1.nii.gz")
    with pytest.raises(ScanError) as caught:
        find_series(scan)
    assert caught.value.code == "UNREADABLE"
    assert "a link to a file that is missing" in caught.value.detail


@pytest.mark.parametrize(
    ("voxels", "suffix"),
    [(".img", ".hdr"), (".img.gz", ".hdr.gz"), (".raw", ".mhd"), (".raw.gz", ".nhdr")],
)
def test_who_gives_voxels_is_told_their_header(voxels: str, suffix: str, tmp_path: Path) -> None:
    """But not its name, which may be a patient's."""
    (tmp_path / f"Doe{voxels}").write_bytes(b"voxels")
    with pytest.raises(ScanError) as caught:
        find_series(tmp_path / f"Doe{voxels}")
    assert caught.value.detail == "neither a DICOM file nor named as a volume file"
    (tmp_path / f"Doe{suffix}").write_bytes(b"header")
    with pytest.raises(ScanError) as caught:
        find_series(tmp_path / f"Doe{voxels}")
    assert caught.value.code == "NO_IMAGES"
    assert caught.value.detail.endswith(f": give its header, the {suffix} file of the same name")
    assert "Doe" not in str(caught.value)


def test_a_series_is_chosen_by_number_or_uid(tmp_path):
    all_series = two_series(tmp_path)
    assert select_series(all_series, "1")[0].modality == "CT"
    assert select_series(all_series, "2")[0].modality == "MR"
    assert select_series(all_series, str(uid("four")))[0].modality == "MR"
    assert scanloom.load_volume(tmp_path, series="2").modality == "MR"
    for wrong in ("0", "3", "1.2.3", ""):
        assert code_of(select_series, all_series, wrong) == "SERIES_UNKNOWN"


def test_the_list_is_the_same_whatever_the_paths(tmp_path):
    numbers = []
    for order in (("x", "y"), ("y", "x")):
        folder = tmp_path / order[0]
        for name, path in zip(("one", "two"), order, strict=True):
            write_series(folder / path, noise((10, 11, 4)), words=Words(name=name))
        numbers.append([s.series_uid for s in find_series(folder)])
    assert numbers[0] == numbers[1]


def test_series_without_uids_are_told_apart_by_folder(tmp_path):
    def edit(k: int, ds: Dataset) -> None:
        ds.StudyInstanceUID = ds.SeriesInstanceUID = ""

    for seed in (1, 2):
        write_series(tmp_path / str(seed), noise(seed=seed), edit=edit)
    assert [len(s.files) for s in find_series(tmp_path)] == [6, 6]
    volume = scanloom.load_volume(tmp_path / "2")
    np.testing.assert_array_equal(volume.array, noise(seed=2) - 1024)


def test_a_damaged_file_is_not_dropped_silently(tmp_path):
    paths = write_series(tmp_path, noise())
    data = paths[-1].read_bytes()
    paths[-1].write_bytes(
        data[:132] + b"\x02\x00\x00\x00ZZ" + data[138:]
    )  # an unknown type of value
    all_series = find_series(tmp_path)
    assert sum(len(s.files) for s in all_series) == 6
    with pytest.raises(ScanError):
        scanloom.load_volume(tmp_path)


def test_volume_files_are_found_beside_dicom(tmp_path):
    nibabel.Nifti1Image(noise(), np.eye(4)).to_filename(tmp_path / "scan.nii.gz")
    assert find_series(tmp_path)[0].kind == "nifti"
    write_series(tmp_path / "dicom", noise())
    assert [s.kind for s in find_series(tmp_path)] == ["dicom", "nifti"]


@pytest.mark.parametrize("name", ["text.dcm", "text.txt", "notes"])
def test_what_is_no_image_is_no_image(tmp_path, name):
    (tmp_path / name).write_text("a text of some length, longer than a preamble " * 5)
    assert code_of(scanloom.load_volume, tmp_path) == "NO_IMAGES"
    assert code_of(scanloom.load_volume, tmp_path / name) == "NO_IMAGES"


def test_an_empty_folder_and_no_folder(tmp_path):
    assert code_of(scanloom.load_volume, tmp_path) == "NO_IMAGES"
    assert code_of(scanloom.load_volume, tmp_path / "absent") == "NOT_FOUND"


def test_a_series_that_changed_after_it_was_found_is_read_again(tmp_path):
    write_series(tmp_path, noise())
    [series] = find_series(tmp_path)
    write_series(tmp_path, noise(seed=1), coding=Coding(intercept="-5000"))
    np.testing.assert_array_equal(read_scan(series).volume.array, noise(seed=1) - 5000)


def test_a_series_is_read_without_having_been_found_here(tmp_path):
    """As a worker does, in another process."""
    paths = write_series(tmp_path, noise())
    volume = read_scan(Series("dicom", tuple(paths))).volume
    np.testing.assert_array_equal(volume.array, noise() - 1024)


def test_options_that_do_not_exist_are_refused(tmp_path):
    write_series(tmp_path, noise())
    with pytest.raises(ValueError, match="gaps"):
        scanloom.load_volume(tmp_path, gaps="fill")
    with pytest.raises(ValueError, match="modality"):
        scanloom.load_volume(tmp_path, modality="XX")
    assert code_of(scanloom.load_volume, tmp_path, phase=1) == "FOUR_D"
    assert scanloom.load_volume(tmp_path, phase=0).grid.shape == (24, 20, 6)


def test_reading_neither_warns_nor_logs_what_the_header_says(tmp_path, caplog):
    def edit(k: int, ds: Dataset) -> None:
        ds.add(DataElement("StudyDate", "DA", "Doe^Jane", validation_mode=config.IGNORE))
        ds.SpecificCharacterSet = "Doe^Jane"
        ds.SeriesDescription = "Doe^Jane"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_series(tmp_path, noise(), edit=edit)
    caplog.clear()  # of what writing brought forth
    scanloom.load_volume(tmp_path)
    assert not caplog.text


def test_errors_say_nothing_of_the_patient(tmp_path):
    def edit(k: int, ds: Dataset) -> None:
        ds.PatientName = ds.SeriesDescription = "Doe^Jane"
        ds.RescaleSlope = "0"

    write_series(tmp_path, noise(), edit=edit)
    write_series(tmp_path / "b", noise(), words=Words(name="other"), edit=edit)
    for series in (None, "1"):
        with pytest.raises(ScanError) as caught:
            scanloom.load_volume(tmp_path, series=series)
        assert "Doe" not in str(caught.value)


@pytest.mark.parametrize("packed", ["", "zip", "gzip"])
@pytest.mark.parametrize("size", [0, 100, 140, 400, 700])
def test_a_last_slice_that_can_not_be_read_is_told(tmp_path, size, packed, monkeypatch):
    """The scan may be longer: it is refused, in an index too, unless the loss is accepted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scan = tmp_path / "scan"
    *whole, last = write_series(scan, noise())
    last.write_bytes(last.read_bytes()[:size])
    if packed == "zip":
        scan = Path(shutil.make_archive(str(tmp_path / "packed"), "zip", scan))
    elif packed:
        for path in whole:
            path.write_bytes(gzip.compress(path.read_bytes()))

    with pytest.raises(ScanError, match="beside its slices") as caught:
        scanloom.load_volume(scan, series="best")
    assert caught.value.code == "SLICES_UNREADABLE"
    volume = scanloom.load_volume(scan, series="best", gaps="interpolate")

    assert volume.array.shape[2] == 5
    assert Flag.FILES_LOST in volume.flags
    index = build_index([scan], bytes(32))
    [whole] = (series for series in index.series if series.info.shape)
    assert whole.info.reason == "SLICES_UNREADABLE"
    assert index.as_series(whole).unreadable == 1


def test_small_files_of_other_kinds_are_not_taken_for_slices(tmp_path):
    write_series(tmp_path, noise())
    (tmp_path / "done.txt").touch()
    (tmp_path / "README").write_text("five slices")

    assert Flag.FILES_LOST not in scanloom.load_volume(tmp_path).flags
