"""Volumes and label maps as images of nibabel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid

if TYPE_CHECKING:
    import nibabel as nib

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
        BAD_GEOMETRY if the affine is not that of a stack of slices.
    """
    if image.affine is None:
        raise ValueError("the image has no affine: use Volume.from_array")
    array = np.asanyarray(image.dataobj)
    if array.ndim == 4 and array.shape[3] == 1:
        array = array[..., 0]
    if array.ndim != 3:
        raise ValueError(f"an image of three dimensions is expected, got {image.shape}")
    affine = np.array(image.affine, np.float64)
    if hasattr(image.header, "get_xyzt_units"):
        affine[:3] *= _UNITS_MM[image.header.get_xyzt_units()[0]]
    return array, Grid(array.shape, affine)
