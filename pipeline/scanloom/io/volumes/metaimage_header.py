"""Parse the header of a MetaImage (.mha, .mhd): text lines, of which ElementDataFile is last."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.core.grid import LPS_TO_RAS
from scanloom.io.volumes.raw_voxels import Coding
from scanloom.io.volumes.text_header import (
    UNPARSED_PATTERN,
    TextHeader,
    check_even_spacing,
    damaged_header,
    floats,
    integers,
    listed_files,
    numbered_files,
    required_field,
    world_affine,
)

_LINE = re.compile(r"\s*([A-Za-z][A-Za-z0-9_]*)\s*[=:]\s*(.*)")
_LAST = re.compile(rb"^[ \t]*ElementDataFile[ \t]*[=:][ \t]*([^\r\n]*)(?:\r?\n|\Z)", re.MULTILINE)

_ALIASES = {
    "Position": "Offset",
    "Origin": "Offset",
    "Orientation": "TransformMatrix",
    "Rotation": "TransformMatrix",
    "ElementByteOrderMSB": "BinaryDataByteOrderMSB",
}
_FIELDS = frozenset(
    (
        *("ObjectType", "NDims", "DimSize", "ElementType", "ElementNumberOfChannels", "HeaderSize"),
        *("BinaryData", "BinaryDataByteOrderMSB", "CompressedData", "CompressedDataSize"),
        *("TransformMatrix", "Offset", "CenterOfRotation", "AnatomicalOrientation"),
        *("ElementSpacing", "DistanceUnits"),
        *("ElementToIntensityFunctionSlope", "ElementToIntensityFunctionOffset"),
    )
)
_IDENTITY_CODES = ("", "RAI", "???")
"""AnatomicalOrientation of an identity matrix: its letters are where the axes start, not end."""
_TYPES = {
    "MET_CHAR": "i1",
    "MET_UCHAR": "u1",
    "MET_SHORT": "i2",
    "MET_USHORT": "u2",
    "MET_INT": "i4",
    "MET_UINT": "u4",
    "MET_LONG": "i4",  # four bytes on all platforms (metaTypes.h)
    "MET_ULONG": "u4",
    "MET_LONG_LONG": "i8",
    "MET_ULONG_LONG": "u8",
    "MET_FLOAT": "f4",
    "MET_DOUBLE": "f8",
}


def parse_metaimage(start: bytes, *, whole: bool) -> TextHeader:
    """Parse the header of a MetaImage from the first bytes of a file, or the `whole` file.

    Raises
    ------
    ScanError
        DAMAGED, TRUNCATED, NOT_AN_IMAGE, PIXEL_TYPE, RESCALE or BAD_GEOMETRY.
    """
    last = _LAST.search(start)
    fields = _fields(start[: last.start()] if last else start)
    if last is None:
        truncated = whole and {"NDims", "ObjectType"} & set(fields)
        reason = Reason.TRUNCATED if truncated else Reason.DAMAGED
        raise ScanError(reason, "the file has no complete MetaImage header")
    if fields.get("ObjectType", "Image").lower() != "image":
        raise ScanError(Reason.NOT_AN_IMAGE, "the MetaIO object is not an image")
    check_even_spacing(start[: last.start()])
    dimensions = integers(required_field(fields, "NDims", "MetaImage"), "NDims", 1)[0]
    if not 1 <= dimensions <= 10:
        raise damaged_header("NDims of the MetaImage header is not from 1 to 10")
    sizes = integers(required_field(fields, "DimSize", "MetaImage"), "DimSize", dimensions)
    if min(sizes) < 1:
        raise damaged_header("DimSize of the MetaImage header is not positive")
    _check_values(fields)
    affine, spacing = _geometry(fields, dimensions) if dimensions >= 3 else (None, None)
    coding, compressed_bytes = _coding(fields)
    data_file = last[1].decode("utf-8", "surrogateescape").strip()
    local = data_file.upper() == "LOCAL"
    return TextHeader(
        sizes=sizes,
        axes=tuple(range(min(dimensions, 3))),
        components=integers(fields.get("ElementNumberOfChannels", "1"), "channels", 1)[0],
        dtype=_dtype(fields),
        affine=affine,
        spacing=spacing,
        coding=coding,
        data_files=() if local else _data_files(data_file, sizes, start[last.end() :], whole=whole),
        start=_start(fields, coding, last.end() if local else 0),
        compressed_bytes=compressed_bytes,
    )


def _fields(header: bytes) -> dict[str, str]:
    """Return the values of the known fields; all others are ignored."""
    fields: dict[str, str] = {}
    for line in header.split(b"\n"):
        match = _LINE.fullmatch(line.decode("utf-8", "replace").rstrip())
        name = _ALIASES.get(match[1], match[1]) if match else ""
        if match is None or name not in _FIELDS:
            continue
        if fields.setdefault(name, match[2]) != match[2]:
            raise damaged_header("the MetaImage header has two values for a field")
    return fields


def _flag(fields: dict[str, str], name: str, default: str) -> bool:
    value = fields.get(name, default).lower()
    if value not in ("true", "false", "t", "f", "1", "0"):
        raise damaged_header(f"{name} of the MetaImage header is neither true nor false")
    return value in ("true", "t", "1")


def _check_values(fields: dict[str, str]) -> None:
    """Refuse scaled values: readers differ in whether they apply the scaling."""
    slope = floats(fields.get("ElementToIntensityFunctionSlope", "1"), "intensity function", 1)[0]
    shift = floats(fields.get("ElementToIntensityFunctionOffset", "0"), "intensity function", 1)[0]
    if (slope, shift) != (1, 0):
        raise ScanError(Reason.RESCALE, "the intensity function is not the identity")


def _coding(fields: dict[str, str]) -> tuple[Coding, int | None]:
    compressed = _flag(fields, "CompressedData", "False")
    if not _flag(fields, "BinaryData", "True"):  # as ITK reads an image without the field
        if compressed:
            raise damaged_header("the voxels are text and compressed")
        return "text", None
    if not compressed:
        return "raw", None
    size = integers(fields.get("CompressedDataSize", "0"), "CompressedDataSize", 1)[0]
    if size < 0:
        raise damaged_header("CompressedDataSize of the MetaImage header is negative")
    return "zlib", size or None


def _dtype(fields: dict[str, str]) -> np.dtype[Any]:
    code = _TYPES.get(required_field(fields, "ElementType", "MetaImage"))
    if code is None:
        raise ScanError(Reason.PIXEL_TYPE, "the ElementType is not a plain number")
    big = _flag(fields, "BinaryDataByteOrderMSB", "False")
    return np.dtype(code).newbyteorder(">" if big else "<")


def _start(fields: dict[str, str], coding: Coding, after_header: int) -> int:
    """Return the byte offset of the data: HeaderSize if set; -1 if the data end with the file."""
    size = integers(fields.get("HeaderSize", "0"), "HeaderSize", 1)[0]
    if size < -1 or (size == -1 and coding != "raw"):
        raise damaged_header("the MetaImage header has an invalid HeaderSize")
    return size or after_header


def _data_files(text: str, sizes: tuple[int, ...], names: bytes, *, whole: bool) -> tuple[str, ...]:
    """Return the names of the data files: a single file, or a list or pattern as MetaIO reads it.

    Each holds one slice, or as many dimensions as a list says. A pattern may be followed by its
    first number, its last and a step. A step that alone is missing is 1: MetaIO takes another
    value then, which cannot be intended.
    """
    if not text:
        raise damaged_header("ElementDataFile of the MetaImage header is empty")
    first, *tokens = text.split()
    if first.upper() == "LIST":
        if not whole:
            raise damaged_header("the list of data files has no end")
        axes_text = tokens[0].upper().removesuffix("D") if tokens else str(len(sizes) - 1)
        [axes] = integers(axes_text, "list of data files", 1)
        if len(tokens) > 1 or not 0 < axes < len(sizes):
            raise damaged_header("the list of data files cannot be parsed")
        return listed_files(names, math.prod(sizes[axes:]))
    if "%" not in text:
        return (text,)
    count = sizes[-1]
    begin, end, step = 1, count, 1
    numbers = integers(" ".join(tokens), "pattern of data files") if tokens else ()
    if numbers:
        begin, end = numbers[0], numbers[0] + count - 1
    if len(numbers) > 1:
        end = numbers[1]
    if len(numbers) > 2:
        step = numbers[2]
    if len(numbers) > 3 or step < 1:
        raise damaged_header(UNPARSED_PATTERN)
    return numbered_files(first, range(begin, end + 1, step), count)


def _geometry(
    fields: dict[str, str], dimensions: int
) -> tuple[NDArray[np.float64] | None, NDArray[np.float64]]:
    """Return the affine (4, 4) to RAS mm and the spacing (3,).

    Directions are LPS if the header has no matrix. An AnatomicalOrientation of other axes without
    a matrix leaves them unknown: the affine is then None.
    """
    if fields.get("DistanceUnits", "mm").lower() not in ("mm", "?", ""):
        raise ScanError(Reason.BAD_GEOMETRY, "the DistanceUnits are not millimetres")
    if "ElementSpacing" not in fields:
        raise ScanError(Reason.BAD_GEOMETRY, "the MetaImage header has no ElementSpacing")
    spacing = np.array(floats(fields["ElementSpacing"], "ElementSpacing", dimensions))

    def numbers(name: str, default: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array(floats(fields[name], name, default.size)) if name in fields else default

    matrix = numbers("TransformMatrix", np.eye(dimensions))
    directions = matrix.reshape(dimensions, dimensions).T  # MetaIO stores axis by axis
    origin = numbers("Offset", np.zeros(dimensions))
    if numbers("CenterOfRotation", np.zeros(dimensions)).any() and not np.array_equal(
        directions, np.eye(dimensions)
    ):
        raise ScanError(Reason.BAD_GEOMETRY, "the centre of rotation is not the origin")
    if np.any(directions[3:, :3]) or np.any(directions[:3, 3:]):
        raise ScanError(Reason.BAD_GEOMETRY, "a spatial axis has a component that is not spatial")
    codes = fields.get("AnatomicalOrientation", "").upper()
    if "TransformMatrix" not in fields and codes not in _IDENTITY_CODES:
        return None, np.abs(spacing[:3])
    columns = directions[:3, :3] * spacing[:3]
    return world_affine(columns, origin[:3], LPS_TO_RAS), np.abs(spacing[:3])
