"""What becomes of voxels that are no numbers, and of whole numbers that float32 can't hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Nan, Reason, ScanError, Volume

AIR = -1024.0
"""HU of nothing: what scanners and ITK's filters write outside the field of view."""
EXACT = 1 << 24
"""Whole numbers up to here are exact in float32."""
_EXACT_DOUBLE = 1 << 53


def without_nan(volume: Volume, nan: Nan) -> Volume:
    """Return a volume of finite voxels; NaN becomes the padding value, if that is asked for.

    That is air for a CT, else the smallest value of the scan: 0 may be bright where values go
    below it.

    Parameters
    ----------
    volume : Volume
        Fresh from a reader, held by nobody else: its voxels are changed in place.
    nan : "refuse" or "padding"

    Raises
    ------
    ScanError
        PIXEL_TYPE where voxels are infinite, or all of them NaN, or NaN is refused.
    """
    if volume.array.dtype.kind != "f":
        return volume
    planes = [plane for plane in volume.array.T if not np.isfinite(plane).all()]
    if not planes:
        return volume
    if any(np.isinf(plane).any() for plane in planes):
        raise ScanError(Reason.PIXEL_TYPE, "some of its voxels are infinite")
    if nan == "refuse":
        detail = "some of its voxels are NaN: --nan padding makes them the padding value"
        raise ScanError(Reason.PIXEL_TYPE, detail)
    smallest = float(np.fmin.reduce(volume.array, axis=None))
    if np.isnan(smallest):
        raise ScanError(Reason.PIXEL_TYPE, "all of its voxels are NaN")
    padding = AIR if volume.unit == "HU" else smallest
    array = volume.array.view()
    array.flags.writeable = True
    for plane in array.T:
        plane[np.isnan(plane)] = padding
    return replace(volume, padding=padding, flags=(*volume.flags, Flag.NAN_PADDED))


def rounding_flags(
    values: NDArray[Any], stored: np.dtype[Any], slope: float = 1.0, intercept: float = 0.0
) -> tuple[Flag, ...]:
    """Return VALUES_ROUNDED where whole numbers were stored that float32 can't hold.

    Parameters
    ----------
    values : array
        As they were read: slope * stored + intercept, finite or not.
    stored : dtype
        In which the file has them.
    """
    if stored.kind not in "iu" or stored.itemsize < np.dtype(np.int32).itemsize:
        return ()
    ends = np.array([np.fmin.reduce(values, axis=None), np.fmax.reduce(values, axis=None)], float)
    most = float(np.abs((ends - intercept) / slope).max())
    if most <= EXACT:
        return ()
    if values.dtype.kind in "iu" and most <= _EXACT_DOUBLE:
        planes = (plane.astype(np.float64) for plane in values.T)
        if all((plane == plane.astype(np.float32)).all() for plane in planes):
            return ()
    return (Flag.VALUES_ROUNDED,)
