"""Which slices lie at one place, and whether places are equally spaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scanloom.io.dicom.slices import Slice

SAME_PLACE_MM = 0.01
"""Slices nearer than this are at one place; scanners write two decimals or more."""
JITTER_MM = 0.05
"""How far a slice may lie off its regular place: rounding to one decimal, table movement."""
SIDE_BY_SIDE = 32
"""Places in one plane among which others are sought; slices of a volume have one."""
JITTER_STEPS = 0.1
"""The same as a share of the distance between slices, for very thin ones."""


@dataclass(frozen=True, eq=False)
class Places:
    """Where parallel slices lie.

    Parameters
    ----------
    ids : (N,) array of int
        The place of each slice, counted along the normal; slices at one place share it.
    positions : (P, 3) array
        Of the first slice at each place, LPS mm.
    depth : (P,) array
        The same along the normal, mm, ascending.
    """

    ids: NDArray[np.intp]
    positions: NDArray[np.float64]
    depth: NDArray[np.float64]


def places_of(slices: Sequence[Slice], normal: NDArray[np.float64]) -> Places:
    """Return the places of slices that all have a position.

    Two are at one place if they differ by no more than slices of a regular stack may: much less
    than a slice is from the next. Slices side by side in one plane are at two places.
    """
    positions = np.array([one.position for one in slices], dtype=np.float64)
    depth = positions @ normal
    order = np.argsort(depth, kind="stable")
    near = _nearness(depth[order])
    ids = np.empty(len(slices), np.intp)
    if np.all(np.diff(depth[order]) > near):  # as nearly always
        ids[order] = np.arange(len(slices))
        return Places(ids, positions[order], depth[order])
    found: list[int] = []  # the first slice of each place
    for n in map(int, order):
        place = _known_place(found, positions, depth, n, near)
        if place is None:
            place = len(found)
            found.append(n)
        ids[n] = place
    return Places(ids, positions[found], depth[found])


def _known_place(
    found: Sequence[int],
    positions: NDArray[np.float64],
    depth: NDArray[np.float64],
    n: int,
    near: float,
) -> int | None:
    """Return the place of slice `n` among those found, None if it lies elsewhere."""
    for place in range(len(found) - 1, max(-1, len(found) - 1 - SIDE_BY_SIDE), -1):
        first = found[place]
        if depth[n] - depth[first] > near:
            return None
        if np.abs(positions[n] - positions[first]).max() <= 2 * JITTER_MM:
            return place
    return None


def steps_off(depth: NDArray[np.float64]) -> tuple[float, float]:
    """Return how far the places are off equal spacing at most, and how far they may be, mm."""
    usual = float(np.median(np.diff(depth)))
    regular = np.linspace(depth[0], depth[-1], len(depth))
    return float(np.abs(depth - regular).max()), min(JITTER_MM, JITTER_STEPS * usual)


def _nearness(depth: NDArray[np.float64]) -> float:
    """Return how near two slices of a place may be: a share of the usual distance, if larger."""
    steps = np.diff(depth)
    wide = steps[steps > max(SAME_PLACE_MM, 0.1 * steps.max(initial=0.0))]
    if not len(wide):
        return SAME_PLACE_MM
    return max(SAME_PLACE_MM, min(JITTER_MM, JITTER_STEPS * float(np.median(wide))))
