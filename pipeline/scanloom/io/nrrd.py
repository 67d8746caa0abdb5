"""The header of a NRRD (teem.sourceforge.net/nrrd/format.html), attached or detached."""

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
    [
        "dimension",
        "type",
        "blocksize",
        "encoding",
        "endian",
        "content",
        "min",
        "max",
        "oldmin",
        "oldmax",
        "datafile",
        "lineskip",
        "byteskip",
        "number",
        "sampleunits",
        "sizes",
        "spacings",
        "thicknesses",
        "axismins",
        "axismaxs",
        "centers",
        "centerings",
        "labels",
        "units",
        "kinds",
        "space",
        "spacedimension",
        "spaceunits",
        "spaceorigin",
        "spacedirections",
        "measurementframe",
    ]
)

_TYPES = {
    "i1": ("signed char", "int8", "int8_t"),
    "u1": ("uchar", "unsigned char", "uint8", "uint8_t"),
    "i2": ("short", "short int", "signed short", "signed short int", "int16", "int16_t"),
    "u2": ("ushort", "unsigned short", "unsigned short int", "uint16", "uint16_t"),
    "i4": ("int", "signed int", "int32", "int32_t"),
    "u4": ("uint", "unsigned int", "uint32", "uint32_t"),
    "i8": (
        "longlong",
        "long long",
        "long long int",
        "signed long long",
        "signed long long int",
        "int64",
        "int64_t",
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
_SPACES = {name: signs for long, signs in _TO_RAS.items() for name in (long, f"{long}-time")}
_SPACES |= {
    "".join(word[0] for word in name.split("-")): s for name, s in _SPACES.items()
}  # ras, rast

_SPACE_KINDS = ("domain", "space", "???", "none")
_COLOURS = frozenset(f"{one}-color" for one in ("rgb", "rgba", "hsv", "xyz", "3", "4"))
_SERIES_KINDS = ("list", "time", "stub", "scalar")


def parse_nrrd(start: bytes, *, whole: bool) -> TextHeader:
    """Judge a NRRD's header.

    Parameters
    ----------
    start : bytes
        The first bytes of the file.
    whole : bool
        Whether that is all of it.

    Raises
    ------
    ScanError
        DAMAGED, TRUNCATED, PIXEL_TYPE, DECODER or BAD_GEOMETRY.
    """
    listed = _LIST.search(start)
    end = _END.search(start, 0, listed.start() if listed else len(start))
    listed = None if end else listed
    if end is None and not whole:
        raise damaged("the header has no end")
    names = start[listed.end() :] if listed else b""
    start = start[: listed.end()] if listed else start
    fields = _fields(start[: end.start()] if end else start)
    check_even(start[: end.start()] if end else start)
    if end is None and "datafile" not in fields:
        raise ScanError(Reason.TRUNCATED, "the file ends in its header")
    dimension = integers(_needed(fields, "dimension"), "dimension", 1)[0]
    if not 1 <= dimension <= 16:
        raise damaged("its dimension is no number from 1 to 16")
    sizes = integers(_needed(fields, "sizes"), "sizes", dimension)
    if min(sizes) < 1:
        raise damaged("its sizes are not positive numbers")
    _check_values(fields)
    steps = _directions(fields, dimension)
    axes, components = _axes(fields, sizes, steps)
    affine, spacing = _place(fields, axes, steps)
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
        colours=bool(_COLOURS & set(fields.get("kinds", "").lower().split())),
        **_offsets(fields, coding, end.end() if end else len(start)),
    )


def _fields(header: bytes) -> dict[str, str]:
    """Return descriptions by field name, in lower case without spaces."""
    first, *lines = header.split(b"\n")
    if first.rstrip() not in _VERSIONS:
        raise damaged("it is no NRRD of version 1 to 5")
    fields: dict[str, str] = {}
    for line in lines:
        text = line.decode("utf-8", "replace").rstrip("\r")
        if not text or text.startswith("#") or _KEY.fullmatch(text):
            continue
        found = _LINE.fullmatch(text)
        name = found[1].replace(" ", "").lower() if found else ""
        if found is None or name not in _FIELDS:
            raise damaged("a line of its header is no field of a NRRD")
        if name in fields:
            raise damaged("a field of its header is there twice")
        fields[name] = found[2].strip()
    return fields


def _needed(fields: dict[str, str], name: str) -> str:
    if name not in fields:
        raise damaged(f"its header says no {name}")
    return fields[name]


def _check_values(fields: dict[str, str]) -> None:
    """Refuse values that were quantised: readers don't bring them back to what they were."""
    ends = [floats(fields[name], name, 1)[0] for name in ("oldmin", "oldmax") if name in fields]
    if any(map(math.isfinite, ends)):
        raise ScanError(Reason.RESCALE, "its values were quantised")


def _coding(fields: dict[str, str]) -> Coding:
    coding = _CODINGS.get(_needed(fields, "encoding").lower())
    if coding is None:
        raise ScanError(Reason.DECODER, "a NRRD in an encoding beside raw, text, gzip and bzip2")
    return coding


def _dtype(fields: dict[str, str], coding: Coding) -> np.dtype[Any]:
    code = _DTYPES.get(" ".join(_needed(fields, "type").lower().split()))
    if code is None:
        raise ScanError(Reason.PIXEL_TYPE, "its voxels are blocks or of an unknown type")
    dtype = np.dtype(code)
    if dtype.itemsize == 1 or coding == "text":
        return dtype
    order = _needed(fields, "endian").lower()
    if order not in ("little", "big"):
        raise damaged("its byte order is neither little nor big")
    return dtype.newbyteorder("<" if order == "little" else ">")


def _offsets(fields: dict[str, str], coding: Coding, end: int) -> dict[str, int]:
    """Return where the data begin; bytes of compressed data are skipped once unpacked."""
    lines = integers(fields.get("lineskip", "0"), "line skip", 1)[0]
    skip = integers(fields.get("byteskip", "0"), "byte skip", 1)[0]
    start = 0 if "datafile" in fields else end
    if skip == -1 and coding == "raw":
        return {"start": -1}
    if lines < 0 or skip < 0:
        raise damaged("it skips a negative number of lines or bytes")
    return {"start": start, "lines": lines, "skip": skip}


def _data_files(text: str | None, sizes: tuple[int, ...], names: bytes) -> tuple[str, ...]:
    """Return the data files: one, or those of a list or a pattern.

    Each holds the data of one place along the slowest axis, or of as many axes as is said; equal
    slabs, if these are all axes.
    """
    if text is None:
        return ()
    words = text.split()
    if words and words[0].upper() == "LIST":
        count = _parts(words[1:], sizes, len([name for name in names.split(b"\n") if name.strip()]))
        return listed_files(names, count)
    if "%" not in text:
        return (text,)
    if not 4 <= len(words) <= 5:
        raise damaged("it names its data files by a pattern that can't be read")
    begin, end, step = integers(" ".join(words[1:4]), "pattern of data files", 3)
    if step == 0:
        raise damaged("it names its data files by a pattern that can't be read")
    numbers = range(begin, end + (1 if step > 0 else -1), step)
    return numbered_files(words[0], numbers, _parts(words[4:], sizes, len(numbers)))


def _parts(words: list[str], sizes: tuple[int, ...], there: int) -> int:
    """Return how many files there must be, if each holds so many axes."""
    [inside] = integers(words[0], "axes a data file", 1) if words else [len(sizes) - 1]
    if len(words) > 1 or not 0 < inside <= len(sizes):
        raise damaged("it can't be known what each of its data files holds")
    if inside == len(sizes) and there and sizes[-1] % there == 0:
        return there
    return math.prod(sizes[inside:])


def _directions(fields: dict[str, str], dimension: int) -> list[tuple[float, ...] | None] | None:
    """Return the step along each axis, None for one that is not in space."""
    text = fields.get("spacedirections")
    if text is None:
        return None
    steps = [
        None if found[1] is None else floats(found[1].replace(",", " "), "space directions")
        for found in _VECTOR.finditer(text)
    ]
    if _VECTOR.sub("", text).strip() or len(steps) != dimension:
        raise damaged("its space directions can't be read")
    if len({len(step) for step in steps if step is not None}) > 1:
        raise damaged("its space directions have different dimensions")
    return [None if step is None or _in_time(step) else step for step in steps]


def _in_time(step: tuple[float, ...]) -> bool:
    """Whether an axis of a space with time goes along time only."""
    return len(step) == 4 and not any(step[:3]) and step[3] != 0


def _axes(
    fields: dict[str, str], sizes: tuple[int, ...], steps: list[tuple[float, ...] | None] | None
) -> tuple[tuple[int, ...], int]:
    """Return which axes are of space, and the numbers a voxel."""
    kinds = [kind.lower() for kind in fields.get("kinds", "").split()] or ["none"] * len(sizes)
    if len(kinds) != len(sizes):
        raise damaged("its kinds are not one an axis")
    if steps is not None:
        axes = tuple(n for n, step in enumerate(steps) if step is not None)
    else:
        axes = tuple(n for n, kind in enumerate(kinds) if kind in _SPACE_KINDS)[:3]
    components = 1
    for n, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        if n not in axes and kind not in (*_SPACE_KINDS, *_SERIES_KINDS):
            components *= size
    return axes, components


def _place(
    fields: dict[str, str], axes: tuple[int, ...], steps: list[tuple[float, ...] | None] | None
) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
    """Return the affine to RAS and the spacing, None where the header does not say."""
    if set(_units(fields, "spaceunits")) - _MM or not _MM.issuperset(_along(fields, axes)):
        raise ScanError(Reason.BAD_GEOMETRY, "its lengths are not in millimetres")
    if len(axes) != 3:
        return None, None
    if steps is None:
        if "spacings" not in fields:
            return None, None
        spacings = floats(fields["spacings"], "spacings")
        if len(spacings) <= max(axes):
            raise damaged("its spacings are not one an axis")
        return None, np.array([spacings[n] for n in axes])
    vectors = [step for step in steps if step is not None]
    if len(vectors[0]) not in (3, 4) or any(any(vector[3:]) for vector in vectors):
        raise ScanError(Reason.BAD_GEOMETRY, "its axes of space do not lie in space")
    columns = np.array(vectors)[:, :3].T
    with np.errstate(over="ignore"):
        spacing = np.linalg.norm(columns, axis=0)
    to_ras = _SPACES.get(fields.get("space", "").lower())
    if to_ras is None:
        return None, spacing
    return affine_of(columns, _origin(fields), to_ras), spacing


def _units(fields: dict[str, str], name: str) -> list[str]:
    return [one or other for one, other in _UNIT.findall(fields.get(name, ""))]


def _along(fields: dict[str, str], axes: tuple[int, ...]) -> list[str]:
    """Return the units along the axes of space; all there are, where they are not one an axis."""
    units = _units(fields, "units")
    return [units[n] for n in axes] if len(units) > max(axes, default=0) else units


def _origin(fields: dict[str, str]) -> NDArray[np.float64]:
    """Return the place of the first voxel; without one it is 0, as for ITK and Slicer."""
    text = fields.get("spaceorigin")
    if text is None:
        return np.zeros(3)
    found = _VECTOR.fullmatch(text)
    origin = floats(found[1].replace(",", " "), "space origin") if found and found[1] else ()
    if len(origin) not in (3, 4):
        raise damaged("its space origin can't be read")
    return np.array(origin[:3])
