"""Read FreeSurfer volumes: .mgh, and .mgz, which is the same compressed by gzip.

The format (surfer.nmr.mgh.harvard.edu/fswiki/FsTutorial/MghFormat) stores the position of the voxel
at half the sizes, and has further data after the voxels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid, Reason, ScanError
from scanloom.io.affines import MIN_VOXELS, check_plausible_size, orthogonalize
from scanloom.io.system.compressed_streams import compression_of, decompressed_start
from scanloom.io.volumes.raw_voxels import (
    RawLayout,
    RawVolume,
    check_layout,
    foreign_errors,
    select_volume,
)

Header = Mapping[str, Any]
"""Header fields by the names of nibabel's MGHHeader."""

MGH_SUFFIXES = (".mgh", ".mgz")

_DATA_OFFSET_BYTES = 284
_TRAILER_LIMIT_BYTES = 1 << 26  # after the voxels: processing history and colour tables
_TYPES = {0: ">u1", 1: ">i4", 3: ">f4", 4: ">i2", 10: ">u2"}


def parse_mgh(
    files: Sequence[Path], phase: int | None, orientation: str | None, limit: int
) -> RawVolume:
    """Parse the header of a .mgh or .mgz file, for `VolumeFormat`.

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
    affine, flags = orthogonalize(_affine(header), layout.shape)
    check_plausible_size(affine, layout.shape)
    return RawVolume(layout, Grid(layout.shape, affine), flags)


def _read_header(path: Path) -> Header:
    from nibabel.freesurfer.mghformat import MGHHeader

    start = decompressed_start(path, _DATA_OFFSET_BYTES)
    if start[:4] != (1).to_bytes(4, "big"):
        raise ScanError(Reason.DAMAGED, "the file has no MGH header")
    if len(start) < _DATA_OFFSET_BYTES:
        raise ScanError(Reason.TRUNCATED, "the file ends within the MGH header")
    record = np.frombuffer(start, MGHHeader.template_dtype, 1)[0]  # without nibabel's checks
    return cast("Header", record)


def _layout(header: Header, path: Path, phase: int | None) -> RawLayout:
    """Check dimensions and data type, and locate the requested volume."""
    i, j, k, volumes = (int(n) for n in header["dims"])
    if min(i, j, k, volumes) < 1:
        raise ScanError(Reason.DAMAGED, "the dimensions of the MGH header are not positive")
    if min(i, j, k) < MIN_VOXELS:
        raise ScanError(Reason.TOO_FEW_SLICES, f"the image has {(i, j, k)} voxels")
    volume = select_volume(volumes, phase)
    code = _TYPES.get(int(header["type"]))
    if code is None:
        raise ScanError(Reason.PIXEL_TYPE, "the MGH data type is not a plain number")
    return RawLayout(
        path,
        compression_of(path) or "raw",
        start=0,
        skip=_DATA_OFFSET_BYTES,
        shape=(i, j, k),
        dtype=np.dtype(code),
        volumes=volumes,
        volume=volume,
        trailing_bytes=_TRAILER_LIMIT_BYTES,
    )


def _affine(header: Header) -> NDArray[np.float64]:
    """Return the affine (4, 4); without valid directions, the header has no voxel size either."""
    if int(header["goodRASFlag"]) <= 0:
        raise ScanError(Reason.BAD_GEOMETRY, "the MGH header has neither voxel size nor directions")
    spacing = np.array(header["delta"], dtype=np.float64)
    if not (spacing > 0).all():
        raise ScanError(Reason.BAD_GEOMETRY, "the voxel size is not positive")
    affine = np.eye(4)
    with np.errstate(over="ignore", invalid="ignore"):
        affine[:3, :3] = np.array(header["Mdc"], dtype=np.float64).T * spacing
        centre = np.array(header["dims"][:3]) / 2
        affine[:3, 3] = np.array(header["Pxyz_c"], dtype=np.float64) - affine[:3, :3] @ centre
    return affine
