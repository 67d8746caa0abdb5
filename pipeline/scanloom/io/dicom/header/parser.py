"""Parse the header of a DICOM file: a plain one from one read, any other with pydicom.

pydicom creates an object for every element. The parser of plain files creates only the values that
are kept: other elements are skipped by their lengths (DICOM PS3.5 7.1), which makes it some five
times as fast. Whatever is unusual gives None and is read by pydicom, so that both give the same
`Elements` for a file that both can read.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import tags, uids
from scanloom.io.dicom.header.elements import (
    CONTRADICTING_ELEMENT,
    FLOAT_PIXELS,
    KEPT_TAGS,
    MODALITY_LUT_PRESENT,
    PRIVATE_TAGS,
    Elements,
    PixelDataLocation,
    elements_from_values,
)
from scanloom.io.system.unpacking import open_inflated

if TYPE_CHECKING:
    from pydicom import Dataset
    from pydicom.tag import BaseTag

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
    """Parse the header of a plain file, explicit or implicit VR, from its `read_first_bytes`.

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
    vr = data[offset + 4 : offset + 6]  # some files contradict their transfer syntax
    if offset == len(data) or explicit != (vr.isupper() and vr.isalpha()):
        raise UnusualHeaderError
    pixels, faults = _walk(
        order, data, offset, values, explicit=explicit, is_whole_file=is_whole_file
    )
    return elements_from_values(values, syntax, little=order.little, pixels=pixels, faults=faults)


def _parse_deflated(compressed: bytes, meta: Mapping[int, bytes]) -> Elements:
    """Inflate no more than the header; pixels are decoded from the whole file."""
    for size in READ_SIZES_BYTES:
        decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
        data, values = decompressor.decompress(compressed, size), dict(meta)
        try:
            at_pixels = _walk(
                LITTLE, data, 0, values, explicit=True, is_whole_file=decompressor.eof
            )
        except struct.error:
            if len(data) < size:
                raise UnusualHeaderError from None
            continue
        pixels, faults = at_pixels
        located = None if pixels is None else PixelDataLocation(0, None)
        syntax = uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN
        return elements_from_values(values, syntax, little=True, pixels=located, faults=faults)
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


def meta_end(data: bytes) -> tuple[int, bytes]:
    """Return the offset of the data set, and the value of the transfer syntax with its padding.

    `data` are the first bytes of a file. UnusualHeaderError or struct.error if they are no meta
    header and the begin of a data set.
    """
    values: dict[int, bytes] = {}
    return _walk_meta(data, values), values.get(tags.TRANSFER_SYNTAX_UID, b"")


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
) -> tuple[PixelDataLocation | None, int]:
    """Keep values up to the pixels; return their location and `Elements.faults`."""
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
            if tag != order.pixel_data:
                return None, FLOAT_PIXELS
            return PixelDataLocation(start, None if length == UNDEFINED_LENGTH else length), 0
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
    return None, 0


def _keep(values: dict[int, bytes], tag: int, value: bytes) -> None:
    """Keep a value; UnusualHeaderError if the tag already has a different one."""
    if values.setdefault(tag, value) != value:
        raise UnusualHeaderError


# --- unusual headers, and whole data sets, with pydicom -------------------------------------------

MAX_INFLATED_BYTES = 1 << 26
"""Size of the inflated header of a deflated file, at most (64 MiB)."""
MAX_VALUE_BYTES = 1 << 26
"""Longer values before the pixels are skipped."""

MAX_ELEMENTS = 1 << 16
"""Elements before the pixels, not counting those in sequences; scanners write a few hundred."""
MAX_ITEMS = 1 << 19
"""Items of all sequences: a scan of 20 000 frames has some 200 000. pydicom takes 0.2 ms for each,
even if it has only the eight bytes of its head."""

_ZERO_HEAD = bytes(8)
_ITEM_HEADS = (b"\xfe\xff\0\xe0", b"\xff\xfe\xe0\0")
"""Tag of an item in each byte order."""
_MAX_ZERO_HEADS = 64
"""Heads of elements in a row that are zeros; one may be the value of a number."""
_CHUNK_BYTES = 1 << 16
_META_BYTES = 1 << 11
"""The transfer syntax is within so many bytes from the start of the file."""
META_START_BYTES = 144
"""Preamble, DICM and FileMetaInformationGroupLength."""
_FUNCTIONAL_GROUPS = (
    tags.SHARED_FUNCTIONAL_GROUPS_SEQUENCE,
    tags.PER_FRAME_FUNCTIONAL_GROUPS_SEQUENCE,
)
_MIN_HEAD_BYTES = 8
_LONG_VRS = (b"OB", b"OW", b"UN")
_READ_TAGS: list[BaseTag | int] = [*KEPT_TAGS, tags.MODALITY_LUT_SEQUENCE]
PARSE_ERRORS = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)
"""Exceptions that pydicom raises for damaged data sets."""


def unreadable_error(exc: OSError) -> ScanError:
    """Return the error for a file that the system can't read."""
    return ScanError(Reason.UNREADABLE, f"a file can't be read ({type(exc).__name__})")


def parse_with_pydicom(path: Path) -> Elements:
    """Read the header of a file that `parse_plain` left, in any encoding.

    Raises
    ------
    OSError
        If it can't be read.
    ScanError
        DAMAGED if it can't be parsed.
    """
    dataset, location, faults, private = _read(path, _READ_TAGS)
    elements = {int(tag): element for tag, element in dataset.items()}  # not converted
    meta = dict(dataset.file_meta.items()).get(tags.MEDIA_STORAGE_SOP_CLASS_UID)
    values = {tag: _raw(elements[tag]) for tag in elements.keys() & KEPT_TAGS} | private
    if meta is not None:
        values[tags.MEDIA_STORAGE_SOP_CLASS_UID] = _raw(meta)
    if getattr(elements.get(tags.MODALITY_LUT_SEQUENCE), "value", None):
        values[MODALITY_LUT_PRESENT] = b"present"
    little = dataset.original_encoding[1] is not False
    return elements_from_values(
        values, _syntax(dataset), little=little, pixels=location, faults=faults
    )


def read_dataset(path: Path) -> Dataset:
    """Read all elements before the pixels. They may identify the patient.

    Raises
    ------
    OSError
        If the file can't be read.
    ScanError
        DAMAGED if it can't be parsed.
    """
    return _read(path, None)[0]


class _UntilZeros:
    """File that ends where only zeros are read for elements, as in a copy that was not completed.

    pydicom would make an element or an item of every eight zeros, for hours in a large file. It
    ends after too many items, too.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self.name = file.seek, file.tell, getattr(file, "name", None)
        self._read, self._zero_heads, self._items = file.read, 0, 0

    def read(self, size: int = -1) -> bytes:
        """Read bytes; none after too many zeros or items, wherever the file is."""
        if self._zero_heads > _MAX_ZERO_HEADS or self._items > MAX_ITEMS:
            return b""
        data = self._read(size)
        if data == _ZERO_HEAD:
            self._zero_heads += 1
        elif size < 0 or not _ZERO_HEAD.startswith(data):  # pydicom looks at the next six, too
            self._zero_heads = 0
        self._items += data[:4] in _ITEM_HEADS
        return data


class _ElementRecorder:
    """Callback that stops pydicom at the pixels and records the location of kept elements.

    Of two elements with one tag, pydicom silently keeps the last. It also copies its list of tags
    for each file, so that those of private attributes in all blocks, which are thousands, are read
    here, into `private`.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.private: dict[int, bytes] = {}
        self._file = file
        self._count = 0
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def __call__(self, tag: int, vr: str | None, length: int) -> bool:
        """Record an element; return whether pydicom stops, as at pixel data of any kind."""
        self._count += 1
        if self._count > MAX_ELEMENTS:
            raise ValueError("too many elements")
        is_private = tag in PRIVATE_TAGS
        if is_private or tag in KEPT_TAGS or tag == tags.MODALITY_LUT_SEQUENCE:
            spans, start = self._spans.setdefault(int(tag), []), self._file.tell()
            if spans and start - spans[-1][0] < _MIN_HEAD_BYTES:
                spans.pop()  # the first element: pydicom reads it twice, to detect the encoding
            spans.append((start, length))
            if is_private and length <= MAX_VALUE_BYTES:
                self.private[int(tag)] = self._file.read(length)
                self._file.seek(start)
        return tag in PIXEL_DATA_TAGS

    def has_contradiction(self) -> bool:
        """Return whether an element occurs twice with different values."""
        repeated = [spans for spans in self._spans.values() if len(spans) > 1]
        return any(len({self._value(*span) for span in spans}) > 1 for spans in repeated)

    def _value(self, start: int, length: int) -> object:
        if length == UNDEFINED_LENGTH:
            return start  # a sequence: its content is not compared, so that two always differ
        self._file.seek(start)
        return self._file.read(length)


def _read(
    path: Path, kept: list[BaseTag | int] | None
) -> tuple[Dataset, PixelDataLocation | None, int, dict[int, bytes]]:
    """Return the data set up to the pixels, their location, `Elements.faults` and private values.

    `kept` are the tags of the elements to read; None for all.
    """
    from pydicom.errors import BytesLengthException, InvalidDicomError
    from pydicom.filereader import read_partial

    try:
        with open_inflated(path, MAX_INFLATED_BYTES) as file:
            inflated = inflate_header(file)
            data: BinaryIO = file if inflated is None else BytesIO(inflated[1])
            data.seek(0)
            recorder = _ElementRecorder(data)
            max_value = MAX_VALUE_BYTES if inflated is None else None
            limited = cast("BinaryIO", _UntilZeros(data))
            dataset = read_partial(limited, recorder, max_value, True, kept)
            if inflated is None and dataset.filename is not None:
                dataset.fileobj_type = open  # for values longer than `max_value`
            location, faults = pixel_location(data, dataset)
            if recorder.has_contradiction() or _meta_contradicts(file):
                faults |= CONTRADICTING_ELEMENT
            if inflated is not None:
                dataset.file_meta = inflated[0]  # its pixels are decoded from the whole file
                location = None if location is None else PixelDataLocation(0, None)
            return dataset, location, faults, recorder.private
    except (InvalidDicomError, BytesLengthException, *PARSE_ERRORS, OSError) as exc:
        if isinstance(exc, OSError) and exc.errno is not None:
            raise  # from the disk; for a file that is cut off, pydicom raises OSError without errno
        detail = f"the header of a DICOM file can't be parsed ({type(exc).__name__})"
        raise ScanError(Reason.DAMAGED, detail) from exc


def _meta_contradicts(file: BinaryIO) -> bool:
    """Return whether the meta header has two different transfer syntaxes or SOP classes."""
    from pydicom.filereader import data_element_generator

    file.seek(0)
    start = file.read(_META_BYTES)
    if start[128:132] != b"DICM":
        return False
    seen: dict[int, set[object]] = {
        tags.TRANSFER_SYNTAX_UID: set(),
        tags.MEDIA_STORAGE_SOP_CLASS_UID: set(),
    }
    meta = BytesIO(start[132:])
    for element in data_element_generator(meta, False, True, lambda tag, *_: tag >> 16 != 2):
        if element.tag in seen:
            seen[element.tag].add(element.value)
    return any(len(values) > 1 for values in seen.values())


def data_set_offset(start: bytes) -> int:
    """Return the end of the meta header, by its length in the first `META_START_BYTES`."""
    return META_START_BYTES + int.from_bytes(start[140:META_START_BYTES], "little")


def inflate_header(file: BinaryIO) -> tuple[Any, bytes] | None:
    """Return meta header and the inflated start of a deflated data set; None for other files.

    pydicom would inflate the whole file, of any size.
    """
    from pydicom.filereader import read_partial

    start = file.read(_CHUNK_BYTES)
    if (
        start[128:132] != b"DICM"
        or uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN.encode() not in start[:_META_BYTES]
    ):
        return None
    end = data_set_offset(start)
    meta = read_partial(BytesIO(start[:end])).file_meta
    if _named_syntax(meta) != uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN:
        return None
    file.seek(end)
    return meta, inflate(file, MAX_INFLATED_BYTES)[0]


def inflate(file: BinaryIO, limit: int) -> tuple[bytes, bool]:
    """Inflate the rest of a file, up to `limit` bytes; return them, and whether that is all.

    Raises
    ------
    zlib.error
        If the data are damaged.
    """
    decompressor, chunks, size = zlib.decompressobj(-zlib.MAX_WBITS), [], 0
    compressed = file.read(_CHUNK_BYTES)
    while compressed and size < limit and not decompressor.eof:
        chunks.append(decompressor.decompress(compressed, limit - size))
        size += len(chunks[-1])
        compressed = decompressor.unconsumed_tail or file.read(_CHUNK_BYTES)
    return b"".join(chunks), decompressor.eof


def has_contradicting_groups(path: Path, elements: Elements) -> bool:
    """Return whether an element of the functional groups occurs twice with different values.

    pydicom silently takes the last of them, such as another PixelSpacing. Identical repetitions
    count as one. Data that cannot be walked over are not judged: pydicom, which reads them later,
    reports the fault.

    Raises
    ------
    ScanError
        UNREADABLE.
    """
    try:
        with open_inflated(path, MAX_INFLATED_BYTES) as file:
            inflated = inflate_header(file)
            if inflated is not None:
                data = inflated[1]
            else:
                file.seek(0)
                pixels = elements.pixels
                data = file.read(min(pixels.offset, MAX_INFLATED_BYTES)) if pixels else b""
                if data[128:132] == b"DICM":
                    data = data[data_set_offset(data) :]
        explicit = elements.syntax != uids.IMPLICIT_VR_LITTLE_ENDIAN
        order = BIG if elements.syntax == uids.EXPLICIT_VR_BIG_ENDIAN else LITTLE
        _GroupsWalk(data, order, explicit=explicit).check(0, len(data), compare=False)
    except OSError as exc:
        raise unreadable_error(exc) from exc
    except _ContradictionError:
        return True
    except (UnusualHeaderError, *PARSE_ERRORS):
        pass
    return False


class _ContradictionError(Exception):
    """An element occurs twice with different values."""


class _GroupsWalk:
    """A walk over a data set as bytes; all offsets count from its first byte."""

    def __init__(self, data: bytes, order: ByteOrder, *, explicit: bool) -> None:
        self._data, self._order, self._explicit = data, order, explicit
        self._groups = set(map(order.swap_tag, _FUNCTIONAL_GROUPS))
        self._item = struct.pack("<I" if order.little else ">I", order.item)

    def check(self, offset: int, end: int, *, compare: bool, depth: int = 0) -> int:
        """Visit the elements of a data set or item; return its end, with a delimiter.

        Elements are compared in the functional groups, at all levels.
        """
        if depth > MAX_SEQUENCE_DEPTH:
            raise UnusualHeaderError
        data, order = self._data, self._order
        seen: dict[int, bytes] = {}
        while offset + 8 <= end:
            tag, length = order.unpack_implicit(data, offset)
            if tag == order.item_end:
                return offset + 8
            start = offset + 8
            is_sequence = data[start : start + 4] == self._item
            if self._explicit:
                _, vr, length = order.unpack_explicit(data, offset)
                if vr in order.long_vrs:
                    (length,) = order.unpack_length(data, start)
                    start += 4
                elif vr not in order.short_vrs:
                    raise UnusualHeaderError
                is_sequence = vr == order.sequence_vr
            compared = compare or tag in self._groups
            if length == UNDEFINED_LENGTH or (is_sequence and compared):
                offset = self._check_items(start, length, compare=compared, depth=depth)
            else:
                offset = start + length
            if compared and seen.setdefault(tag, data[start:offset]) != data[start:offset]:
                raise _ContradictionError
        return offset

    def _check_items(self, offset: int, length: int, *, compare: bool, depth: int) -> int:
        end = len(self._data) if length == UNDEFINED_LENGTH else offset + length
        while offset < end:
            tag, length = self._order.unpack_implicit(self._data, offset)
            offset += 8
            if tag == self._order.sequence_end:
                return offset
            if tag != self._order.item:
                raise UnusualHeaderError
            item_end = len(self._data) if length == UNDEFINED_LENGTH else offset + length
            offset = self.check(offset, item_end, compare=compare, depth=depth + 1)
        return offset


def _named_syntax(meta: Any) -> str:
    return str(meta.get("TransferSyntaxUID", "") or "").strip(" \0")


def _syntax(dataset: Dataset) -> str:
    syntax = _named_syntax(dataset.file_meta)
    if syntax:
        return syntax
    implicit, little = dataset.original_encoding  # inferred by pydicom from the first element
    if implicit:
        return uids.IMPLICIT_VR_LITTLE_ENDIAN
    return uids.EXPLICIT_VR_LITTLE_ENDIAN if little else uids.EXPLICIT_VR_BIG_ENDIAN


def pixel_location(file: BinaryIO, dataset: Dataset) -> tuple[PixelDataLocation | None, int]:
    """Return the location of the pixels, and `Elements.faults`; the file is at their tag."""
    offset = file.tell()
    start = file.read(12)
    if len(start) < 8:
        return None, 0
    implicit, little = dataset.original_encoding
    order = "<" if little else ">"
    group, element = struct.unpack(order + "HH", start[:4])
    if group << 16 | element != tags.PIXEL_DATA:
        return None, FLOAT_PIXELS if group << 16 | element in PIXEL_DATA_TAGS else 0
    offset, form, field = offset + 8, "I", start[4:8]
    has_vr = start[6:8] == b"\0\0" or not implicit  # as a length, OB would be odd
    if start[4:6] in _LONG_VRS and has_vr:
        offset, field = offset + 4, start[8:12]
    elif not implicit:
        form, field = "H", start[6:8]
    if len(field) < struct.calcsize(form):
        return None, 0
    (length,) = struct.unpack(order + form, field)
    return PixelDataLocation(offset, None if length == UNDEFINED_LENGTH else length), 0


def _raw(element: Any) -> bytes:
    """Return the unconverted bytes of an element.

    When pydicom converts a value, its warnings quote the header, which may name a patient.
    """
    value = element.value
    if isinstance(value, bytes):
        return value
    return b"" if value is None else str(value).encode("ascii", "replace")
