"""Read unusual headers, and whole data sets, with pydicom."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

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
from scanloom.io.dicom.header.parser import (
    BIG,
    LITTLE,
    MAX_SEQUENCE_DEPTH,
    PIXEL_DATA_TAGS,
    UNDEFINED_LENGTH,
    ByteOrder,
    UnusualHeaderError,
)
from scanloom.io.system.unpacking import open_inflated

if TYPE_CHECKING:
    from pydicom import Dataset
    from pydicom.tag import BaseTag

MAX_INFLATED_BYTES = 1 << 26
"""Size of the inflated header of a deflated file, at most (64 MiB)."""
MAX_VALUE_BYTES = 1 << 26
"""Longer values before the pixels are skipped."""

MAX_ELEMENTS = 1 << 16
"""Elements before the pixels, not counting those in sequences; scanners write a few hundred."""

_ZERO_HEAD = bytes(8)
_MAX_ZERO_HEADS = 64
"""Heads of elements in a row that are zeros; one may be the value of a number."""
_CHUNK_BYTES = 1 << 16
_META_BYTES = 1 << 11
"""The transfer syntax is within so many bytes from the start of the file."""
_META_START_BYTES = 144
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

    pydicom would make an element of every eight zeros, for hours in a large file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self.name = file.seek, file.tell, getattr(file, "name", None)
        self._read, self._zero_heads = file.read, 0

    def read(self, size: int = -1) -> bytes:
        """Read bytes; none after too many zeros, wherever the file is."""
        if self._zero_heads > _MAX_ZERO_HEADS:
            return b""
        data = self._read(size)
        self._zero_heads = self._zero_heads + 1 if data == _ZERO_HEAD else 0
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
            location, faults = _pixel_location(data, dataset)
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
    end = _META_START_BYTES + int.from_bytes(start[140:144], "little")
    meta = read_partial(BytesIO(start[:end])).file_meta
    if _named_syntax(meta) != uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN:
        return None
    file.seek(end)
    return meta, _inflate(file)


def _inflate(file: BinaryIO) -> bytes:
    decompressor, chunks, size = zlib.decompressobj(-zlib.MAX_WBITS), [], 0
    compressed = file.read(_CHUNK_BYTES)
    while compressed and size < MAX_INFLATED_BYTES and not decompressor.eof:
        chunks.append(decompressor.decompress(compressed, MAX_INFLATED_BYTES - size))
        size += len(chunks[-1])
        compressed = decompressor.unconsumed_tail or file.read(_CHUNK_BYTES)
    return b"".join(chunks)


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
                    data = data[_META_START_BYTES + int.from_bytes(data[140:144], "little") :]
        explicit = elements.syntax != uids.IMPLICIT_VR_LITTLE_ENDIAN
        order = BIG if elements.syntax == uids.EXPLICIT_VR_BIG_ENDIAN else LITTLE
        _GroupsWalk(data, order, explicit=explicit).check(0, len(data), compare=False)
    except OSError as exc:
        detail = f"a file can't be read ({type(exc).__name__})"
        raise ScanError(Reason.UNREADABLE, detail) from exc
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


def _pixel_location(file: BinaryIO, dataset: Dataset) -> tuple[PixelDataLocation | None, int]:
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
