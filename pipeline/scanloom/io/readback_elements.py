"""DICOM elements by the bytes, for reading back what we wrote ourselves.

The frames of a DICOM SEG have some twenty elements each; as objects of a library they cost more
than all voxels. Explicit little endian with explicit lengths only (PS3.5 7.1.2, 7.5.1): in a file
of ours there is nothing else.
"""

from __future__ import annotations

import struct

_ITEM = b"\xfe\xff\x00\xe0"
_LONG = frozenset((b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR"))
_LONG |= {b"UT", b"UV"}
_SHORT_HEAD = struct.Struct("<HH2sH")
_LONG_LENGTH = struct.Struct("<I")

Elements = dict[int, memoryview]
"""Values by tag."""


def items_of(sequence: memoryview) -> list[Elements]:
    """Return the elements of each item of a sequence.

    Raises
    ------
    ValueError, struct.error
        If it is laid out otherwise, or cut.
    """
    found, at = [], 0
    while at < len(sequence):
        (length,) = _LONG_LENGTH.unpack_from(sequence, at + 4)
        if sequence[at : at + 4] != _ITEM or at + 8 + length > len(sequence):
            raise ValueError("no item where one should be")
        found.append(_elements(sequence[at + 8 : at + 8 + length]))
        at += 8 + length
    return found


def item_of(sequence: memoryview) -> Elements:
    """Return the elements of a sequence's one item.

    Raises
    ------
    ValueError, struct.error
        If there is another number of them, or they are laid out otherwise.
    """
    [item] = items_of(sequence)
    return item


def numbers_of(value: memoryview) -> list[float]:
    """Return the numbers of decimal strings (DS)."""
    return [float(part) for part in bytes(value).split(b"\\")]


def text_of(value: memoryview) -> str:
    """Return ASCII text without its padding."""
    return bytes(value).decode("ascii").strip(" \0")


def _elements(item: memoryview) -> Elements:
    found, at = {}, 0
    while at < len(item):
        group, element, vr, length = _SHORT_HEAD.unpack_from(item, at)
        at += 8
        if vr in _LONG:
            (length,) = _LONG_LENGTH.unpack_from(item, at)
            at += 4
        if at + length > len(item):
            raise ValueError("an element ends after its item")
        found[group << 16 | element] = item[at : at + length]
        at += length
    return found
