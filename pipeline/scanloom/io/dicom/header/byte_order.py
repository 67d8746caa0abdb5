"""Unpack the heads of elements in one byte order, with each tag as a single integer."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from scanloom.io.dicom import tags
from scanloom.io.dicom.header.elements import KEPT_TAGS, MODALITY_LUT_PRESENT

STOP, MISPLACED = -1, -3
"""Stand-ins for tags in `ByteOrder.kept`: of pixel data, where parsing ends, and of items and
delimiters, which cannot occur outside sequences."""
SHORT_LENGTH_VRS = b"AE AS AT CS DA DS DT FL FD IS LO LT PN SH SL SS ST TM UI UL US"
LONG_LENGTH_VRS = b"OB OD OF OL OV OW SQ SV UC UN UR UT UV"
"""Value representations whose length field has two and four bytes (PS3.5 7.1.2)."""
UNDEFINED_LENGTH = 0xFFFFFFFF
"""Undefined length: the end is marked by a delimiter."""

_PIXEL_DATA_TAGS = (tags.PIXEL_DATA, tags.FLOAT_PIXEL_DATA, tags.DOUBLE_FLOAT_PIXEL_DATA)
_ITEM_TAGS = (tags.ITEM, tags.ITEM_DELIMITATION_ITEM, tags.SEQUENCE_DELIMITATION_ITEM)

Unpack = Callable[[bytes, int], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class ByteOrder:
    """Unpacking functions and constants for the heads of elements in one byte order.

    All tags and VRs are integers as they are unpacked in this order: see `swap_tag`.

    Parameters
    ----------
    little : bool
        Whether values are little endian.
    unpack_explicit : function of (bytes, offset)
        Returns tag, VR and short length.
    unpack_implicit : function of (bytes, offset)
        Returns tag and length.
    unpack_length : function of (bytes, offset)
        Returns a long length.
    kept : mapping of int to int
        For each tag of interest the number 0xGGGGEEEE, `MODALITY_LUT_PRESENT`, `STOP` or
        `MISPLACED`.
    short_vrs, long_vrs : frozenset of int
        Value representations by the size of their length field.
    sequence_vr : int
        The VR SQ.
    pixel_data, item, item_end, sequence_end : int
        Tags of PixelData, items and delimiters.
    group_mask, item_group : int
        A tag & `group_mask` is `item_group` for items and delimiters.
    """

    little: bool
    unpack_explicit: Unpack
    unpack_implicit: Unpack
    unpack_length: Unpack
    kept: Mapping[int, int]
    short_vrs: frozenset[int]
    long_vrs: frozenset[int]
    sequence_vr: int
    pixel_data: int
    item: int
    item_end: int
    sequence_end: int
    group_mask: int
    item_group: int

    def swap_tag(self, tag: int) -> int:
        """Convert a tag as read into the number 0xGGGGEEEE, or such a number into a tag as read."""
        return _swap_words(tag) if self.little else tag


def _swap_words(tag: int) -> int:
    return (tag & 0xFFFF) << 16 | tag >> 16


def _make_order(name: Literal["little", "big"]) -> ByteOrder:
    mark = "<" if name == "little" else ">"

    def as_read(tag: int) -> int:
        return _swap_words(tag) if name == "little" else tag

    def vrs(names: bytes) -> frozenset[int]:
        return frozenset(int.from_bytes(vr, name) for vr in names.split())

    kept = {as_read(tag): tag for tag in KEPT_TAGS} | {
        as_read(tags.MODALITY_LUT_SEQUENCE): MODALITY_LUT_PRESENT
    }
    kept |= dict.fromkeys(map(as_read, _PIXEL_DATA_TAGS), STOP)
    kept |= dict.fromkeys(map(as_read, _ITEM_TAGS), MISPLACED)
    return ByteOrder(
        little=name == "little",
        unpack_explicit=struct.Struct(mark + "IHH").unpack_from,
        unpack_implicit=struct.Struct(mark + "II").unpack_from,
        unpack_length=struct.Struct(mark + "I").unpack_from,
        kept=kept,
        short_vrs=vrs(SHORT_LENGTH_VRS),
        long_vrs=vrs(LONG_LENGTH_VRS),
        sequence_vr=int.from_bytes(b"SQ", name),
        pixel_data=as_read(tags.PIXEL_DATA),
        item=as_read(tags.ITEM),
        item_end=as_read(tags.ITEM_DELIMITATION_ITEM),
        sequence_end=as_read(tags.SEQUENCE_DELIMITATION_ITEM),
        group_mask=as_read(0xFFFF0000),
        item_group=as_read(0xFFFE0000),
    )


LITTLE, BIG = _make_order("little"), _make_order("big")
