"""Regular stacks whose positions were rounded in the headers, fitted by bounded least squares.

Every slice is rounded, the first and the last too, so that the line through these two is no more
accurate than the others. Many slices average their roundings out. The least-squares line of a
regular stack that was rounded to tenths of a millimetre comes within one such step of each of its
positions, in every coordinate, for any distance and number of slices. What is further off is
irregular.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scanloom.core.grid import ORTHOGONAL

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
