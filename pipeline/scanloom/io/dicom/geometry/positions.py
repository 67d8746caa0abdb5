"""Group slices by position, and measure how evenly the positions are spaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scanloom.core.grid import ORTHOGONAL
from scanloom.io.dicom.geometry.slices import Slice

SAME_POSITION_MM = 0.01
"""Slices closer than this share a position; scanners write at least two decimals."""
MAX_JITTER_MM = 0.05
"""Largest deviation of a slice from even spacing: rounding to one decimal, table movement."""
_MAX_COPLANAR = 32
"""Number of recent positions searched for a match; a proper volume has one position per plane."""
_JITTER_FRACTION = 0.1
"""Jitter as a fraction of the slice spacing, for very thin slices."""


@dataclass(frozen=True, eq=False)
class SlicePositions:
    """Distinct positions of parallel slices.

    Parameters
    ----------
    ids : (N,) array of int
        Number of each slice's position, counted along the normal; slices may share one.
    positions : (P, 3) array
        Position of the first slice at each, LPS mm.
    depth : (P,) array
        The positions projected on the normal, mm, ascending.
    """

    ids: NDArray[np.intp]
    positions: NDArray[np.float64]
    depth: NDArray[np.float64]


def locate_slices(slices: Sequence[Slice], normal: NDArray[np.float64]) -> SlicePositions:
    """Return the distinct positions of slices that all have ImagePositionPatient.

    Two slices share a position if they differ by no more than the jitter tolerance, which is
    well below the slice spacing. Slices side by side in one plane have different positions.

    Parameters
    ----------
    slices : sequence of Slice
        In any order.
    normal : (3,) array
        Unit normal of the slices, LPS.
    """
    positions = np.array([s.position for s in slices], dtype=np.float64)
    depth = positions @ normal
    order = np.argsort(depth, kind="stable")
    tolerance = _depth_tolerance(depth[order])
    ids = np.empty(len(slices), np.intp)
    if np.all(np.diff(depth[order]) > tolerance):  # the usual case: no duplicates
        ids[order] = np.arange(len(slices))
        return SlicePositions(ids, positions[order], depth[order])
    firsts: list[int] = []  # the first slice at each position
    for index in map(int, order):
        position_id = _known_position(firsts, positions, depth, index, tolerance)
        if position_id is None:
            position_id = len(firsts)
            firsts.append(index)
        ids[index] = position_id
    return SlicePositions(ids, positions[firsts], depth[firsts])


def _known_position(
    firsts: Sequence[int],
    positions: NDArray[np.float64],
    depth: NDArray[np.float64],
    index: int,
    tolerance: float,
) -> int | None:
    """Return the number of the known position that a slice shares; None if it has a new one.

    `firsts` has the index of the first slice at each known position, ascending in `depth` (N,), mm
    along the normal; `positions` (N, 3) are LPS mm, and `tolerance` the largest difference in
    depth.
    """
    for position_id in range(len(firsts) - 1, max(-1, len(firsts) - 1 - _MAX_COPLANAR), -1):
        first = firsts[position_id]
        if depth[index] - depth[first] > tolerance:
            return None
        if np.abs(positions[index] - positions[first]).max() <= 2 * MAX_JITTER_MM:
            return position_id
    return None


def spacing_deviation(depth: NDArray[np.float64]) -> tuple[float, float]:
    """Return the largest deviation of depths from even spacing, and the allowed one, mm."""
    spacing = float(np.median(np.diff(depth)))
    regular = np.linspace(depth[0], depth[-1], len(depth))
    return float(np.abs(depth - regular).max()), min(MAX_JITTER_MM, _JITTER_FRACTION * spacing)


def _depth_tolerance(depth: NDArray[np.float64]) -> float:
    """Return the largest depth difference of slices that share a position, mm."""
    steps = np.diff(depth)
    gaps = steps[steps > max(SAME_POSITION_MM, 0.1 * steps.max(initial=0.0))]
    if not len(gaps):
        return SAME_POSITION_MM
    return max(SAME_POSITION_MM, min(MAX_JITTER_MM, _JITTER_FRACTION * float(np.median(gaps))))


# --- rounded positions ----------------------------------------------------------------------------
# Regular stacks whose positions were rounded in the headers, fitted by bounded least squares.
#
# Every slice is rounded, the first and the last too, so that the line through these two is no more
# accurate than the others. Many slices average their roundings out. The least-squares line of a
# regular stack that was rounded to tenths of a millimetre comes within one such step of each of its
# positions, in every coordinate, for any distance and number of slices. What is further off is
# irregular.

ROUNDING_STEP_MM = 0.1
"""Coarsest step to which scanners and converters round a coordinate, or a multiple of it to which
they add a constant."""
MAX_ROUNDING_SHARE = 0.2
"""Largest shift of a slice by rounding, as a share of the slice distance: with a quarter, a missing
slice could not be detected."""
_FLOAT_ERROR_MM = 1e-6

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Line:
    """A regular stack: slice k is at origin + k * step, LPS mm."""

    origin: Numbers
    step: Numbers


def fit_line(positions: Numbers, index: NDArray[np.intp]) -> Line | None:
    """Return the regular stack in any direction that has these positions, or None.

    Parameters
    ----------
    positions : (P, 3) array
        Positions of the slices in order, LPS mm.
    index : (P,) array
        Number k of each slice in the stack, from 0.
    """
    step, centre = _least_squares(positions, index)
    return _bounded(positions, index, step, centre)


def fit_line_along(positions: Numbers, index: NDArray[np.intp], normal: Numbers) -> Line | None:
    """Return the regular stack along a unit normal that has these positions, or None.

    Parameters are those of `fit_line`. Direction cosines are rounded too, so the slices may drift
    sideways by as much as still counts as orthogonal.
    """
    slope, centre = _least_squares(positions, index)
    step = float(slope @ normal) * normal
    sideways = np.sqrt(np.clip(1 - normal**2, 0, None))
    drift = ORTHOGONAL / 2 * abs(float((positions[-1] - positions[0]) @ normal)) * sideways
    return _bounded(positions, index, step, centre, drift)


def is_rounded_stack(positions: Numbers) -> bool:
    """Return whether (P, 3) positions in their order are those of a regular stack, rounded."""
    return fit_line(positions, np.arange(len(positions))) is not None


def rounding_shift(normal: Numbers) -> float:
    """Return the largest shift of a slice by rounding, along a unit vector in mm."""
    return ROUNDING_STEP_MM / 2 * float(np.abs(normal).sum())


def _least_squares(positions: Numbers, index: NDArray[np.intp]) -> tuple[Numbers, Numbers]:
    """Return the step of the best fit, and its position in the middle of the stack."""
    centred = index - index.mean()
    return centred @ positions / (centred @ centred), positions.mean(axis=0)


def _bounded(
    positions: Numbers,
    index: NDArray[np.intp],
    step: Numbers,
    centre: Numbers,
    drift: Numbers | float = 0.0,
) -> Line | None:
    """Return the line if no position is off by more than a rounding step and the drift, each axis.

    For thin slices the rounding step shrinks: rounding may not conceal a missing one.
    """
    distance = float(np.linalg.norm(step))
    if not distance > 0:
        return None
    share = rounding_shift(step / distance) / (MAX_ROUNDING_SHARE * distance)
    allowed = ROUNDING_STEP_MM / max(1.0, share) + drift + _FLOAT_ERROR_MM
    origin = centre - index.mean() * step
    off = np.abs(positions - origin - np.outer(index, step))
    return Line(origin, step) if (off <= allowed).all() else None
