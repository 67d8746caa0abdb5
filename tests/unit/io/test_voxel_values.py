"""Voxels that are no numbers become padding if that is asked for; rounded ones have a flag."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk
from numpy.typing import NDArray
from pydicom import Dataset

import scanloom
from scanloom.core import ScanError, Volume
from support.write_dicom import Coding, noise, write_series

FORMATS = ("a.nii", "a.nii.gz", "a.nrrd", "a.mha", "a.mhd")


def write(path: Path, array: NDArray[Any]) -> Path:
    """Write an array (I, J, K) by the library that others use, RAS and 2 mm."""
    if path.name.startswith("a.nii"):
        image = nibabel.Nifti1Image(array, np.diag([2.0, 2.0, 2.0, 1.0]), dtype=array.dtype)
        nibabel.save(image, path)
    else:
        sitk.WriteImage(sitk.GetImageFromArray(array.T), path)
    return path


def around_nan(kind: str = "f4") -> NDArray[Any]:
    array = noise().astype(kind) - 1000
    array[:4] = array[:, :, 5] = np.nan
    return array


def code_of(path: Path, **options: Any) -> str:
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(path, **options)
    return caught.value.code


def flags_of(volume: Volume) -> set[str]:
    return {flag.code for flag in volume.flags}


@pytest.mark.parametrize("kind", ["f4", "f8"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("modality", ["CT", "MR", None])
def test_nan_becomes_padding_if_that_is_asked_for(tmp_path, name, kind, modality):
    array = around_nan(kind)
    path = write(tmp_path / name, array)
    assert code_of(path, modality=modality) == "PIXEL_TYPE"

    volume = scanloom.load_volume(path, modality=modality, nan="padding")

    padding = -1024 if modality == "CT" else np.nanmin(array)
    expected = np.where(np.isnan(array), padding, array)
    np.testing.assert_array_equal(volume.array, expected)
    assert volume.padding == padding
    assert volume.is_padding(volume.array)[:4].all()
    assert "NAN_PADDED" in flags_of(volume)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.parametrize("name", ["a.nii", "a.nrrd"])
def test_infinite_voxels_are_refused_all_the_same(tmp_path, name, value):
    array = around_nan()
    array[9, 9, 2] = value
    assert code_of(write(tmp_path / name, array), nan="padding") == "PIXEL_TYPE"


def test_a_scan_of_nothing_but_nan_is_refused(tmp_path):
    path = write(tmp_path / "a.nii", np.full((5, 6, 7), np.nan, np.float32))
    assert code_of(path, nan="padding") == "PIXEL_TYPE"
    assert code_of(path, nan="padding", modality="CT") == "PIXEL_TYPE"


def test_without_nan_nothing_changes(tmp_path):
    path = write(tmp_path / "a.nii", noise().astype("f4"))
    volume = scanloom.load_volume(path, nan="padding")
    assert (volume.padding, flags_of(volume)) == (None, set())


def test_an_option_that_does_not_exist_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match="nan"):
        scanloom.load_volume(tmp_path, nan="zero")


def large(kind: str, most: int) -> NDArray[Any]:
    array = noise().astype(kind)
    array[3, 4, 2] = most
    return array


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("kind", "most", "flag"),
    [
        ("i4", 1 << 24, False),
        ("i4", (1 << 24) + 1, True),
        ("i4", (1 << 24) + 2, False),  # even: float32 holds it
        ("i4", -(1 << 24) - 1, True),
        ("u4", (1 << 32) - 1, True),
    ],
)
def test_whole_numbers_that_float32_rounds_have_a_flag(tmp_path, name, kind, most, flag):
    array = large(kind, most)
    volume = scanloom.load_volume(write(tmp_path / name, array))
    assert (
        ("VALUES_ROUNDED" in flags_of(volume)) == flag == bool((array != array.astype("f4")).any())
    )
    np.testing.assert_array_equal(volume.array, array)


@pytest.mark.parametrize(("most", "flag"), [(1000, False), ((1 << 24) + 9, True)])
def test_scaled_whole_numbers_are_rounded_too(tmp_path, most, flag):
    image = nibabel.Nifti1Image(large("i4", most), np.diag([2.0, 2.0, 2.0, 1.0]), dtype="i4")
    image.header.set_slope_inter(0.5, 3)
    nibabel.save(image, tmp_path / "a.nii")
    data = bytearray((tmp_path / "a.nii").read_bytes())
    data[112:120] = np.array((0.5, 3), "<f4").tobytes()
    (tmp_path / "a.nii").write_bytes(data)
    assert ("VALUES_ROUNDED" in flags_of(scanloom.load_volume(tmp_path / "a.nii"))) == flag


@pytest.mark.parametrize(
    ("coding", "most", "flag"),
    [
        (Coding(32, 32, True, "1", "0"), (1 << 24) + 1, True),
        (Coding(32, 32, True, "1", "0"), 1 << 24, False),
        (Coding(32, 32, False, "1", "0"), (1 << 32) - 1, True),
        (Coding(32, 32, False, "0.5", "0"), (1 << 30) + 1, True),
        (Coding(32, 32, False, "0.5", "0"), 4000, False),
        (Coding(16, 16, True, "0.5", "0"), 2000, False),
    ],
)
def test_whole_numbers_in_dicom_that_float32_rounds_have_a_flag(tmp_path, coding, most, flag):
    array = noise().astype(np.int64)

    def put(k: int, ds: Dataset) -> None:
        if k == 2:
            samples = np.frombuffer(ds.PixelData, f"<u{coding.allocated // 8}").copy()
            samples[7] = most
            ds.PixelData = samples.tobytes()

    write_series(tmp_path, array, coding=coding, edit=put)
    assert ("VALUES_ROUNDED" in flags_of(scanloom.load_volume(tmp_path))) == flag


# --- zeros behind the voxels ----------------------------------------------------------------------


def with_rest(path: Path, rest: bytes) -> Path:
    """Write a volume file with bytes behind its voxels; of an .mhd, behind those of its .raw."""
    write(path, noise())
    data = path.with_suffix(".raw") if path.suffix == ".mhd" else path
    if path.name.endswith(".gz"):
        data.write_bytes(gzip.compress(gzip.decompress(data.read_bytes()) + rest))
    else:
        data.write_bytes(data.read_bytes() + rest)
    return path


SMALLEST = 2 * 20 * 6  # bytes of a plane of noise() across its longest axis


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [1, 2, 100, SMALLEST - 1])
def test_zeros_behind_the_voxels_are_no_voxels(tmp_path, name, count):
    path = with_rest(tmp_path / name, bytes(count))
    np.testing.assert_array_equal(scanloom.load_volume(path).array, noise())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "rest",
    [b"\1", bytes(99) + b"\1", bytes(SMALLEST), bytes(1 << 16)],
    ids=["a byte", "zeros and a byte", "a plane", "64 KiB"],
)
def test_what_a_wrong_dimension_may_have_left_is_damage(tmp_path, name, rest):
    """A plane of zeros and more may be voxels; other bytes always may."""
    assert code_of(with_rest(tmp_path / name, rest)) == "DAMAGED"


def test_zeros_behind_voxels_that_begin_late_are_damage(tmp_path):
    """If there is an extension, the offset may be wrong, and the zeros voxels."""
    image = nibabel.Nifti1Image(noise(), np.diag([2.0, 2.0, 2.0, 1.0]))
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension(6, b"a comment"))
    nibabel.save(image, tmp_path / "a.nii")
    scanloom.load_volume(tmp_path / "a.nii")
    data = (tmp_path / "a.nii").read_bytes()
    (tmp_path / "a.nii").write_bytes(data + bytes(16))
    assert code_of(tmp_path / "a.nii") == "DAMAGED"


def test_zeros_behind_an_img_file(tmp_path):
    nibabel.save(nibabel.Nifti1Pair(noise(), np.diag([2.0, 2.0, 2.0, 1.0])), tmp_path / "a.img")
    data = (tmp_path / "a.img").read_bytes()
    (tmp_path / "a.img").write_bytes(data + bytes(64))
    np.testing.assert_array_equal(scanloom.load_volume(tmp_path / "a.hdr").array, noise())
    (tmp_path / "a.img").write_bytes(data + bytes(63) + b"\1")
    assert code_of(tmp_path / "a.hdr") == "DAMAGED"
