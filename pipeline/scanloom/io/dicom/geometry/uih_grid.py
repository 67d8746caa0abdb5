"""UIH's VFRAME grids: single-frame files whose one plane holds a whole volume as tiles.

A private attribute holds the number of tiles, and a private sequence next to it has one item per
tile with its position (rordenlab/dcm2niix issue 225).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import tags
from scanloom.io.dicom.geometry.slices import Slice, Tile, decode_text, parse_decimal, single_slice
from scanloom.io.dicom.header.fallback import PARSE_ERRORS
from scanloom.io.dicom.header.header import Header, pydicom_muted

if TYPE_CHECKING:
    from pydicom import Dataset

_MAX_TILES = 4096
"""Largest number of tiles in one grid; scanners write a few dozen."""
_GROUP, _COUNT, _FRAMES = 0x0065, 0x50, 0x51
_CREATOR = "Image Private Header"
_DEFAULT_BLOCK = 0x10
_POSITION, _ORIENTATION = tags.IMAGE_POSITION_PATIENT, tags.IMAGE_ORIENTATION_PATIENT
_COSINE_TOLERANCE = 1e-4


def is_uih_grid(header: Header) -> bool:
    """Whether ImageType marks a grid of tiles and the file has no position of its own."""
    return "VFRAME" in header.image_type and header.position is None


def uih_grid_slices(header: Header) -> list[Slice]:
    """Return the tiles of a grid as slices with their own positions.

    N tiles are stored row by row in ceil(sqrt(N)) columns and as many rows as needed.

    Raises
    ------
    ScanError
        MOSAIC if the private attributes are missing or unreadable; DAMAGED if the tiles do not
        fit the plane; SLICE_ORIENTATION if they differ in orientation.
    """
    template = single_slice(header)
    try:
        with pydicom_muted():
            positions, cosines = _tile_geometry(header.read_dataset())
    except (OSError, *PARSE_ERRORS) as exc:
        detail = f"the private attributes of a grid can't be parsed ({type(exc).__name__})"
        raise ScanError(Reason.MOSAIC, detail) from exc
    if any(
        tile_cosines and _differ(tile_cosines, header.orientation or cosines[0])
        for tile_cosines in cosines
    ):
        raise ScanError(Reason.SLICE_ORIENTATION, "tiles of a grid differ in orientation")
    count = len(positions)
    across = math.ceil(math.sqrt(count))
    down = -(-count // across)
    rows, columns = header.rows // down, header.columns // across
    if rows * down != header.rows or columns * across != header.columns or not rows * columns:
        raise ScanError(Reason.DAMAGED, f"{count} tiles do not fit the size of a grid")
    return [
        replace(
            template,
            position=position,
            orientation=header.orientation or cosines[0] or None,
            tile=Tile(n // across * rows, n % across * columns, rows, columns),
            shared=None,
        )
        for n, position in enumerate(positions)
    ]


def _tile_geometry(dataset: Dataset) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Return the position (LPS mm) and the direction cosines of each tile.

    The cosines of a tile may be empty. A missing position or a contradictory count is a ValueError.
    """
    block = next(
        (
            element
            for element in range(_DEFAULT_BLOCK, 0x100)
            if _raw_text(dataset, element) == _CREATOR
        ),
        _DEFAULT_BLOCK,
    )
    count, items = (_element(dataset, block << 8 | n) for n in (_COUNT, _FRAMES))
    number = parse_decimal(_text(count))
    frames = _items(items)
    if not number.is_integer() or not 1 <= number <= _MAX_TILES or number != len(frames):
        raise ValueError("unexpected number of tiles")
    positions = [_numbers(frame, _POSITION, 3) for frame in frames]
    cosines = [_numbers(frame, _ORIENTATION, 6) for frame in frames]
    if () in positions:
        raise ValueError("a tile without a position")
    return positions, cosines


def _element(dataset: Dataset, element: int) -> object:
    return dataset[_GROUP, element].value


def _raw_text(dataset: Dataset, element: int) -> str:
    if (_GROUP, element) not in dataset:
        return ""
    return _text(dataset[_GROUP, element].value)


def _text(value: object) -> str:
    return decode_text(value) if isinstance(value, bytes) else str(value).strip(" \0")


def _items(value: object) -> Sequence[Dataset]:
    """Return the items of a sequence; raw bytes of unknown VR are parsed as implicit VR."""
    from pydicom.sequence import Sequence as Items
    from pydicom.values import convert_SQ

    if isinstance(value, bytes):
        value = convert_SQ(value, is_implicit_VR=True, is_little_endian=True)
    if not isinstance(value, Items):
        raise TypeError("not a sequence")
    return tuple(value)


def _numbers(frame: Dataset, tag: int, count: int) -> tuple[float, ...]:
    if tag not in frame:
        return ()
    value = frame.get_item(tag).value
    if not isinstance(value, bytes):
        raise TypeError("not text")
    values = tuple(map(parse_decimal, decode_text(value).split("\\")))
    if len(values) != count or not all(map(math.isfinite, values)):
        raise ValueError("unexpected number of values")
    return values


def _differ(first: Sequence[float], second: Sequence[float]) -> bool:
    return any(abs(a - b) > _COSINE_TOLERANCE for a, b in zip(first, second, strict=True))
