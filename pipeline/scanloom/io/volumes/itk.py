"""Read NRRD and MetaImage: .nrrd, .nhdr, .mha, .mhd.

Headers are parsed here and not by ITK: sizes, types and offsets are checked before anything is
allocated, damage is distinguished from truncation, and no library opens a file that a header
names. The tests compare with SimpleITK.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Grid, Reason, ScanError
from scanloom.io.affines import MIN_VOXELS, affine_from_codes, check_plausible_size, orthogonalize
from scanloom.io.system.compressed_streams import compression_of
from scanloom.io.system.regular_files import open_regular_file
from scanloom.io.volumes.metaimage_header import parse_metaimage
from scanloom.io.volumes.nrrd_header import MAGIC, parse_nrrd
from scanloom.io.volumes.raw_voxels import (
    Coding,
    RawLayout,
    RawVolume,
    check_layout,
    foreign_errors,
    regular_file_size,
    select_volume,
)
from scanloom.io.volumes.text_header import HEADER_LIMIT_BYTES, TextHeader, damaged_header

ITK_SUFFIXES = (".nrrd", ".nhdr", ".mha", ".mhd")

_LINES_LIMIT_BYTES = 1 << 24  # of the lines to skip


def itk_companions(path: Path) -> tuple[Path, ...]:
    """Return the files of an image: the header, and the data files that it names.

    A header that cannot be used has no data files here; `parse_itk` raises its error.
    """
    try:
        return (path, *_data_paths(path, _read_header(path)))
    except ScanError:
        return (path,)


def parse_itk(
    files: Sequence[Path], phase: int | None, orientation: str | None, limit: int
) -> RawVolume:
    """Parse the header of a NRRD or MetaImage, for `VolumeFormat`.

    Raises
    ------
    ScanError
        TOO_FEW_SLICES, FOUR_D, COLOR, PIXEL_TYPE, ORIENTATION_UNKNOWN, BAD_GEOMETRY, RESCALE,
        TOO_LARGE, TRUNCATED, DAMAGED, DECODER, NOT_FOUND, NOT_AN_IMAGE, UNREADABLE or
        OUT_OF_MEMORY.
    """
    header = _read_header(files[0])
    volumes, volume = _select_volume(header, phase)
    i, j, k = (header.sizes[n] for n in header.axes)
    shape = i, j, k
    affine, flags = _affine(header, shape, orientation)
    check_plausible_size(affine, shape)
    data = _data_paths(files[0], header)
    if not set(files[1:]) <= set(data):
        raise damaged_header("the header names other data files than when it was found")
    with foreign_errors("the image"):
        layout = _layout(header, data or (files[0],), shape, volumes, volume)
        check_layout(layout, limit)
    return RawVolume(layout, Grid(shape, affine), flags)


def _read_header(path: Path) -> TextHeader:
    with foreign_errors("the image"), open_regular_file(path) as file:
        size, start = os.fstat(file.fileno()).st_size, file.read(HEADER_LIMIT_BYTES)
    parse = parse_nrrd if start.startswith(MAGIC) else parse_metaimage
    return parse(start, whole=size <= HEADER_LIMIT_BYTES)


def _data_paths(path: Path, header: TextHeader) -> tuple[Path, ...]:
    """Return the data files, in the folder of the header or below it; none if it holds the voxels.

    NOT_FOUND if a data file is missing; DAMAGED if one is outside the header's folder.
    """
    files = tuple(path.parent / name for name in header.data_files)
    for file in files:
        try:
            is_inside = file.resolve().is_relative_to(path.parent.resolve())
            exists = is_inside and file.is_file()
        except (OSError, RuntimeError, ValueError) as exc:  # too long, a null byte, a loop of links
            raise damaged_header("the header names a data file by an impossible path") from exc
        if not is_inside:
            raise damaged_header("the header names a data file outside its folder")
        if not exists:
            raise ScanError(Reason.NOT_FOUND, "a data file that the header names is missing")
    return files


def _select_volume(header: TextHeader, phase: int | None) -> tuple[int, int]:
    """Return the number of volumes and the index of the requested one; refuse all but grey ones."""
    if header.components != 1:
        like_rgb = header.components in (3, 4) and header.dtype == np.uint8
        reason = Reason.COLOR if header.is_colour or like_rgb else Reason.PIXEL_TYPE
        raise ScanError(reason, f"the image has {header.components} components per voxel")
    sizes = tuple(header.sizes[n] for n in header.axes)
    volumes = math.prod(header.sizes) // math.prod(sizes)
    if len(sizes) < 3 or min(sizes) < MIN_VOXELS:
        raise ScanError(Reason.TOO_FEW_SLICES, f"the image has {header.sizes} voxels")
    if len(sizes) > 3:
        raise ScanError(Reason.PIXEL_TYPE, f"the image has {len(sizes)} spatial axes")
    return volumes, select_volume(volumes, phase)


def _affine(
    header: TextHeader, shape: tuple[int, int, int], orientation: str | None
) -> tuple[NDArray[np.float64], tuple[Flag, ...]]:
    """Return the affine (4, 4); `orientation` is used only if the header has no space."""
    if header.affine is not None:
        return orthogonalize(header.affine, shape)
    if orientation is None:
        raise ScanError(Reason.ORIENTATION_UNKNOWN, "the header has no anatomical space")
    if header.spacing is None:
        raise ScanError(Reason.BAD_GEOMETRY, "the header has no voxel size")
    affine = affine_from_codes(orientation, np.abs(header.spacing), shape)
    return affine, (Flag.ORIENTATION_GIVEN,)


def _layout(
    header: TextHeader,
    data: tuple[Path, ...],
    shape: tuple[int, int, int],
    volumes: int,
    volume: int,
) -> RawLayout:
    if len(data) > 1 and (header.coding == "text" or header.compressed_bytes is not None):
        detail = "text, or compressed data of a given length, in several files"
        raise ScanError(Reason.DECODER, detail)
    starts = tuple((file, _start(header, file, len(data))) for file in data)
    path, start = starts[0]
    coding: Coding = header.coding
    if coding == "zlib" and compression_of(path, start) == "gzip":
        coding = "gzip"  # MetaIO decompresses both
    return RawLayout(
        path,
        coding,
        start=start,
        skip=header.skip,
        shape=shape,
        dtype=header.dtype,
        volumes=volumes,
        volume=volume,
        interleaved_voxels=_interleaved_voxels(header, volumes),
        compressed_bytes=header.compressed_bytes,
        further_files=starts[1:],
    )


def _start(header: TextHeader, data: Path, count: int) -> int:
    """Return the byte offset of the data in one of `count` data files."""
    start = header.start
    if start == -1:
        start = regular_file_size(data) - math.prod(header.sizes) // count * header.dtype.itemsize
        if start < 0:
            raise ScanError(Reason.TRUNCATED, "the file ends before its last voxel")
    return _skip_lines(data, start, header.skipped_lines)


def _interleaved_voxels(header: TextHeader, volumes: int) -> int | None:
    """Return the length of a run of voxels of one volume, None if volumes are not interleaved."""
    series_axes = [n for n, size in enumerate(header.sizes) if n not in header.axes and size > 1]
    slower = [n for n in header.axes if series_axes and n > series_axes[0] and header.sizes[n] > 1]
    if volumes == 1 or not slower:
        return None
    if len(series_axes) > 1:
        detail = "several axes that are not spatial lie between the spatial axes"
        raise ScanError(Reason.PIXEL_TYPE, detail)
    return math.prod(header.sizes[: series_axes[0]])


def _skip_lines(path: Path, start: int, lines: int) -> int:
    """Return the byte offset after `lines` lines from `start`."""
    if lines == 0:
        return start
    with open_regular_file(path) as file:
        file.seek(start)
        text = file.read(_LINES_LIMIT_BYTES)
    end = -1
    for _ in range(lines):
        end = text.find(b"\n", end + 1)
        if end < 0:
            raise ScanError(Reason.TRUNCATED, "the file has fewer lines than its header skips")
    return start + end + 1
