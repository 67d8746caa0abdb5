"""Volumes and label maps as images of nibabel and SimpleITK, as tensors of PyTorch and MONAI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid, Reason, ScanError
from scanloom.core.errors import check_type
from scanloom.core.grid import LPS_TO_RAS_AFFINE

if TYPE_CHECKING:
    import nibabel as nib
    import SimpleITK as sitk  # noqa: N813 - the library's own documentation imports it so
    import torch
    from monai.data import MetaTensor

_FORM_CODES = ("sform_code", "qform_code")
_FOR_FILES = " (load_volume reads files)"
_UNITS_MM = {"unknown": 1.0, "meter": 1000.0, "mm": 1.0, "micron": 0.001}


def to_nibabel(array: NDArray[Any], grid: Grid) -> nib.Nifti1Image:
    """Return an array (I, J, K) as a NIfTI image in mm; float16 becomes float32."""
    import nibabel as nib

    if array.dtype == np.float16:  # not a NIfTI type; float32 represents every value
        array = array.astype(np.float32)
    copy = np.array(array, array.dtype.newbyteorder("="), order="F")
    image = nib.Nifti1Image(copy, grid.affine.copy(), dtype=copy.dtype)
    image.header.set_xyzt_units(xyz="mm")
    return image


def from_nibabel(image: nib.spatialimages.SpatialImage) -> tuple[NDArray[Any], Grid]:
    """Return the scaled values (I, J, K) of an image and its grid; a last axis of 1 is dropped.

    Raises
    ------
    ValueError
        If the image has several volumes, or no affine.
    ScanError
        ORIENTATION_UNKNOWN if a NIfTI or Analyze image states none, so that its affine is nibabel's
        guess; BAD_GEOMETRY if the affine is not that of a stack of slices, or its unit is unknown.
    """
    from nibabel.analyze import AnalyzeHeader
    from nibabel.spatialimages import SpatialImage

    check_type(image, SpatialImage, f"from_nibabel takes an image of nibabel{_FOR_FILES}")
    header = image.header
    if image.affine is None:
        raise ValueError("the image has no affine: use Volume.from_array")
    if isinstance(header, AnalyzeHeader) and not any(header.get(name, 0) for name in _FORM_CODES):
        detail = "the image has neither sform nor qform: give its affine to Volume.from_array"
        raise ScanError(Reason.ORIENTATION_UNKNOWN, detail)
    array = np.asanyarray(image.dataobj)
    if array.ndim == 4 and array.shape[3] == 1:
        array = array[..., 0]
    if array.ndim != 3:
        raise ValueError(f"an image of three dimensions is expected, got {image.shape}")
    affine = np.array(image.affine, np.float64)
    if hasattr(header, "get_xyzt_units"):
        try:
            affine[:3] *= _UNITS_MM[header.get_xyzt_units()[0]]
        except KeyError as exc:
            raise ScanError(Reason.BAD_GEOMETRY, "the image's unit of length is unknown") from exc
    return array, Grid(array.shape, affine)


def to_sitk(array: NDArray[Any], grid: Grid) -> sitk.Image:
    """Return an array (I, J, K) as an image; float16 becomes float32.

    Raises
    ------
    ScanError
        SHEAR_NOT_SUPPORTED if the grid is sheared: ITK's direction is a rotation.
    """
    import SimpleITK as sitk  # noqa: N813 - the library's own documentation imports it so

    if grid.sheared:
        detail = "SimpleITK can't express sheared slices (gantry tilt)"
        raise ScanError(Reason.SHEAR_NOT_SUPPORTED, detail)
    if array.dtype == np.float16:
        array = array.astype(np.float32)
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    image = sitk.GetImageFromArray(np.ascontiguousarray(native.T))
    affine, spacing = LPS_TO_RAS_AFFINE @ grid.affine, np.array(grid.spacing)
    image.SetSpacing(grid.spacing)
    image.SetOrigin(affine[:3, 3].tolist())
    image.SetDirection((affine[:3, :3] / spacing).ravel().tolist())
    return image


def from_sitk(image: sitk.Image) -> tuple[NDArray[Any], Grid]:
    """Return the values (I, J, K) of an image and its grid.

    Raises
    ------
    ValueError
        If the image has not three dimensions, or several values a voxel.
    ScanError
        BAD_GEOMETRY if its axes are not those of a stack of slices.
    """
    import SimpleITK as sitk  # noqa: N813 - the library's own documentation imports it so

    check_type(image, sitk.Image, f"from_sitk takes an image of SimpleITK{_FOR_FILES}")
    if image.GetDimension() != 3 or image.GetNumberOfComponentsPerPixel() != 1:
        raise ValueError(
            f"an image of three dimensions and one value a voxel is expected, got "
            f"{image.GetDimension()} dimensions and {image.GetNumberOfComponentsPerPixel()} values"
        )
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
    affine[:3, 3] = image.GetOrigin()
    array = sitk.GetArrayFromImage(image).T
    return array, Grid(array.shape, LPS_TO_RAS_AFFINE @ affine)


def to_torch(array: NDArray[Any]) -> torch.Tensor:
    """Return an array (I, J, K) as a contiguous tensor of its own memory."""
    import torch

    return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))


def to_metatensor(array: NDArray[Any], grid: Grid) -> MetaTensor:
    """Return an array (I, J, K) as a tensor (1, I, J, K) with the affine in RAS mm."""
    import torch
    from monai.data import MetaTensor
    from monai.utils import MetaKeys, SpaceKeys

    affine = torch.from_numpy(grid.affine.copy())
    meta = {
        MetaKeys.SPACE: SpaceKeys.RAS,
        MetaKeys.ORIGINAL_AFFINE: affine.clone(),
        MetaKeys.SPATIAL_SHAPE: np.array(grid.shape),
        MetaKeys.ORIGINAL_CHANNEL_DIM: "no_channel",
    }
    return MetaTensor(to_torch(array)[None], affine=affine, meta=meta)


def from_metatensor(tensor: MetaTensor) -> tuple[NDArray[Any], Grid]:
    """Return the values (I, J, K) of a tensor (1, I, J, K) or (I, J, K), and its grid.

    bfloat16, which NumPy lacks, becomes float32.

    Raises
    ------
    ValueError
        If the tensor has several channels, or its space is neither RAS nor LPS.
    ScanError
        BAD_GEOMETRY if the affine is not that of a stack of slices.
    """
    import torch
    from monai.data import MetaTensor
    from monai.utils import MetaKeys, SpaceKeys

    check_type(tensor, MetaTensor, f"from_metatensor takes a MetaTensor{_FOR_FILES}")
    values = tensor.detach().cpu().as_tensor()
    array = (values.float() if values.dtype is torch.bfloat16 else values).numpy()
    if array.ndim == 4 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 3:
        raise ValueError(f"a tensor (1, I, J, K) is expected, got {tuple(tensor.shape)}")
    affine = tensor.affine.cpu().numpy().astype(np.float64)
    space = tensor.meta.get(MetaKeys.SPACE, SpaceKeys.RAS)
    if space not in (SpaceKeys.RAS, SpaceKeys.LPS):
        raise ValueError(f"the space of the affine must be RAS or LPS, got {space!r}")
    affine = LPS_TO_RAS_AFFINE @ affine if space == SpaceKeys.LPS else affine
    return np.array(array), Grid(array.shape, affine)
