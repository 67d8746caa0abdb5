"""NIfTI out, judged by nibabel and SimpleITK."""

from __future__ import annotations

import gzip
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from scanloom.core import Grid, ScanError
from scanloom.io.scan import GridOnlySource, NiftiSource, Scan
from scanloom.io.write.nifti import write_nifti
from support import case_folders


def write(scan: Scan, path: Path) -> np.ndarray:
    labels = case_folders.labels_on(scan.volume.grid.shape)
    write_nifti(labels, scan.volume.grid, scan.source, path)
    return labels


@pytest.mark.parametrize("codes", case_folders.ORDERS)
@pytest.mark.parametrize("oblique", [0.0, 35.0])
def test_two_readers_find_each_voxel_at_its_place(
    codes: str, oblique: float, tmp_path: Path
) -> None:
    """All 48 axis orders, straight and oblique: shape, affine, both forms, voxels."""
    grid = case_folders.grid_of(case_folders.turned(case_folders.directions(codes), oblique))
    path = tmp_path / "x.nii.gz"
    labels = write(case_folders.itk_scan(grid), path)

    image, theirs = nib.load(path), sitk.ReadImage(path)

    assert image.get_data_dtype() == np.uint8
    np.testing.assert_array_equal(np.asarray(image.dataobj), labels)
    np.testing.assert_array_equal(sitk.GetArrayFromImage(theirs).T, labels)
    assert (image.header["sform_code"], image.header["qform_code"]) == (1, 1)
    np.testing.assert_allclose(image.get_sform(), grid.affine, atol=1e-5)
    np.testing.assert_allclose(image.get_qform(), grid.affine, atol=1e-4)
    for index in [(0, 0, 0), (18, 13, 8), (3, 11, 2)]:
        lps = np.array(theirs.TransformIndexToPhysicalPoint(index))
        np.testing.assert_allclose(lps * (-1, -1, 1), grid.world(index), atol=1e-3)


def test_sheared_grid_has_no_qform(tmp_path: Path) -> None:
    """A quaternion can't say a shear: without a qform no reader drops it silently."""
    scan = case_folders.dicom_scan("LPS", 10.0, 18.0)
    path = tmp_path / "x.nii.gz"
    labels = write(scan, path)
    image = nib.load(path)
    assert (image.header["sform_code"], image.header["qform_code"]) == (1, 0)
    np.testing.assert_allclose(image.affine, scan.volume.grid.affine, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(image.dataobj), labels)
    np.testing.assert_allclose(image.header.get_zooms(), scan.volume.grid.spacing, atol=1e-5)


@pytest.mark.parametrize(("sform", "qform"), [(1, 0), (0, 1), (2, 1), (4, 4), (0, 3), (5, 0)])
def test_nifti_source_keeps_its_own_forms(sform: int, qform: int, tmp_path: Path) -> None:
    """Result and scan lie alike in every tool, whichever form it prefers."""
    grid = case_folders.grid_of(case_folders.turned(case_folders.directions("RAI")))
    second_form = np.array(grid.affine)
    second_form[:3, 3] += (5.0, -7.0, 2.0)  # the forms disagree, as they may
    source = NiftiSource(
        grid.affine if sform else None, sform, second_form if qform else None, qform
    )
    path = tmp_path / "x.nii.gz"
    write(Scan(case_folders.volume_of(grid), source), path)
    header = nib.load(path).header
    assert (header["sform_code"], header["qform_code"]) == (sform, qform)
    if sform:
        np.testing.assert_allclose(header.get_sform(), grid.affine, atol=1e-5)
    if qform:
        np.testing.assert_allclose(header.get_qform(), second_form, atol=1e-4)


def test_nifti_without_forms_gets_the_orientation_it_was_given(tmp_path: Path) -> None:
    scan = case_folders.nifti_scan(
        case_folders.grid_of(case_folders.directions("PSR")), sform=0, qform=0
    )
    write(scan, tmp_path / "x.nii.gz")
    image = nib.load(tmp_path / "x.nii.gz")
    np.testing.assert_allclose(image.affine, scan.volume.grid.affine, atol=1e-5)
    assert image.header["sform_code"] == 1


def test_header_holds_geometry_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.nii.gz"
    write(case_folders.dicom_scan(), path)
    header = nib.load(path).header
    assert header.get_xyzt_units()[0] == "mm"
    assert header.get_slope_inter() in [(1.0, 0.0), (None, None)]
    for field in ("descrip", "aux_file", "intent_name", "db_name"):
        assert header[field].item() == b""
    assert not header.extensions
    with gzip.open(path) as file:
        assert file.read()[344:352] == b"n+1\0\0\0\0\0"


def test_same_content_same_bytes(tmp_path: Path) -> None:
    """No time, no file name in the gzip header, so that equal runs are equal."""
    (tmp_path / "a").mkdir()
    for name in ("x.nii.gz", "a/other.nii.gz"):
        write(case_folders.dicom_scan(), tmp_path / name)
    first = (tmp_path / "x.nii.gz").read_bytes()
    assert first == (tmp_path / "a" / "other.nii.gz").read_bytes()
    assert first[3] == 0  # FLG (RFC 1952): no name, no comment
    assert first[4:8] == bytes(4)  # MTIME


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", ">i2", "uint16", "int32", "float16", "float32", "float64"]
)
def test_image_keeps_values_and_type(dtype: str, tmp_path: Path) -> None:
    grid = case_folders.grid_of(case_folders.directions("LPS"))
    rng = np.random.default_rng(0)
    array = np.asfortranarray(rng.integers(0, 100, grid.shape).astype(dtype))
    if array.dtype.kind == "f":
        array[0, 0, 0] = np.nan
    write_nifti(array, grid, GridOnlySource(), tmp_path / "x.nii.gz")
    image = nib.load(tmp_path / "x.nii.gz")
    kept = np.float32 if dtype == "float16" else np.dtype(dtype).newbyteorder("=")
    assert image.get_data_dtype().newbyteorder("=") == kept
    np.testing.assert_array_equal(np.asarray(image.dataobj), array)
    theirs = sitk.GetArrayFromImage(sitk.ReadImage(tmp_path / "x.nii.gz")).T
    np.testing.assert_array_equal(theirs, np.nan_to_num(array))  # ITK makes 0 of NaN


def test_uint16_labels(tmp_path: Path) -> None:
    grid = case_folders.grid_of(case_folders.directions("LPS"))
    labels = np.full(grid.shape, 40000, np.uint16, order="F")
    write_nifti(labels, grid, GridOnlySource(), tmp_path / "x.nii.gz")
    image = nib.load(tmp_path / "x.nii.gz")
    assert image.get_data_dtype() == np.uint16
    assert (np.asarray(image.dataobj) == 40000).all()


def test_mask_is_one_where_the_structure_is(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    labels = case_folders.labels_on(scan.volume.grid.shape)
    write_nifti(labels == 2, scan.volume.grid, scan.source, tmp_path / "x.nii.gz")
    mask = np.asarray(nib.load(tmp_path / "x.nii.gz").dataobj)
    assert mask.dtype == np.uint8
    np.testing.assert_array_equal(mask, labels == 2)


def test_too_long_for_nifti(tmp_path: Path) -> None:
    grid = Grid((1, 1, 40000), np.eye(4))
    labels = np.zeros(grid.shape, np.uint8)
    with pytest.raises(ScanError) as caught:
        write_nifti(labels, grid, GridOnlySource(), tmp_path / "x.nii.gz")
    assert caught.value.code == "TOO_LARGE"
