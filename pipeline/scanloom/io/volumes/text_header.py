"""Text headers of volume files: the fields that NRRD and MetaImage share, and their parsing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.volumes.raw_voxels import Coding

UNPARSED_PATTERN = "the pattern of the data files cannot be parsed"
HEADER_LIMIT_BYTES = 1 << 20
"""Largest header: those with a table of segments or gradients have some 100 kB."""

MAX_DATA_FILES = 1 << 17
"""Largest number of data files of one header."""

MAX_DEVIATION_MM = 0.05
"""Largest deviation of the slices from even spacing, as in a DICOM series."""

_NON_UNIFORM = re.compile(
    rb"^[ \t]*ITK_non_uniform_sampling_deviation[ \t]*:?=[ \t]*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)",
    re.MULTILINE,
)
_FILE_PATTERN = re.compile(r"([^%]*)%(0?)(\d{0,2})[diu]([^%]*)")
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_FLOAT = re.compile(
    r"[+-]?(?:(?:\d{1,40}\.?\d{0,40}|\.\d{1,40})(?:[eE][+-]?\d{1,3})?|nan|inf)", re.I
)


@dataclass(frozen=True, eq=False)
class TextHeader:
    """The header of a volume, checked by itself without its data.

    Parameters
    ----------
    sizes : tuple of int
        Voxels along every axis, fastest first.
    axes : tuple of int
        Indices of the spatial axes in `sizes`.
    components : int
        Numbers per voxel.
    dtype : dtype
        As stored, with its byte order.
    affine : (4, 4) array or None
        Voxel index to RAS mm; None if the header has no anatomical space.
    spacing : (3,) array or None
        In mm; None if the header has no spacing.
    coding : Coding
    data_files : tuple of str
        Names of the data files in order, each with an equal share of the data; empty if the data
        follow the header.
    start : int
        Byte offset of the data in the data file; -1 if the data end with the file.
    skip : int
        Bytes before the first voxel, after decompression.
    skipped_lines : int
        Lines between `start` and the data.
    compressed_bytes : int or None
        Length of the compressed data; None if unknown.
    is_colour : bool
        Whether the header declares the numbers of a voxel to be a colour.
    """

    sizes: tuple[int, ...]
    axes: tuple[int, ...]
    components: int
    dtype: np.dtype[Any]
    affine: NDArray[np.float64] | None
    spacing: NDArray[np.float64] | None
    coding: Coding
    data_files: tuple[str, ...]
    start: int
    skip: int = 0
    skipped_lines: int = 0
    compressed_bytes: int | None = None
    is_colour: bool = False


def damaged_header(detail: str) -> ScanError:
    """Return the error for a header that violates its format; `detail` never quotes the header."""
    return ScanError(Reason.DAMAGED, detail)


def required_field(fields: Mapping[str, str], name: str, file_format: str) -> str:
    """Return the text of a field.

    Raises
    ------
    ScanError
        DAMAGED if the header lacks it.
    """
    if name not in fields:
        raise damaged_header(f"the {file_format} header has no `{name}` field")
    return fields[name]


def check_even_spacing(header: bytes) -> None:
    """Refuse a scan if ITK recorded in its header that its slices are not evenly spaced.

    Raises
    ------
    ScanError
        SPACING_CHANGES.
    """
    deviation = _NON_UNIFORM.search(header)
    if deviation and float(deviation[1]) > MAX_DEVIATION_MM:
        detail = "slices are not evenly spaced (ITK_non_uniform_sampling_deviation)"
        raise ScanError(Reason.SPACING_CHANGES, detail)


def integers(text: str, field: str, count: int | None = None) -> tuple[int, ...]:
    """Return the integers of a field; `count` is their number, if known."""
    tokens = text.split()
    if not all(map(_INTEGER.fullmatch, tokens)) or count not in (None, len(tokens)):
        raise damaged_header(f"the {field} of the header cannot be parsed")
    return tuple(map(int, tokens))


def floats(text: str, field: str, count: int | None = None) -> tuple[float, ...]:
    """Return the numbers of a field, which may be NaN; `count` is their number, if known."""
    tokens = text.split()
    if not all(map(_FLOAT.fullmatch, tokens)) or count not in (None, len(tokens)):
        raise damaged_header(f"the {field} of the header cannot be parsed")
    return tuple(map(float, tokens))


def listed_files(lines: bytes, count: int) -> tuple[str, ...]:
    """Return the names of `count` data files, one per line.

    Raises
    ------
    ScanError
        DAMAGED if the number of names is not `count`.
    """
    names = (line.strip().decode("utf-8", "surrogateescape") for line in lines.split(b"\n"))
    return _checked_names([name for name in names if name], count)


def numbered_files(pattern: str, numbers: range, count: int) -> tuple[str, ...]:
    """Return the names of `count` data files from a printf(3) pattern with one number.

    Raises
    ------
    ScanError
        DAMAGED if the pattern cannot be parsed, or the number of names is not `count`.
    """
    match = _FILE_PATTERN.fullmatch(pattern)
    if match is None or not numbers or min(numbers[0], numbers[-1]) < 0:
        raise damaged_header(UNPARSED_PATTERN)
    if numbers[MAX_DATA_FILES:]:
        raise damaged_header("the header names too many data files")
    prefix, zeros, width, suffix = match.groups()
    return _checked_names([f"{prefix}{n:{zeros}{width}d}{suffix}" for n in numbers], count)


def _checked_names(names: list[str], count: int) -> tuple[str, ...]:
    if len(names) != count or len(names) > MAX_DATA_FILES:
        raise damaged_header(f"the header names {len(names)} data files, but its data need {count}")
    if len(set(names)) < len(names):
        raise damaged_header("the header names a data file twice")
    return tuple(names)


def world_affine(
    columns: NDArray[np.float64], origin: NDArray[np.float64], to_ras: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the affine (4, 4) from voxel index to RAS mm.

    Parameters
    ----------
    columns : (3, 3) array
        Step along each voxel axis in mm, one per column, in the header's patient axes.
    origin : (3,) array
        Position of the first voxel in mm, in the same axes.
    to_ras : (3,) array
        Signs that convert these axes to RAS.
    """
    affine = np.eye(4)
    affine[:3, :3] = columns * to_ras[:, None]
    affine[:3, 3] = origin * to_ras
    return affine
