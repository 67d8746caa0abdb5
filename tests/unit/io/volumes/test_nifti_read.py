"""NIfTI images lie where nibabel and SimpleITK put them, or are refused."""

from __future__ import annotations

import gzip

import nibabel
import numpy as np
import pytest
import SimpleITK
from scipy.spatial.transform import Rotation

import scanloom
from scanloom.core import Flag, ScanError
from support.write_dicom import noise

ORDERS = ["RAS", "LPS", "LAS", "PIR", "SLA", "IPR", "ALS", "SRP"]
DTYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"]


def affine_of(order: str) -> np.ndarray:
    """A turned affine whose axes follow `order`; its directions are at right angles."""
    turn = Rotation.from_euler("xyz", (7, -11, 13), degrees=True).as_matrix()
    affine = np.eye(4)
    for n, (code, spacing) in enumerate(zip(order, (0.8, 0.9, 2.5), strict=True)):
        axis = ["RL", "AP", "SI"].index(next(pair for pair in ("RL", "AP", "SI") if code in pair))
        affine[:3, n] = turn[:, axis] * spacing * (1 if code in "RAS" else -1)
    affine[:3, 3] = (11, -23, 47)
    return affine


def save(path, array, affine, *, sform=1, qform=1, kind=nibabel.Nifti1Image, dtype=None):
    image = kind(array, None, dtype=dtype or array.dtype)
    image.header.set_xyzt_units("mm")
    if sform:
        image.set_sform(affine, sform)
    if qform:
        image.set_qform(affine, qform)
    image.header["pixdim"][1:4] = np.linalg.norm(affine[:3, :3], axis=0)  # ITK's spacing
    image.header["sform_code"], image.header["qform_code"] = sform, qform
    image.to_filename(path)
    return path


def code_of(path, **options):
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(path, **options)
    return caught.value.code


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("forms", [(1, 0), (0, 1), (2, 1)])
def test_voxels_lie_where_simpleitk_puts_them(tmp_path, order, forms):
    path = save(tmp_path / "a.nii.gz", noise(), affine_of(order), sform=forms[0], qform=forms[1])

    volume, image = scanloom.load_volume(path), SimpleITK.ReadImage(str(path))

    assert volume.grid.axis_codes == order
    for index in [(0, 0, 0), (23, 0, 0), (0, 19, 0), (0, 0, 5), (23, 19, 5), (7, 3, 2)]:
        ras = np.array(image.TransformIndexToPhysicalPoint(index)) * (-1, -1, 1)
        np.testing.assert_allclose(volume.grid.world(index), ras, atol=1e-3)
        assert volume.array[index] == image.GetPixel(index)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "a.hdr"])
@pytest.mark.parametrize("endian", ["<", ">"])
def test_every_stored_type_is_kept(tmp_path, dtype, name, endian):
    array = (noise() % 120).astype(endian + dtype)
    kind = nibabel.Nifti1Pair if name == "a.hdr" else nibabel.Nifti1Image
    header = kind.header_class(endianness=endian)
    header.set_data_dtype(array.dtype)
    kind(array, np.eye(4), header).to_filename(tmp_path / name)

    volume = scanloom.load_volume(tmp_path / name)

    assert volume.array.dtype == np.dtype(dtype)
    assert volume.array.dtype.isnative
    assert volume.array.flags.f_contiguous
    np.testing.assert_array_equal(volume.array, array)


def test_nifti_2(tmp_path):
    path = save(tmp_path / "a.nii.gz", noise(), affine_of("LPS"), kind=nibabel.Nifti2Image)
    volume = scanloom.load_volume(path)
    np.testing.assert_array_equal(volume.array, noise())
    np.testing.assert_allclose(volume.grid.affine, affine_of("LPS"), atol=1e-5)


def test_scaling_is_applied_as_nibabel_does(tmp_path):
    image = nibabel.Nifti1Image(noise(), affine_of("RAS"))
    image.header.set_slope_inter(0.25, -17)
    image.to_filename(tmp_path / "a.nii")
    volume = scanloom.load_volume(tmp_path / "a.nii")
    assert volume.array.dtype == np.float32
    expected = nibabel.load(tmp_path / "a.nii").get_fdata()
    np.testing.assert_allclose(volume.array, expected, rtol=1e-6)
    assert abs(expected).max() > 0


def test_one_volume_of_several(tmp_path):
    array = np.stack([noise(seed=n) for n in range(3)], axis=-1)
    for name in ("a.nii", "a.nii.gz"):
        path = save(tmp_path / name, array, affine_of("RAS"))
        assert code_of(path) == "FOUR_D"
        assert code_of(path, phase=3) == "FOUR_D"
        np.testing.assert_array_equal(scanloom.load_volume(path, phase=2).array, noise(seed=2))
    single = save(tmp_path / "b.nii", array[..., :1], affine_of("RAS"))
    np.testing.assert_array_equal(scanloom.load_volume(single).array, noise())


def test_sform_wins_and_a_difference_is_told(tmp_path):
    image = nibabel.Nifti1Image(noise(), None)
    image.set_sform(affine_of("LPS"), 2)
    image.set_qform(affine_of("RPS"), 1)
    image.to_filename(tmp_path / "a.nii")
    volume = scanloom.load_volume(tmp_path / "a.nii")
    np.testing.assert_allclose(volume.grid.affine, affine_of("LPS"), atol=1e-5)
    assert volume.flags == (Flag.FORMS_DISAGREE,)


def test_a_sheared_sform_keeps_its_shear(tmp_path):
    affine = affine_of("LPS")
    affine[:3, 2] += affine[:3, 1] * 0.3
    image = nibabel.Nifti1Image(noise(), None)
    image.set_sform(affine, 1)
    image.to_filename(tmp_path / "a.nii")
    volume = scanloom.load_volume(tmp_path / "a.nii")
    assert volume.grid.shear_axis == 2
    np.testing.assert_allclose(volume.grid.affine, affine, atol=1e-5)


def test_without_orientation_it_is_refused_unless_it_is_given(tmp_path):
    path = save(tmp_path / "a.nii", noise(), np.diag([0.8, 0.9, 2.5, 1]), sform=0, qform=0)
    assert code_of(path) == "ORIENTATION_UNKNOWN"
    volume = scanloom.load_volume(path, orientation="PSL")
    assert volume.grid.axis_codes == "PSL"
    np.testing.assert_allclose(volume.grid.spacing, (0.8, 0.9, 2.5), rtol=1e-6)
    assert volume.flags == (Flag.ORIENTATION_GIVEN,)
    with pytest.raises(ValueError, match="orientation"):
        scanloom.load_volume(path, orientation="RAX")


def test_orientation_is_not_used_where_the_file_says_it(tmp_path):
    path = save(tmp_path / "a.nii", noise(), affine_of("LPS"))
    with pytest.warns(UserWarning, match="was not used: the scan states LPS"):
        volume = scanloom.load_volume(path, orientation="RAS")
    assert volume.grid.axis_codes == "LPS"
    assert volume.flags == ()
    assert scanloom.load_volume(path, orientation=" lps ").flags == ()  # agrees: no warning


@pytest.mark.parametrize(("modality", "unit"), [(None, "unknown"), ("CT", "HU"), ("MR", "a.u.")])
def test_unit_follows_the_modality_that_was_given(tmp_path, modality, unit):
    path = save(tmp_path / "a.nii", noise(), affine_of("LPS"))
    volume = scanloom.load_volume(path, modality=modality)
    assert (volume.modality, volume.unit) == (modality, unit)


def test_a_file_that_ends_too_early_is_truncated(tmp_path):
    for name in ("a.nii", "a.nii.gz"):
        path = save(tmp_path / name, noise(), affine_of("LPS"))
        data = path.read_bytes()
        for kept in (200, len(data) // 2, len(data) - 9):
            path.write_bytes(data[:kept])
            assert code_of(path) == "TRUNCATED"
    path.write_bytes(gzip.compress(gzip.decompress(data)[:-5]))
    assert code_of(path) == "TRUNCATED"


def test_a_gzip_with_a_wrong_checksum_is_damaged(tmp_path):
    path = save(tmp_path / "a.nii.gz", noise(), affine_of("LPS"))
    data = bytearray(path.read_bytes())
    data[-6] ^= 0xFF
    path.write_bytes(data)
    assert code_of(path) == "DAMAGED"


def patched(path, offset, value):
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    path.write_bytes(data)
    return path


HEADERS = {
    "text": (0, b"x" * 400, "DAMAGED"),
    "magic": (344, b"nope", "DAMAGED"),
    "negative dimension": (42, b"\xff\xff", "DAMAGED"),
    "no dimension": (40, b"\x00\x00", "DAMAGED"),
    "huge": (42, b"\xff\x7f\xff\x7f\xff\x7f", "TRUNCATED"),
    "offset": (108, np.float32(-5).tobytes(), "DAMAGED"),
    "offset NaN": (108, np.float32(np.nan).tobytes(), "DAMAGED"),
    "unknown type": (70, b"\x63\x00", "PIXEL_TYPE"),
    "colour": (70, b"\x80\x00", "PIXEL_TYPE"),
    "complex": (70, b"\x20\x00", "PIXEL_TYPE"),
    "slope": (112, np.float32(np.inf).tobytes(), "RESCALE"),
    "metres": (123, b"\x01", "BAD_GEOMETRY"),
    "sform NaN": (280, np.float32(np.nan).tobytes(), "BAD_GEOMETRY"),
    "sform zero": (280, bytes(48), "BAD_GEOMETRY"),
    "CIFTI": (68, np.int16(3001).tobytes(), "NOT_AN_IMAGE"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_damaged_header_is_refused(tmp_path, name):
    offset, value, code = HEADERS[name]
    path = patched(save(tmp_path / "a.nii", noise(), affine_of("LPS")), offset, value)
    assert code_of(path) == code


def test_a_qform_that_is_no_rotation_is_refused(tmp_path):
    path = save(tmp_path / "a.nii", noise(), affine_of("LPS"), sform=0)
    patched(path, 256, np.array([2, 2, 2], "<f4").tobytes())
    assert code_of(path) == "BAD_GEOMETRY"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_voxels_that_are_not_finite_are_refused(tmp_path, value):
    array = noise().astype(np.float32)
    array[3, 4, 5] = value
    assert code_of(save(tmp_path / "a.nii", array, affine_of("LPS"))) == "PIXEL_TYPE"


@pytest.mark.parametrize("shape", [(24, 20), (24, 20, 2), (1, 20, 6)])
def test_what_is_flat_is_no_volume(tmp_path, shape):
    assert code_of(save(tmp_path / "a.nii", noise(shape), np.eye(4))) == "TOO_FEW_SLICES"


def test_a_header_without_its_data_is_refused(tmp_path):
    nibabel.Nifti1Pair(noise(), np.eye(4)).to_filename(tmp_path / "a.hdr")
    (tmp_path / "a.img").unlink()
    assert code_of(tmp_path / "a.hdr") == "NOT_FOUND"
