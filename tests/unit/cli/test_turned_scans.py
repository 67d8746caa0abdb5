"""`scanloom segment` of scans that are turned by a hair, and of headers that were rounded."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from pydicom import Dataset
from scipy.spatial.transform import Rotation

from support import case_folders
from support.commands import scanloom
from support.write_dicom import Edit, Geometry, noise, plane, write_series

SHAPE = (160, 160, 12)
SPACING = (0.5, 0.5)


def about(vector: tuple[float, ...], angle: float) -> Geometry:
    turn = Rotation.from_rotvec(np.array(vector) / np.linalg.norm(vector) * angle).as_matrix()
    return Geometry(across=tuple(turn[:, 0]), down=tuple(turn[:, 1]), spacing=SPACING)


TURNED = {
    "axial, by a milliradian": about((1, 2, 3), 1e-3),
    "axial, by a head's tilt": about((1, 0.1, 0), 0.2),
    "coronal": plane("coronal", spacing=SPACING),
}


def segmented(source: Path, model: Path, out: Path) -> Path:
    """Segment by the command line; return the label map that was published."""
    ended = scanloom("segment", source, "--model", model, "--out", out)
    assert ended.code == 0, ended.err
    [folder] = (out / "cases").iterdir()
    return folder / "segmentation.nii.gz"


@pytest.mark.parametrize("name", TURNED)
def test_a_turned_series_is_published_where_it_lies(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    geometry = TURNED[name]
    write_series(tmp_path / "ct", noise(SHAPE), geometry)

    path = segmented(tmp_path / "ct", tiny_model, tmp_path / "out")

    header = nib.load(path).header
    for affine in (header.get_sform(), case_folders.by_itk(path)):
        assert case_folders.farthest(affine, geometry.affine, SHAPE) < 1e-3
    if header["qform_code"]:
        assert case_folders.farthest(header.get_qform(), geometry.affine, SHAPE) < 0.01
    assert (path.parent / "dicom" / "segmentation.dcm").exists()


@pytest.mark.parametrize("forms", ["qform", "both"])
def test_a_turned_nifti_is_published_as_it_is(forms: str, tiny_model: Path, tmp_path: Path) -> None:
    """Its own forms and codes, to the bit: every reader sees result and scan alike."""
    image = nib.Nifti1Image(noise(SHAPE) - 1024, None)
    affine = about((1, 2, 3), 1e-3).affine
    image.set_sform(affine, 1 if forms != "qform" else 0)
    image.set_qform(affine, 1 if forms != "sform" else 0)
    image.header.set_xyzt_units("mm")
    image.to_filename(tmp_path / "scan.nii")

    path = segmented(tmp_path / "scan.nii", tiny_model, tmp_path / "out")

    scan, result = nib.load(tmp_path / "scan.nii").header, nib.load(path).header
    fields = ["sform_code", "qform_code", *(f"quatern_{x}" for x in "bcd")]
    fields += [f"qoffset_{x}" for x in "xyz"]
    fields += [f"srow_{x}" for x in "xyz"] if forms == "both" else []
    np.testing.assert_array_equal(result["pixdim"][:4], scan["pixdim"][:4])
    for field in fields:
        np.testing.assert_array_equal(result[field], scan[field])
    ours, theirs = case_folders.by_itk(path), case_folders.by_itk(tmp_path / "scan.nii")
    np.testing.assert_array_equal(ours, theirs)


def test_a_qform_is_read_as_itk_reads_it(tmp_path: Path) -> None:
    """nibabel takes it for half a turn, a milliradian off."""
    import scanloom as package

    image = nib.Nifti1Image(noise(SHAPE) - 1024, None)
    image.set_qform(about((0, 0, 1), 1e-3).affine, 1)
    image.header.set_xyzt_units("mm")
    image.to_filename(tmp_path / "scan.nii")
    grid = package.load_volume(tmp_path / "scan.nii").grid
    assert (
        case_folders.farthest(grid.affine, case_folders.by_itk(tmp_path / "scan.nii"), SHAPE) < 1e-4
    )
    assert case_folders.farthest(nib.load(tmp_path / "scan.nii").affine, grid.affine, SHAPE) > 0.05


@pytest.mark.thorough
def test_a_qform_in_float64_goes_into_the_sform(tiny_model: Path, tmp_path: Path) -> None:
    """NIfTI-2 says it exactly, NIfTI-1 could not by its qform."""
    image = nib.Nifti2Image(noise(SHAPE) - 1024, None)
    affine = about((1, 2, 3), 1e-3).affine
    image.set_qform(affine, 3)
    image.header.set_xyzt_units("mm")
    image.to_filename(tmp_path / "scan.nii")

    path = segmented(tmp_path / "scan.nii", tiny_model, tmp_path / "out")

    header = nib.load(path).header
    assert (header["sform_code"], header["qform_code"]) == (3, 0)
    for seen in (header.get_sform(), case_folders.by_itk(path)):
        assert case_folders.farthest(seen, affine, SHAPE) < 1e-3


def three_decimals(k: int, ds: Dataset) -> None:
    ds.ImageOrientationPatient = [f"{float(v):.3f}" for v in ds.ImageOrientationPatient]


def a_table_that_shakes(k: int, ds: Dataset) -> None:
    x, y, z = map(float, ds.ImagePositionPatient)
    ds.ImagePositionPatient = [f"{x + 0.06 * (k % 2):.6f}", f"{y:.6f}", f"{z:.6f}"]


@pytest.mark.parametrize("edit", [three_decimals, a_table_that_shakes])
def test_a_header_that_was_rounded_is_published(
    edit: Edit, tiny_model: Path, tmp_path: Path
) -> None:
    """The DICOM SEG lies on the source images as they say it, the label map on the grid."""
    shape = (512, 512, 3) if edit is three_decimals else (96, 96, 12)
    turn = about((1, 2, 3), 0.3)
    geometry = Geometry(across=turn.across, down=turn.down, spacing=(0.2, 0.2))
    write_series(tmp_path / "ct", noise(shape), geometry, edit=edit)

    path = segmented(tmp_path / "ct", tiny_model, tmp_path / "out")

    assert case_folders.farthest(nib.load(path).affine, geometry.affine, shape) < 0.5
    assert (path.parent / "dicom" / "segmentation.dcm").exists()
