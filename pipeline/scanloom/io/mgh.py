"""Read the volumes of FreeSurfer: .mgh, and .mgz, which is the same packed by gzip.

The format (surfer.nmr.mgh.harvard.edu/fswiki/FsTutorial/MghFormat) counts the place of a volume
from the voxel at half its sizes, and has other data behind the voxels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid, Reason, ScanError
from scanloom.io.packing import packing_of, unpacked_start
from scanloom.io.plain import MIN_VOXELS, check_size, straighten
from scanloom.io.raw_volume import RawVolume
from scanloom.io.voxels import Layout, check_layout, foreign_errors

Header = Mapping[str, Any]
"""By the names of nibabel's MGHHeader."""

MGH_SUFFIXES = (".mgh", ".mgz")

_DATA = 284  # byte at which the voxels begin
_REST = 1 << 26  # bytes behind them: what was done to the volume, and tables of colours
_TYPES = {0: ">u1", 1: ">i4", 3: ">f4", 4: ">i2", 10: ">u2"}


def parse_mgh(
    files: Sequence[Path], phase: int | None, orientation: str | None, limit: int
) -> RawVolume:
    """Parse the header of a .mgh or .mgz file; see `ParseHeader`.

    `orientation` is not used: a file without directions has no voxel size either.

    Raises
    ------
    ScanError
        FOUR_D, PIXEL_TYPE, BAD_GEOMETRY, TOO_FEW_SLICES, TOO_LARGE, TRUNCATED, DAMAGED, UNREADABLE
        or OUT_OF_MEMORY.
    """
    path = files[0]
    with foreign_errors("the MGH file"):
        header = _read_header(path)
        layout = _layout(header, path, phase)
        check_layout(layout, limit)
    affine, flags = straighten(_affine(header), layout.shape)
    check_size(affine, layout.shape)
    return RawVolume(layout, Grid(layout.shape, affine), flags)


def _read_header(path: Path) -> Header:
    from nibabel.freesurfer.mghformat import MGHHeader

    start = unpacked_start(path, _DATA)
    if start[:4] != (1).to_bytes(4, "big"):
        raise ScanError(Reason.DAMAGED, "the file has no MGH header")
    if len(start) < _DATA:
        raise ScanError(Reason.TRUNCATED, "the file ends in its header")
    return cast("Header", np.frombuffer(start, MGHHeader.template_dtype, 1)[0])  # unchecked


def _layout(header: Header, path: Path, phase: int | None) -> Layout:
    """Judge dimensions and data type, and find the volume that is meant."""
    i, j, k, volumes = (int(n) for n in header["dims"])
    if min(i, j, k, volumes) < 1:
        raise ScanError(Reason.DAMAGED, "its dimensions are not positive numbers")
    if min(i, j, k) < MIN_VOXELS:
        raise ScanError(Reason.TOO_FEW_SLICES, f"the image has {(i, j, k)} voxels")
    if phase is None and volumes > 1:
        raise ScanError(Reason.FOUR_D, f"{volumes} volumes, numbered from 0")
    if not 0 <= (phase or 0) < volumes:
        raise ScanError(Reason.FOUR_D, f"{volumes} volumes from 0, number {phase} was asked for")
    code = _TYPES.get(int(header["type"]))
    if code is None:
        raise ScanError(Reason.PIXEL_TYPE, "its data type is no plain number of MGH")
    return Layout(
        path,
        packing_of(path) or "raw",
        start=0,
        skip=_DATA,
        shape=(i, j, k),
        dtype=np.dtype(code),
        volumes=volumes,
        volume=phase or 0,
        rest=_REST,
    )


def _affine(header: Header) -> NDArray[np.float64]:
    """Return the affine; a header without good directions says no voxel size either."""
    if int(header["goodRASFlag"]) <= 0:
        raise ScanError(Reason.BAD_GEOMETRY, "its header says neither voxel size nor directions")
    spacing = np.array(header["delta"], dtype=np.float64)
    if not (spacing > 0).all():
        raise ScanError(Reason.BAD_GEOMETRY, "its voxel size can't be")
    affine = np.eye(4)
    with np.errstate(over="ignore", invalid="ignore"):
        affine[:3, :3] = np.array(header["Mdc"], dtype=np.float64).T * spacing
        middle = np.array(header["dims"][:3]) / 2
        affine[:3, 3] = np.array(header["Pxyz_c"], dtype=np.float64) - affine[:3, :3] @ middle
    return affine
