"""The table of formats is the only list of them: probing agrees with reading in each."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest
from pydicom import Dataset

from scanloom.core import DICOM, Flag, ReadOptions, ScanError
from scanloom.io.formats import FORMATS, VOLUME_FORMATS, count_volumes, format_by_suffix, probe
from scanloom.io.index.build import build_index
from scanloom.io.index.series import find_series
from scanloom.io.read import load_volume, read_scan
from support.input_kinds import write_mgh, write_nifti
from support.write_dicom import Words, noise, uid, write_series

KEY = bytes(32)


def test_each_suffix_is_of_one_format() -> None:
    suffixes = [suffix for entry in VOLUME_FORMATS for suffix in entry.suffixes]
    assert len(suffixes) == len(set(suffixes))
    for entry in VOLUME_FORMATS:
        assert FORMATS[entry.name] is entry
        assert set(entry.detached_suffixes) <= set(entry.suffixes)
        for suffix in entry.suffixes:
            assert (
                format_by_suffix(f"a{suffix}")
                == format_by_suffix(f"A{suffix.upper()}")
                == entry.name
            )


def test_dicom_is_recognised_by_content_alone() -> None:
    assert not FORMATS[DICOM].suffixes
    assert format_by_suffix("a.dcm") is None
    assert {DICOM, *(entry.name for entry in VOLUME_FORMATS)} == set(FORMATS)


@pytest.mark.parametrize("kind", [DICOM, "nifti", "mgh"])
def test_probing_agrees_with_reading(tmp_path: Path, kind: str) -> None:
    stored = noise()
    if kind == DICOM:
        write_series(tmp_path, stored)
    elif kind == "nifti":
        write_nifti(tmp_path / "a.nii.gz", stored)
    else:
        write_mgh(tmp_path / "a.mgz", stored)
    [series] = find_series(tmp_path)
    assert series.kind == kind
    grid, dtype = probe(series)
    volume = read_scan(series).volume
    assert volume.grid.shape == grid.shape
    assert volume.array.dtype == dtype
    np.testing.assert_array_equal(volume.grid.affine, grid.affine)


@pytest.mark.parametrize("kind", [DICOM, "mgh"])
def test_scans_are_read_where_the_working_folder_is_gone(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scan"
    write_series(path, noise()) if kind == DICOM else write_mgh(path.with_suffix(".mgh"))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert load_volume(tmp_path).grid.shape == noise().shape


def test_an_option_of_another_format_is_ignored(tmp_path: Path) -> None:
    path = write_mgh(tmp_path / "a.mgh")
    read = FORMATS["mgh"].read
    ignored = ReadOptions(gaps="interpolate", orientation="LPS")
    plain, with_options = read((path,)), read((path,), None, ignored)
    np.testing.assert_array_equal(plain.volume.grid.affine, with_options.volume.grid.affine)
    with pytest.raises(ScanError, match="not volume 2"):
        read((path,), phase=2)


def write_volumes(folder: Path, count: int) -> list[list[Path]]:
    """Write volumes of a series, each into a folder, and return the files of each."""

    def edit(k: int, ds: Dataset) -> None:
        ds.SOPInstanceUID = uid(ds.AcquisitionNumber, k)

    words = [Words(more={"AcquisitionNumber": n}) for n in range(count)]
    return [
        write_series(folder / f"{n}", noise(seed=n), words=each, edit=edit)
        for n, each in enumerate(words)
    ]


def test_a_volume_that_is_refused_hides_no_other(tmp_path: Path) -> None:
    write_volumes(tmp_path, 3)[0][2].unlink()
    [series] = find_series(tmp_path)
    with pytest.raises(ScanError, match="SLICE_GAP"):
        probe(series, 0)
    assert count_volumes(series) == 3


def test_slices_that_are_lost_for_two_reasons_are_flagged_once(tmp_path: Path) -> None:
    lost = write_volumes(tmp_path, 2)[1][-1]
    lost.write_bytes(lost.read_bytes()[:400])
    volume = load_volume(tmp_path, series="best", phase=1, gaps="interpolate")
    assert volume.grid.shape[2] == 5
    assert volume.flags.count(Flag.FILES_LOST) == 1


def test_volumes_are_counted_with_the_options_of_their_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.nii"
    nibabel.Nifti1Image(np.zeros((4, 4, 4, 5), np.int16), None).to_filename(path)
    [series] = find_series(path)
    assert count_volumes(series, ReadOptions(orientation="LPS")) == 5
    with pytest.raises(ScanError, match="ORIENTATION_UNKNOWN"):
        count_volumes(series)


def test_unreadable_slices_are_missed_by_dicom_alone(tmp_path: Path) -> None:
    files = write_series(tmp_path / "scan", noise())
    files[0].write_bytes(files[0].read_bytes()[:400])
    write_mgh(tmp_path / "scan" / "a.mgh")
    unreadable = {series.kind: series.unreadable for series in find_series(tmp_path)}
    assert unreadable == {DICOM: 1, "mgh": 0}
    index = build_index([tmp_path], KEY, tmp_path / "out")
    indexed = {
        known.kind: index.as_series(known).unreadable for known in index.series if known.series_uid
    }
    assert indexed == {DICOM: 1}
    assert [index.as_series(known).unreadable for known in index.series if known.kind == "mgh"] == [
        0
    ]
