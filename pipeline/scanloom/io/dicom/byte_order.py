"""Numbers of a data set as they are read in one byte order, a tag being one number."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from scanloom.io.dicom import tags
from scanloom.io.dicom.elements import LOOKUP, TAGS

STOP, ODD = -1, -3
"""What is meant by a tag that is wanted, beside values that are kept: pixels, and what has no place
outside sequences."""
PIXELS = tags.PIXEL_DATA
STOPS = (PIXELS, tags.FLOAT_PIXEL_DATA, tags.DOUBLE_FLOAT_PIXEL_DATA)
"""PixelData, FloatPixelData, DoubleFloatPixelData: nothing is read behind them."""
SHORT = b"AE AS AT CS DA DS DT FL FD IS LO LT PN SH SL SS ST TM UI UL US"
LONG = b"OB OD OF OL OV OW SQ SV UC UN UR UT UV"
"""Value representations whose length has two and four bytes (PS3.5 7.1.2)."""
UNDEFINED = 0xFFFFFFFF

_ITEM, _ITEM_END, _SEQUENCE_END = (
    tags.ITEM,
    tags.ITEM_DELIMITATION_ITEM,
    tags.SEQUENCE_DELIMITATION_ITEM,
)

Unpack = Callable[[bytes, int], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class ByteOrder:
    """How heads of elements are read.

    Parameters
    ----------
    little : bool
    explicit, implicit, long : function of (bytes, place)
        Tag, VR and short length; tag and length; a long length.
    wanted : mapping of int to int
        The plain tag, or what is meant by it.
    short, long_vrs : frozenset of int
        Value representations by the size of their length.
    sequence : int
        The VR of a sequence.
    pixels, item, item_end, sequence_end : int
        Tags.
    group, delimiters : int
        A tag & `group` is `delimiters` for items and delimiters.
    """

    little: bool
    explicit: Unpack
    implicit: Unpack
    long: Unpack
    wanted: Mapping[int, int]
    short: frozenset[int]
    long_vrs: frozenset[int]
    sequence: int
    pixels: int
    item: int
    item_end: int
    sequence_end: int
    group: int
    delimiters: int

    def swap_tag(self, tag: int) -> int:
        """Convert a tag as read into the number 0xGGGGEEEE, or such a number into a tag as read."""
        return (tag & 0xFFFF) << 16 | tag >> 16 if self.little else tag


def _order(name: Literal["little", "big"]) -> ByteOrder:
    mark = "<" if name == "little" else ">"

    def tag(plain: int) -> int:
        return (plain & 0xFFFF) << 16 | plain >> 16 if name == "little" else plain

    def vrs(names: bytes) -> frozenset[int]:
        return frozenset(int.from_bytes(one, name) for one in names.split())

    wanted = {tag(one): one for one in TAGS} | {tag(tags.MODALITY_LUT_SEQUENCE): LOOKUP}
    wanted |= dict.fromkeys(map(tag, STOPS), STOP)
    wanted |= dict.fromkeys(map(tag, (_ITEM, _ITEM_END, _SEQUENCE_END)), ODD)
    return ByteOrder(
        little=name == "little",
        explicit=struct.Struct(mark + "IHH").unpack_from,
        implicit=struct.Struct(mark + "II").unpack_from,
        long=struct.Struct(mark + "I").unpack_from,
        wanted=wanted,
        short=vrs(SHORT),
        long_vrs=vrs(LONG),
        sequence=int.from_bytes(b"SQ", name),
        pixels=tag(PIXELS),
        item=tag(_ITEM),
        item_end=tag(_ITEM_END),
        sequence_end=tag(_SEQUENCE_END),
        group=tag(0xFFFF0000),
        delimiters=tag(0xFFFE0000),
    )


LITTLE, BIG = _order("little"), _order("big")
