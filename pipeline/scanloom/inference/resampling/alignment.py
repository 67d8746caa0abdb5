"""Grids that divide the axes of a scan anew: where their voxels lie, and which axis is coarse.

Coordinates are computed in the order of operations of SciPy and scikit-image, since the last bit
decides which of two neighbours is the nearest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import NetworkGrid
from scanloom.core import Grid

SAME_AFFINE = 1e-3
"""Differences of spacing (mm) and affine below it are ignored (MONAI's AFFINE_TOL)."""

_FLOAT32_LENGTH = 3e-7
"""Largest relative error of a length whose three components are float32."""

Alignment = Literal["first", "edges", "ends", "centre"]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ScaledGrid:
    """A grid with the axes of another one, `oriented`.

    Parameters
    ----------
    network : Grid
        The grid; `oriented` itself if both are the same.
    scale, shift : (3,) arrays
        The index in `network` is ``scale * index + shift`` for an index in `oriented`.
    step : (4, 4) array
        Maps an index of `network` to an index of `oriented`.
    nearest : (int or None, int or None)
        Axis that is resampled by nearest neighbour: to `network`, and back.
    """

    network: Grid
    scale: Float64
    shift: Float64
    step: Float64
    nearest: tuple[int | None, int | None]


def _by_edges(count: int, size: int) -> Float64:
    """Return where `count` voxels lie on an axis of `size` voxels with the same outer edges."""
    return np.asarray(size / count * (np.arange(count) + 0.5) - 0.5)


def _by_ends(count: int, size: int) -> Float64:
    """Return where `count` voxels lie on an axis of `size` voxels with the same outermost ones."""
    return np.asarray(np.arange(count) * ((size - 1) / (count - 1) if count > 1 else 1.0))


SCALED: dict[str, Callable[[int, int], Float64]] = {
    "edges": _by_edges,
    "ends": _by_ends,
}
"""Coordinates of one axis on another, by the alignments that depend on both lengths alone."""


def round_half_up(at: Float64, size: int) -> Float64:
    """Return the nearest voxel of an axis, the upper of two (SciPy's interpolation of order 0)."""
    return np.clip(np.floor(at + 0.5), 0.0, size - 1.0)


def scale_axes(
    oriented: Grid, requested: NetworkGrid, flipped: tuple[bool, bool, bool]
) -> ScaledGrid:
    """Return the grid of the requested spacing or shape, aligned by edges, ends or centre.

    `flipped` are the axes of `oriented` whose direction in the scan is the opposite.
    """
    # nnU-Net and TotalSegmentator read the spacing of NIfTI's header
    own = np.array(oriented.spacing) if requested.alignment == "centre" else nifti_spacing(oriented)
    wanted = wanted_spacing(requested, own)
    before = np.array(oriented.shape)
    ratio = own / wanted * before
    after = np.array(requested.shape or [max(1, round(float(n))) for n in ratio])
    if requested.alignment == "edges":
        scale = after / before
        shift = (scale - 1.0) / 2.0
    elif requested.alignment == "ends":
        both = (before > 1) & (after > 1)
        scale = np.where(both, (after - 1.0) / np.maximum(before - 1.0, 1.0), 1.0)
        shift = np.zeros(3)
    else:  # FreeSurfer's centre of an axis of n voxels is index n / 2, counted as in the scan
        scale = own / wanted
        centre = before / 2.0 - np.where(flipped, 1.0, 0.0)
        shift = after / 2.0 - scale * centre
    step = np.diag(np.append(1.0 / scale, 1.0))
    step[:3, 3] = -shift / scale
    above = requested.separate_above
    nearest: tuple[int | None, int | None] = (None, None)
    if above is not None:
        nearest = (coarse_axis(own, wanted, above), coarse_axis(wanted, own, above))
    if np.array_equal(before, after) and np.allclose(step, np.eye(4), atol=SAME_AFFINE):
        return ScaledGrid(oriented, np.ones(3), np.zeros(3), np.eye(4), nearest)
    x, y, z = (int(n) for n in after)
    return ScaledGrid(Grid((x, y, z), oriented.affine @ step), scale, shift, step, nearest)


def nifti_spacing(grid: Grid) -> Float64:
    """Return the spacing (3,) in mm that a NIfTI header states for a grid, which is in float32.

    The length of a direction that was rounded to float32 differs in the last digit, which decides
    half a voxel: 10 slices of 3.1 mm are 15.5 slices of 2 mm. So the value is a decimal of six
    digits or a 4096th of a millimetre (matrix sizes), if such a value lies within the rounding.
    """
    return np.array([_stated(length) for length in grid.spacing])


def _stated(length: float) -> float:
    """Return the float32 value that a header states for a length, as float64."""
    for value in (float(f"{length:.6g}"), round(length * 4096.0) / 4096.0):
        if abs(value - length) <= _FLOAT32_LENGTH * length:
            return float(np.float32(value))
    return float(np.float32(length))


def wanted_spacing(requested: NetworkGrid, own: Float64) -> Float64:
    """Return the requested spacing; `own` is kept along axes for which none is requested."""
    target = np.array([value or 0.0 for value in requested.spacing or (None, None, None)])
    return np.where(target > 0.0, target, own)


def coarse_axis(first: Float64, second: Float64, above: float) -> int | None:
    """Return the axis of the largest spacing of an anisotropic grid (nnU-Net's separate z).

    The first of the two spacings that is anisotropic decides. None if none is, or if several axes
    share the largest spacing.
    """
    for spacing in (first, second):
        if spacing.max() / spacing.min() > above:
            coarse = np.flatnonzero(spacing.max() / spacing == 1)
            return int(coarse[0]) if len(coarse) == 1 else None
    return None
