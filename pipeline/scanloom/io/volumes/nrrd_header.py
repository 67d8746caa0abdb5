"""Parse the header of a NRRD (teem.sourceforge.net/nrrd/format.html), attached or detached."""

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

MAGIC = b"NRRD"

_VERSIONS = (b"NRRD00.01", *(b"NRRD000%d" % n for n in range(1, 6)))
_LIST = re.compile(rb"^data[ ]?file:[ \t]*LIST\b[^\n]*(?:\n|\Z)", re.MULTILINE | re.IGNORECASE)
_END = re.compile(rb"\r?\n\r?\n")
_LINE = re.compile(r"([A-Za-z][A-Za-z ]*):(?!=)\s*(.*)")
_KEY = re.compile(r"[^:]+:=.*")
_VECTOR = re.compile(r"\(([^()]*)\)|none", re.IGNORECASE)
_UNIT = re.compile(r'"([^"]*)"|([^\s"]+)')
_MM = frozenset(("mm", "", "???", "none"))

_FIELDS = frozenset(
    (
        *("dimension", "type", "blocksize", "encoding", "endian", "content", "number", "labels"),
        *("min", "max", "oldmin", "oldmax", "datafile", "lineskip", "byteskip", "sampleunits"),
        *("sizes", "spacings", "thicknesses", "axismins", "axismaxs", "centers", "centerings"),
        *("units", "kinds", "space", "spacedimension", "spaceunits", "spaceorigin"),
        *("spacedirections", "measurementframe"),
    )
)
"""Names of the fields, in lower case without spaces."""

_TYPES = {
    "i1": ("signed char", "int8", "int8_t"),
    "u1": ("uchar", "unsigned char", "uint8", "uint8_t"),
    "i2": ("short", "short int", "signed short", "signed short int", "int16", "int16_t"),
    "u2": ("ushort", "unsigned short", "unsigned short int", "uint16", "uint16_t"),
    "i4": ("int", "signed int", "int32", "int32_t"),
    "u4": ("uint", "unsigned int", "uint32", "uint32_t"),
    "i8": (
        *("longlong", "long long", "long long int", "signed long long", "signed long long int"),
        *("int64", "int64_t"),
    ),
    "u8": ("ulonglong", "unsigned long long", "unsigned long long int", "uint64", "uint64_t"),
    "f4": ("float",),
    "f8": ("double",),
}
_DTYPES = {name: code for code, names in _TYPES.items() for name in names}

_CODINGS: dict[str, Coding] = {
    "raw": "raw",
    "txt": "text",
    "text": "text",
    "ascii": "text",
    "gz": "gzip",
    "gzip": "gzip",
    "bz2": "bzip2",
    "bzip2": "bzip2",
}

_TO_RAS = {
    "right-anterior-superior": np.ones(3),
    "left-anterior-superior": np.array([-1.0, 1.0, 1.0]),
    "left-posterior-superior": LPS_TO_RAS,
}
_SPACES = {name: signs for space, signs in _TO_RAS.items() for name in (space, f"{space}-time")}
_SPACES |= {  # ras, rast
    "".join(axis[0] for axis in name.split("-")): signs for name, signs in _SPACES.items()
}

_SPACE_KINDS = ("domain", "space", "???", "none")
_COLOUR_KINDS = frozenset(f"{space}-color" for space in ("rgb", "rgba", "hsv", "xyz", "3", "4"))
_SERIES_KINDS = ("list", "time", "stub", "scalar")


def parse_nrrd(start: bytes, *, whole: bool) -> TextHeader:
    """Parse the header of a NRRD from the first bytes of a file, or the `whole` file.

    Raises
    ------
    ScanError
        DAMAGED, TRUNCATED, PIXEL_TYPE, DECODER or BAD_GEOMETRY.
    """
    # A list of data files ends the header, unless an empty line ended it before
    listed = _LIST.search(start)
    end = _END.search(start, 0, listed.start() if listed else len(start))
    listed = None if end else listed
    if end is None and not whole:
        raise damaged_header("the end of the NRRD header is missing")
    names = start[listed.end() :] if listed else b""
    start = start[: listed.end()] if listed else start
    fields = _fields(start[: end.start()] if end else start)
    check_even_spacing(start[: end.start()] if end else start)
    if end is None and "datafile" not in fields:
        raise ScanError(Reason.TRUNCATED, "the file ends within the NRRD header")
    dimension = integers(required_field(fields, "dimension", "NRRD"), "dimension", 1)[0]
    if not 1 <= dimension <= 16:
        raise damaged_header("the dimension of the NRRD header is not from 1 to 16")
    sizes = integers(required_field(fields, "sizes", "NRRD"), "sizes", dimension)
    if min(sizes) < 1:
        raise damaged_header("the sizes of the NRRD header are not positive")
    _check_values(fields)
    steps = _directions(fields, dimension)
    axes, components = _axes(fields, sizes, steps)
    affine, spacing = _geometry(fields, axes, steps)
    coding = _coding(fields)
    return TextHeader(
        sizes=sizes,
        axes=axes,
        components=components,
        dtype=_dtype(fields, coding),
        affine=affine,
        spacing=spacing,
        coding=coding,
        data_files=_data_files(fields.get("datafile"), sizes, names),
        is_colour=bool(_COLOUR_KINDS & set(fields.get("kinds", "").lower().split())),
        **_offsets(fields, coding, end.end() if end else len(start)),
    )


def _fields(header: bytes) -> dict[str, str]:
    """Return the text of each field by its name, in lower case without spaces."""
    first, *lines = header.split(b"\n")
    if first.rstrip() not in _VERSIONS:
        raise damaged_header("the file is not a NRRD of version 1 to 5")
    fields: dict[str, str] = {}
    for line in lines:
        text = line.decode("utf-8", "replace").rstrip("\r")
        if not text or text.startswith("#") or _KEY.fullmatch(text):
            continue
        match = _LINE.fullmatch(text)
        name = match[1].replace(" ", "").lower() if match else ""
        if match is None or name not in _FIELDS:
            raise damaged_header("a line of the NRRD header is not a known field")
        if name in fields:
            raise damaged_header("the NRRD header has a field twice")
        fields[name] = match[2].strip()
    return fields


def _check_values(fields: dict[str, str]) -> None:
    """Refuse quantised values: other readers do not restore the original ones."""
    limits = [floats(fields[name], name, 1)[0] for name in ("oldmin", "oldmax") if name in fields]
    if any(map(math.isfinite, limits)):
        raise ScanError(Reason.RESCALE, "the values were quantised")


def _coding(fields: dict[str, str]) -> Coding:
    coding = _CODINGS.get(required_field(fields, "encoding", "NRRD").lower())
    if coding is None:
        raise ScanError(Reason.DECODER, "the NRRD encoding is not raw, text, gzip or bzip2")
    return coding


def _dtype(fields: dict[str, str], coding: Coding) -> np.dtype[Any]:
    code = _DTYPES.get(" ".join(required_field(fields, "type", "NRRD").lower().split()))
    if code is None:
        raise ScanError(Reason.PIXEL_TYPE, "the voxels are blocks or of an unknown type")
    dtype = np.dtype(code)
    if dtype.itemsize == 1 or coding == "text":
        return dtype
    order = required_field(fields, "endian", "NRRD").lower()
    if order not in ("little", "big"):
        raise damaged_header("the byte order of the NRRD header is neither little nor big")
    return dtype.newbyteorder("<" if order == "little" else ">")


def _offsets(fields: dict[str, str], coding: Coding, end: int) -> dict[str, int]:
    """Return the offsets of the data; in compressed data, bytes are skipped after decompression."""
    lines = integers(fields.get("lineskip", "0"), "line skip", 1)[0]
    skip = integers(fields.get("byteskip", "0"), "byte skip", 1)[0]
    start = 0 if "datafile" in fields else end
    if skip == -1 and coding == "raw":
        return {"start": -1}
    if lines < 0 or skip < 0:
        raise damaged_header("the NRRD header skips a negative number of lines or bytes")
    return {"start": start, "skipped_lines": lines, "skip": skip}


def _data_files(text: str | None, sizes: tuple[int, ...], names: bytes) -> tuple[str, ...]:
    """Return the names of the data files: a single file, a list or a pattern.

    Each holds the data of one index along the slowest axis, or of as many axes as the field says;
    equal slabs, if these are all axes.
    """
    if text is None:
        return ()
    tokens = text.split()
    if tokens and tokens[0].upper() == "LIST":
        listed = sum(1 for name in names.split(b"\n") if name.strip())
        return listed_files(names, _file_count(tokens[1:], sizes, listed))
    if "%" not in text:
        return (text,)
    if not 4 <= len(tokens) <= 5:
        raise damaged_header(UNPARSED_PATTERN)
    begin, end, step = integers(" ".join(tokens[1:4]), "pattern of data files", 3)
    if step == 0:
        raise damaged_header(UNPARSED_PATTERN)
    numbers = range(begin, end + (1 if step > 0 else -1), step)
    return numbered_files(tokens[0], numbers, _file_count(tokens[4:], sizes, len(numbers)))


def _file_count(tokens: list[str], sizes: tuple[int, ...], named: int) -> int:
    """Return the number of data files that the data need.

    `tokens` has the number of axes that each file holds, if the field says it; else it is all but
    the slowest. `named`, the number of files in the header, counts if each file holds a slab of all
    axes.
    """
    [axes] = integers(tokens[0], "number of axes per data file", 1) if tokens else [len(sizes) - 1]
    if len(tokens) > 1 or not 0 < axes <= len(sizes):
        raise damaged_header("the number of axes per data file cannot be parsed")
    if axes == len(sizes) and named and sizes[-1] % named == 0:
        return named
    return math.prod(sizes[axes:])


def _directions(fields: dict[str, str], dimension: int) -> list[tuple[float, ...] | None] | None:
    """Return the step along each axis, None for an axis that is not spatial."""
    text = fields.get("spacedirections")
    if text is None:
        return None
    steps = [
        None if match[1] is None else floats(match[1].replace(",", " "), "space directions")
        for match in _VECTOR.finditer(text)
    ]
    if _VECTOR.sub("", text).strip() or len(steps) != dimension:
        raise damaged_header("the space directions cannot be parsed")
    if len({len(step) for step in steps if step is not None}) > 1:
        raise damaged_header("the space directions have different dimensions")
    # An axis of a space with time that goes along time only is not spatial
    in_time = [
        step is not None and len(step) == 4 and not any(step[:3]) and step[3] for step in steps
    ]
    return [None if is_temporal else step for step, is_temporal in zip(steps, in_time, strict=True)]


def _axes(
    fields: dict[str, str], sizes: tuple[int, ...], steps: list[tuple[float, ...] | None] | None
) -> tuple[tuple[int, ...], int]:
    """Return the indices of the spatial axes, and the number of components per voxel."""
    kinds = [kind.lower() for kind in fields.get("kinds", "").split()] or ["none"] * len(sizes)
    if len(kinds) != len(sizes):
        raise damaged_header("the number of kinds is not the number of axes")
    if steps is not None:
        axes = tuple(n for n, step in enumerate(steps) if step is not None)
    else:
        axes = tuple(n for n, kind in enumerate(kinds) if kind in _SPACE_KINDS)[:3]
    components = 1
    for n, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        if n not in axes and kind not in (*_SPACE_KINDS, *_SERIES_KINDS):
            components *= size
    return axes, components


def _geometry(
    fields: dict[str, str], axes: tuple[int, ...], steps: list[tuple[float, ...] | None] | None
) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
    """Return the affine (4, 4) to RAS mm and the spacing (3,), None if the header lacks them."""
    units = _units(fields, "units")
    if len(units) > max(axes, default=0):  # else their number is not that of the axes
        units = [units[n] for n in axes]
    if not _MM.issuperset((*_units(fields, "spaceunits"), *units)):
        raise ScanError(Reason.BAD_GEOMETRY, "the NRRD header's unit of length is not mm")
    if len(axes) != 3:
        return None, None
    if steps is None:
        if "spacings" not in fields:
            return None, None
        spacings = floats(fields["spacings"], "spacings")
        if len(spacings) <= max(axes):
            raise damaged_header("the number of spacings is not the number of axes")
        return None, np.array([spacings[n] for n in axes])
    vectors = [step for step in steps if step is not None]
    if len(vectors[0]) not in (3, 4) or any(any(vector[3:]) for vector in vectors):
        raise ScanError(Reason.BAD_GEOMETRY, "a spatial axis has a component that is not spatial")
    columns = np.array(vectors)[:, :3].T
    with np.errstate(over="ignore"):
        spacing = np.linalg.norm(columns, axis=0)
    to_ras = _SPACES.get(fields.get("space", "").lower())
    if to_ras is None:
        return None, spacing
    return world_affine(columns, _origin(fields), to_ras), spacing


def _units(fields: dict[str, str], name: str) -> list[str]:
    return [quoted or bare for quoted, bare in _UNIT.findall(fields.get(name, ""))]


def _origin(fields: dict[str, str]) -> NDArray[np.float64]:
    """Return the position (3,) of the first voxel; 0 by default, as in ITK and Slicer."""
    text = fields.get("spaceorigin")
    if text is None:
        return np.zeros(3)
    match = _VECTOR.fullmatch(text)
    origin = floats(match[1].replace(",", " "), "space origin") if match and match[1] else ()
    if len(origin) not in (3, 4):
        raise damaged_header("the space origin cannot be parsed")
    return np.array(origin[:3])
