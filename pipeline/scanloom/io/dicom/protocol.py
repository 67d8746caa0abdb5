"""Siemens' protocol as text, in the header of the series (CSA): where its slices were planned."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

_TEXT = re.compile(r"### ASCCONV BEGIN.*?###(.*?)### ASCCONV END ###", re.DOTALL)
_COUNT = re.compile(r"^\s*sSliceArray\.lSize\s*=\s*(0x[0-9a-fA-F]+|\d+)\s*$", re.MULTILINE)
_PLACE = re.compile(
    r"^\s*sSliceArray\.asSlice\[(\d+)\]\.sPosition\.d(Sag|Cor|Tra)\s*=\s*([-+.\deE]+)\s*$",
    re.MULTILINE,
)
_AXES = {"Sag": 0, "Cor": 1, "Tra": 2}


def planned_centres(protocol: str, most: int) -> Numbers:
    """Return the centre of each slice in the order of the plan, (N, 3), LPS mm.

    A coordinate of 0 is left out of the text.

    Raises
    ------
    ValueError
        If the protocol names no slices, or more than `most`.
    """
    found = _TEXT.search(protocol)
    text = found[1] if found else ""
    size = _COUNT.search(text)
    count = int(size[1], 0) if size else 0
    if not 2 <= count <= most:
        raise ValueError("no slices in the protocol")
    centres = np.zeros((count, 3))
    for number, axis, value in _PLACE.findall(text):
        if int(number) < count:
            centres[int(number), _AXES[axis]] = float(value)
    return centres


def way_of_tiles(centres: Numbers, first: Numbers, distance: float) -> Numbers:
    """Return the unit vector from tile to tile, by which end of the plan the first tile lies at.

    Parameters
    ----------
    centres : (N, 3) array
        As `planned_centres` gives them.
    first : (3,) array
        Centre of the first tile, LPS mm.
    distance : float
        From tile to tile, mm.

    Raises
    ------
    ValueError
        If the plan is no regular stack of that distance, or the first tile lies at neither end.
    """
    count = len(centres)
    step = (centres[-1] - centres[0]) / (count - 1)
    length = float(np.linalg.norm(step))
    off = centres - centres[0] - np.outer(np.arange(count), step)
    if not abs(length - distance) <= 0.02 * distance or np.abs(off).max() > 0.1 * distance:
        raise ValueError("the protocol plans other slices")
    if not np.isfinite(first).all():
        raise ValueError("the first tile lies nowhere")
    place = float((first - centres[0]) @ step) / length**2
    way: Numbers = step / length
    if abs(place) < _NEAR:
        return way
    if abs(place - (count - 1)) < _NEAR:
        return -way
    raise ValueError("the first tile is at neither end of the plan")


_NEAR = 0.25
"""Steps that the first tile may lie beside an end of the plan."""
