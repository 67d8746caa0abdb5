"""What the text headers of NRRD and MetaImage say, in words of both, and how they are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.voxels import Coding

HEADER_LIMIT = 1 << 20
"""Bytes of a header: those with a table of segments or gradients have some 100 kB."""

MOST_FILES = 1 << 17
"""With the data of one header."""

EVEN_MM = 0.05
"""How far slices may have been off their places, as in a DICOM series."""
_UNEVEN = re.compile(
    rb"^[ \t]*ITK_non_uniform_sampling_deviation[ \t]*:?=[ \t]*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)",
    re.MULTILINE,
)
_PATTERN = re.compile(r"([^%]*)%(0?)(\d{0,2})[diu]([^%]*)")
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_FLOAT = re.compile(
    r"[+-]?(?:(?:\d{1,40}\.?\d{0,40}|\.\d{1,40})(?:[eE][+-]?\d{1,3})?|nan|inf)", re.I
)


@dataclass(frozen=True, eq=False)
class TextHeader:
    """The header of a volume, judged by itself: no look at the data.

    Parameters
    ----------
    sizes : tuple of int
        Voxels along every axis, fastest first.
    axes : tuple of int
        Which of them are axes of space.
    components : int
        Numbers a voxel.
    dtype : dtype
        As stored, with its byte order.
    affine : (4, 4) array or None
        Index to RAS mm; None where the header does not say the anatomical space.
    spacing : (3,) array or None
        In mm; None where the header says none.
    coding : Coding
    data_files : tuple of str
        In the order of the data, of which each holds an equal share; empty where these follow the
        header.
    start : int
        Byte of the data file at which the data begin; -1: they are its last.
    skip : int
        Bytes before the voxels, once unpacked.
    lines : int
        Lines of the data file before `start`.
    packed : int or None
        Length of the compressed data.
    colours : bool
        Whether the numbers of a voxel are said to be a colour.
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
    lines: int = 0
    packed: int | None = None
    colours: bool = False


def damaged(detail: str) -> ScanError:
    """Return the error for a header that breaks its format's rules; it never holds its text."""
    return ScanError(Reason.DAMAGED, detail)


def check_even(header: bytes) -> None:
    """Refuse a scan of which ITK wrote that its slices were not equally spaced, by mm.

    Raises
    ------
    ScanError
        SPACING_CHANGES.
    """
    found = _UNEVEN.search(header)
    if found and float(found[1]) > EVEN_MM:
        raise ScanError(Reason.SPACING_CHANGES, "its writer says that its slices were uneven")


def integers(text: str, what: str, count: int | None = None) -> tuple[int, ...]:
    """Return the whole numbers of a field."""
    words = text.split()
    if not all(_INTEGER.fullmatch(word) for word in words) or count not in (None, len(words)):
        raise damaged(f"its {what} can't be read")
    return tuple(int(word) for word in words)


def floats(text: str, what: str, count: int | None = None) -> tuple[float, ...]:
    """Return the numbers of a field; NaN is one."""
    words = text.split()
    if not all(_FLOAT.fullmatch(word) for word in words) or count not in (None, len(words)):
        raise damaged(f"its {what} can't be read")
    return tuple(float(word) for word in words)


def listed_files(lines: bytes, count: int) -> tuple[str, ...]:
    """Return the names of data files, one a line.

    Raises
    ------
    ScanError
        DAMAGED unless there are as many as the data need.
    """
    named = (line.strip().decode("utf-8", "surrogateescape") for line in lines.split(b"\n"))
    return _as_many([name for name in named if name], count)


def numbered_files(pattern: str, numbers: range, count: int) -> tuple[str, ...]:
    """Return the names that a pattern as of printf(3), with one number in it, gives.

    Raises
    ------
    ScanError
        DAMAGED if it is none, or unless there are as many as the data need.
    """
    found = _PATTERN.fullmatch(pattern)
    if found is None or not numbers or min(numbers[0], numbers[-1]) < 0:
        raise damaged("it names its data files by a pattern that can't be read")
    if numbers[MOST_FILES:]:
        raise damaged("its header names too many data files")
    before, zeros, width, behind = found.groups()
    form = f"{zeros}{width}d"
    return _as_many([f"{before}{n:{form}}{behind}" for n in numbers], count)


def _as_many(names: list[str], count: int) -> tuple[str, ...]:
    if len(names) != count or len(names) > MOST_FILES:
        raise damaged(f"its header names {len(names)} data files for {count} parts of its data")
    if len(set(names)) < len(names):
        raise damaged("its header names a data file twice")
    return tuple(names)


def affine_of(
    columns: NDArray[np.float64], origin: NDArray[np.float64], to_ras: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the affine to RAS mm with these steps along its axes, one a column.

    `to_ras` holds the signs that lead from the header's patient axes to RAS.
    """
    affine = np.eye(4)
    affine[:3, :3] = columns * to_ras[:, None]
    affine[:3, 3] = origin * to_ras
    return affine
