"""Read single data elements: tag, length and position of the value."""

from __future__ import annotations

from scanloom.io.dicom.header.byte_order import MISPLACED, STOP, UNDEFINED_LENGTH, ByteOrder
from scanloom.io.dicom.header.elements import PixelDataLocation
from scanloom.io.dicom.header.sequences import UnusualHeaderError, explicit_end, implicit_end
from scanloom.io.dicom.header.template import ElementSpan


def read_element(order: ByteOrder, data: bytes, offset: int, *, explicit: bool) -> ElementSpan:
    """Return the location of the element at an offset."""
    if explicit:
        tag, vr, length = order.unpack_explicit(data, offset)
        if vr in order.short_vrs:
            start = offset + 8
        elif vr in order.long_vrs:
            (length,) = order.unpack_length(data, offset + 8)
            start = offset + 12
        else:
            raise UnusualHeaderError
        may_be_sequence = vr == order.sequence_vr
    else:
        tag, length = order.unpack_implicit(data, offset)
        start, may_be_sequence = offset + 8, True
    kept_tag = order.kept.get(tag, 0)
    if kept_tag == STOP:
        return ElementSpan(offset, start, start + length, STOP, False)
    if length != UNDEFINED_LENGTH:
        if kept_tag == MISPLACED:
            raise UnusualHeaderError
        return ElementSpan(offset, start, start + length, kept_tag, True)
    if kept_tag or not may_be_sequence:
        raise UnusualHeaderError
    if explicit:
        return ElementSpan(offset, start, explicit_end(order, data, start), 0, False)
    return ElementSpan(offset, start, implicit_end(order, data, tag, start), 0, False)


def pixel_data_location(
    order: ByteOrder, data: bytes, head: ElementSpan, *, explicit: bool
) -> PixelDataLocation | None:
    """Return the location of the pixel data if `head` is that element, else None."""
    unpack = order.unpack_explicit if explicit else order.unpack_implicit
    tag = unpack(data, head.offset)[0]
    if tag != order.pixel_data:
        return None
    length = head.value_end - head.value_start
    return PixelDataLocation(head.value_start, None if length == UNDEFINED_LENGTH else length)
