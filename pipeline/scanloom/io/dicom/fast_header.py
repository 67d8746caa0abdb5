"""The header of a plain DICOM file from one read; what is not plain is left to pydicom.

pydicom makes an object of every element. Here nothing is made but what is kept: the elements are
passed over by their lengths (DICOM PS3.5 7.1). Whatever is odd gives None, and pydicom reads the
file: both give the same `Elements`.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

from scanloom.io.dicom.elements import LOOKUP_TABLE, MEDIA_CLASS, SYNTAX, TAGS, Elements, PixelPlace

READS = (1 << 15, 1 << 18, 1 << 22)
"""Bytes that are read: most headers are shorter than the first, private data need the others."""
PACKED = 1 << 18
"""Bytes of a deflated file that are read: its header takes fewer."""

IMPLICIT = b"1.2.840.10008.1.2"
EXPLICIT = b"1.2.840.10008.1.2.1"
DEFLATED = b"1.2.840.10008.1.2.1.99"
RLE = b"1.2.840.10008.1.2.5"
JPEG = b"1.2.840.10008.1.2.4."
"""JPEG, JPEG-LS, JPEG 2000 and HTJ2K: explicit little endian before the pixels."""
_NOT_PLAIN = (JPEG + b"94", JPEG + b"95", JPEG + b"204", JPEG + b"205")
"""JPIP: pixels lie elsewhere, and two are deflated."""

_SHORT = b"AE AS AT CS DA DS DT FL FD IS LO LT PN SH SL SS ST TM UI UL US"
_LONG = b"OB OD OF OL OV OW SQ SV UC UN UR UT UV"


def _swapped(tag: int) -> int:
    """Return the tag as four little endian bytes read as one number."""
    return (tag & 0xFFFF) << 16 | tag >> 16


def _vr_numbers(names: bytes) -> frozenset[int]:
    return frozenset(int.from_bytes(name, "little") for name in names.split())


_SHORT_VRS, _LONG_VRS = _vr_numbers(_SHORT), _vr_numbers(_LONG)
_SQ, _UI = (int.from_bytes(name, "little") for name in (b"SQ", b"UI"))
_META_START = b"DICM\x02\0\0\0UL\x04\0"
"""FileMetaInformationGroupLength comes first."""
_OTHER_PIXELS = (_swapped(0x7FE00008), _swapped(0x7FE00009))  # float: pydicom stops at them too
_PIXELS = _swapped(0x7FE00010)
_STOP, _LOOKUP, _ODD = -1, -2, -3
_ITEM, _ITEM_END, _SEQUENCE_END = map(_swapped, (0xFFFEE000, 0xFFFEE00D, 0xFFFEE0DD))
_META = {_swapped(tag): tag for tag in (SYNTAX, MEDIA_CLASS)}
_WANTED = {_swapped(tag): tag for tag in TAGS} | {
    _swapped(LOOKUP_TABLE): _LOOKUP,
    **dict.fromkeys((_PIXELS, *_OTHER_PIXELS), _STOP),
    **dict.fromkeys((_ITEM, _ITEM_END, _SEQUENCE_END), _ODD),
}
_DELIMITERS = 0xFFFE  # their group
_UNDEFINED = 0xFFFFFFFF
_DEEPEST = 32
"""Sequences inside sequences; deeper ones are no header of a scanner's."""

_explicit = struct.Struct("<IHH").unpack_from  # tag, VR, length or nothing
_implicit = struct.Struct("<II").unpack_from  # tag, length
_long = struct.Struct("<I").unpack_from


class _NotPlainError(Exception):
    """Something that pydicom shall judge."""


def read_start(path: Path | str, size: int = READS[0]) -> bytes:
    """Return the first bytes of a file, all of them if there are no more than `size`.

    Raises
    ------
    OSError
        If it can't be read. A pipe gives nothing, rather than waiting for a writer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def read_plain(path: Path | str, start: bytes) -> Elements | None:
    """Return what a plain explicit or implicit little endian file says.

    Parameters
    ----------
    path : Path or str
        The file.
    start : bytes
        What `read_start` gave.

    Returns
    -------
    Elements or None
        None where the file is not plain, damaged, or has no preamble.

    Raises
    ------
    OSError
        If the file can't be read.
    """
    if start[128:140] != _META_START:
        return None
    data = start
    for size in READS:
        try:
            if size > READS[0]:
                data = read_start(path, size)
            return _elements(path, data, size)
        except struct.error:  # it goes on behind what was read
            if len(data) < size:
                return None
        except (_NotPlainError, zlib.error):
            return None
    return None


def _elements(path: Path | str, data: bytes, size: int) -> Elements:
    """Walk over meta header and data set; struct.error where `size` bytes are not enough."""
    values: dict[int, bytes] = {}
    place = _walk_meta(data, values)
    whole = len(data) < size
    syntax = values.pop(SYNTAX, b"").rstrip(b"\0 ")
    if syntax == DEFLATED:
        return _deflated_elements(read_start(path, PACKED)[place:], values)
    if syntax == IMPLICIT:
        walk = _walk_implicit
    elif syntax in (EXPLICIT, RLE) or (syntax.startswith(JPEG) and syntax not in _NOT_PLAIN):
        walk = _walk_explicit
    else:
        raise _NotPlainError
    if place == len(data):
        raise _NotPlainError
    pixels = walk(data, place, values, whole=whole)
    table = bool(values.pop(_LOOKUP, b""))
    return Elements(values, syntax.decode("ascii"), True, table, pixels)


def _deflated_elements(packed: bytes, values: dict[int, bytes]) -> Elements:
    """Inflate no more than the header; pixels are decoded from the whole file."""
    for size in READS:
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
        data = unpacker.decompress(packed, size)
        found = dict(values)
        try:
            pixels = _walk_explicit(data, 0, found, whole=unpacker.eof)
        except struct.error:
            if len(data) < size:
                raise _NotPlainError from None
            continue
        table = bool(found.pop(_LOOKUP, b""))
        place = None if pixels is None else PixelPlace(0, None)
        return Elements(found, DEFLATED.decode("ascii"), True, table, place)
    raise _NotPlainError


def _walk_meta(data: bytes, values: dict[int, bytes]) -> int:
    """Return where the meta header ends: it is explicit little endian (PS3.10 7.1)."""
    place = 132
    while True:
        tag, vr, length = _explicit(data, place)
        if tag & 0xFFFF != 2:
            return place
        if vr in _SHORT_VRS:
            start = place + 8
        elif vr in _LONG_VRS:
            start, (length,) = place + 12, _long(data, place + 8)
        else:
            raise _NotPlainError
        place = start + length
        if tag in _META:
            if vr != _UI:
                raise _NotPlainError
            values[_META[tag]] = data[start:place]


def _walk_explicit(
    data: bytes, place: int, values: dict[int, bytes], *, whole: bool
) -> PixelPlace | None:
    """Take what is wanted and return where the pixels lie; None at the end of the file."""
    wanted = _WANTED
    end = len(data) if whole else -1
    while place != end:
        tag, vr, length = _explicit(data, place)
        if vr in _SHORT_VRS:
            start = place + 8
        elif vr in _LONG_VRS:
            (length,) = _long(data, place + 8)
            start = place + 12
        else:
            raise _NotPlainError
        if tag in wanted:
            if wanted[tag] == _STOP:
                return _pixel_place(tag, start, length)
            if wanted[tag] == _ODD or length == _UNDEFINED:
                raise _NotPlainError
            values[wanted[tag]] = data[start : start + length]
        elif length == _UNDEFINED:
            if vr != _SQ:
                raise _NotPlainError
            length = _explicit_sequence(data, start, _DEEPEST) - start
        place = start + length
    return None


def _walk_implicit(
    data: bytes, place: int, values: dict[int, bytes], *, whole: bool
) -> PixelPlace | None:
    """Do the same where no VRs are written."""
    _check_implicit(data, place)
    wanted = _WANTED
    end = len(data) if whole else -1
    while place != end:
        tag, length = _implicit(data, place)
        start = place + 8
        if tag in wanted:
            if wanted[tag] == _STOP:
                return _pixel_place(tag, start, length)
            if wanted[tag] == _ODD or length == _UNDEFINED:
                raise _NotPlainError
            values[wanted[tag]] = data[start : start + length]
        elif length == _UNDEFINED:
            length = _implicit_sequence(data, tag, start, _DEEPEST) - start
        place = start + length
    return None


def _pixel_place(tag: int, start: int, length: int) -> PixelPlace | None:
    if tag != _PIXELS:
        return None
    return PixelPlace(start, None if length == _UNDEFINED else length)


def _check_implicit(data: bytes, place: int) -> None:
    """Refuse what looks like a VR: some files are explicit, whatever their syntax says."""
    if all(0x40 < letter < 0x5B for letter in data[place + 4 : place + 6]):
        raise _NotPlainError


def _explicit_sequence(data: bytes, place: int, depth: int) -> int:
    """Return where a sequence of undefined length ends, its delimiter included (PS3.5 7.5)."""
    if not depth:
        raise _NotPlainError
    while True:
        tag, length = _implicit(data, place)
        place += 8
        if tag == _SEQUENCE_END and length == 0:
            return place
        if tag != _ITEM:
            raise _NotPlainError
        end = None if length == _UNDEFINED else place + length
        place = _explicit_item(data, place, end, depth - 1)


def _explicit_item(data: bytes, place: int, end: int | None, depth: int) -> int:
    """Return where an item ends; every element in it is looked at, as pydicom does."""
    while place != end:
        tag, vr, length = _explicit(data, place)
        if end is None and tag == _ITEM_END and _implicit(data, place)[1] == 0:
            return place + 8
        if tag & 0xFFFF == _DELIMITERS:
            raise _NotPlainError
        if vr in _SHORT_VRS:
            place += 8
        elif vr in _LONG_VRS:
            (length,) = _long(data, place + 8)
            place += 12
        else:
            raise _NotPlainError
        if length != _UNDEFINED:
            place += length
        elif vr == _SQ:
            place = _explicit_sequence(data, place, depth)
        else:
            raise _NotPlainError
        if end is not None and place > end:
            raise _NotPlainError
    return place


def _implicit_sequence(data: bytes, owner: int, place: int, depth: int) -> int:
    """Return where a sequence of undefined length ends, its delimiter included."""
    if not depth or not _may_be_sequence(owner, data, place):
        raise _NotPlainError
    while True:
        tag, length = _implicit(data, place)
        place += 8
        if tag == _SEQUENCE_END and length == 0:
            return place
        if tag != _ITEM:
            raise _NotPlainError
        end = None if length == _UNDEFINED else place + length
        place = _implicit_item(data, place, end, depth - 1)


def _implicit_item(data: bytes, place: int, end: int | None, depth: int) -> int:
    while place != end:
        tag, length = _implicit(data, place)
        place += 8
        if end is None and tag == _ITEM_END and length == 0:
            return place
        if tag & 0xFFFF == _DELIMITERS:
            raise _NotPlainError
        if length == _UNDEFINED:
            place = _implicit_sequence(data, tag, place, depth)
        else:
            place += length
        if end is not None and place > end:
            raise _NotPlainError
    return place


def _may_be_sequence(swapped: int, data: bytes, place: int) -> bool:
    """Whether pydicom takes it for a sequence: by its dictionary, or by the item it begins with."""
    from pydicom.datadict import dictionary_VR

    try:
        return bool(dictionary_VR(_swapped(swapped)) == "SQ")
    except KeyError:
        return bool(_implicit(data, place)[0] == _ITEM)
