"""Find the end of sequences of undefined length, visiting every element in them as pydicom does."""

from __future__ import annotations

from scanloom.io.dicom.header.byte_order import UNDEFINED_LENGTH, ByteOrder

MAX_SEQUENCE_DEPTH = 32
"""Sequences inside sequences, at most; scanners write only a few."""


class UnusualHeaderError(Exception):
    """The header has something unusual that is left to pydicom."""


def explicit_end(
    order: ByteOrder, data: bytes, offset: int, depth: int = MAX_SEQUENCE_DEPTH
) -> int:
    """Return the end of an explicit VR sequence, its delimiter included (PS3.5 7.5).

    Parameters
    ----------
    order : ByteOrder
        Byte order of the data set.
    data : bytes
        The file, or its start.
    offset : int
        Start of the first item.
    depth : int
        Levels of nesting that are still allowed.

    Raises
    ------
    NotPlainError
        If the sequence is malformed or nested too deeply.
    struct.error
        If `data` ends too early.
    """
    if not depth:
        raise UnusualHeaderError
    while True:
        tag, length = order.unpack_implicit(data, offset)
        offset += 8
        if tag == order.sequence_end and length == 0:
            return offset
        if tag != order.item:
            raise UnusualHeaderError
        end = None if length == UNDEFINED_LENGTH else offset + length
        offset = _explicit_item(order, data, offset, end, depth - 1)


def _explicit_item(order: ByteOrder, data: bytes, offset: int, end: int | None, depth: int) -> int:
    while offset != end:
        tag, vr, length = order.unpack_explicit(data, offset)
        if end is None and tag == order.item_end and order.unpack_implicit(data, offset)[1] == 0:
            return offset + 8
        if tag & order.group_mask == order.item_group:
            raise UnusualHeaderError
        if vr in order.short_vrs:
            offset += 8
        elif vr in order.long_vrs:
            (length,) = order.unpack_length(data, offset + 8)
            offset += 12
        else:
            raise UnusualHeaderError
        if length != UNDEFINED_LENGTH:
            offset += length
        elif vr == order.sequence_vr:
            offset = explicit_end(order, data, offset, depth)
        else:
            raise UnusualHeaderError
        if end is not None and offset > end:
            raise UnusualHeaderError
    return offset


def implicit_end(
    order: ByteOrder, data: bytes, owner: int, offset: int, depth: int = MAX_SEQUENCE_DEPTH
) -> int:
    """Return the end of an implicit VR sequence, like `explicit_end`.

    Parameters
    ----------
    owner : int
        Tag of the sequence as read, to look up its VR.
    """
    if not depth or not _may_be_sequence(order, data, owner, offset):
        raise UnusualHeaderError
    while True:
        tag, length = order.unpack_implicit(data, offset)
        offset += 8
        if tag == order.sequence_end and length == 0:
            return offset
        if tag != order.item:
            raise UnusualHeaderError
        end = None if length == UNDEFINED_LENGTH else offset + length
        offset = _implicit_item(order, data, offset, end, depth - 1)


def _implicit_item(order: ByteOrder, data: bytes, offset: int, end: int | None, depth: int) -> int:
    while offset != end:
        tag, length = order.unpack_implicit(data, offset)
        offset += 8
        if end is None and tag == order.item_end and length == 0:
            return offset
        if tag & order.group_mask == order.item_group:
            raise UnusualHeaderError
        if length == UNDEFINED_LENGTH:
            offset = implicit_end(order, data, tag, offset, depth)
        else:
            offset += length
        if end is not None and offset > end:
            raise UnusualHeaderError
    return offset


def _may_be_sequence(order: ByteOrder, data: bytes, owner: int, offset: int) -> bool:
    """Return whether pydicom takes an element for a sequence: by its dictionary or first item."""
    from pydicom.datadict import dictionary_VR

    try:
        return bool(dictionary_VR(order.swap_tag(owner)) == "SQ")
    except KeyError:
        return bool(order.unpack_implicit(data, offset)[0] == order.item)
