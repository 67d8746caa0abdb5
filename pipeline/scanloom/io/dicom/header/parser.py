"""Parse the header of a plain DICOM file from one read; unusual files are left to pydicom.

pydicom creates an object for every element. This parser creates only the values that are kept:
other elements are skipped by their lengths (DICOM PS3.5 7.1), which makes it some five times as
fast. Whatever is unusual gives None and is read by pydicom (`fallback`), so that both give the same
`Elements` for a file that both can read.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from scanloom.io.dicom import tags, uids
from scanloom.io.dicom.header.elements import (
    FLOAT_PIXELS,
    KEPT_TAGS,
    MODALITY_LUT_PRESENT,
    PRIVATE_TAGS,
    Elements,
    PixelDataLocation,
    elements_from_values,
)

READ_SIZES_BYTES = (1 << 15, 1 << 18, 1 << 22)
"""Sizes of a read: most headers fit into the first, private data need the others."""
DEFLATED_READ_BYTES = 1 << 18
"""Size of the read of a deflated file: its compressed header is shorter."""

_PLAIN_SYNTAXES = (
    uids.IMPLICIT_VR_LITTLE_ENDIAN,
    uids.EXPLICIT_VR_LITTLE_ENDIAN,
    uids.EXPLICIT_VR_BIG_ENDIAN,
    uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN,
    uids.RLE_LOSSLESS,
)
"""Syntaxes that are parsed here, together with the JPEG family but for JPIP."""
_JPIP_SYNTAXES = (
    uids.JPIP_REFERENCED,
    uids.JPIP_REFERENCED_DEFLATE,
    uids.JPIP_HTJ2K_REFERENCED,
    uids.JPIP_HTJ2K_REFERENCED_DEFLATE,
)
"""Syntaxes whose pixels are on a server; the data sets of some are deflated."""
_META_START = b"\x02\0\0\0UL\x04\0"
"""Head of FileMetaInformationGroupLength, which comes first."""
_GROUP_8 = b"\x08\0"


STOP, MISPLACED = -1, -3
"""Stand-ins for tags in `ByteOrder.kept`: of pixel data, where parsing ends, and of items and
delimiters, which cannot occur outside sequences, and zero, which begins no data set of a file."""
SHORT_LENGTH_VRS = b"AE AS AT CS DA DS DT FL FD IS LO LT PN SH SL SS ST TM UI UL US"
LONG_LENGTH_VRS = b"OB OD OF OL OV OW SQ SV UC UN UR UT UV"
"""Value representations whose length field has two and four bytes (PS3.5 7.1.2)."""
UNDEFINED_LENGTH = 0xFFFFFFFF
"""Undefined length: the end is marked by a delimiter."""

PIXEL_DATA_TAGS = (tags.PIXEL_DATA, tags.FLOAT_PIXEL_DATA, tags.DOUBLE_FLOAT_PIXEL_DATA)
_MISPLACED_TAGS = (0, tags.ITEM, tags.ITEM_DELIMITATION_ITEM, tags.SEQUENCE_DELIMITATION_ITEM)

Unpack = Callable[[bytes, int], tuple[Any, ...]]


class ByteOrder:
    """Unpacking functions and constants for the heads of elements in one byte order.

    All tags and VRs are integers as they are unpacked in this order: see `swap_tag`.

    Parameters
    ----------
    name : "little" or "big"

    Attributes
    ----------
    unpack_explicit : function of (bytes, offset)
        Returns tag, VR and short length.
    unpack_implicit : function of (bytes, offset)
        Returns tag and length.
    unpack_length : function of (bytes, offset)
        Returns a long length.
    kept : dict of int to int
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

    def __init__(self, name: Literal["little", "big"]) -> None:
        mark = "<" if name == "little" else ">"
        self.little = name == "little"
        self.unpack_explicit: Unpack = struct.Struct(mark + "IHH").unpack_from
        self.unpack_implicit: Unpack = struct.Struct(mark + "II").unpack_from
        self.unpack_length: Unpack = struct.Struct(mark + "I").unpack_from
        as_read = self.swap_tag
        self.kept = {as_read(tag): tag for tag in KEPT_TAGS | PRIVATE_TAGS}
        self.kept[as_read(tags.MODALITY_LUT_SEQUENCE)] = MODALITY_LUT_PRESENT
        self.kept |= dict.fromkeys(map(as_read, PIXEL_DATA_TAGS), STOP)
        self.kept |= dict.fromkeys(map(as_read, _MISPLACED_TAGS), MISPLACED)
        self.short_vrs, self.long_vrs = (
            frozenset(int.from_bytes(vr, name) for vr in vrs.split())
            for vrs in (SHORT_LENGTH_VRS, LONG_LENGTH_VRS)
        )
        self.sequence_vr = int.from_bytes(b"SQ", name)
        self.pixel_data, self.item = as_read(tags.PIXEL_DATA), as_read(tags.ITEM)
        self.item_end = as_read(tags.ITEM_DELIMITATION_ITEM)
        self.sequence_end = as_read(tags.SEQUENCE_DELIMITATION_ITEM)
        self.group_mask, self.item_group = as_read(0xFFFF0000), as_read(0xFFFE0000)

    def swap_tag(self, tag: int) -> int:
        """Convert a tag as read into the number 0xGGGGEEEE, or such a number into a tag as read."""
        return (tag & 0xFFFF) << 16 | tag >> 16 if self.little else tag


LITTLE, BIG = ByteOrder("little"), ByteOrder("big")

_META_TAGS = {
    LITTLE.swap_tag(tag): tag
    for tag in (tags.TRANSFER_SYNTAX_UID, tags.MEDIA_STORAGE_SOP_CLASS_UID)
}
"""Tags whose values are kept of the meta header, by the tag as read in little endian."""
_UI = int.from_bytes(b"UI", "little")


MAX_SEQUENCE_DEPTH = 32
"""Sequences inside sequences, at most; scanners write only a few."""


class UnusualHeaderError(Exception):
    """The header has something unusual that is left to pydicom."""


def _sequence_end(
    order: ByteOrder,
    data: bytes,
    offset: int,
    *,
    explicit: bool,
    owner: int,
    depth: int = MAX_SEQUENCE_DEPTH,
) -> int:
    """Return the end of a sequence of undefined length, its delimiter included (PS3.5 7.5).

    `offset` is the start of the first item, `owner` the tag of the sequence as read, to look up its
    VR if elements have none, `depth` the levels of nesting that are still allowed.
    UnusualHeaderError if the sequence is malformed or nested too deeply, struct.error if `data`
    ends too early.
    """
    if not depth or not (explicit or _may_be_sequence(order, data, owner, offset)):
        raise UnusualHeaderError
    vr = order.sequence_vr
    while True:
        tag, length = order.unpack_implicit(data, offset)
        offset += 8
        if tag == order.sequence_end and length == 0:
            return offset
        if tag != order.item:
            raise UnusualHeaderError
        end = None if length == UNDEFINED_LENGTH else offset + length
        while offset != end:
            if explicit:
                tag, vr, length = order.unpack_explicit(data, offset)
            else:
                tag, length = order.unpack_implicit(data, offset)
            if tag & order.group_mask == order.item_group:
                delimiter = (order.item_end, 0)
                if end is None and order.unpack_implicit(data, offset) == delimiter:
                    offset += 8
                    break
                raise UnusualHeaderError
            offset += 8
            if explicit and vr not in order.short_vrs:
                if vr not in order.long_vrs:
                    raise UnusualHeaderError
                (length,) = order.unpack_length(data, offset)
                offset += 4
            if length != UNDEFINED_LENGTH:
                offset += length
            elif vr == order.sequence_vr:
                offset = _sequence_end(
                    order, data, offset, explicit=explicit, owner=tag, depth=depth - 1
                )
            else:
                raise UnusualHeaderError
            if end is not None and offset > end:
                raise UnusualHeaderError


def _may_be_sequence(order: ByteOrder, data: bytes, owner: int, offset: int) -> bool:
    """Return whether pydicom takes an element for a sequence: by its dictionary or first item."""
    from pydicom.datadict import dictionary_VR

    try:
        return bool(dictionary_VR(order.swap_tag(owner)) == "SQ")
    except KeyError:
        return bool(order.unpack_implicit(data, offset)[0] == order.item)


class _Pixels(NamedTuple):
    """Value of the element at which a header ends: PixelData if they are integers."""

    are_integers: bool
    offset: int
    length: int


def read_first_bytes(path: Path | str, size: int = READ_SIZES_BYTES[0]) -> bytes:
    """Return the first `size` bytes of a file, or all of a shorter file.

    Raises
    ------
    OSError
        If it can't be read. A pipe gives no bytes, rather than waiting for a writer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        data = chunk = os.read(descriptor, size)
        while chunk and len(data) < size:  # a share may return less than it has
            chunk = os.read(descriptor, size - len(data))
            data += chunk
        return data
    finally:
        os.close(descriptor)


def parse_plain(path: Path | str, start: bytes) -> Elements | None:
    """Parse the header of a plain file: explicit or implicit VR, deflated or not.

    Parameters
    ----------
    path : Path or str
        The file.
    start : bytes
        Result of `read_first_bytes`.

    Returns
    -------
    Elements or None
        None if the file is not plain, or damaged.

    Raises
    ------
    OSError
        If the file can't be read.
    """
    data = start
    for next_size in (*READ_SIZES_BYTES[1:], None):
        is_whole_file = len(data) not in READ_SIZES_BYTES
        try:
            return _parse(path, data, is_whole_file=is_whole_file)
        except struct.error:  # the header is longer than the bytes that were read
            if is_whole_file or next_size is None:
                return None
            data = read_first_bytes(path, next_size)
        except (UnusualHeaderError, zlib.error):
            return None
    return None


def _parse(path: Path | str, data: bytes, *, is_whole_file: bool) -> Elements:
    """Walk over meta header and data set; struct.error if `data` ends too early."""
    values: dict[int, bytes] = {}
    offset = _walk_meta(data, values)
    order, explicit, syntax = _encoding(values.pop(tags.TRANSFER_SYNTAX_UID, b""), data, offset)
    if syntax == uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN:
        return _parse_deflated(read_first_bytes(path, DEFLATED_READ_BYTES)[offset:], values)
    if offset == len(data) or explicit != _has_vr(data, offset):
        raise UnusualHeaderError
    pixels = _walk(order, data, offset, values, explicit=explicit, is_whole_file=is_whole_file)
    location, faults = None, 0
    if pixels is not None and pixels.are_integers:
        location = PixelDataLocation(
            pixels.offset, None if pixels.length == UNDEFINED_LENGTH else pixels.length
        )
    elif pixels is not None:
        faults = FLOAT_PIXELS
    return elements_from_values(values, syntax, little=order.little, pixels=location, faults=faults)


def _parse_deflated(compressed: bytes, meta: Mapping[int, bytes]) -> Elements:
    """Inflate no more than the header; pixels are decoded from the whole file."""
    for size in READ_SIZES_BYTES:
        decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
        data, values = decompressor.decompress(compressed, size), dict(meta)
        try:
            pixels = _walk(LITTLE, data, 0, values, explicit=True, is_whole_file=decompressor.eof)
        except struct.error:
            if len(data) < size:
                raise UnusualHeaderError from None
            continue
        are_integers = pixels is not None and pixels.are_integers
        return elements_from_values(
            values,
            uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN,
            little=True,
            pixels=PixelDataLocation(0, None) if are_integers else None,
            faults=0 if pixels is None or are_integers else FLOAT_PIXELS,
        )
    raise UnusualHeaderError


def _encoding(raw_syntax: bytes, data: bytes, offset: int) -> tuple[ByteOrder, bool, str]:
    """Return the byte order, whether VRs are explicit, and the transfer syntax."""
    syntax = raw_syntax.rstrip(b"\0 ").decode("latin-1")
    if not syntax:
        explicit = _looks_explicit(data, offset)
        inferred = uids.EXPLICIT_VR_LITTLE_ENDIAN if explicit else uids.IMPLICIT_VR_LITTLE_ENDIAN
        return LITTLE, explicit, inferred
    is_jpeg = syntax.startswith(uids.JPEG_FAMILY) and syntax not in _JPIP_SYNTAXES
    if not is_jpeg and syntax not in _PLAIN_SYNTAXES:
        raise UnusualHeaderError
    order = BIG if syntax == uids.EXPLICIT_VR_BIG_ENDIAN else LITTLE
    return order, syntax != uids.IMPLICIT_VR_LITTLE_ENDIAN, syntax


def _walk_meta(data: bytes, values: dict[int, bytes]) -> int:
    """Keep the values of the meta header, which is explicit little endian (PS3.10 7.1).

    The result is the offset of the data set.
    """
    offset = 132 if data[128:132] == b"DICM" else 0
    if not data.startswith(_META_START, offset):
        if offset or not data.startswith(_GROUP_8):
            raise UnusualHeaderError
        return 0  # neither preamble nor meta header
    while True:
        tag, vr, length = LITTLE.unpack_explicit(data, offset)
        if tag & 0xFFFF != 2:
            return offset
        if vr in LITTLE.short_vrs:
            start = offset + 8
        elif vr in LITTLE.long_vrs:
            start, (length,) = offset + 12, LITTLE.unpack_length(data, offset + 8)
        else:
            raise UnusualHeaderError
        offset = start + length
        if tag in _META_TAGS:
            if vr != _UI:
                raise UnusualHeaderError
            _keep(values, _META_TAGS[tag], data[start:offset])


def _has_vr(data: bytes, offset: int) -> bool:
    """Return whether an element seems to have a VR; some files contradict their transfer syntax."""
    return data[offset + 4 : offset + 6].isupper() and data[offset + 4 : offset + 6].isalpha()


def _looks_explicit(data: bytes, offset: int) -> bool:
    """Return whether a file without transfer syntax has VRs.

    It is little endian if its first group is small; else it is left to pydicom.
    """
    tag, vr, _ = LITTLE.unpack_explicit(data, offset)
    if tag & 0xFFFF >= 0x400:
        raise UnusualHeaderError
    return vr in LITTLE.short_vrs or vr in LITTLE.long_vrs


def _walk(
    order: ByteOrder,
    data: bytes,
    offset: int,
    values: dict[int, bytes],
    *,
    explicit: bool,
    is_whole_file: bool,
) -> _Pixels | None:
    """Keep values up to the pixels, and return the head of these; None without pixels."""
    end = len(data) if is_whole_file else -1
    while offset != end:
        if explicit:
            tag, vr, length = order.unpack_explicit(data, offset)
            start = offset + 8
            if vr not in order.short_vrs:
                if vr not in order.long_vrs:
                    raise UnusualHeaderError
                (length,) = order.unpack_length(data, start)
                start += 4
        else:
            tag, length = order.unpack_implicit(data, offset)
            start, vr = offset + 8, order.sequence_vr  # any element may be a sequence
        kept = order.kept.get(tag, 0)
        # Pixels before all else: their length may be undefined, and nothing is read beyond them
        if kept == STOP:
            return _Pixels(tag == order.pixel_data, start, length)
        if length == UNDEFINED_LENGTH:
            # pydicom decides about sequences that are kept, and about values without a length
            if kept or vr != order.sequence_vr:
                raise UnusualHeaderError
            offset = _sequence_end(order, data, start, explicit=explicit, owner=tag)
            continue
        offset = start + length
        if kept == MISPLACED:
            raise UnusualHeaderError
        if kept:
            _keep(values, kept, data[start:offset])
    return None


def _keep(values: dict[int, bytes], tag: int, value: bytes) -> None:
    """Keep a value; UnusualHeaderError if the tag already has a different one."""
    if values.setdefault(tag, value) != value:
        raise UnusualHeaderError
