"""Parses DICOM elements from bytes, to read back the files that scanloom wrote.

The frames of a DICOM SEG have some twenty elements each; as objects of a library they cost more
than all voxels. Only explicit little endian with explicit lengths is parsed (PS3.5 7.1.2, 7.5.1):
scanloom's own files use no other encoding.
"""

from __future__ import annotations

import struct

_ITEM_TAG = b"\xfe\xff\x00\xe0"
_LONG_VRS = frozenset((b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR"))
_LONG_VRS |= {b"UT", b"UV"}
_SHORT_HEADER = struct.Struct("<HH2sH")
_LONG_LENGTH = struct.Struct("<I")

Elements = dict[int, memoryview]
"""Encoded values by tag."""


def sequence_items(sequence: memoryview) -> list[Elements]:
    """Return the elements of each item of a sequence.

    Raises
    ------
    ValueError, struct.error
        If the sequence has another encoding or is truncated.
    """
    items, offset = [], 0
    while offset < len(sequence):
        (length,) = _LONG_LENGTH.unpack_from(sequence, offset + 4)
        start = offset + 8
        if sequence[offset : offset + 4] != _ITEM_TAG or start + length > len(sequence):
            raise ValueError("an item is missing or truncated")
        items.append(_elements(sequence[start : start + length]))
        offset = start + length
    return items


def only_item(sequence: memoryview) -> Elements:
    """Return the elements of the only item of a sequence.

    Raises
    ------
    ValueError, struct.error
        If the sequence does not have exactly one item, has another encoding or is truncated.
    """
    [item] = sequence_items(sequence)
    return item


def parse_decimals(value: memoryview) -> list[float]:
    """Parse decimal strings (DS)."""
    return [float(text) for text in bytes(value).split(b"\\")]


def parse_text(value: memoryview) -> str:
    """Return ASCII text without its padding."""
    return bytes(value).decode("ascii").strip(" \0")


def _elements(item: memoryview) -> Elements:
    elements, offset = {}, 0
    while offset < len(item):
        group, element, vr, length = _SHORT_HEADER.unpack_from(item, offset)
        offset += 8
        if vr in _LONG_VRS:
            (length,) = _LONG_LENGTH.unpack_from(item, offset)
            offset += 4
        if offset + length > len(item):
            raise ValueError("an element exceeds its item")
        elements[group << 16 | element] = item[offset : offset + length]
        offset += length
    return elements
