"""Elements of functional groups that stand twice: of two, libraries take either without a word."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import tags, uids
from scanloom.io.dicom.byte_order import BIG, LITTLE, UNDEFINED, ByteOrder
from scanloom.io.dicom.headers import Header
from scanloom.io.dicom.odd_header import PARSE_ERRORS, inflated_start
from scanloom.io.dicom.sequences import DEEPEST, NotPlainError, explicit_end, implicit_end
from scanloom.io.unpack import opened_plain

_GROUPS = (tags.SHARED_FUNCTIONAL_GROUPS_SEQUENCE, tags.PER_FRAME_FUNCTIONAL_GROUPS_SEQUENCE)
_META_LENGTH = 144  # bytes of preamble, DICM and FileMetaInformationGroupLength
_MOST = 1 << 26  # bytes of a header, as elsewhere


class _TwiceError(Exception):
    """An element stands twice, with different values."""


def groups_contradict(header: Header) -> bool:
    """Whether an element in the functional groups of a file, or a group, stands there twice.

    Identical repetitions count as one. What can't be walked over is not judged: pydicom, which
    reads it, says what is wrong with it.

    Raises
    ------
    ScanError
        UNREADABLE.
    """
    order = BIG if header.syntax == uids.EXPLICIT_VR_BIG_ENDIAN else LITTLE
    try:
        with opened_plain(header.path, _MOST) as file:
            data = _data_set(file, header)
    except OSError as exc:
        detail = f"a file can't be read ({type(exc).__name__})"
        raise ScanError(Reason.UNREADABLE, detail) from exc
    except PARSE_ERRORS:
        return False
    try:
        _walk(_Bytes(order, data, explicit=header.syntax != uids.IMPLICIT_VR_LITTLE_ENDIAN))
    except _TwiceError:
        return True
    except (NotPlainError, struct.error):
        return False
    return False


def _data_set(file: BinaryIO, header: Header) -> bytes:
    """Return what stands between meta header and pixels."""
    if header.syntax == uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN:
        found = inflated_start(file)
        return b"" if found is None else found[1]
    data = file.read(min(header.pixels.offset, _MOST)) if header.pixels else b""
    if data[128:132] != b"DICM":
        return data
    return data[_META_LENGTH + int.from_bytes(data[140:144], "little") :]


class _Bytes:
    """A data set as bytes."""

    def __init__(self, order: ByteOrder, data: bytes, *, explicit: bool) -> None:
        self.order, self.data, self.explicit = order, data, explicit

    def element(self, place: int) -> tuple[int, int, int, bool]:
        """Return tag, start and end of the value, and whether it is a sequence."""
        order, data = self.order, self.data
        if self.explicit:
            tag, vr, length = order.explicit(data, place)
            start = place + 8
            if vr in order.long_vrs:
                (length,) = order.long(data, start)
                start += 4
            elif vr not in order.short:
                raise NotPlainError
            sequence = vr == order.sequence
        else:
            tag, length = order.implicit(data, place)
            start = place + 8
            sequence = data[start : start + 4] == order_bytes(order)
        if length != UNDEFINED:
            return tag, start, start + length, sequence
        if self.explicit:
            return tag, start, explicit_end(order, data, start), True
        return tag, start, implicit_end(order, data, tag, start), True

    def items(self, start: int, end: int) -> Iterator[tuple[int, int | None]]:
        """Yield where each item of a sequence begins, and ends; None up to its delimiter."""
        place = start
        while place < end:
            tag, length = self.order.implicit(self.data, place)
            if tag != self.order.item:
                return
            place += 8
            if length == UNDEFINED:
                yield place, None
                place = self.end_of_item(place)
            else:
                yield place, place + length
                place += length

    def end_of_item(self, place: int) -> int:
        """Return where an item ends that has no length, its delimiter included."""
        while True:
            tag, length = self.order.implicit(self.data, place)
            if tag == self.order.item_end and length == 0:
                return place + 8
            place = self.element(place)[2]


def order_bytes(order: ByteOrder) -> bytes:
    """Return how the tag of an item stands in a file."""
    return struct.pack("<I" if order.little else ">I", order.item)


def _walk(file: _Bytes) -> None:
    """Go over the data set, and into its functional groups."""
    groups = set(map(file.order.swap_tag, _GROUPS))
    seen: dict[int, tuple[int, int]] = {}
    place = 0
    while place + 8 <= len(file.data):
        tag, start, end, _ = file.element(place)
        if tag in groups:
            _note(file, seen, tag, start, end)
            for item, item_end in file.items(start, end):
                _walk_item(file, item, item_end, DEEPEST)
        place = end


def _walk_item(file: _Bytes, place: int, end: int | None, depth: int) -> None:
    if not depth:
        raise NotPlainError
    seen: dict[int, tuple[int, int]] = {}
    while place != end:
        if end is None and file.order.implicit(file.data, place) == (file.order.item_end, 0):
            return
        tag, start, stop, sequence = file.element(place)
        _note(file, seen, tag, start, stop)
        if sequence:
            for item, item_end in file.items(start, stop):
                _walk_item(file, item, item_end, depth - 1)
        place = stop
        if end is not None and place > end:
            raise NotPlainError


def _note(file: _Bytes, seen: dict[int, tuple[int, int]], tag: int, start: int, end: int) -> None:
    before = seen.setdefault(tag, (start, end))
    if before != (start, end) and file.data[slice(*before)] != file.data[start:end]:
        raise _TwiceError
