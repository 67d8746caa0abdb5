"""Where sequences of undefined length end: every element in them is looked at, as pydicom does."""

from __future__ import annotations

from scanloom.io.dicom.byte_order import UNDEFINED, ByteOrder

DEEPEST = 32
"""Sequences inside sequences; deeper ones are no header of a scanner's."""


class NotPlainError(Exception):
    """Something that pydicom shall judge."""


def explicit_end(order: ByteOrder, data: bytes, place: int, depth: int = DEEPEST) -> int:
    """Return where a sequence of undefined length ends, its delimiter included (PS3.5 7.5).

    Raises
    ------
    NotPlainError, struct.error
        If it is odd; if `data` ends too early.
    """
    if not depth:
        raise NotPlainError
    while True:
        tag, length = order.implicit(data, place)
        place += 8
        if tag == order.sequence_end and length == 0:
            return place
        if tag != order.item:
            raise NotPlainError
        end = None if length == UNDEFINED else place + length
        place = _explicit_item(order, data, place, end, depth - 1)


def _explicit_item(order: ByteOrder, data: bytes, place: int, end: int | None, depth: int) -> int:
    while place != end:
        tag, vr, length = order.explicit(data, place)
        if end is None and tag == order.item_end and order.implicit(data, place)[1] == 0:
            return place + 8
        if tag & order.group == order.delimiters:
            raise NotPlainError
        if vr in order.short:
            place += 8
        elif vr in order.long_vrs:
            (length,) = order.long(data, place + 8)
            place += 12
        else:
            raise NotPlainError
        if length != UNDEFINED:
            place += length
        elif vr == order.sequence:
            place = explicit_end(order, data, place, depth)
        else:
            raise NotPlainError
        if end is not None and place > end:
            raise NotPlainError
    return place


def implicit_end(
    order: ByteOrder, data: bytes, owner: int, place: int, depth: int = DEEPEST
) -> int:
    """Do the same where no VRs are written; `owner` is the tag of the sequence."""
    if not depth or not _may_be_sequence(order, data, owner, place):
        raise NotPlainError
    while True:
        tag, length = order.implicit(data, place)
        place += 8
        if tag == order.sequence_end and length == 0:
            return place
        if tag != order.item:
            raise NotPlainError
        end = None if length == UNDEFINED else place + length
        place = _implicit_item(order, data, place, end, depth - 1)


def _implicit_item(order: ByteOrder, data: bytes, place: int, end: int | None, depth: int) -> int:
    while place != end:
        tag, length = order.implicit(data, place)
        place += 8
        if end is None and tag == order.item_end and length == 0:
            return place
        if tag & order.group == order.delimiters:
            raise NotPlainError
        if length == UNDEFINED:
            place = implicit_end(order, data, tag, place, depth)
        else:
            place += length
        if end is not None and place > end:
            raise NotPlainError
    return place


def _may_be_sequence(order: ByteOrder, data: bytes, owner: int, place: int) -> bool:
    """Whether pydicom takes it for a sequence: by its dictionary, or by the item it begins with."""
    from pydicom.datadict import dictionary_VR

    try:
        return bool(dictionary_VR(order.swap_tag(owner)) == "SQ")
    except KeyError:
        return bool(order.implicit(data, place)[0] == order.item)
