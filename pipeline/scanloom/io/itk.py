"""Read NRRD and MetaImage: .nrrd, .nhdr, .mha, .mhd.

Headers are read here and not by ITK: size, type and place are judged before anything is allocated,
damage is told from truncation, and no library sees a file name that a header made up. SimpleITK is
the witness of the tests.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Grid, Reason, ScanError
from scanloom.io.metaimage import parse_metaimage
from scanloom.io.nrrd import MAGIC, parse_nrrd
from scanloom.io.packing import packing_of
from scanloom.io.plain import (
    MIN_VOXELS,
    affine_from_codes,
    check_size,
    straighten,
)
from scanloom.io.raw_volume import RawVolume
from scanloom.io.regular import open_regular
from scanloom.io.text_header import HEADER_LIMIT, TextHeader, damaged
from scanloom.io.voxels import (
    Coding,
    Layout,
    check_layout,
    foreign_errors,
    size_of,
)

ITK_SUFFIXES = (".nrrd", ".nhdr", ".mha", ".mhd")

_LINES_LIMIT = 1 << 24  # bytes in which the lines to be skipped must end


def itk_files(path: Path) -> tuple[Path, ...]:
    """Return the files of an image: itself, and the data files that its header names.

    A header that can't be used names none; `parse_itk` says why.
    """
    try:
        return (path, *_data_paths(path, _read_header(path)))
    except ScanError:
        return (path,)


def parse_itk(
    files: Sequence[Path], phase: int | None, orientation: str | None, limit: int
) -> RawVolume:
    """Parse the header of a NRRD or MetaImage; see `ParseHeader`.

    Raises
    ------
    ScanError
        TOO_FEW_SLICES, FOUR_D, COLOR, PIXEL_TYPE, ORIENTATION_UNKNOWN, BAD_GEOMETRY, RESCALE,
        TOO_LARGE, TRUNCATED, DAMAGED, DECODER, NOT_FOUND, NOT_AN_IMAGE, UNREADABLE or
        OUT_OF_MEMORY.
    """
    header = _read_header(files[0])
    volumes = _check_kind(header, phase)
    shape = (
        header.sizes[header.axes[0]],
        header.sizes[header.axes[1]],
        header.sizes[header.axes[2]],
    )
    affine, flags = _affine(header, shape, orientation)
    check_size(affine, shape)
    data = _data_paths(files[0], header)
    if not set(files[1:]) <= set(data):
        raise damaged("its header names another data file than before")
    with foreign_errors("the image"):
        layout = _layout(header, data or (files[0],), shape, volumes, phase or 0)
        check_layout(layout, limit)
    return RawVolume(layout, Grid(shape, affine), flags)


def _read_header(path: Path) -> TextHeader:
    with foreign_errors("the image"), open_regular(path) as file:
        size, start = os.fstat(file.fileno()).st_size, file.read(HEADER_LIMIT)
    parse = parse_nrrd if start.startswith(MAGIC) else parse_metaimage
    return parse(start, whole=size <= HEADER_LIMIT)


def _data_paths(path: Path, header: TextHeader) -> tuple[Path, ...]:
    """Return the files of the voxels, none where they follow the header.

    None is outside the folder of the header and those below it.

    Raises
    ------
    ScanError
        NOT_FOUND if one is missing; DAMAGED if one is elsewhere.
    """
    return tuple(_data_path(path, name) for name in header.data_files)


def _data_path(path: Path, name: str) -> Path:
    data = path.parent / name
    try:
        inside = data.resolve().is_relative_to(path.parent.resolve())
        found = inside and data.is_file()
    except (OSError, RuntimeError, ValueError) as exc:  # too long, a zero in it, links in a circle
        raise damaged("its header names a data file that can't be") from exc
    if not inside:
        raise damaged("its header names a data file in another folder")
    if not found:
        raise ScanError(Reason.NOT_FOUND, "a data file that its header names is missing")
    return data


def _check_kind(header: TextHeader, phase: int | None) -> int:
    """Refuse what is no grey volume; return how many volumes there are."""
    if header.components != 1:
        bytes_each = header.components in (3, 4) and header.dtype == np.uint8
        colour = header.colours or bytes_each
        detail = f"{header.components} numbers a voxel"
        raise ScanError(Reason.COLOR if colour else Reason.PIXEL_TYPE, detail)
    sizes = tuple(header.sizes[n] for n in header.axes)
    volumes = math.prod(header.sizes) // math.prod(sizes)
    if len(sizes) < 3 or min(sizes) < MIN_VOXELS:
        raise ScanError(Reason.TOO_FEW_SLICES, f"the image has {header.sizes} voxels")
    if len(sizes) > 3:
        raise ScanError(Reason.PIXEL_TYPE, f"{len(sizes)} axes of space")
    if phase is None and volumes > 1:
        raise ScanError(Reason.FOUR_D, f"{volumes} volumes, numbered from 0")
    if not 0 <= (phase or 0) < volumes:
        raise ScanError(Reason.FOUR_D, f"{volumes} volumes from 0, number {phase} was asked for")
    return volumes


def _affine(
    header: TextHeader, shape: tuple[int, int, int], orientation: str | None
) -> tuple[NDArray[np.float64], tuple[Flag, ...]]:
    """Return the affine; `orientation` only where the header says no anatomical space."""
    if header.affine is not None:
        return straighten(header.affine, shape)
    if orientation is None:
        raise ScanError(Reason.ORIENTATION_UNKNOWN, "the file names no anatomical space")
    if header.spacing is None:
        raise ScanError(Reason.BAD_GEOMETRY, "its header says no voxel size")
    affine = affine_from_codes(orientation, np.abs(header.spacing), shape)
    return affine, (Flag.ORIENTATION_GIVEN,)


def _layout(
    header: TextHeader,
    data: tuple[Path, ...],
    shape: tuple[int, int, int],
    volumes: int,
    volume: int,
) -> Layout:
    if len(data) > 1 and (header.coding == "text" or header.packed is not None):
        raise ScanError(Reason.DECODER, "text, or packed data of a said length, in several files")
    starts = tuple((file, _start(header, file, len(data))) for file in data)
    path, start = starts[0]
    coding: Coding = header.coding
    if coding == "zlib" and packing_of(path, start) == "gzip":
        coding = "gzip"  # MetaIO inflates both
    return Layout(
        path,
        coding,
        start=start,
        skip=header.skip,
        shape=shape,
        dtype=header.dtype,
        volumes=volumes,
        volume=volume,
        run=_run(header, volumes),
        packed=header.packed,
        parts=starts[1:],
    )


def _start(header: TextHeader, data: Path, count: int) -> int:
    """Return the byte of one of `count` data files at which its data begin."""
    start = header.start
    if start == -1:
        start = size_of(data) - math.prod(header.sizes) // count * header.dtype.itemsize
        if start < 0:
            raise ScanError(Reason.TRUNCATED, "the file ends before its last voxel")
    return _after_lines(data, start, header.lines)


def _run(header: TextHeader, volumes: int) -> int | None:
    """Return how many voxels of a volume stand together, where volumes are not one by one."""
    others = [n for n, size in enumerate(header.sizes) if n not in header.axes and size > 1]
    behind = [n for n in header.axes if others and n > others[0] and header.sizes[n] > 1]
    if volumes == 1 or not behind:
        return None
    if len(others) > 1:
        raise ScanError(Reason.PIXEL_TYPE, "several axes beside space, among those of space")
    return math.prod(header.sizes[: others[0]])


def _after_lines(path: Path, start: int, lines: int) -> int:
    """Return the byte behind so many lines."""
    if lines == 0:
        return start
    with open_regular(path) as file:
        file.seek(start)
        text = file.read(_LINES_LIMIT)
    end = -1
    for _ in range(lines):
        end = text.find(b"\n", end + 1)
        if end < 0:
            raise ScanError(Reason.TRUNCATED, "the file has fewer lines than are to be skipped")
    return start + end + 1
