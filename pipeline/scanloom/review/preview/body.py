"""The body in a scan: its extent, by which pictures are cropped, and its volume."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import binary_opening, find_objects, label

from scanloom.core import Volume
from scanloom.review.preview.slicing import View

MAX_VOXELS = 400_000
"""Approximate number of voxels from which the body is found."""
BODY_HU = -400.0
"""Lower limit of the body in CT, between lung and fat."""
BODY_SHARE = 0.12
"""Lower limit of the body in other scans, as a share of the 99th percentile."""
MIN_PART = 0.05
"""Volume of a part, such as a second thigh, as a share of that of the largest part."""


@dataclass(frozen=True, eq=False)
class Body:
    """The body in a subsampled scan.

    Parameters
    ----------
    low, high : (3,) array
        First and last voxel of the body in the view, by index.
    values : (N,) array
        Finite intensities inside the body, without padding; of all voxels if none is found.
    volume_ml : float
        Approximate volume.
    found : bool
        Whether the scan has a body in front of a background.
    """

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    values: NDArray[np.float64]
    volume_ml: float
    found: bool


def find_body(volume: Volume, view: View, hounsfield: bool) -> Body:
    """Find the body: large connected parts above a limit, without thin things such as a table.

    Parameters
    ----------
    volume : Volume
        The scan.
    view : View
        The scan's grid in patient orientation.
    hounsfield : bool
        Whether intensities are in HU.
    """
    steps = _steps(view)
    sample = view.of(volume.array)[tuple(slice(n // 2, None, n) for n in steps)]
    sample = np.ascontiguousarray(sample, dtype=np.float64)
    valid = np.isfinite(sample) & ~volume.is_padding(sample)
    inside = _largest_parts(valid & (sample > _limit(sample[valid], hounsfield)))
    boxes = find_objects(inside.astype(np.uint8))
    values = sample[inside & valid] if boxes else sample[valid]
    if not boxes:
        return Body(np.zeros(3), np.array(view.shape) - 1.0, values, 0.0, found=False)
    last = np.array(view.shape) - 1.0
    low, high = np.zeros(3), last.copy()
    for axis, (extent, step) in enumerate(zip(boxes[0], steps, strict=True)):
        if extent.start > 0:  # else it may reach the border between samples
            low[axis] = extent.start * step + step // 2
        if extent.stop < inside.shape[axis]:
            high[axis] = (extent.stop - 1) * step + step // 2
    ml = np.count_nonzero(inside) * math.prod(steps) * volume.grid.voxel_volume / 1000
    return Body(low, high, values, float(ml), found=True)


def _steps(view: View) -> tuple[int, int, int]:
    """Return the step of the sample along each axis of the view, about equal in mm."""
    spacing = np.array([view.source.spacing[n] for n in view.order])
    target = (math.prod(view.shape) * np.prod(spacing) / MAX_VOXELS) ** (1 / 3)
    a, b, c = (int(n) for n in np.maximum(1, np.rint(target / spacing)))
    return a, b, c


def _limit(values: NDArray[np.float64], hounsfield: bool) -> float:
    """Return the intensity above which a voxel is of the body."""
    if hounsfield or not values.size:
        return BODY_HU
    low, high = np.percentile(values, (1, 99))
    return float(low + BODY_SHARE * (high - low))


def _largest_parts(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the large connected parts of a mask, without thin ones."""
    thick = [n > 2 for n in mask.shape]
    shape: Any = tuple(3 if n else 1 for n in thick)
    opened = binary_opening(mask, np.ones(shape, bool)) if all(thick[:2]) else mask
    components, count = label(opened if opened.any() else mask)
    if not count:
        return mask
    sizes = np.bincount(components.ravel())
    sizes[0] = 0
    return np.asarray((sizes >= MIN_PART * sizes.max())[components])
