"""Parse the header of a plain DICOM file from one read; unusual files are left to pydicom.

pydicom creates an object for every element. This parser creates only the values that are kept:
other elements are skipped by their lengths (DICOM PS3.5 7.1). Files of a series are alike: if the
elements are at the same distances as in the previous file, they are compared all at once
(`HeaderTemplate`). Unusual files give None and are read by pydicom. Both give the same `Elements`.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

from scanloom.io.dicom import tags, uids
from scanloom.io.dicom.header.byte_order import (
    BIG,
    LITTLE,
    STOP,
    ByteOrder,
)
from scanloom.io.dicom.header.data_elements import pixel_data_location, read_element
from scanloom.io.dicom.header.elements import (
    FLOAT_PIXELS,
    Elements,
    PixelDataLocation,
    elements_from_values,
)
from scanloom.io.dicom.header.sequences import UnusualHeaderError
from scanloom.io.dicom.header.template import (
    ElementSpan,
)
from scanloom.io.dicom.header.template_cache import TemplateCache
from scanloom.io.session import current_session

READ_SIZES_BYTES = (1 << 13, 1 << 15, 1 << 18, 1 << 22)
"""Sizes of a read: most headers fit into the first two, private data need the others."""
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
_META_TAGS = {
    LITTLE.swap_tag(tag): tag
    for tag in (tags.TRANSFER_SYNTAX_UID, tags.MEDIA_STORAGE_SOP_CLASS_UID)
}
"""Tags whose values are kept of the meta header, by the tag as read in little endian."""
_UI = int.from_bytes(b"UI", "little")

_read_size = [READ_SIZES_BYTES[0]]
_encodings: dict[bytes, tuple[ByteOrder, bool, str]] = {}
_MAX_ENCODINGS = 64


def read_first_bytes(path: Path | str, size: int = 0) -> bytes:
    """Return the first `size` bytes of a file, or all of a shorter file.

    Parameters
    ----------
    path : Path or str
        The file.
    size : int
        Number of bytes; 0 for the size that the previous header needed, one of `READ_SIZES_BYTES`.

    Raises
    ------
    OSError
        If it can't be read. A pipe gives no bytes, rather than waiting for a writer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    wanted = size or _read_size[0]
    try:
        data = part = os.read(descriptor, wanted)
        while part and len(data) < wanted:  # a share may return less than it has
            part = os.read(descriptor, wanted - len(data))
            data += part
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
    data, templates = start, current_session().cache(TemplateCache)
    while True:
        is_whole_file = len(data) not in READ_SIZES_BYTES
        try:
            with templates.lock:
                elements = _parse(path, data, templates, is_whole_file=is_whole_file)
        except struct.error:  # the header is longer than the bytes that were read
            if is_whole_file or len(data) == READ_SIZES_BYTES[-1]:
                return None
            data = read_first_bytes(path, READ_SIZES_BYTES[READ_SIZES_BYTES.index(len(data)) + 1])
        except (UnusualHeaderError, zlib.error):
            return None
        else:
            needed = elements.pixels.offset + 12 if elements.pixels else 0
            if needed > _read_size[0] or needed <= _read_size[0] >> 2:
                sizes = (size for size in READ_SIZES_BYTES if size >= needed)
                _read_size[0] = next(sizes, READ_SIZES_BYTES[-1])
            return elements


def _parse(
    path: Path | str, data: bytes, templates: TemplateCache, *, is_whole_file: bool
) -> Elements:
    """Walk over meta header and data set; struct.error if `data` ends too early."""
    elements = templates.read(data)
    if elements is not None:
        return elements
    values: dict[int, bytes] = {}
    heads: list[ElementSpan] = []
    offset = _walk_meta(data, values, heads)
    raw_syntax = values.pop(tags.TRANSFER_SYNTAX_UID, b"")
    order, explicit, syntax = _encodings.get(raw_syntax) or _encoding(raw_syntax, data, offset)
    if syntax == uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN:
        return _parse_deflated(read_first_bytes(path, DEFLATED_READ_BYTES)[offset:], values)
    if offset == len(data) or explicit != _has_vr(data, offset):
        raise UnusualHeaderError
    elements = templates.read_other(data, order.little, explicit)
    if elements is not None:
        return elements
    last = _walk(order, data, offset, values, heads, explicit=explicit, is_whole_file=is_whole_file)
    pixels = None
    if last is not None:
        pixels = pixel_data_location(order, data, last, explicit=explicit)
        templates.note(data, heads, order, syntax, explicit=explicit)
    faults = FLOAT_PIXELS if last is not None and pixels is None else 0
    return elements_from_values(values, syntax, little=order.little, pixels=pixels)._replace(
        faults=faults
    )


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
    encoding = order, syntax != uids.IMPLICIT_VR_LITTLE_ENDIAN, syntax
    if len(_encodings) < _MAX_ENCODINGS:
        _encodings[raw_syntax] = encoding
    return encoding


def _parse_deflated(compressed: bytes, meta: Mapping[int, bytes]) -> Elements:
    """Inflate no more than the header; pixels are decoded from the whole file."""
    for size in READ_SIZES_BYTES:
        decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
        data, values = decompressor.decompress(compressed, size), dict(meta)
        try:
            last = _walk(LITTLE, data, 0, values, [], explicit=True, is_whole_file=decompressor.eof)
        except struct.error:
            if len(data) < size:
                raise UnusualHeaderError from None
            continue
        has_pixels = last is not None and pixel_data_location(LITTLE, data, last, explicit=True)
        faults = FLOAT_PIXELS if last is not None and not has_pixels else 0
        elements = elements_from_values(
            values,
            uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN,
            little=True,
            pixels=PixelDataLocation(0, None) if has_pixels else None,
        )
        return elements._replace(faults=faults)
    raise UnusualHeaderError


def _walk_meta(data: bytes, values: dict[int, bytes], heads: list[ElementSpan]) -> int:
    """Walk over the meta header, which is explicit little endian (PS3.10 7.1).

    Values that are kept and the heads of all elements are added to `values` and `heads`.

    Returns
    -------
    int
        Offset of the data set.
    """
    offset = 132 if data[128:132] == b"DICM" else 0
    if offset:
        heads.append(ElementSpan(128, 132, 132, 0, True))
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
        heads.append(ElementSpan(offset, start, start + length, _META_TAGS.get(tag, 0), True))
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
    heads: list[ElementSpan],
    *,
    explicit: bool,
    is_whole_file: bool,
) -> ElementSpan | None:
    """Step from element to element up to the pixels, and return their head; None without pixels.

    Values that are kept and the heads of all elements are added to `values` and `heads`.
    """
    end = len(data) if is_whole_file else -1
    while offset != end:
        head = read_element(order, data, offset, explicit=explicit)
        heads.append(head)
        if head.kept_tag == STOP:
            return head
        if head.kept_tag:
            _keep(values, head.kept_tag, data[head.value_start : head.value_end])
        offset = head.value_end
    return None


def _keep(values: dict[int, bytes], tag: int, value: bytes) -> None:
    """Keep a value; NotPlainError if the tag already has a different one."""
    if values.setdefault(tag, value) != value:
        raise UnusualHeaderError
