"""Colours of structures in pictures, looked up by SNOMED CT code in `colors.json`.

One hue serves both sides of a paired structure: the right one is darker. `Structure.color`, which
DICOM SEG and `segments.json` record, is the model's own and does not change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from scanloom.cards.codes import RIGHT
from scanloom.core import Structure
from scanloom.core.segmentation import Color

OTHER: Final = "Other structures"
"""System of structures whose code is not in the table."""
RIGHT_SHADE: Final = 0.72
"""Brightness of a right structure relative to the left one, as a factor of each sRGB value."""

MIN_RGB_RANGE: Final = 60
"""Smallest difference between the sRGB values of a colour that is distinct from grey."""


def display_colors(structures: Iterable[Structure]) -> dict[int, Color]:
    """Return a colour for each structure of a model, by its number.

    A structure gets the colour of its code and side, or the model's own if the table lacks the
    code. If that is greyish, or taken by another structure, it gets a free colour of the table.
    """
    colors: dict[int, Color] = {}
    ordered = sorted(structures, key=lambda s: s.number)
    for structure in ordered:
        color = table_color(structure) or structure.color
        if color not in colors.values() and max(color) - min(color) >= MIN_RGB_RANGE:
            colors[structure.number] = color
    free = [c for c in _palette() if c not in colors.values()] or list(_palette())
    rest = [s.number for s in ordered if s.number not in colors]
    colors.update((number, free[n % len(free)]) for n, number in enumerate(rest))
    return colors


def table_color(structure: Structure) -> Color | None:
    """Return the colour of a structure's code and side; None if the table lacks the code."""
    entry = _table().get(structure.type.value)
    if entry is None:
        return None
    right = structure.laterality is not None and structure.laterality.value == RIGHT.value
    red, green, blue = (round(c * RIGHT_SHADE) if right else c for c in entry[1])
    return red, green, blue


def system_of(structure: Structure) -> str:
    """Return the system of the body that a structure belongs to, by its code."""
    entry = _table().get(structure.type.value)
    return OTHER if entry is None else entry[0]


@cache
def systems() -> tuple[str, ...]:
    """Return the names of all systems, in the order of the table."""
    return (*dict.fromkeys(system for system, _ in _table().values()), OTHER)


@cache
def _table() -> Mapping[str, tuple[str, Color]]:
    """Return system and colour of each code."""
    file = Path(__file__).with_name("colors.json")
    document = json.loads(file.read_text(encoding="utf-8"))
    return {
        code: (system, (red, green, blue))
        for system, rows in document["systems"].items()
        for code, (_, red, green, blue) in rows.items()
    }


@cache
def _palette() -> tuple[Color, ...]:
    """Return the different colours of the table, each far from the one before it."""
    colors = tuple(dict.fromkeys(color for _, color in _table().values()))
    step = next(n for n in (37, 41, 43) if len(colors) % n)
    return tuple(colors[n * step % len(colors)] for n in range(len(colors)))
