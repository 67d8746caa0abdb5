"""Reads back NIfTI files: decompressed by zlib, parsed byte by byte, one plane at a time.

The geometry is compared with the grid, within the precision of float32, and with the geometry that
SimpleITK reads from the file.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid
from scanloom.core.grid import LPS_TO_RAS_AFFINE
from scanloom.core.text import is_utf8
from scanloom.io.readback.mismatch import decoding, mismatch_error
from scanloom.io.scan import NiftiSource, Source
from scanloom.io.volumes.nifti import forms_for, has_own_forms

_FLOAT32_TOLERANCE = 2 * float(np.finfo(np.float32).eps)
"""Largest relative error of a position. Direction, its length, spacing and offset are rounded to
float32, each with an error of at most a quarter of this."""

_QFORM_TOLERANCE_MM = 0.01
"""Largest distance of a corner by a qform from the same corner by the qform's affine."""

_MAX_AXIS_COSINE = 9e-5
"""Cosine between two axes above which ITK may refuse an sform: its limit is 1e-4, in float32."""

Planes = Iterator[NDArray[Any]]


@dataclass(frozen=True, eq=False)
class NiftiGeometry:
    """Decoded geometry and layout of a NIfTI-1 header.

    Parameters
    ----------
    shape : (I, J, K)
        Shape of the grid.
    dtype : dtype
        Type of the stored voxels.
    offset : int
        Offset of the voxels in the decompressed file, in bytes.
    sform, qform : (4, 4) array
        Voxel index to RAS mm.
    sform_code, qform_code : int
        0 if the form is not set.
    """

    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    offset: int
    sform: NDArray[np.float64]
    sform_code: int
    qform: NDArray[np.float64]
    qform_code: int


_TYPES = {2: "u1", 4: "<i2", 8: "<i4", 16: "<f4", 64: "<f8", 256: "i1", 512: "<u2", 768: "<u4"}
_TYPES |= {1024: "<i8", 1280: "<u8"}


def checked_planes(path: Path, grid: Grid, source: Source, *, slope: float = 1.0) -> Planes:
    """Yield the planes (J, I) of a NIfTI after checking its geometry against the grid.

    Planes are decoded one at a time, to limit memory.

    Raises
    ------
    ScanError
        WRITE_MISMATCH. A damaged file may raise other exceptions, which the caller handles.
    """
    forms = check_geometry(path, grid, source, slope=slope)
    _check_length(path, forms)
    i, j, k = grid.shape
    size = i * j * forms.dtype.itemsize
    with gzip.open(path) as file:
        file.read(forms.offset)
        for _ in range(k):
            yield np.frombuffer(file.read(size), forms.dtype).reshape(j, i)
        if file.read(1):  # reading to the end verifies the checksum
            raise mismatch_error(f"{path.name} is too long")


def check_voxels(
    folder: Path, name: str, array: NDArray[Any], grid: Grid, source: Source, *, slope: float = 1.0
) -> None:
    """Compare a NIfTI file with an array (I, J, K) on the grid: geometry and voxels.

    Raises
    ------
    ScanError
        WRITE_MISMATCH.
    """
    with decoding(name):
        planes = checked_planes(folder / name, grid, source, slope=slope)
        deque(same_planes(planes, array, name), maxlen=0)


def same_planes(written: Planes, array: NDArray[Any], name: str) -> Planes:
    """Compare planes (J, I) with an array (I, J, K) by value, and yield them."""
    for plane, expected in zip(written, array.T, strict=True):
        nan = bool(plane.dtype.kind == "f" and expected.dtype.kind == "f")
        if not np.array_equal(plane, expected, equal_nan=nan):
            raise mismatch_error(f"{name} holds other voxels")
        yield plane


def check_geometry(path: Path, grid: Grid, source: Source, *, slope: float = 1.0) -> NiftiGeometry:
    """Compare the geometry of a NIfTI, by its header and by SimpleITK, with the grid.

    Raises
    ------
    ScanError
        WRITE_MISMATCH.
    """
    forms = _forms(path, slope)
    if forms.shape != grid.shape:
        raise mismatch_error(f"{path.name} has a different shape")
    sform, qform = grid.affine, grid.affine
    itk_accepts = not grid.sheared
    if isinstance(source, NiftiSource) and has_own_forms(source):
        # If one form is missing, the other is in its place
        existing = [form for form in (source.sform, source.qform) if form is not None]
        sform, qform = existing[0], existing[-1]
        directions = sform[:3, :3] / np.linalg.norm(sform[:3, :3], axis=0)
        deviation = np.abs(directions @ directions.T - np.eye(3)).max()
        itk_accepts = not deviation > _MAX_AXIS_COSINE
    _check_forms(forms, sform, qform, forms_for(grid, source), path.name)
    if itk_accepts:
        _check_itk(path, forms)
    return forms


def _check_itk(path: Path, forms: NiftiGeometry) -> None:
    """Compare the geometry that SimpleITK reads with the decoded geometry."""
    form = forms.sform if forms.sform_code else forms.qform
    forms_distance = _corner_distance(form, forms.qform, forms) if forms.qform_code else 0.0
    if forms_distance > _QFORM_TOLERANCE_MM + _rounding(form, forms):
        return  # the source's own forms differ, and so do their readers
    # ITK takes directions and offset from one form, the spacing from the other
    tolerance = _rounding(form, forms) + 6 * forms_distance
    if not _corner_distance(itk_affine(path), form, forms) <= tolerance:
        raise mismatch_error(f"{path.name} has a different position in ITK")


def _check_length(path: Path, forms: NiftiGeometry) -> None:
    """Check the decompressed length in the gzip trailer: ITK reads a truncated file as zeros."""
    with path.open("rb") as file:
        file.seek(-4, os.SEEK_END)
        length = struct.unpack("<I", file.read())[0]  # RFC 1952: ISIZE, modulo 2^32
    if length != (forms.offset + math.prod(forms.shape) * forms.dtype.itemsize) % 2**32:
        raise mismatch_error(f"{path.name} is truncated")


@contextmanager
def path_for_itk(path: Path) -> Iterator[str]:
    """Yield a path of a file that is UTF-8: SimpleITK aborts the process at any other.

    The name of the file itself must be UTF-8.
    """
    if is_utf8(str(path)):
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def itk_array(path: Path) -> NDArray[Any]:
    """Return the voxels (I, J, K) that SimpleITK reads."""
    import SimpleITK as sitk  # noqa: N813  # as its documentation does

    with path_for_itk(path) as plain:
        return np.asarray(sitk.GetArrayFromImage(sitk.ReadImage(plain)).T)


def itk_affine(path: Path) -> NDArray[np.float64]:
    """Return the affine, voxel index to RAS mm, that SimpleITK reads."""
    import SimpleITK as sitk  # noqa: N813  # as its documentation does

    reader = sitk.ImageFileReader()
    with path_for_itk(path) as plain:
        reader.SetFileName(plain)
        reader.ReadImageInformation()
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(reader.GetDirection(), (3, 3)) * reader.GetSpacing()
    affine[:3, 3] = reader.GetOrigin()
    return np.asarray(LPS_TO_RAS_AFFINE @ affine)


def _check_forms(
    forms: NiftiGeometry,
    sform: NDArray[np.float64],
    qform: NDArray[np.float64],
    expected: NiftiSource,
    name: str,
) -> None:
    """Compare the decoded forms with `sform` and `qform`; `expected` gives their codes."""
    if (forms.sform_code, forms.qform_code) != (expected.sform_code, expected.qform_code):
        raise mismatch_error(f"{name} has different form codes")
    if forms.sform_code and not np.array_equal(forms.sform, np.float32(sform)):
        raise mismatch_error(f"{name} has a different position")
    if forms.qform_code:
        tolerance = _QFORM_TOLERANCE_MM + _rounding(qform, forms)
        if not _corner_distance(forms.qform, qform, forms) <= tolerance:
            raise mismatch_error(f"{name} has a different position by its qform")


def _forms(path: Path, scale: float) -> NiftiGeometry:
    """Parse a NIfTI-1 header (nifti1.h); refuse contents that scanloom never writes."""
    with gzip.open(path) as file:
        raw = file.read(352)
    size, magic = struct.unpack_from("<i", raw)[0], raw[344:348]
    dim, pixdim = struct.unpack_from("<8h", raw, 40), struct.unpack_from("<8f", raw, 76)
    slope, intercept = struct.unpack_from("<2f", raw, 112)
    is_ours = (size, magic, dim[0], raw[123]) == (348, b"n+1\0", 3, 2)
    if not is_ours or (slope, intercept) != (np.float32(scale), 0):
        raise mismatch_error(f"{path.name} is not a NIfTI-1 in mm of the expected scale")
    if any(raw[148:252]) or any(raw[328:344]):
        raise mismatch_error(f"{path.name} has text in its header")
    sform = np.eye(4)
    sform[:3] = np.reshape(struct.unpack_from("<12f", raw, 280), (3, 4))
    return NiftiGeometry(
        shape=(dim[1], dim[2], dim[3]),
        dtype=np.dtype(_TYPES[struct.unpack_from("<h", raw, 70)[0]]),
        offset=int(struct.unpack_from("<f", raw, 108)[0]),
        sform=sform,
        sform_code=struct.unpack_from("<h", raw, 254)[0],
        qform=_qform(struct.unpack_from("<6f", raw, 256), pixdim),
        qform_code=struct.unpack_from("<h", raw, 252)[0],
    )


def _qform(quaternion: tuple[float, ...], pixdim: tuple[float, ...]) -> NDArray[np.float64]:
    """Return the affine by method 2 of nifti1.h: rotation (b, c, d), offset, signed pixdim.

    As in nifti1_io, the rotation is by 180 degrees if a is nearly 0.
    """
    b, c, d, *offset = quaternion
    rest = 1.0 - (b * b + c * c + d * d)
    a = math.sqrt(max(rest, 0.0))
    if rest < 1e-7:
        length = math.sqrt(b * b + c * c + d * d)
        a, b, c, d = 0.0, b / length, c / length, d / length
    rotation = [
        [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
        [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
        [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c],
    ]
    form = np.eye(4)
    form[:3, :3] = np.array(rotation) * (pixdim[1], pixdim[2], pixdim[3] * (pixdim[0] or 1.0))
    form[:3, 3] = offset
    return form


def _corner_distance(
    first: NDArray[Any], second: NDArray[Any], grid: Grid | NiftiGeometry
) -> float:
    """Return the largest distance in mm between the corners of the grid by two affines."""
    corners = np.array([[i, j, k, 1] for i in (0, 1) for j in (0, 1) for k in (0, 1)])
    corners = corners * (*(n - 1 for n in grid.shape), 1)
    return float(np.linalg.norm((corners @ (first - second).T)[:, :3], axis=1).max())


def _rounding(affine: NDArray[np.float64], grid: Grid | NiftiGeometry) -> float:
    """Return the largest shift of a corner of the grid by rounding to float32, in mm."""
    magnitudes = np.abs(affine[:3]) @ (*(n - 1 for n in grid.shape), 1)
    return _FLOAT32_TOLERANCE * float(np.linalg.norm(magnitudes))
