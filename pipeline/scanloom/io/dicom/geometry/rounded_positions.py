"""Regular stacks whose positions were rounded to one or two decimals in the headers.

Every slice is rounded, the first and the last too, so that the line through these two is no more
accurate than the others. Therefore any regular stack within the rounding of all slices is searched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scanloom.core.grid import ORTHOGONAL

ROUNDING_STEPS_MM = (0.1, 0.01)
"""Steps to which scanners and converters round, coarsest first."""
FINEST_STEP_MM = 1e-3
"""Rounding step of a coordinate that has more decimals."""
MAX_ROUNDING_SHARE = 0.2
"""Largest shift of a slice by rounding, as a share of the slice distance: with a quarter, a missing
slice could not be detected."""
_FLOAT_ERROR_MM = 1e-6
"""Deviation of a multiple of a rounding step in float64."""
_SIDEWAYS_SHARE = ORTHOGONAL / 2
"""Sideways shift of slices as a share of the length: direction cosines are rounded too."""
_ITERATIONS = 60
"""Iterations of the ternary search."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Line:
    """A regular stack: slice k is at origin + k * step, LPS mm."""

    origin: Numbers
    step: Numbers


def rounding_steps(positions: Numbers) -> Numbers | None:
    """Return the rounding step of each coordinate of (P, 3) positions, (3,) in mm.

    None if no coordinate that varies is rounded.
    """
    grains = np.full(3, FINEST_STEP_MM)
    for grain in ROUNDING_STEPS_MM[::-1]:
        multiples = positions / grain
        deviation = np.abs(multiples - np.rint(multiples)).max(axis=0)
        grains[deviation < _FLOAT_ERROR_MM / grain] = grain
    constant = np.ptp(positions, axis=0) == 0
    return None if (grains[~constant] == FINEST_STEP_MM).all() else grains


def fit_line_along(positions: Numbers, index: NDArray[np.intp], normal: Numbers) -> Line | None:
    """Return the regular stack along `normal` with these rounded positions, or None.

    Parameters
    ----------
    positions : (P, 3) array
        Positions of the slices in order, LPS mm.
    index : (P,) array
        Number k of each slice in the stack, from 0.
    normal : (3,) array
        Unit normal of the slices.
    """
    grains = rounding_steps(positions)
    if grains is None:
        return None
    length = float((positions[-1] - positions[0]) @ normal)
    sideways = np.sqrt(np.clip(1 - normal**2, 0, None))
    if not _fits(positions, index, normal, grains + 2 * _SIDEWAYS_SHARE * abs(length) * sideways):
        return None
    slope, origin = _least_squares(positions, index)
    step = float(slope @ normal) * normal
    origin = origin + index.mean() * (slope - step)
    return Line(origin, step) if _is_coarse_enough(step, grains) else None


def fit_line(positions: Numbers, index: NDArray[np.intp]) -> Line | None:
    """Return the regular stack in any direction with these rounded positions, or None.

    Parameters are those of `fit_line_along`.
    """
    grains = rounding_steps(positions)
    if grains is None:
        return None
    for n, axis in enumerate(np.eye(3)):
        if not _fits(positions[:, n : n + 1], index, axis[n : n + 1], grains[n : n + 1]):
            return None
    slope, origin = _least_squares(positions, index)
    return Line(origin, slope) if _is_coarse_enough(slope, grains) else None


def rounding_shift(positions: Numbers, normal: Numbers) -> float:
    """Return the largest shift of a slice by rounding, along the normal in mm; 0 if not rounded."""
    grains = rounding_steps(positions)
    return 0.0 if grains is None else float(np.abs(normal) @ grains) / 2


def _fits(
    positions: Numbers, index: NDArray[np.intp], direction: Numbers, spreads: Numbers
) -> bool:
    """Return whether some regular stack along a direction is within the rounding of all positions.

    For some step t, the spread of each coordinate of positions - index * t * direction has to be
    at most that of `spreads`. The largest ratio of the two is convex in t, so that a ternary search
    finds its minimum. It starts from the first and last position, which are rounded themselves.
    """
    allowed = spreads + _FLOAT_ERROR_MM
    middle = float((positions[-1] - positions[0]) @ direction) / float(index[-1])
    margin = 2 * float(np.abs(direction) @ allowed) / float(index[-1])
    low, high = middle - margin, middle + margin
    for _ in range(_ITERATIONS):
        third = (high - low) / 3
        lower = _spread_ratio(positions, index, (low + third) * direction, allowed)
        upper = _spread_ratio(positions, index, (high - third) * direction, allowed)
        if min(lower, upper) <= 1:
            return True
        low, high = (low, high - third) if lower < upper else (low + third, high)
    return False


def _spread_ratio(
    positions: Numbers, index: NDArray[np.intp], step: Numbers, allowed: Numbers
) -> float:
    """Return the largest ratio of spread around a regular stack to allowed spread."""
    return float((np.ptp(positions - np.outer(index, step), axis=0) / allowed).max())


def _least_squares(positions: Numbers, index: NDArray[np.intp]) -> tuple[Numbers, Numbers]:
    """Return step and origin of the best fit: roundings of many slices average out."""
    centred = index - index.mean()
    slope = centred @ positions / (centred @ centred)
    return slope, positions.mean(axis=0) - index.mean() * slope


def _is_coarse_enough(step: Numbers, grains: Numbers) -> bool:
    """Return whether slices are far enough apart for rounding not to conceal a missing one."""
    distance = float(np.linalg.norm(step))
    return float(np.abs(step) @ grains) / 2 <= MAX_ROUNDING_SHARE * distance**2


def is_rounded_stack(positions: Numbers) -> bool:
    """Return whether (P, 3) positions in their order are rounded ones of a regular stack."""
    return fit_line(positions, np.arange(len(positions))) is not None
