"""Voxels: limits of their size, NaN and infinity, integers that float32 cannot represent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Nan, ReadOptions, Reason, ScanError, Volume

AIR_HU = -1024.0
"""HU outside the field of view, as scanners and ITK's filters write it."""
MAX_EXACT_FLOAT32 = 1 << 24
"""Largest magnitude up to which all integers are exact in float32."""
_EXACT_FLOAT64 = 1 << 53


def replace_nan(volume: Volume, nan: Nan) -> Volume:
    """Return a volume of finite voxels; if `nan` is "padding", replace NaN by a padding value.

    The padding value is air for a CT, else the smallest value of the scan: 0 may be bright in a
    scan with negative values. The volume is fresh from a reader and not shared: its voxels are
    changed in place.

    Raises
    ------
    ScanError
        PIXEL_TYPE if a voxel is infinite, if all are NaN, or if any is NaN and NaN is refused.
    """
    if volume.array.dtype.kind != "f":
        return volume
    planes = [plane for plane in volume.array.T if not np.isfinite(plane).all()]
    if not planes:
        return volume
    if any(np.isinf(plane).any() for plane in planes):
        raise ScanError(Reason.PIXEL_TYPE, "some voxels are infinite")
    if nan == "refuse":
        detail = (
            "some voxels are NaN: `segment --nan padding` or a workflow's `nan` replaces them by "
            "the padding value"
        )
        raise ScanError(Reason.PIXEL_TYPE, detail)
    smallest = float(np.fmin.reduce(volume.array, axis=None))
    if np.isnan(smallest):
        raise ScanError(Reason.PIXEL_TYPE, "all voxels are NaN")
    padding = AIR_HU if volume.unit == "HU" else smallest
    array = volume.array.view()
    array.flags.writeable = True
    for plane in array.T:
        plane[np.isnan(plane)] = padding
    return replace(volume, padding=padding, flags=(*volume.flags, Flag.NAN_PADDED))


def rounding_flags(
    values: NDArray[Any], stored: np.dtype[Any], slope: float = 1.0, intercept: float = 0.0
) -> tuple[Flag, ...]:
    """Return VALUES_ROUNDED if integers were stored that float32 cannot represent exactly.

    Parameters
    ----------
    values : array
        Values as read: slope * stored + intercept, finite or not.
    stored : dtype
        Type of the voxels in the file.
    """
    if stored.kind not in "iu" or stored.itemsize < np.dtype(np.int32).itemsize:
        return ()
    extremes = np.fmin.reduce(values, axis=None), np.fmax.reduce(values, axis=None)
    largest = float(np.abs((np.array(extremes, float) - intercept) / slope).max())
    if largest <= MAX_EXACT_FLOAT32:
        return ()
    if values.dtype.kind in "iu" and largest <= _EXACT_FLOAT64:
        planes = (plane.astype(np.float64) for plane in values.T)
        if all((plane == plane.astype(np.float32)).all() for plane in planes):
            return ()
    return (Flag.VALUES_ROUNDED,)


# --- limits ---------------------------------------------------------------------------------------

VOXEL_LIMIT_BYTES = 4 << 30
"""Largest size of the decoded voxels of a volume, unless the caller passes another limit."""


def voxel_limit(options: ReadOptions) -> int:
    """Return the largest size of the decoded voxels, in bytes."""
    return VOXEL_LIMIT_BYTES if options.max_size is None else options.max_size
