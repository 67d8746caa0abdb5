"""The header of a MetaImage (.mha, .mhd): text lines, ElementDataFile the last."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.core.world import LPS_TO_RAS
from scanloom.io.text_header import (
    TextHeader,
    affine_of,
    check_even,
    damaged,
    floats,
    integers,
    listed_files,
    numbered_files,
)
from scanloom.io.voxels import Coding

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
    [
        "ObjectType",
        "NDims",
        "DimSize",
        "BinaryData",
        "BinaryDataByteOrderMSB",
        "CompressedData",
        "CompressedDataSize",
        "TransformMatrix",
        "Offset",
        "CenterOfRotation",
        "AnatomicalOrientation",
        "ElementSpacing",
        "ElementType",
        "HeaderSize",
        "ElementNumberOfChannels",
        "DistanceUnits",
        "ElementToIntensityFunctionSlope",
        "ElementToIntensityFunctionOffset",
    ]
)
_NO_TURN = ("", "RAI", "???")
"""AnatomicalOrientation of an identity: an axis goes from, not to, the side that it names."""
_TYPES = {
    "MET_CHAR": "i1",
    "MET_UCHAR": "u1",
    "MET_SHORT": "i2",
    "MET_USHORT": "u2",
    "MET_INT": "i4",
    "MET_UINT": "u4",
    "MET_LONG": "i4",  # four bytes, whatever a C compiler says (metaTypes.h)
    "MET_ULONG": "u4",
    "MET_LONG_LONG": "i8",
    "MET_ULONG_LONG": "u8",
    "MET_FLOAT": "f4",
    "MET_DOUBLE": "f8",
}


def parse_metaimage(start: bytes, *, whole: bool) -> TextHeader:
    """Judge a MetaImage's header.

    Parameters
    ----------
    start : bytes
        The first bytes of the file.
    whole : bool
        Whether that is all of it.

    Raises
    ------
    ScanError
        DAMAGED, TRUNCATED, NOT_AN_IMAGE, PIXEL_TYPE, RESCALE or BAD_GEOMETRY.
    """
    last = _LAST.search(start)
    fields = _fields(start[: last.start()] if last else start)
    if last is None:
        cut = whole and {"NDims", "ObjectType"} & set(fields)
        reason = Reason.TRUNCATED if cut else Reason.DAMAGED
        raise ScanError(reason, "the file has no whole MetaImage header")
    if fields.get("ObjectType", "Image").lower() != "image":
        raise ScanError(Reason.NOT_AN_IMAGE, "the MetaIO file holds another object than an image")
    check_even(start[: last.start()])
    count = integers(_needed(fields, "NDims"), "NDims", 1)[0]
    if not 1 <= count <= 10:
        raise damaged("its NDims is no number from 1 to 10")
    sizes = integers(_needed(fields, "DimSize"), "DimSize", count)
    if min(sizes) < 1:
        raise damaged("its DimSize is not positive")
    _check_values(fields)
    affine, spacing = _place(fields, count) if count >= 3 else (None, None)
    coding, packed = _coding(fields)
    data_file = last[1].decode("utf-8", "surrogateescape").strip()
    local = data_file.upper() == "LOCAL"
    return TextHeader(
        sizes=sizes,
        axes=tuple(range(min(count, 3))),
        components=integers(fields.get("ElementNumberOfChannels", "1"), "channels", 1)[0],
        dtype=_dtype(fields),
        affine=affine,
        spacing=spacing,
        coding=coding,
        data_files=() if local else _data_files(data_file, sizes, start[last.end() :], whole=whole),
        start=_start(fields, coding, last.end() if local else 0),
        packed=packed,
    )


def _fields(header: bytes) -> dict[str, str]:
    """Return the values of the fields that matter; others may say what they like."""
    fields: dict[str, str] = {}
    for line in header.split(b"\n"):
        found = _LINE.fullmatch(line.decode("utf-8", "replace").rstrip())
        name = _ALIASES.get(found[1], found[1]) if found else ""
        if found is None or name not in _FIELDS:
            continue
        if fields.setdefault(name, found[2]) != found[2]:
            raise damaged("a field of its header is there twice")
    return fields


def _needed(fields: dict[str, str], name: str) -> str:
    if name not in fields:
        raise damaged(f"its header says no {name}")
    return fields[name]


def _flag(fields: dict[str, str], name: str, default: str) -> bool:
    value = fields.get(name, default).lower()
    if value not in ("true", "false", "t", "f", "1", "0"):
        raise damaged(f"its {name} is neither true nor false")
    return value in ("true", "t", "1")


def _check_values(fields: dict[str, str]) -> None:
    """Refuse scaled values: readers differ in whether they apply it."""
    slope = floats(fields.get("ElementToIntensityFunctionSlope", "1"), "intensity function", 1)[0]
    shift = floats(fields.get("ElementToIntensityFunctionOffset", "0"), "intensity function", 1)[0]
    if (slope, shift) != (1, 0):
        raise ScanError(Reason.RESCALE, "its intensity function is not the identity")


def _coding(fields: dict[str, str]) -> tuple[Coding, int | None]:
    compressed = _flag(fields, "CompressedData", "False")
    if not _flag(fields, "BinaryData", "True"):  # what ITK takes an image without a word for
        if compressed:
            raise damaged("its text is compressed")
        return "text", None
    if not compressed:
        return "raw", None
    size = integers(fields.get("CompressedDataSize", "0"), "CompressedDataSize", 1)[0]
    if size < 0:
        raise damaged("its CompressedDataSize is negative")
    return "zlib", size or None


def _dtype(fields: dict[str, str]) -> np.dtype[Any]:
    code = _TYPES.get(_needed(fields, "ElementType"))
    if code is None:
        raise ScanError(Reason.PIXEL_TYPE, "its voxels are of a type that is no plain number")
    big = _flag(fields, "BinaryDataByteOrderMSB", "False")
    return np.dtype(code).newbyteorder(">" if big else "<")


def _start(fields: dict[str, str], coding: Coding, after_header: int) -> int:
    """Return where the data begin: HeaderSize counts from the file's begin, -1 from its end."""
    size = integers(fields.get("HeaderSize", "0"), "HeaderSize", 1)[0]
    if size < -1 or (size == -1 and coding != "raw"):
        raise damaged("its HeaderSize can't be")
    return size or after_header


def _data_files(
    text: str, sizes: tuple[int, ...], behind: bytes, *, whole: bool
) -> tuple[str, ...]:
    """Return the data files: one, or those of a list or pattern as MetaIO reads it.

    Each holds one slice, unless a list says of how many dimensions it is. A pattern stands alone,
    or with its first number, its last and a step; what MetaIO takes the step for where it alone
    is not said can't be meant, unless it is 1.
    """
    if not text:
        raise damaged("it does not name its data file")
    first, *words = text.split()
    if first.upper() == "LIST":
        if not whole:
            raise damaged("the list of its data files has no end")
        said = words[0].upper().removesuffix("D") if words else str(len(sizes) - 1)
        [inside] = integers(said, "list of data files", 1)
        if len(words) > 1 or not 0 < inside < len(sizes):
            raise damaged("the list of its data files can't be read")
        return listed_files(behind, math.prod(sizes[inside:]))
    if "%" not in text:
        return (text,)
    count = sizes[-1]
    begin, end, step = 1, count, 1
    numbers = integers(" ".join(words), "pattern of data files") if words else ()
    if numbers:
        begin, end = numbers[0], numbers[0] + count - 1
    if len(numbers) > 1:
        end = numbers[1]
    if len(numbers) > 2:
        step = numbers[2]
    if len(numbers) > 3 or step < 1:
        raise damaged("it names its data files by a pattern that can't be read")
    return numbered_files(first, range(begin, end + 1, step), count)


def _place(
    fields: dict[str, str], count: int
) -> tuple[NDArray[np.float64] | None, NDArray[np.float64]]:
    """Return affine and spacing; directions, where not said, are LPS by definition.

    Without a matrix, an AnatomicalOrientation of other axes leaves them unknown.
    """
    if fields.get("DistanceUnits", "mm").lower() not in ("mm", "?", ""):
        raise ScanError(Reason.BAD_GEOMETRY, "its lengths are not in millimetres")
    if "ElementSpacing" not in fields:
        raise ScanError(Reason.BAD_GEOMETRY, "its header says no voxel size")
    spacing = np.array(floats(fields["ElementSpacing"], "ElementSpacing", count))
    identity = " ".join(str(int(n)) for n in np.eye(count).ravel())
    matrix = floats(fields.get("TransformMatrix", identity), "TransformMatrix", count * count)
    directions = np.array(matrix).reshape(count, count).T  # MetaIO stores an axis after the other
    zeros = " ".join("0" * count)
    origin = np.array(floats(fields.get("Offset", zeros), "Offset", count))
    centre = floats(fields.get("CenterOfRotation", zeros), "CenterOfRotation", count)
    if any(centre) and not np.array_equal(directions, np.eye(count)):
        raise ScanError(Reason.BAD_GEOMETRY, "it turns about another point than its origin")
    if np.any(directions[3:, :3]) or np.any(directions[:3, 3:]):
        raise ScanError(Reason.BAD_GEOMETRY, "its axes of space do not lie in space")
    said = fields.get("AnatomicalOrientation", "").upper()
    if "TransformMatrix" not in fields and said not in _NO_TURN:
        return None, np.abs(spacing[:3])
    columns = directions[:3, :3] * spacing[:3]
    return affine_of(columns, origin[:3], LPS_TO_RAS), np.abs(spacing[:3])
