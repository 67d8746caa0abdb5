"""Volumes and label maps as images of SimpleITK, whose positions are LPS mm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid, Reason, ScanError

if TYPE_CHECKING:
    import SimpleITK as sitk  # noqa: N813 - the library's own documentation imports it so

_LPS = np.diag((-1.0, -1.0, 1.0, 1.0))
"""RAS mm to LPS mm, and back."""


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
    affine, spacing = _LPS @ grid.affine, np.array(grid.spacing)
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

    if image.GetDimension() != 3 or image.GetNumberOfComponentsPerPixel() != 1:
        raise ValueError(
            f"an image of three dimensions and one value a voxel is expected, got "
            f"{image.GetDimension()} dimensions and {image.GetNumberOfComponentsPerPixel()} values"
        )
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
    affine[:3, 3] = image.GetOrigin()
    array = sitk.GetArrayFromImage(image).T
    return array, Grid(array.shape, _LPS @ affine)
