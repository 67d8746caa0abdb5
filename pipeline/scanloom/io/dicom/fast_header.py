"""The header of a plain DICOM file from one read; what is not plain is left to pydicom.

pydicom makes an object of every element. Here nothing is made but what is kept: the elements are
passed over by their lengths (DICOM PS3.5 7.1). Files of a series are alike: where elements stand as
in the file before, they are compared all at once (`Layout`). Whatever is odd gives None, and
pydicom reads the file: both give the same `Elements`.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from scanloom.io.dicom import tags, uids
from scanloom.io.dicom.byte_order import BIG, LITTLE, ODD, STOP, UNDEFINED, ByteOrder
from scanloom.io.dicom.elements import (
    FLOATS,
    LOOKUP,
    Elements,
    PixelPlace,
    elements_of,
)
from scanloom.io.dicom.layout import STEADY_TAGS, Head, Layout, is_plain
from scanloom.io.dicom.sequences import NotPlainError, explicit_end, implicit_end

READS = (1 << 13, 1 << 15, 1 << 18, 1 << 22)
"""Bytes that are read: most headers fit into the first two, private data need the others."""
PACKED = 1 << 18
"""Bytes of a deflated file that are read: its header takes fewer."""

_NOT_PLAIN = (
    uids.JPIP_REFERENCED,
    uids.JPIP_REFERENCED_DEFLATE,
    uids.JPIP_HTJ2K_REFERENCED,
    uids.JPIP_HTJ2K_REFERENCED_DEFLATE,
)
"""Syntaxes whose pixels are in another file; the data sets of some are deflated."""
_PLAIN = (
    uids.IMPLICIT_VR_LITTLE_ENDIAN,
    uids.EXPLICIT_VR_LITTLE_ENDIAN,
    uids.EXPLICIT_VR_BIG_ENDIAN,
    uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN,
    uids.RLE_LOSSLESS,
)
_META_START = b"\x02\0\0\0UL\x04\0"
"""FileMetaInformationGroupLength comes first."""
_GROUP_8 = b"\x08\0"
_META = {
    LITTLE.swap_tag(tag): tag
    for tag in (tags.TRANSFER_SYNTAX_UID, tags.MEDIA_STORAGE_SOP_CLASS_UID)
}
"""Tags whose values are kept of the meta header, by the tag as read in little endian."""
_UI = int.from_bytes(b"UI", "little")
_SEVERAL = 8  # files unlike the layout until another one is made
"""Where series are mixed, making layouts would take longer than it saves."""

_usual = [READS[0]]
_encodings: dict[bytes, tuple[ByteOrder, bool, str]] = {}
_MOST_ENCODINGS = 64


def read_start(path: Path | str, size: int = 0) -> bytes:
    """Return the first bytes of a file, all of them if there are no more than `size`.

    Parameters
    ----------
    size : int
        0 for as many as the header before took, one of `READS`.

    Raises
    ------
    OSError
        If it can't be read. A pipe gives nothing, rather than waiting for a writer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.read(descriptor, size or _usual[0])
    finally:
        os.close(descriptor)


def read_plain(path: Path | str, start: bytes) -> Elements | None:
    """Return what a plain file says: explicit or implicit, deflated or not.

    Parameters
    ----------
    path : Path or str
        The file.
    start : bytes
        What `read_start` gave.

    Returns
    -------
    Elements or None
        None where the file is not plain, or damaged.

    Raises
    ------
    OSError
        If the file can't be read.
    """
    data = start
    while True:
        whole = len(data) not in READS
        try:
            with BEFORE.lock:
                found = _elements(path, data, whole=whole)
        except struct.error:  # it goes on behind what was read
            if whole or len(data) == READS[-1]:
                return None
            data = read_start(path, READS[READS.index(len(data)) + 1])
        except (NotPlainError, zlib.error):
            return None
        else:
            needed = found.pixels.offset + 12 if found.pixels else 0
            if needed > _usual[0] or needed <= _usual[0] >> 2:
                _usual[0] = next((size for size in READS if size >= needed), READS[-1])
            return found


def _elements(path: Path | str, data: bytes, *, whole: bool) -> Elements:
    """Walk over meta header and data set; struct.error where `data` ends too early."""
    found = BEFORE.read(data)
    if found is not None:
        return found
    values: dict[int, bytes] = {}
    heads: list[Head] = []
    place = _walk_meta(data, values, heads)
    named = values.pop(tags.TRANSFER_SYNTAX_UID, b"")
    order, explicit, syntax = _encodings.get(named) or _encoding(named, data, place)
    if syntax == uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN:
        return _deflated_elements(read_start(path, PACKED)[place:], values)
    if place == len(data) or explicit != _has_vr(data, place):
        raise NotPlainError
    found = BEFORE.read_other(data, order.little, explicit)
    if found is not None:
        return found
    last = _walk(order, data, place, values, heads, explicit=explicit, whole=whole)
    pixels = None
    if last is not None:
        pixels = _pixels(order, data, last, explicit=explicit)
        BEFORE.note(data, heads, order, syntax, explicit=explicit)
    faults = FLOATS if last is not None and pixels is None else 0
    return elements_of(values, syntax, little=order.little, pixels=pixels)._replace(faults=faults)


def _read_as_before(data: bytes, layout: Layout) -> Elements | None:
    """Return what a file says that is like the ones before; None if it is not."""
    own: dict[int, bytes] = {}
    place, number = layout.begin, 0
    try:
        while True:
            part = layout.parts[number]
            if not part.is_same(data, place):
                if not layout.fit(number, data, place):
                    return None
                continue
            number += 1
            if part.tags:
                own.update(zip(part.tags, part.take(data, place), strict=True))
            place += part.size
            if not data.startswith(part.follows, place):
                return None
            head = _step(part.order, data, place, explicit=part.explicit)
            if part.kept == STOP:
                break
            if part.kept in STEADY_TAGS:
                layout.learn({part.kept: data[head.start : head.end]})
            elif part.kept:
                own[part.kept] = data[head.start : head.end]
            place = head.end
    except (struct.error, NotPlainError):  # one without pixels, or of which more has to be read
        return None
    table = bool(own.pop(LOOKUP, b""))
    pixels = _pixels(part.order, data, head, explicit=part.explicit)
    return Elements(layout.common, own, table, pixels, faults=0 if pixels else FLOATS)


class Before:
    """The layouts of files before, one for each encoding; who reads a file holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._last: Layout | None = None
        self._layouts: dict[tuple[bool, bool], Layout] = {}
        self._misses: dict[tuple[bool, bool], int] = {}

    def read(self, data: bytes) -> Elements | None:
        """Return what a file says that is like the last one; None if it is not."""
        return None if self._last is None else _read_as_before(data, self._last)

    def read_other(self, data: bytes, little: bool, explicit: bool) -> Elements | None:
        """Return what a file says that is like another one with its encoding."""
        layout = self._layouts.get((little, explicit))
        if layout is None or layout is self._last:
            return None
        found = _read_as_before(data, layout)
        if found is not None:
            self._last = layout
        return found

    def note(
        self, data: bytes, heads: Sequence[Head], order: ByteOrder, syntax: str, *, explicit: bool
    ) -> None:
        """Make a layout of a file that was unlike those before, if several were."""
        key = order.little, explicit
        self._misses[key] = self._misses.get(key, -1) + 1
        if self._misses[key] % _SEVERAL == 0 and is_plain(heads):
            self._last = Layout(data, heads, order, syntax, explicit=explicit)
            self._layouts[key] = self._last


BEFORE = Before()


def _encoding(named: bytes, data: bytes, place: int) -> tuple[ByteOrder, bool, str]:
    """Return byte order, whether VRs are written, and the transfer syntax."""
    syntax = named.rstrip(b"\0 ").decode("latin-1")
    if not syntax:
        explicit = _looks_explicit(data, place)
        return (
            LITTLE,
            explicit,
            uids.EXPLICIT_VR_LITTLE_ENDIAN if explicit else uids.IMPLICIT_VR_LITTLE_ENDIAN,
        )
    jpeg = syntax.startswith(uids.JPEG_FAMILY) and syntax not in _NOT_PLAIN
    if not jpeg and syntax not in _PLAIN:
        raise NotPlainError
    encoding = (
        BIG if syntax == uids.EXPLICIT_VR_BIG_ENDIAN else LITTLE,
        syntax != uids.IMPLICIT_VR_LITTLE_ENDIAN,
        syntax,
    )
    if len(_encodings) < _MOST_ENCODINGS:
        _encodings[named] = encoding
    return encoding


def _deflated_elements(packed: bytes, meta: Mapping[int, bytes]) -> Elements:
    """Inflate no more than the header; pixels are decoded from the whole file."""
    for size in READS:
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
        data, values = unpacker.decompress(packed, size), dict(meta)
        try:
            last = _walk(LITTLE, data, 0, values, [], explicit=True, whole=unpacker.eof)
        except struct.error:
            if len(data) < size:
                raise NotPlainError from None
            continue
        found = last is not None and _pixels(LITTLE, data, last, explicit=True)
        place = PixelPlace(0, None) if found else None
        faults = FLOATS if last is not None and not found else 0
        elements = elements_of(
            values, uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN, little=True, pixels=place
        )
        return elements._replace(faults=faults)
    raise NotPlainError


def _walk_meta(data: bytes, values: dict[int, bytes], heads: list[Head]) -> int:
    """Return where the data set begins; the meta header is explicit little endian (PS3.10 7.1)."""
    place = 132 if data[128:132] == b"DICM" else 0
    if place:
        heads.append(Head(128, 132, 132, 0, True))
    if not data.startswith(_META_START, place):
        if place or not data.startswith(_GROUP_8):
            raise NotPlainError
        return 0  # neither preamble nor meta header
    while True:
        tag, vr, length = LITTLE.explicit(data, place)
        if tag & 0xFFFF != 2:
            return place
        if vr in LITTLE.short:
            start = place + 8
        elif vr in LITTLE.long_vrs:
            start, (length,) = place + 12, LITTLE.long(data, place + 8)
        else:
            raise NotPlainError
        heads.append(Head(place, start, start + length, _META.get(tag, 0), True))
        place = start + length
        if tag in _META:
            if vr != _UI:
                raise NotPlainError
            _keep(values, _META[tag], data[start:place])


def _has_vr(data: bytes, place: int) -> bool:
    """Whether a VR seems to be written: some files are explicit, whatever their syntax says."""
    return data[place + 4 : place + 6].isupper() and data[place + 4 : place + 6].isalpha()


def _looks_explicit(data: bytes, place: int) -> bool:
    """Whether a file without transfer syntax has VRs; little endian if its first group is small."""
    tag, vr, _ = LITTLE.explicit(data, place)
    if tag & 0xFFFF >= 0x400:
        raise NotPlainError
    return vr in LITTLE.short or vr in LITTLE.long_vrs


def _walk(
    order: ByteOrder,
    data: bytes,
    place: int,
    values: dict[int, bytes],
    heads: list[Head],
    *,
    explicit: bool,
    whole: bool,
) -> Head | None:
    """Go from element to element to the pixels, and return their head; note all in `heads`."""
    end = len(data) if whole else -1
    while place != end:
        head = _step(order, data, place, explicit=explicit)
        heads.append(head)
        if head.kept == STOP:
            return head
        if head.kept:
            _keep(values, head.kept, data[head.start : head.end])
        place = head.end
    return None


def _keep(values: dict[int, bytes], tag: int, value: bytes) -> None:
    """Keep a value; NotPlainError if another one stood there before."""
    if values.setdefault(tag, value) != value:
        raise NotPlainError


def _step(order: ByteOrder, data: bytes, place: int, *, explicit: bool) -> Head:
    """Return the element at a place."""
    if explicit:
        tag, vr, length = order.explicit(data, place)
        if vr in order.short:
            start = place + 8
        elif vr in order.long_vrs:
            (length,) = order.long(data, place + 8)
            start = place + 12
        else:
            raise NotPlainError
        sequence = vr == order.sequence
    else:
        tag, length = order.implicit(data, place)
        start, sequence = place + 8, True
    kept = order.wanted.get(tag, 0)
    if kept == STOP:
        return Head(place, start, start + length, STOP, False)
    if length != UNDEFINED:
        if kept == ODD:
            raise NotPlainError
        return Head(place, start, start + length, kept, True)
    if kept or not sequence:
        raise NotPlainError
    if explicit:
        return Head(place, start, explicit_end(order, data, start), 0, False)
    return Head(place, start, implicit_end(order, data, tag, start), 0, False)


def _pixels(order: ByteOrder, data: bytes, head: Head, *, explicit: bool) -> PixelPlace | None:
    tag = (order.explicit if explicit else order.implicit)(data, head.place)[0]
    if tag != order.pixels:
        return None
    length = head.end - head.start
    return PixelPlace(head.start, None if length == UNDEFINED else length)
