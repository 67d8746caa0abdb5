"""The form of a NIfTI that counts, its unit and angles; and the choice of several volumes."""

from __future__ import annotations

import nibabel
import numpy as np
import pytest
import SimpleITK

import scanloom
from scanloom.core import Flag, ScanError
from scanloom.io.formats import FORMATS
from support.case_folders import ORDERS, directions, turned
from support.write_dicom import noise

SPACING = (0.8, 0.9, 2.5)
SHAPE = (24, 20, 6)


def affine_of(order="LPS", *, oblique=0.0):
    affine = np.eye(4)
    affine[:3, :3] = turned(directions(order), oblique) * SPACING
    affine[:3, 3] = (11, -23, 47)
    return affine


def save(path, array=None, sform=None, qform=None, *, codes=(1, 1), edit=None, unit="mm"):
    """Write with nibabel; `edit` changes header fields last."""
    image = nibabel.Nifti1Image(noise() if array is None else array, None)
    image.header.set_xyzt_units(unit)
    if sform is not None:
        image.set_sform(sform, codes[0])
    if qform is not None:
        image.set_qform(qform, codes[1])
    for name, value in (edit or {}).items():
        image.header[name] = value
    image.to_filename(path)
    return path


def code_of(path, **options):
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(path, **options)
    return caught.value.code


@pytest.mark.parametrize("order", ORDERS)
def test_all_48_orders_lie_where_simpleitk_puts_them(tmp_path, order):
    path = save(tmp_path / "a.nii.gz", None, affine_of(order, oblique=20), affine_of(order))
    volume, image = scanloom.load_volume(path), SimpleITK.ReadImage(str(path))
    assert volume.flags == (Flag.FORMS_DISAGREE,)
    for index in [(0, 0, 0), (23, 0, 0), (0, 19, 0), (0, 0, 5), (7, 3, 2)]:
        ras = np.array(image.TransformIndexToPhysicalPoint(index)) * (-1, -1, 1)
        np.testing.assert_allclose(volume.grid.world(index), ras, atol=1e-3)
        assert volume.array[index] == image.GetPixel(index)


@pytest.mark.parametrize("codes", [(1, 1), (1, 2), (2, 1), (3, 1), (4, 1), (5, 5)])
def test_the_sform_wins_whatever_the_codes_as_for_itk_and_nibabel(tmp_path, codes):
    path = save(tmp_path / "a.nii", None, affine_of("LPS"), affine_of("RPS"), codes=codes)
    volume = scanloom.load_volume(path)
    image = SimpleITK.ReadImage(str(path))
    np.testing.assert_allclose(volume.grid.affine, nibabel.load(path).affine, atol=1e-5)
    ras = np.array(image.TransformIndexToPhysicalPoint((9, 8, 3))) * (-1, -1, 1)
    np.testing.assert_allclose(volume.grid.world((9, 8, 3)), ras, atol=1e-3)
    assert volume.flags == (Flag.FORMS_DISAGREE,)


def test_forms_that_differ_by_rounding_agree(tmp_path):
    affine = affine_of(oblique=20)
    path = save(tmp_path / "a.nii", None, affine, affine)
    assert scanloom.load_volume(path).flags == ()


BROKEN = {  # byte of the header, value
    "quaternion too long": {256: 2.0, 260: 2.0},
    "quaternion NaN": {256: np.nan},
    "offset infinite": {268: np.inf},
    "negative spacing": {84: -0.9},
    "no spacing": {84: 0.0},
}


def patched(path, values):
    """Change numbers of a header behind nibabel's back."""
    data = bytearray(path.read_bytes())
    for offset, value in values.items():
        data[offset : offset + 4] = np.float32(value).tobytes()
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", BROKEN)
def test_a_qform_that_can_not_be_is_left_out_if_there_is_a_sform(tmp_path, name):
    affine = affine_of()
    path = patched(save(tmp_path / "a.nii", None, affine, affine), BROKEN[name])
    volume = scanloom.load_volume(path)
    np.testing.assert_allclose(volume.grid.affine, affine, atol=1e-5)
    assert volume.flags == (Flag.FORMS_DISAGREE,)
    source = FORMATS["nifti"].read((path,)).source
    assert (source.qform, source.qform_code, source.sform_code) == (None, 0, 1)
    alone = patched(save(tmp_path / "b.nii", None, None, affine), BROKEN[name])
    assert code_of(alone) == "BAD_GEOMETRY"


@pytest.mark.parametrize(("qfac", "sign"), [(0, 1), (1, 1), (-1, -1), (-3, -1), (7, 1)])
def test_pixdim_0_says_by_its_sign_which_way_k_grows(tmp_path, qfac, sign):
    """nifti1.h: 0 is 1; nibabel refuses all values but 1 and -1."""
    path = patched(save(tmp_path / "a.nii", None, None, np.diag([*SPACING, 1])), {76: qfac})
    volume = scanloom.load_volume(path)
    np.testing.assert_allclose(volume.grid.affine[:3, 2], (0, 0, sign * 2.5), atol=1e-6)


@pytest.mark.parametrize("field", ["sform_code", "qform_code"])
@pytest.mark.parametrize("code", [-1, 6, 300])
def test_a_form_code_that_the_standard_lacks_is_damage(tmp_path, field, code):
    path = save(tmp_path / "a.nii", None, affine_of(), affine_of(), edit={field: code})
    assert code_of(path) == "DAMAGED"


@pytest.mark.parametrize(("unit", "scale"), [("meter", 1e-3), ("mm", 1), ("micron", 1e3)])
@pytest.mark.parametrize("form", ["sform", "qform", "neither"])
def test_lengths_in_other_units_become_mm(tmp_path, unit, scale, form):
    affine = affine_of("LPS")
    stored = np.diag([scale] * 3 + [1]) @ affine
    forms = {form: stored} if form != "neither" else {}
    spacing = [1, *(np.array(SPACING) * scale), 1, 1, 1, 1]
    edit = {"pixdim": spacing} if form == "neither" else {}
    path = save(tmp_path / "a.nii", **forms, unit=unit, edit=edit)
    volume = scanloom.load_volume(path, orientation="LPS")
    np.testing.assert_allclose(volume.grid.affine[:3, :3], affine[:3, :3], atol=1e-5)
    if form != "neither":
        np.testing.assert_allclose(volume.grid.affine, affine, atol=1e-4)
        source = FORMATS["nifti"].read((path,)).source  # what a result is written with, in mm
        np.testing.assert_allclose(getattr(source, form), affine, atol=1e-4)


def test_metres_that_can_only_be_millimetres_are_refused(tmp_path):
    assert code_of(save(tmp_path / "a.nii", sform=affine_of(), unit="meter")) == "BAD_GEOMETRY"
    path = save(tmp_path / "b.nii", sform=affine_of(), edit={"xyzt_units": 5})
    assert code_of(path) == "BAD_GEOMETRY"


@pytest.mark.parametrize("code", [0, 2, 3])
@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("form", ["sform", "qform", "neither"])
def test_a_scan_of_a_speck_or_a_mountain_is_in_another_unit(tmp_path, code, scale, form):
    stored = np.diag([scale] * 3 + [1]) @ affine_of()
    forms = {form: stored} if form != "neither" else {}
    spacing = [1, *(np.array(SPACING) * scale), 1, 1, 1, 1]
    edit = {"xyzt_units": code} | ({"pixdim": spacing} if form == "neither" else {})
    path = save(tmp_path / "a.nii", **forms, edit=edit)
    assert code_of(path, orientation="LPS") == "BAD_GEOMETRY"


def test_millimetres_called_micrometres_are_refused(tmp_path):
    assert code_of(save(tmp_path / "a.nii", sform=affine_of(), unit="micron")) == "BAD_GEOMETRY"


def leaning(cosine, order="LPS"):
    """An affine whose axes j and k lean on each other by `cosine`."""
    affine = affine_of(order, oblique=20)
    j, k = affine[:3, 1] / SPACING[1], affine[:3, 2] / SPACING[2]
    affine[:3, 2] = (k * np.sqrt(1 - cosine**2) + j * cosine) * SPACING[2]
    return affine


@pytest.mark.parametrize("cosine", [3e-6, 5e-5, 9e-5])
def test_rounded_directions_are_made_exactly_orthonormal(tmp_path, cosine):
    affine = leaning(cosine)
    volume = scanloom.load_volume(save(tmp_path / "a.nii", sform=affine))
    assert volume.flags == (Flag.AFFINE_ROUNDED,)
    axes = volume.grid.affine[:3, :3] / volume.grid.spacing
    np.testing.assert_allclose(axes.T @ axes, np.eye(3), atol=1e-12)
    np.testing.assert_allclose(volume.grid.spacing, SPACING, rtol=1e-6)
    middle = (np.array(SHAPE) - 1) / 2
    expected = affine[:3, :3] @ middle + affine[:3, 3]
    np.testing.assert_allclose(volume.grid.world(middle), expected, atol=1e-5)
    corners = np.array([(0, 0, 0), (23, 19, 5), (23, 0, 5)])
    moved = volume.grid.world(corners) - (corners @ affine[:3, :3].T + affine[:3, 3])
    assert np.abs(moved).max() < 2e-3


def test_what_single_precision_leaves_is_not_touched(tmp_path):
    affine = affine_of("PIR", oblique=20)
    volume = scanloom.load_volume(save(tmp_path / "a.nii", sform=affine))
    assert volume.flags == ()
    np.testing.assert_array_equal(volume.grid.affine, affine.astype(np.float32))


def test_what_leans_more_is_a_shear(tmp_path):
    volume = scanloom.load_volume(save(tmp_path / "a.nii", sform=leaning(3e-4)))
    assert volume.flags == ()
    assert volume.grid.sheared


def test_axes_without_any_right_angle_are_refused(tmp_path):
    affine = affine_of()
    affine[:3, 0] += 0.1 * affine[:3, 1] + 0.1 * affine[:3, 2]
    affine[:3, 2] += 0.05 * affine[:3, 1]
    assert code_of(save(tmp_path / "a.nii", sform=affine)) == "BAD_GEOMETRY"


def volumes(count):
    return np.stack([noise(seed=n) for n in range(count)], axis=-1)


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "a.hdr"])
@pytest.mark.parametrize("shape", [(6,), (1, 6), (3, 2), (1, 1, 6)])
def test_volumes_of_four_and_more_dimensions_are_numbered(tmp_path, name, shape):
    """In the order in which they are stored: the fourth dimension runs fastest."""
    array = volumes(6).reshape(*SHAPE, *shape, order="F")
    kind = nibabel.Nifti1Pair if name == "a.hdr" else nibabel.Nifti1Image
    kind(array, np.eye(4)).to_filename(tmp_path / name)
    assert code_of(tmp_path / name) == "FOUR_D"
    for phase in (0, 4, 5):
        volume = scanloom.load_volume(tmp_path / name, phase=phase)
        np.testing.assert_array_equal(volume.array, noise(seed=phase))
    for phase in (-1, 6):
        assert code_of(tmp_path / name, phase=phase) == "FOUR_D"


@pytest.mark.parametrize("intent", [1005, 1006, 1007, 1010, 2003])
def test_a_fifth_dimension_of_vectors_is_no_choice(tmp_path, intent):
    array = volumes(3).reshape(*SHAPE, 1, 3)
    path = save(tmp_path / "a.nii", array, affine_of(), edit={"intent_code": intent})
    assert code_of(path) == "PIXEL_TYPE"
    assert code_of(path, phase=1) == "PIXEL_TYPE"


def test_scaling_of_one_volume_of_several_big_endian(tmp_path):
    header = nibabel.Nifti1Header(endianness=">")
    header.set_data_dtype(">i2")
    header.set_slope_inter(0.5, 3)
    nibabel.Nifti1Image(volumes(2) * 0.5 + 3, np.eye(4), header).to_filename(tmp_path / "a.nii.gz")
    image = nibabel.load(tmp_path / "a.nii.gz")
    volume = scanloom.load_volume(tmp_path / "a.nii.gz", phase=1)
    assert volume.array.dtype == np.float32
    np.testing.assert_allclose(volume.array, image.get_fdata()[..., 1], rtol=1e-6)


def test_text_of_the_header_comes_nowhere(tmp_path):
    canary = b"Canary^Bird"
    edit = {"descrip": canary, "aux_file": canary, "db_name": canary, "intent_name": canary}
    path = save(tmp_path / "a.nii", sform=affine_of(), edit=edit)
    scan = FORMATS["nifti"].read((path,))
    assert b"Canary" not in repr(scan.source).encode() + repr(scan.volume.flags).encode()
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(save(tmp_path / "b.nii", edit=edit))
    assert "Canary" not in str(caught.value)
