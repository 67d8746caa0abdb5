"""Headers that are not plain, and whole data sets: by pydicom."""

from __future__ import annotations

import struct
import zlib
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import tags, uids
from scanloom.io.dicom.elements import (
    FLOATS,
    LOOKUP,
    TAGS,
    TWICE,
    Elements,
    PixelPlace,
    elements_of,
)
from scanloom.io.unpack import opened_plain

if TYPE_CHECKING:
    from pydicom import Dataset

MOST_INFLATED = 1 << 26
"""Bytes that the header of a deflated file may have: 64 MiB, as the longest value of others."""
LONGEST_VALUE = 1 << 26
"""Bytes; longer values before the pixels are passed over."""

_PIECE = 1 << 16
_META = 1 << 11  # bytes from the start within which a meta header names its syntax
_HEAD = 8  # bytes of an element's head, at least
_PIXELS = tags.PIXEL_DATA
_ALL_PIXELS = frozenset((_PIXELS, tags.DOUBLE_FLOAT_PIXEL_DATA, tags.FLOAT_PIXEL_DATA))
_LONG_VRS = (b"OB", b"OW", b"UN")
_UNDEFINED = 0xFFFFFFFF
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
"""What pydicom raises for damaged data sets."""


def read_odd(path: Path) -> Elements:
    """Return what a file says that `read_plain` left, whatever its encoding.

    Raises
    ------
    OSError
        If it can't be read.
    ScanError
        DAMAGED if it can't be parsed.
    """
    dataset, place, faults = _read(path, _wanted())
    elements = {int(tag): element for tag, element in dataset.items()}  # as they were read
    meta = dict(dataset.file_meta.items()).get(tags.MEDIA_STORAGE_SOP_CLASS_UID)
    values = {tag: _raw(elements[tag]) for tag in elements.keys() & TAGS}
    if meta is not None:
        values[tags.MEDIA_STORAGE_SOP_CLASS_UID] = _raw(meta)
    if getattr(elements.get(tags.MODALITY_LUT_SEQUENCE), "value", None):
        values[LOOKUP] = b"there"
    little = dataset.original_encoding[1] is not False
    found = elements_of(values, _syntax(dataset), little=little, pixels=place)
    return found._replace(faults=faults)


def read_dataset(path: Path) -> Dataset:
    """Return all elements before the pixels. They hold identity.

    Raises
    ------
    OSError
        If the file can't be read.
    ScanError
        DAMAGED if it can't be parsed.
    """
    return _read(path, None)[0]


@cache
def _wanted() -> list[Any]:
    from pydicom.tag import BaseTag

    return [BaseTag(tag) for tag in (*TAGS, tags.MODALITY_LUT_SEQUENCE)]


class _Watch:
    """Tells pydicom where to stop, and notes where the elements stand that are wanted.

    Of two elements pydicom keeps the last one without a word.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def __call__(self, tag: int, vr: str | None, length: int) -> bool:
        """Whether pydicom stops here: at pixels of any kind."""
        if tag in TAGS or tag == tags.MODALITY_LUT_SEQUENCE:
            spans, here = self._spans.setdefault(int(tag), []), self._file.tell()
            if spans and here - spans[-1][0] < _HEAD:
                spans.pop()  # the same: of the first pydicom asks twice, to tell how it is encoded
            spans.append((here, length))
        return tag in _ALL_PIXELS

    def found_twice(self) -> bool:
        """Whether an element stands twice, with different values."""
        several = [spans for spans in self._spans.values() if len(spans) > 1]
        return any(len({self._value(*span) for span in spans}) > 1 for spans in several)

    def _value(self, start: int, length: int) -> object:
        if length == _UNDEFINED:
            return start  # a sequence: none is looked into, so that two of them differ
        self._file.seek(start)
        return self._file.read(length)


def _read(path: Path, wanted: list[Any] | None) -> tuple[Dataset, PixelPlace | None, int]:
    """Return the data set, or what is wanted of it, where the pixels lie, and `faults`."""
    from pydicom.errors import BytesLengthException, InvalidDicomError
    from pydicom.filereader import read_partial

    try:
        with opened_plain(path, MOST_INFLATED) as file:
            inflated = inflated_start(file)
            data: BinaryIO = file if inflated is None else BytesIO(inflated[1])
            data.seek(0)
            watch = _Watch(data)
            longest = LONGEST_VALUE if inflated is None else None
            dataset = read_partial(data, watch, longest, True, wanted)
            place, faults = _pixel_place(data, dataset)
            if watch.found_twice() or _meta_says_two(file):
                faults |= TWICE
            if inflated is not None:
                dataset.file_meta = inflated[0]  # its pixels are decoded from the whole file
                place = None if place is None else PixelPlace(0, None)
            return dataset, place, faults
    except (InvalidDicomError, BytesLengthException, *PARSE_ERRORS, OSError) as exc:
        if isinstance(exc, OSError) and exc.errno is not None:
            raise  # the disk's; pydicom raises OSError without a number where a file is cut off
        detail = f"the header of a DICOM file can't be parsed ({type(exc).__name__})"
        raise ScanError(Reason.DAMAGED, detail) from exc


def _meta_says_two(file: BinaryIO) -> bool:
    """Whether syntax or class stand twice in the meta header, with different values."""
    from pydicom.filereader import data_element_generator

    file.seek(0)
    start = file.read(_META)
    if start[128:132] != b"DICM":
        return False
    said: dict[int, set[object]] = {
        tags.TRANSFER_SYNTAX_UID: set(),
        tags.MEDIA_STORAGE_SOP_CLASS_UID: set(),
    }
    meta = BytesIO(start[132:])
    for element in data_element_generator(meta, False, True, lambda tag, *_: tag >> 16 != 2):
        if element.tag in said:
            said[element.tag].add(element.value)
    return any(len(values) > 1 for values in said.values())


def inflated_start(file: BinaryIO) -> tuple[Any, bytes] | None:
    """Return meta header and the inflated start of a deflated data set; None for other files.

    pydicom would inflate the file whole, however large that is.
    """
    from pydicom.filereader import read_partial

    start = file.read(_PIECE)
    if (
        start[128:132] != b"DICM"
        or uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN.encode() not in start[:_META]
    ):
        return None
    end = 144 + int.from_bytes(start[140:144], "little")  # FileMetaInformationGroupLength
    meta = read_partial(BytesIO(start[:end])).file_meta
    if _named(meta) != uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN:
        return None
    file.seek(end)
    return meta, _inflate(file)


def _inflate(file: BinaryIO) -> bytes:
    unpacker, parts, size = zlib.decompressobj(-zlib.MAX_WBITS), [], 0
    packed = file.read(_PIECE)
    while packed and size < MOST_INFLATED and not unpacker.eof:
        parts.append(unpacker.decompress(packed, MOST_INFLATED - size))
        size += len(parts[-1])
        packed = unpacker.unconsumed_tail or file.read(_PIECE)
    return b"".join(parts)


def _named(meta: Any) -> str:
    return str(meta.get("TransferSyntaxUID", "") or "").strip(" \0")


def _syntax(dataset: Dataset) -> str:
    named = _named(dataset.file_meta)
    if named:
        return named
    implicit, little = dataset.original_encoding  # guessed by pydicom from the first element
    if implicit:
        return uids.IMPLICIT_VR_LITTLE_ENDIAN
    return uids.EXPLICIT_VR_LITTLE_ENDIAN if little else uids.EXPLICIT_VR_BIG_ENDIAN


def _pixel_place(file: BinaryIO, dataset: Dataset) -> tuple[PixelPlace | None, int]:
    """Return where the value of PixelData lies, and `faults`; pydicom left the file at its tag."""
    offset = file.tell()
    start = file.read(12)
    if len(start) < 8:
        return None, 0
    implicit, little = dataset.original_encoding
    order = "<" if little else ">"
    group, element = struct.unpack(order + "HH", start[:4])
    if group << 16 | element != _PIXELS:
        return None, FLOATS if group << 16 | element in _ALL_PIXELS else 0
    offset, form, field = offset + 8, "I", start[4:8]
    written = start[6:8] == b"\0\0" or not implicit  # an implicit length would be even
    if start[4:6] in _LONG_VRS and written:
        offset, field = offset + 4, start[8:12]
    elif not implicit:
        form, field = "H", start[6:8]
    if len(field) < struct.calcsize(form):
        return None, 0
    (length,) = struct.unpack(order + form, field)
    return PixelPlace(offset, None if length == _UNDEFINED else length), 0


def _raw(element: Any) -> bytes:
    """Return the bytes of an element as they are in the file.

    Nothing is converted: pydicom warns with the header's text, which may name a patient.
    """
    value = element.value
    if isinstance(value, bytes):
        return value
    return b"" if value is None else str(value).encode("ascii", "replace")
