"""NRRD and MetaImage volumes equal the scan that SimpleITK wrote into them."""

from __future__ import annotations

import nibabel
import numpy as np
import pytest
import SimpleITK

import scanloom
from scanloom.core import Flag, ScanError
from scanloom.io.index.series import find_series
from support.write_dicom import PLANES, noise, plane

NAMES = ["a.mha", "a.mhd", "a.nrrd", "a.nhdr"]


def drawn(name="doubly oblique", dtype=np.int16):
    geometry = plane(name)
    image = SimpleITK.GetImageFromArray(np.ascontiguousarray(noise().T).astype(dtype))
    lps = np.diag([-1, -1, 1, 1]) @ geometry.affine
    spacing = np.linalg.norm(lps[:3, :3], axis=0)
    image.SetSpacing(spacing)
    image.SetDirection((lps[:3, :3] / spacing).ravel())
    image.SetOrigin(geometry.origin)
    return image, geometry.affine


def code_of(path, **options):
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(path, **options)
    return caught.value.code


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("where", ["axial", "sagittal, both negated", "doubly oblique"])
def test_voxels_and_world_are_those_of_the_image(tmp_path, name, compressed, where):
    assert where in PLANES
    image, affine = drawn(where)
    SimpleITK.WriteImage(image, str(tmp_path / name), compressed)

    volume = scanloom.load_volume(tmp_path / name, modality="CT")

    np.testing.assert_array_equal(volume.array, noise())
    np.testing.assert_allclose(volume.grid.affine, affine, atol=1e-6)
    assert (volume.unit, volume.array.dtype) == ("HU", np.int16)


def test_it_lies_where_the_same_image_as_nifti_does(tmp_path):
    image, _ = drawn()
    for name in ("a.nrrd", "a.nii"):
        SimpleITK.WriteImage(image, str(tmp_path / name))
    ours = scanloom.load_volume(tmp_path / "a.nrrd")
    theirs = nibabel.load(tmp_path / "a.nii")
    np.testing.assert_allclose(ours.grid.affine, theirs.affine, atol=1e-4)
    np.testing.assert_array_equal(ours.array, np.asarray(theirs.dataobj))


def test_the_files_of_a_detached_header_belong_together(tmp_path):
    SimpleITK.WriteImage(drawn()[0], str(tmp_path / "a.mhd"))
    [series] = find_series(tmp_path / "a.mhd")
    assert [path.name for path in series.files] == ["a.mhd", "a.raw"]


@pytest.mark.parametrize("name", ["a.mhd", "a.nhdr"])
def test_data_in_another_folder_are_refused(tmp_path, name):
    SimpleITK.WriteImage(drawn()[0], str(tmp_path / name))
    (tmp_path / "sub").mkdir()
    text = (tmp_path / name).read_text()
    for data_name in ("../a.raw", str(tmp_path / "a.raw")):
        (tmp_path / "sub" / name).write_text(text.replace("a.raw", data_name))
        assert code_of(tmp_path / "sub" / name) == "DAMAGED"


@pytest.mark.parametrize("name", ["a.mha", "a.nrrd"])
def test_attached_headers_may_not_point_elsewhere_either(tmp_path, name):
    SimpleITK.WriteImage(drawn()[0], str(tmp_path / {"a.mha": "a.mhd", "a.nrrd": "a.nhdr"}[name]))
    [header] = [p for p in tmp_path.iterdir() if p.suffix in (".mhd", ".nhdr")]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / name).write_text(header.read_text().replace("a.raw", "../a.raw"))
    assert code_of(tmp_path / "sub" / name) == "DAMAGED"


def test_missing_data_are_told(tmp_path):
    SimpleITK.WriteImage(drawn()[0], str(tmp_path / "a.mhd"))
    (tmp_path / "a.raw").unlink()
    assert code_of(tmp_path / "a.mhd") == "NOT_FOUND"


@pytest.mark.parametrize("name", ["a.mha", "a.nrrd"])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_that_ends_too_early_is_refused(tmp_path, name, compressed):
    SimpleITK.WriteImage(drawn()[0], str(tmp_path / name), compressed)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) * 2 // 3])
    assert code_of(tmp_path / name) == "TRUNCATED"


def test_a_nrrd_without_space_is_refused_unless_it_is_given(tmp_path):
    SimpleITK.WriteImage(drawn("axial")[0], str(tmp_path / "a.nrrd"))
    data = (tmp_path / "a.nrrd").read_bytes()
    data = data.replace(b"space: left-posterior-superior", b"space dimension: 3")
    (tmp_path / "a.nrrd").write_bytes(data)
    assert code_of(tmp_path / "a.nrrd") == "ORIENTATION_UNKNOWN"
    volume = scanloom.load_volume(tmp_path / "a.nrrd", orientation="LPS")
    assert volume.grid.axis_codes == "LPS"
    assert volume.flags == (Flag.ORIENTATION_GIVEN,)


@pytest.mark.parametrize(
    ("space", "flip"),
    [("right-anterior-superior", (-1, -1, 1)), ("left-anterior-superior", (1, -1, 1))],
)
def test_other_spaces_are_understood(tmp_path, space, flip):
    """The same numbers in another space are another place."""
    image, affine = drawn()
    SimpleITK.WriteImage(image, str(tmp_path / "a.nrrd"))
    data = (tmp_path / "a.nrrd").read_bytes()
    (tmp_path / "a.nrrd").write_bytes(data.replace(b"left-posterior-superior", space.encode()))
    volume = scanloom.load_volume(tmp_path / "a.nrrd")
    expected = np.diag([*flip, 1]) @ affine
    np.testing.assert_allclose(volume.grid.affine, expected, atol=1e-6)


def test_other_lengths_than_millimetres_are_refused(tmp_path):
    SimpleITK.WriteImage(drawn()[0], str(tmp_path / "a.nrrd"))
    data = (tmp_path / "a.nrrd").read_bytes()
    data = data.replace(b"\nkinds:", b'\nspace units: "um" "um" "um"\nkinds:')
    (tmp_path / "a.nrrd").write_bytes(data)
    assert code_of(tmp_path / "a.nrrd") == "BAD_GEOMETRY"


def image_of(shape, *, vector=False, dtype=np.uint8):
    return SimpleITK.GetImageFromArray(np.zeros(shape, dtype), isVector=vector)


KINDS = {
    "flat": (image_of((20, 24)), "TOO_FEW_SLICES"),
    "two slices": (image_of((2, 20, 24)), "TOO_FEW_SLICES"),
    "colour": (image_of((6, 20, 24, 3), vector=True), "COLOR"),
    "vectors": (image_of((6, 20, 24, 2), vector=True, dtype=np.float32), "PIXEL_TYPE"),
    "several": (SimpleITK.JoinSeries([image_of((6, 20, 24))] * 2), "FOUR_D"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a.mha", "a.nrrd"])
def test_what_is_no_grey_volume_is_refused(tmp_path, kind, name):
    image, code = KINDS[kind]
    SimpleITK.WriteImage(image, str(tmp_path / name))
    assert code_of(tmp_path / name) == code


@pytest.mark.parametrize("name", NAMES)
def test_a_text_with_that_name_is_damaged(tmp_path, name):
    (tmp_path / name).write_text("hello")
    assert code_of(tmp_path / name) == "DAMAGED"


def test_voxels_that_are_not_finite_are_refused(tmp_path):
    array = noise().T.astype(np.float32)
    array[1, 2, 3] = np.nan
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(array), str(tmp_path / "a.mha"))
    assert code_of(tmp_path / "a.mha") == "PIXEL_TYPE"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("mm", "code"), [("0.9", "SPACING_CHANGES"), ("0.001", None)])
def test_slices_that_were_uneven_are_refused(tmp_path, name, mm, code):
    """ITK writes so into a volume that it made of a series with gaps."""
    image, _ = drawn()
    image.SetMetaData("ITK_non_uniform_sampling_deviation", mm)
    SimpleITK.WriteImage(image, str(tmp_path / name))
    assert b"ITK_non_uniform_sampling_deviation" in (tmp_path / name).read_bytes()

    if code:
        assert code_of(tmp_path / name) == code
    else:
        assert scanloom.load_volume(tmp_path / name).array.shape == noise().shape
