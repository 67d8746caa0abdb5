"""Volumes and label maps as images of nibabel, SimpleITK, PyTorch and MONAI, and back."""

from __future__ import annotations

import warnings
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
import torch
from monai.data import MetaTensor, NibabelReader
from monai.utils import SpaceKeys
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from scanloom.core import Code, Grid, Layer, Reason, ScanError, Segmentation, Structure, Volume

SHAPE = (5, 4, 3)
CODE = Code("10200004", "SCT", "Liver")
DTYPES = [np.uint8, np.int16, np.uint16, np.int32, np.float32, np.float64]


def affine(kind: str) -> NDArray[np.float64]:
    """Return an affine whose axes are flipped, oblique, or sheared as by gantry tilt."""
    matrix = np.diag((-0.7, -0.8, 2.5, 1.0))
    if kind != "flipped":
        turn = Rotation.from_euler("xyz", (12, -25, 40), degrees=True).as_matrix()
        matrix[:3, :3] = turn @ matrix[:3, :3]
    if kind == "sheared":
        matrix[:3, 2] += 0.4 * matrix[:3, 1]
    matrix[:3, 3] = (31.5, -120.25, 77.0)
    return matrix


def make_volume(kind: str, dtype: type = np.int16) -> Volume:
    values = np.arange(60).reshape(SHAPE).astype(dtype)
    return Volume.from_array(values, affine(kind), modality="CT")


def assert_equal(volume: Volume, expected: Volume, dtype: type) -> None:
    assert expected.array.dtype == dtype
    np.testing.assert_array_equal(expected.array, volume.array)
    np.testing.assert_allclose(expected.grid.affine, volume.grid.affine, rtol=0, atol=1e-12)
    assert (expected.modality, expected.unit) == ("CT", "HU")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["flipped", "oblique", "sheared"])
def test_there_and_back_is_equal(kind: str, dtype: type) -> None:
    volume = make_volume(kind, dtype)

    through_nibabel = Volume.from_nibabel(volume.to_nibabel(), modality="CT")
    through_monai = Volume.from_metatensor(volume.to_metatensor(), modality="CT")
    assert_equal(volume, through_nibabel, dtype)
    assert_equal(volume, through_monai, dtype)
    if kind != "sheared":
        assert_equal(volume, Volume.from_sitk(volume.to_sitk(), modality="CT"), dtype)


@pytest.mark.parametrize("kind", ["flipped", "oblique", "sheared"])
def test_other_libraries_see_each_voxel_where_it_is(kind: str) -> None:
    volume, voxel = make_volume(kind), (3, 1, 2)
    ras = volume.grid.world(voxel)

    image = volume.to_nibabel()
    assert image.dataobj[voxel] == volume.array[voxel]
    np.testing.assert_allclose(nib.affines.apply_affine(image.affine, voxel), ras)
    tensor = volume.to_metatensor()
    assert tensor[(0, *voxel)] == volume.array[voxel]
    np.testing.assert_allclose(tensor.affine.numpy() @ (*voxel, 1), (*ras, 1))
    if kind != "sheared":
        itk = volume.to_sitk()
        assert itk[voxel] == volume.array[voxel]
        lps = itk.TransformIndexToPhysicalPoint(voxel)
        np.testing.assert_allclose(lps, ras * (-1, -1, 1))


def test_shear_is_refused_for_simpleitk() -> None:
    with pytest.raises(ScanError, match=r"SimpleITK can't express sheared.*to_nibabel") as caught:
        make_volume("sheared").to_sitk()
    assert caught.value.reason is Reason.SHEAR_NOT_SUPPORTED


def test_saved_images_are_read_as_the_volume(tmp_path: Path) -> None:
    """MONAI reads from nibabel's file the values that it is given directly."""
    volume = make_volume("oblique", np.float32)
    nib.save(volume.to_nibabel(), tmp_path / "scan.nii.gz")

    reader = NibabelReader()
    values, meta = reader.get_data(reader.read(tmp_path / "scan.nii.gz"))

    tensor = volume.to_metatensor()
    np.testing.assert_array_equal(values, tensor[0])
    assert (meta["space"], tuple(meta["spatial_shape"])) == (tensor.meta["space"], SHAPE)
    np.testing.assert_allclose(meta["affine"], tensor.affine, atol=1e-4)


def test_tensors_own_their_memory() -> None:
    volume = make_volume("flipped")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors = [volume.to_torch(), volume.to_metatensor()]
    for tensor in tensors:
        assert tensor.is_contiguous()
        tensor += 1
    np.testing.assert_array_equal(volume.array, make_volume("flipped").array)


def test_other_byte_orders_and_half_floats() -> None:
    native = make_volume("flipped")
    big = Volume(native.array.astype(">i2"), native.grid, "HU", "CT")
    assert big.to_torch().dtype is torch.int16
    assert big.to_sitk()[4, 3, 2] == 59
    half = make_volume("flipped", np.float16)
    assert half.to_nibabel().get_data_dtype() == np.float32
    assert half.to_sitk().GetPixelID() == sitk.sitkFloat32
    assert half.to_torch().dtype is torch.float16


def test_bfloat16_of_torch_becomes_float32() -> None:
    volume = make_volume("flipped", np.float32)
    half = volume.to_metatensor().to(torch.bfloat16)
    assert_equal(volume, Volume.from_metatensor(half, modality="CT"), np.float32)


def test_lps_of_monai_and_micrometres_of_nifti_are_converted() -> None:
    volume = make_volume("oblique")
    lps = np.diag((-1.0, -1.0, 1.0, 1.0)) @ volume.grid.affine
    tensor = MetaTensor(volume.to_torch(), affine=torch.from_numpy(lps))
    tensor.meta["space"] = SpaceKeys.LPS
    assert Volume.from_metatensor(tensor).grid.matches(volume.grid, 1e-9)
    image = volume.to_nibabel()
    image.header.set_xyzt_units(xyz="micron")
    np.testing.assert_allclose(Volume.from_nibabel(image).grid.spacing, (7e-4, 8e-4, 2.5e-3))


def test_images_that_are_no_volume_are_refused() -> None:
    several = np.zeros((*SHAPE, 2), np.float32)
    with pytest.raises(ValueError, match="three dimensions"):
        Volume.from_nibabel(nib.Nifti1Image(several, np.eye(4)))
    with pytest.raises(ValueError, match="one value a voxel"):
        Volume.from_sitk(sitk.GetImageFromArray(several, isVector=True))
    with pytest.raises(ValueError, match="one value a voxel"):
        Volume.from_sitk(sitk.Image(4, 4, sitk.sitkInt16))
    with pytest.raises(ValueError, match=r"\(1, I, J, K\)"):
        Volume.from_metatensor(MetaTensor(torch.zeros((2, *SHAPE))))
    with pytest.raises(ValueError, match=r"\(I, J, K\)"):
        Volume.from_array(several, np.eye(4))
    unknown = MetaTensor(torch.zeros(SHAPE), meta={"space": "screen"})
    with pytest.raises(ValueError, match="RAS or LPS"):
        Volume.from_metatensor(unknown)


@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image, nib.Spm2AnalyzeImage])
def test_an_affine_that_nibabel_guesses_is_refused(kind: type, tmp_path: Path) -> None:
    """As `load_volume` refuses the file: nothing in it says which side is left."""
    path = tmp_path / ("scan.img" if kind is nib.Spm2AnalyzeImage else "scan.nii")
    kind(np.zeros(SHAPE, np.int16), None).to_filename(path)

    with pytest.raises(ScanError, match="neither sform nor qform") as caught:
        Volume.from_nibabel(nib.load(path))
    assert caught.value.reason is Reason.ORIENTATION_UNKNOWN


def test_an_unknown_unit_of_nifti_is_refused() -> None:
    image = make_volume("flipped").to_nibabel()
    image.header["xyzt_units"] = 5
    with pytest.raises(ScanError, match="unit of length") as caught:
        Volume.from_nibabel(image)
    assert caught.value.reason is Reason.BAD_GEOMETRY


def test_scaled_values_of_nifti_are_scaled(tmp_path: Path) -> None:
    image = nib.Nifti1Image(np.full(SHAPE, 4, np.int16), np.eye(4))
    image.to_filename(tmp_path / "scan.nii")
    content = bytearray((tmp_path / "scan.nii").read_bytes())
    content[112:120] = np.array([2, -1], "<f4").tobytes()  # scl_slope, scl_inter
    (tmp_path / "scan.nii").write_bytes(content)

    read = nib.load(tmp_path / "scan.nii")

    assert Volume.from_nibabel(read).array[0, 0, 0] == 7


def segmentation(*numbers: tuple[int, ...]) -> Segmentation:
    layers = []
    for group in numbers:
        labels = np.zeros(SHAPE, np.uint8)
        for n in group:
            labels[n] = n
        structures = tuple(Structure(f"part_{n}", n, "Part", CODE, CODE, (9, 9, n)) for n in group)
        layers.append(Layer(labels, structures))
    return Segmentation("tiny", tuple(layers), Grid(SHAPE, affine("oblique")))


def test_label_maps_and_masks_are_converted() -> None:
    segmented = segmentation((1, 2))
    labels = segmented.layers[0].labels

    np.testing.assert_array_equal(np.asarray(segmented.to_nibabel().dataobj), labels)
    np.testing.assert_array_equal(sitk.GetArrayFromImage(segmented.to_sitk()).T, labels)
    np.testing.assert_array_equal(segmented.to_torch().numpy(), labels)
    np.testing.assert_array_equal(segmented.to_torch("part_2").numpy(), labels == 2)
    np.testing.assert_array_equal(segmented.to_nibabel().affine, segmented.grid.affine)


def test_overlapping_structures_need_a_label() -> None:
    segmented = segmentation((1,), (2,))

    with pytest.raises(ValueError, match="give the label of a structure"):
        segmented.to_sitk()
    assert sitk.GetArrayFromImage(segmented.to_sitk("part_2")).sum() == 12
