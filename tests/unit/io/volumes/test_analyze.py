"""Analyze 7.5 is read where a caller says how its axes lie, and refused where nobody does."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK

import scanloom
from scanloom.core import Flag, ScanError
from support.case_folders import ORDERS
from support.input_kinds import SPACING, write_analyze
from support.write_dicom import noise


def code_of(path: Path, **options: Any) -> str:
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(path, **options)
    return caught.value.code


def test_without_a_word_on_its_axes_it_is_refused_by_that_name(tmp_path: Path) -> None:
    assert code_of(write_analyze(tmp_path / "a.hdr")) == "ORIENTATION_UNKNOWN"


@pytest.mark.parametrize("order", ORDERS)
def test_in_all_48_orders_it_lies_as_a_nifti_without_forms(tmp_path: Path, order: str) -> None:
    path = write_analyze(tmp_path / "a.hdr")
    image = nibabel.Nifti1Image(noise(), None)
    image.header["pixdim"][1:4] = SPACING
    image.to_filename(tmp_path / "b.nii")

    volume = scanloom.load_volume(path, orientation=order)
    as_nifti = scanloom.load_volume(tmp_path / "b.nii", orientation=order)

    assert volume.grid.axis_codes == order
    np.testing.assert_allclose(volume.grid.affine, as_nifti.grid.affine)
    np.testing.assert_array_equal(volume.array, as_nifti.array)
    assert volume.flags == (Flag.ORIENTATION_GIVEN,)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "f4", "f8"])
def test_values_and_voxel_size_are_those_of_nibabel_and_simpleitk(
    tmp_path: Path, dtype: str, order: str
) -> None:
    array = (noise() % 120).astype(dtype)
    header = nibabel.AnalyzeHeader(endianness=order)
    header.set_data_dtype(dtype)
    image = nibabel.AnalyzeImage(array, None, header)
    image.header.set_zooms(SPACING)
    image.to_filename(tmp_path / "a.hdr")

    volume = scanloom.load_volume(tmp_path / "a.hdr", orientation="LPS")

    theirs = nibabel.load(tmp_path / "a.hdr")
    assert volume.array.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(volume.array, np.asarray(theirs.dataobj))
    np.testing.assert_allclose(volume.grid.spacing, theirs.header.get_zooms(), rtol=1e-6)
    reader = SimpleITK.ImageFileReader()
    reader.SetFileName(str(tmp_path / "a.img"))
    reader.SetImageIO("NiftiImageIO")
    image = reader.Execute()
    np.testing.assert_array_equal(SimpleITK.GetArrayFromImage(image).T, array)
    np.testing.assert_allclose(volume.grid.spacing, image.GetSpacing(), rtol=1e-6)


def test_packed_and_several_volumes_are_read(tmp_path: Path) -> None:
    array = np.stack([noise(seed=n) for n in range(2)], axis=-1)
    path = write_analyze(tmp_path / "a.hdr", array)
    for name in ("a.hdr", "a.img"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        (tmp_path / name).unlink()
    path = tmp_path / "a.hdr.gz"
    assert code_of(path, orientation="RAS") == "FOUR_D"
    volume = scanloom.load_volume(path, orientation="RAS", phase=1)
    np.testing.assert_array_equal(volume.array, array[..., 1])


FIELDS = {
    "complex": ({"datatype": 32}, "PIXEL_TYPE"),
    "colour": ({"datatype": 128}, "PIXEL_TYPE"),
    "of NIfTI": ({"datatype": 512}, "PIXEL_TYPE"),
    "a factor": ({"funused1": 2.0}, "RESCALE"),
    "a shift": ({"funused2": 5.0}, "RESCALE"),
    "centimetres": ({"vox_units": b"cm"}, "BAD_GEOMETRY"),
    "no voxel size": ({"pixdim": [0] * 8}, "BAD_GEOMETRY"),
    "flat": ({"dim": [3, 24, 120, 1, 1, 0, 0, 0]}, "TOO_FEW_SLICES"),
    "negative": ({"dim": [3, 24, -20, 6, 1, 0, 0, 0]}, "DAMAGED"),
    "terabytes": ({"dim": [3, 30000, 30000, 30000, 1, 0, 0, 0]}, "TRUNCATED"),
    "before": ({"vox_offset": -8}, "DAMAGED"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_what_can_not_be_known_is_refused(tmp_path: Path, name: str) -> None:
    edit, code = FIELDS[name]
    path = write_analyze(tmp_path / "a.hdr", edit=edit)
    assert code_of(path, orientation="RAS") == code


def test_a_file_that_ends_too_early_or_is_missing_is_refused(tmp_path: Path) -> None:
    path = write_analyze(tmp_path / "a.hdr")
    voxels, header = tmp_path / "a.img", path.read_bytes()
    voxels.write_bytes(voxels.read_bytes()[:-1])
    assert code_of(path, orientation="RAS") == "TRUNCATED"
    voxels.unlink()
    assert code_of(path, orientation="RAS") == "NOT_FOUND"
    path.write_bytes(header[:300])
    assert code_of(path, orientation="RAS") == "TRUNCATED"


def test_text_with_that_name_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "a.hdr").write_text("ENVI\nsamples = 24\n" * 40)
    assert code_of(tmp_path / "a.hdr", orientation="RAS") == "DAMAGED"
