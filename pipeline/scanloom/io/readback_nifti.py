"""NIfTI, inflated by zlib and laid out by its header, byte by byte, plane by plane.

Where it lies is compared with what float32 can say of the grid, and with where SimpleITK puts it.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid
from scanloom.core.world import LPS_TO_RAS_AFFINE
from scanloom.io.forms import forms_for, has_own_forms
from scanloom.io.readback_slices import mismatch
from scanloom.io.scan import NiftiSource, Source

ROUNDED = 2 * float(np.finfo(np.float32).eps)
"""Share of its parts by which a place may move: direction, its length, spacing and offset are
rounded to float32, each by a quarter of this at most."""

APART = 0.01
"""mm between a corner by a qform and by the affine that it was made of."""

LEANING = 9e-5
"""Cosine of axes above which ITK may take no sform: its limit is 1e-4, in float32."""

Planes = Iterator[NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Forms:
    """The geometry of a NIfTI-1 header, as the standard lays its bytes out."""

    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    offset: int
    sform: NDArray[np.float64]
    sform_code: int
    qform: NDArray[np.float64]
    qform_code: int


_TYPES = {2: "u1", 4: "<i2", 8: "<i4", 16: "<f4", 64: "<f8", 256: "i1", 512: "<u2", 768: "<u4"}
_TYPES |= {1024: "<i8", 1280: "<u8"}


def planes_of(path: Path, grid: Grid, source: Source) -> Planes:
    """Yield a NIfTI's planes (J, I) after its geometry was compared with the grid's.

    Never all at once: the labels themselves are the most that is held.

    Raises
    ------
    ScanError
        WRITE_MISMATCH. What else is raised for a damaged file is the caller's to take.
    """
    forms = check_place(path, grid, source)
    _check_whole(path, forms)
    i, j, k = grid.shape
    size = i * j * forms.dtype.itemsize
    with gzip.open(path) as file:
        file.read(forms.offset)
        for _ in range(k):
            yield np.frombuffer(file.read(size), forms.dtype).reshape(j, i)
        if file.read(1):  # to the end, where the check sum is
            raise mismatch(f"{path.name} is too long")


def check_place(path: Path, grid: Grid, source: Source) -> Forms:
    """Compare the header of a NIfTI, and SimpleITK's reading of it, with where the voxels lie.

    Raises
    ------
    ScanError
        WRITE_MISMATCH.
    """
    forms = _forms(path)
    if forms.shape != grid.shape:
        raise mismatch(f"{path.name} has another shape")
    sform, qform = grid.affine, grid.affine
    itk_takes_it = not grid.sheared
    if isinstance(source, NiftiSource) and has_own_forms(source):
        sform, qform = _both(source)
        itk_takes_it = not _leans(sform)
    _check_forms(forms, sform, qform, forms_for(grid, source), path.name)
    if itk_takes_it:
        _check_itk(path, forms)
    return forms


def _check_itk(path: Path, forms: Forms) -> None:
    """Compare SimpleITK's reading with what was decoded."""
    form = forms.sform if forms.sform_code else forms.qform
    differ = _apart(form, forms.qform, forms) if forms.qform_code else 0.0
    if differ > APART + _rounding(form, forms):
        return  # the source's own forms; readers differ
    # ITK mixes: directions and offset of one form, the spacing of the other
    if not _apart(itk_affine(path), form, forms) <= _rounding(form, forms) + 6 * differ:
        raise mismatch(f"{path.name} lies elsewhere for ITK")


def _both(source: NiftiSource) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return sform and qform, one for the other where it is missing."""
    forms = [form for form in (source.sform, source.qform) if form is not None]
    return forms[0], forms[-1]


def _check_whole(path: Path, forms: Forms) -> None:
    """Compare the length that the gzip says at its end: ITK reads a file that was cut as zeros."""
    with path.open("rb") as file:
        file.seek(-4, os.SEEK_END)
        length = struct.unpack("<I", file.read())[0]  # RFC 1952: ISIZE, modulo 2^32
    if length != (forms.offset + math.prod(forms.shape) * forms.dtype.itemsize) % 2**32:
        raise mismatch(f"{path.name} is cut")


def itk_array(path: Path) -> NDArray[Any]:
    """Return voxels (I, J, K) as SimpleITK reads them."""
    import SimpleITK as sitk  # noqa: N813

    return np.asarray(sitk.GetArrayFromImage(sitk.ReadImage(path)).T)


def itk_affine(path: Path) -> NDArray[np.float64]:
    """Return voxel index to RAS mm as SimpleITK reads it."""
    import SimpleITK as sitk  # noqa: N813

    reader = sitk.ImageFileReader()
    reader.SetFileName(path)
    reader.ReadImageInformation()
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(reader.GetDirection(), (3, 3)) * reader.GetSpacing()
    affine[:3, 3] = reader.GetOrigin()
    return np.asarray(LPS_TO_RAS_AFFINE @ affine)


def _check_forms(
    forms: Forms,
    sform: NDArray[np.float64],
    qform: NDArray[np.float64],
    wanted: NiftiSource,
    name: str,
) -> None:
    """Compare what was decoded with what the forms should say; `wanted` says only which are due."""
    if (forms.sform_code, forms.qform_code) != (wanted.sform_code, wanted.qform_code):
        raise mismatch(f"{name} has other form codes")
    if forms.sform_code and not np.array_equal(forms.sform, np.float32(sform)):
        raise mismatch(f"{name} lies elsewhere")
    if forms.qform_code and not _apart(forms.qform, qform, forms) <= APART + _rounding(
        qform, forms
    ):
        raise mismatch(f"{name} lies elsewhere by its qform")


def _forms(path: Path) -> Forms:
    """Read a NIfTI-1 header (nifti1.h), and refuse what we never write in it."""
    with gzip.open(path) as file:
        raw = file.read(352)
    size, magic = struct.unpack_from("<i", raw)[0], raw[344:348]
    dim, pixdim = struct.unpack_from("<8h", raw, 40), struct.unpack_from("<8f", raw, 76)
    slope, intercept = struct.unpack_from("<2f", raw, 112)
    if (size, magic, dim[0], raw[123]) != (348, b"n+1\0", 3, 2) or (slope, intercept) != (1, 0):
        raise mismatch(f"{path.name} is no unscaled NIfTI-1 in mm")
    if any(raw[148:252]) or any(raw[328:344]):
        raise mismatch(f"{path.name} has text in its header")
    sform = np.eye(4)
    sform[:3] = np.reshape(struct.unpack_from("<12f", raw, 280), (3, 4))
    return Forms(
        shape=(dim[1], dim[2], dim[3]),
        dtype=np.dtype(_TYPES[struct.unpack_from("<h", raw, 70)[0]]),
        offset=int(struct.unpack_from("<f", raw, 108)[0]),
        sform=sform,
        sform_code=struct.unpack_from("<h", raw, 254)[0],
        qform=_qform(struct.unpack_from("<6f", raw, 256), pixdim),
        qform_code=struct.unpack_from("<h", raw, 252)[0],
    )


def _qform(quaternion: tuple[float, ...], pixdim: tuple[float, ...]) -> NDArray[np.float64]:
    """Return method 2 of nifti1.h: a rotation (b, c, d), an offset, and pixdim with its sign.

    As nifti1_io does it: half a turn where a would be nearly 0.
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


def _apart(one: NDArray[Any], other: NDArray[Any], grid: Grid | Forms) -> float:
    """Return the largest distance, mm, that two affines put between one corner of the grid."""
    corners = np.array([[i, j, k, 1] for i in (0, 1) for j in (0, 1) for k in (0, 1)])
    corners = corners * (*(n - 1 for n in grid.shape), 1)
    return float(np.linalg.norm((corners @ (one - other).T)[:, :3], axis=1).max())


def _rounding(affine: NDArray[np.float64], grid: Grid | Forms) -> float:
    """Return by how many mm float32 may move a corner of the grid."""
    parts = np.abs(affine[:3]) @ (*(n - 1 for n in grid.shape), 1)
    return ROUNDED * float(np.linalg.norm(parts))


def _leans(affine: NDArray[np.float64]) -> bool:
    """Whether ITK may find that an sform's axes are not at right angles."""
    directions = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    return bool(np.abs(directions @ directions.T - np.eye(3)).max() > LEANING)
