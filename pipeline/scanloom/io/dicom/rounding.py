"""Regular stacks of which the positions were rounded to one or two decimals in the headers.

Every slice is rounded, the first and the last too: the line through these two is off by as much as
any. So the question is whether some regular stack lies within the rounding of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scanloom.core.grid import ORTHOGONAL

GRAINS = (0.1, 0.01)
"""mm to which scanners and converters round."""
FINEST = 1e-3
"""The same of a coordinate that has more decimals."""
MOST_OF_STEP = 0.2
"""How far rounding may move a slice, as a share of the distance of slices: by a quarter, one that
is missing could not be told."""
_WHOLE = 1e-6
"""What float64 leaves of a multiple of a grain."""
_TURNS = ORTHOGONAL / 2
"""Share of the length by which slices may wander sideways: direction cosines are rounded too."""
_THIRDS = 60

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Line:
    """A regular stack: slice k lies at origin + k * step, LPS mm."""

    origin: Numbers
    step: Numbers


def grains_of(positions: Numbers) -> Numbers | None:
    """Return to what each coordinate of (P, 3) positions was rounded; None if none looks so."""
    grains = np.full(3, FINEST)
    for grain in GRAINS[::-1]:
        whole = np.abs(positions / grain - np.rint(positions / grain)).max(axis=0) < _WHOLE / grain
        grains[whole] = grain
    still = np.ptp(positions, axis=0) == 0
    return None if (grains[~still] == FINEST).all() else grains


def straight_line(positions: Numbers, index: NDArray[np.intp], normal: Numbers) -> Line | None:
    """Return the regular stack along `normal` of which these are the rounded positions, or None.

    Parameters
    ----------
    positions : (P, 3) array
        Of the slices in order, LPS mm.
    index : (P,) array
        Which k each is, from 0.
    normal : (3,) array
        Unit normal of the slices.
    """
    grains = grains_of(positions)
    if grains is None:
        return None
    length = float((positions[-1] - positions[0]) @ normal)
    sideways = np.sqrt(np.clip(1 - normal**2, 0, None))
    if not _fits(positions, index, normal, grains + 2 * _TURNS * abs(length) * sideways):
        return None
    slope, origin = _least_squares(positions, index)
    step = float(slope @ normal) * normal
    origin = origin + index.mean() * (slope - step)
    return Line(origin, step) if _is_thick(step, grains) else None


def leaning_line(positions: Numbers, index: NDArray[np.intp]) -> Line | None:
    """Return the regular stack in any direction of which these are the positions, or None."""
    grains = grains_of(positions)
    if grains is None:
        return None
    for n, axis in enumerate(np.eye(3)):
        if not _fits(positions[:, n : n + 1], index, axis[n : n + 1], grains[n : n + 1]):
            return None
    slope, origin = _least_squares(positions, index)
    return Line(origin, slope) if _is_thick(slope, grains) else None


def reach_of(positions: Numbers, normal: Numbers) -> float:
    """Return how far rounding moves a slice along the normal, mm; 0 if it was not rounded."""
    grains = grains_of(positions)
    return 0.0 if grains is None else float(np.abs(normal) @ grains) / 2


def _fits(positions: Numbers, index: NDArray[np.intp], way: Numbers, spreads: Numbers) -> bool:
    """Whether for some t no coordinate of positions - index * t * way spreads by more than this.

    The largest spread is convex in t, so that the thirds close in on the smallest. The ends say
    where to begin: they are off by no more than the spreads.
    """
    allowed = spreads + _WHOLE
    middle = float((positions[-1] - positions[0]) @ way) / float(index[-1])
    most = 2 * float(np.abs(way) @ allowed) / float(index[-1])
    low, high = middle - most, middle + most
    for _ in range(_THIRDS):
        third = (high - low) / 3
        one = _spread(positions, index, (low + third) * way, allowed)
        other = _spread(positions, index, (high - third) * way, allowed)
        if min(one, other) <= 1:
            return True
        low, high = (low, high - third) if one < other else (low + third, high)
    return False


def _spread(positions: Numbers, index: NDArray[np.intp], step: Numbers, allowed: Numbers) -> float:
    return float((np.ptp(positions - np.outer(index, step), axis=0) / allowed).max())


def _least_squares(positions: Numbers, index: NDArray[np.intp]) -> tuple[Numbers, Numbers]:
    """Return step and origin: the best guess, as roundings of many slices level out."""
    middle = index - index.mean()
    slope = middle @ positions / (middle @ middle)
    return slope, positions.mean(axis=0) - index.mean() * slope


def _is_thick(step: Numbers, grains: Numbers) -> bool:
    """Whether rounding is small beside the distance of slices, so that none can hide in it."""
    distance = float(np.linalg.norm(step))
    return float(np.abs(step) @ grains) / 2 <= MOST_OF_STEP * distance**2


def is_rounded_stack(positions: Numbers) -> bool:
    """Whether (P, 3) positions in their order are those of a regular stack, rounded."""
    return leaning_line(positions, np.arange(len(positions))) is not None
