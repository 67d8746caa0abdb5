"""Planned slice positions from Siemens' protocol, a text in the series header (CSA)."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

_PROTOCOL = re.compile(r"### ASCCONV BEGIN.*?###(.*?)### ASCCONV END ###", re.DOTALL)
_SLICE_COUNT = re.compile(r"^\s*sSliceArray\.lSize\s*=\s*(0x[0-9a-fA-F]+|\d+)\s*$", re.MULTILINE)
_SLICE_CENTRE = re.compile(
    r"^\s*sSliceArray\.asSlice\[(\d+)\]\.sPosition\.d(Sag|Cor|Tra)\s*=\s*([-+.\deE]+)\s*$",
    re.MULTILINE,
)
_AXES = {"Sag": 0, "Cor": 1, "Tra": 2}
_MAX_SPACING_DIFFERENCE = 0.02
"""Share of the slice distance by which that of the protocol may differ."""
_MAX_DEVIATION = 0.1
"""Distance of a planned slice from its position in a regular stack, as a share of the distance."""
_MAX_TILE_SHIFT = 0.25
"""Distance of the first tile from an end of the plan, in steps from slice to slice."""


def planned_slice_centres(protocol: str, max_count: int) -> Numbers:
    """Return the centre of each slice in the order of the plan.

    A coordinate of 0 is left out of the text.

    Parameters
    ----------
    protocol : str
        Text of the header that contains the protocol.
    max_count : int
        Number of slices, at most.

    Returns
    -------
    (N, 3) array
        LPS mm.

    Raises
    ------
    ValueError
        If the protocol has fewer than 2 slices, or more than `max_count`.
    """
    section = _PROTOCOL.search(protocol)
    text = section[1] if section else ""
    size = _SLICE_COUNT.search(text)
    count = int(size[1], 0) if size else 0
    if not 2 <= count <= max_count:
        raise ValueError("the protocol has no valid number of slices")
    centres = np.zeros((count, 3))
    for number, axis, value in _SLICE_CENTRE.findall(text):
        if int(number) < count:
            centres[int(number), _AXES[axis]] = float(value)
    return centres


def tile_direction(centres: Numbers, first: Numbers, distance: float) -> Numbers:
    """Return the unit vector from tile to tile.

    Its sign depends on the end of the plan at which the first tile lies.

    Parameters
    ----------
    centres : (N, 3) array
        Result of `planned_slice_centres`, LPS mm.
    first : (3,) array
        Centre of the first tile, LPS mm.
    distance : float
        Distance from tile to tile, mm.

    Raises
    ------
    ValueError
        If the plan is not a regular stack of that distance, or the first tile is at neither end.
    """
    count = len(centres)
    step = (centres[-1] - centres[0]) / (count - 1)
    length = float(np.linalg.norm(step))
    deviation = np.abs(centres - centres[0] - np.outer(np.arange(count), step)).max()
    same_distance = abs(length - distance) <= _MAX_SPACING_DIFFERENCE * distance
    if not same_distance or deviation > _MAX_DEVIATION * distance:
        raise ValueError("the slices of the protocol differ from the tiles")
    if not np.isfinite(first).all():
        raise ValueError("the position of the first tile is not finite")
    steps_from_start = float((first - centres[0]) @ step) / length**2
    direction: Numbers = step / length
    if abs(steps_from_start) < _MAX_TILE_SHIFT:
        return direction
    if abs(steps_from_start - (count - 1)) < _MAX_TILE_SHIFT:
        return -direction
    raise ValueError("the first tile is at neither end of the plan")
