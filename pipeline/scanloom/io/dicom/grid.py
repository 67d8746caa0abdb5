"""UIH's VFRAME grids: a file of one plane that holds a whole volume as tiles.

How many there are stands in a private attribute, and where each lies in a private sequence beside
it, with an item for each tile (rordenlab/dcm2niix issue 225).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import tags
from scanloom.io.dicom.headers import Header, quiet
from scanloom.io.dicom.odd_header import PARSE_ERRORS
from scanloom.io.dicom.slices import Slice, Tile, plain_text, single_slice, to_float

if TYPE_CHECKING:
    from pydicom import Dataset

MOST_TILES = 4096
"""Of one grid; scanners make some tens."""
_GROUP, _COUNT, _FRAMES = 0x0065, 0x50, 0x51
_CREATOR = "Image Private Header"
_USUAL_BLOCK = 0x10
_POSITION, _ORIENTATION = tags.IMAGE_POSITION_PATIENT, tags.IMAGE_ORIENTATION_PATIENT
_SAME_COSINE = 1e-4


def is_grid(header: Header) -> bool:
    """Whether ImageType says that the file holds tiles, and none of them has the file's place."""
    return "VFRAME" in header.image_type and header.position is None


def grid_slices(header: Header) -> list[Slice]:
    """Return the tiles of a grid, each as a slice where it says that it lies.

    They stand row by row in the fewest columns that make a square, and no more rows than it takes.

    Raises
    ------
    ScanError
        MOSAIC where the private attributes are missing or can't be read; DAMAGED where the tiles
        do not fit.
    """
    whole = single_slice(header)
    try:
        with quiet():
            positions, turns = _places(header.read_dataset())
    except (OSError, *PARSE_ERRORS) as exc:
        detail = f"its tiles can't be told apart ({type(exc).__name__})"
        raise ScanError(Reason.MOSAIC, detail) from exc
    if any(turn and _differ(turn, header.orientation or turns[0]) for turn in turns):
        raise ScanError(Reason.SLICE_ORIENTATION, "tiles of a grid differ in orientation")
    count = len(positions)
    across = math.ceil(math.sqrt(count))
    down = -(-count // across)
    rows, columns = header.rows // down, header.columns // across
    if rows * down != header.rows or columns * across != header.columns or not rows * columns:
        raise ScanError(Reason.DAMAGED, f"{count} tiles do not fit the size of a grid")
    return [
        replace(
            whole,
            position=position,
            orientation=header.orientation or turns[0] or None,
            tile=Tile(n // across * rows, n % across * columns, rows, columns),
            shared=None,
        )
        for n, position in enumerate(positions)
    ]


def _places(dataset: Dataset) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Return position and, where it is said, orientation of each tile; ValueError if unclear."""
    block = next(
        (
            element
            for element in range(_USUAL_BLOCK, 0x100)
            if _raw_text(dataset, element) == _CREATOR
        ),
        _USUAL_BLOCK,
    )
    count, items = (_element(dataset, block << 8 | n) for n in (_COUNT, _FRAMES))
    number = to_float(_text(count))
    frames = _items(items)
    if not number.is_integer() or not 1 <= number <= MOST_TILES or number != len(frames):
        raise ValueError("another number of tiles")
    positions = [_numbers(frame, _POSITION, 3) for frame in frames]
    turns = [_numbers(frame, _ORIENTATION, 6) for frame in frames]
    if () in positions:
        raise ValueError("a tile without a place")
    return positions, turns


def _element(dataset: Dataset, element: int) -> object:
    return dataset[_GROUP, element].value


def _raw_text(dataset: Dataset, element: int) -> str:
    if (_GROUP, element) not in dataset:
        return ""
    return _text(dataset[_GROUP, element].value)


def _text(value: object) -> str:
    return plain_text(value) if isinstance(value, bytes) else str(value).strip(" \0")


def _items(value: object) -> Sequence[Dataset]:
    """Return the items of a sequence, also of one whose type nobody names: that is implicit."""
    from pydicom.sequence import Sequence as Items
    from pydicom.values import convert_SQ

    if isinstance(value, bytes):
        value = convert_SQ(value, is_implicit_VR=True, is_little_endian=True)
    if not isinstance(value, Items):
        raise TypeError("no sequence")
    return tuple(value)


def _numbers(frame: Dataset, tag: int, count: int) -> tuple[float, ...]:
    if tag not in frame:
        return ()
    value = frame.get_item(tag).value
    if not isinstance(value, bytes):
        raise TypeError("no text")
    numbers = tuple(map(to_float, plain_text(value).split("\\")))
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise ValueError("another number of values")
    return numbers


def _differ(one: Sequence[float], other: Sequence[float]) -> bool:
    return any(abs(a - b) > _SAME_COSINE for a, b in zip(one, other, strict=True))
