"""Read NIfTI-1 and NIfTI-2: single files, packed or not, and .hdr/.img pairs; of Analyze 7.5 too.

Which of two forms counts: the standard gives them different meanings (qform: the scanner; sform:
the scanner, or an atlas it was aligned with) and leaves the choice to the program. The sform wins,
as for nibabel and, since 5.2, for ITK; where the qform says something else, FORMS_DISAGREE tells.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Grid, Reason, ScanError
from scanloom.io.analyze import analyze_as_nifti, is_analyze
from scanloom.io.packing import packing_of, unpacked_start
from scanloom.io.plain import (
    MIN_VOXELS,
    affine_from_codes,
    check_size,
    straighten,
)
from scanloom.io.quaternion import HALF_TURN, HALF_TURN_DOUBLE, rotations
from scanloom.io.raw_volume import RawVolume
from scanloom.io.scan import NiftiSource
from scanloom.io.voxels import Coding, Layout, check_layout, foreign_errors

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1Header

PAIR_SUFFIXES = (".hdr", ".hdr.gz")
NIFTI_SUFFIXES = (".nii", ".nii.gz", ".nii.bz2", ".nii.xz", ".nii.zst", *PAIR_SUFFIXES)
FORMS_DISAGREE_MM = 0.1
"""Forms that place a corner this differently lie apart: within a few milliradians of half a turn
that may be the rounding of the quaternion, but readers differ by as much."""
TOO_LONG, TOO_LONG_DOUBLE = (3 * float(np.finfo(kind).eps) for kind in (np.float32, np.float64))
"""By how much b² + c² + d² may be more than 1: rounding, as nibabel allows it."""

_HEADER_BYTES = 540  # of NIfTI-2; NIfTI-1 has 348
_MAGIC_END = 348
_HEADER_SIZES = tuple(n.to_bytes(4, order) for n in (348, 540) for order in ("little", "big"))
_LENGTHS = {0: 1.0, 1: 1000.0, 2: 1.0, 3: 0.001}  # xyzt_units: unknown, m, mm, micrometre; to mm
_FORM_CODES = range(6)  # nifti1.h: NIFTI_XFORM_UNKNOWN to NIFTI_XFORM_TEMPLATE_OTHER
_CIFTI = range(3000, 3100)  # intent codes of surfaces and connectivity (CIFTI-2)
_VECTORS = (*range(1004, 1011), 2003, 2004)  # matrices, vectors, quaternions, RGB(A) vectors


def nifti_files(path: Path) -> tuple[Path, ...]:
    """Return the files of a NIfTI image: itself, and the .img of a .hdr."""
    name = path.name
    for suffix in (".hdr.gz", ".hdr"):
        if name.lower().endswith(suffix):
            stem = name[: -len(suffix)]
            for other in (".img", ".img.gz", ".IMG"):
                if path.with_name(stem + other).exists():
                    return path, path.with_name(stem + other)
    return (path,)


def parse_nifti(
    files: Sequence[Path], phase: int | None, orientation: str | None, limit: int
) -> RawVolume:
    """Parse the header of a NIfTI or Analyze image; see `ParseHeader`.

    The volumes of a file with 5 dimensions are numbered in the order in which they are stored.

    Raises
    ------
    ScanError
        FOUR_D, PIXEL_TYPE, ORIENTATION_UNKNOWN, BAD_GEOMETRY, TOO_FEW_SLICES, RESCALE, TOO_LARGE,
        TRUNCATED, DAMAGED, NOT_AN_IMAGE, NOT_FOUND, UNREADABLE or OUT_OF_MEMORY.
    """
    with foreign_errors("the NIfTI"):
        header = _read_header(files[0])
        layout = _layout(header, files, phase)
        check_layout(layout, limit)
    source, broken = _forms(header)
    affine, flags = _affine(header, source, layout.shape, orientation)
    check_size(affine, layout.shape)
    flags = (Flag.FORMS_DISAGREE, *flags) if broken else flags
    return RawVolume(layout, Grid(layout.shape, affine), flags, source)


def _read_header(path: Path) -> Nifti1Header:
    from nibabel.nifti1 import Nifti1Header, Nifti1PairHeader
    from nibabel.nifti2 import Nifti2Header, Nifti2PairHeader
    from nibabel.spatialimages import HeaderDataError
    from nibabel.wrapstruct import WrapStructError

    start = unpacked_start(path, _HEADER_BYTES)
    kinds = {
        b"n+1\0": Nifti1Header,
        b"ni1\0": Nifti1PairHeader,
        b"n+2\0": Nifti2Header,
        b"ni2\0": Nifti2PairHeader,
    }
    kind = kinds.get(start[344:348]) or kinds.get(start[4:8])
    if kind is None and path.name.lower().endswith(PAIR_SUFFIXES) and is_analyze(start):
        return analyze_as_nifti(start)
    if kind is None:
        cut = start[:4] in _HEADER_SIZES and len(start) < _MAGIC_END
        reason = Reason.TRUNCATED if cut else Reason.DAMAGED
        raise ScanError(reason, "the file has no NIfTI header")
    size = kind.template_dtype.itemsize
    if len(start) < size:
        raise ScanError(Reason.TRUNCATED, "the file ends in its header")
    try:
        return kind.from_fileobj(io.BytesIO(start[:size] + bytes(4)), check=False)
    except (HeaderDataError, WrapStructError, ValueError, KeyError) as exc:
        detail = f"the NIfTI header is damaged ({type(exc).__name__})"
        raise ScanError(Reason.DAMAGED, detail) from exc


def _layout(header: Nifti1Header, files: Sequence[Path], phase: int | None) -> Layout:
    """Judge dimensions and data type, and find the volume that is meant."""
    if int(header["intent_code"]) in _CIFTI:
        raise ScanError(Reason.NOT_AN_IMAGE, "the file holds CIFTI data, no volume")
    shape = _shape(header)
    volumes = math.prod(shape[3:])
    if math.prod(shape[4:]) > 1 and int(header["intent_code"]) in _VECTORS:
        raise ScanError(Reason.PIXEL_TYPE, "its voxels are vectors")
    if len(shape) < 3 or min(shape[:3]) < MIN_VOXELS:
        raise ScanError(Reason.TOO_FEW_SLICES, f"the image has {shape} voxels")
    if phase is None and volumes > 1:
        raise ScanError(Reason.FOUR_D, f"{volumes} volumes, numbered from 0")
    if not 0 <= (phase or 0) < volumes:
        raise ScanError(Reason.FOUR_D, f"{volumes} volumes from 0, number {phase} was asked for")
    dtype = _dtype(header)
    paired = header["magic"].item() in (b"ni1", b"ni2")
    if len(files) < 2:
        files = nifti_files(files[0])
    if paired and len(files) < 2:
        raise ScanError(Reason.NOT_FOUND, "the .img file beside the .hdr is missing")
    offset = float(header["vox_offset"])
    least = 0 if paired else header.template_dtype.itemsize
    if not least <= offset < 1 << 40:
        raise ScanError(Reason.DAMAGED, "the header says that the voxels begin inside it")
    path = files[-1] if paired else files[0]
    slope, intercept = _scaling(header)
    coding: Coding = packing_of(path) or "raw"
    size = (shape[0], shape[1], shape[2])
    return Layout(
        path,
        coding,
        start=0,
        skip=int(offset),
        shape=size,
        dtype=dtype,
        volumes=volumes,
        volume=phase or 0,
        slope=slope,
        intercept=intercept,
    )


def _shape(header: Nifti1Header) -> tuple[int, ...]:
    dims = [int(n) for n in header["dim"]]
    if not 1 <= dims[0] <= 7 or min(dims[1 : dims[0] + 1]) < 1:
        raise ScanError(Reason.DAMAGED, "its dimensions are not positive numbers")
    shape = dims[1 : dims[0] + 1]
    while len(shape) > 3 and shape[-1] == 1:
        shape.pop()
    return tuple(shape)


def _dtype(header: Nifti1Header) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(header.get_data_dtype())
    except (KeyError, TypeError) as exc:  # an unknown code
        raise ScanError(Reason.PIXEL_TYPE, "its data type code is unknown") from exc
    if dtype.kind not in "iuf" or dtype.itemsize > 8 or dtype.itemsize < 1:
        raise ScanError(Reason.PIXEL_TYPE, "its voxels are colours, complex or extended numbers")
    if dtype == np.float16:
        raise ScanError(Reason.PIXEL_TYPE, "its voxels are half-precision numbers")
    return dtype


def _scaling(header: Nifti1Header) -> tuple[float, float]:
    """Return scl_slope and scl_inter; a slope of 0 or NaN means none (NIfTI-1 standard)."""
    slope, intercept = float(header["scl_slope"]), float(header["scl_inter"])
    if slope == 0 or math.isnan(slope):
        return 1.0, 0.0
    if not (math.isfinite(slope) and math.isfinite(intercept)):
        raise ScanError(Reason.RESCALE, "scl_slope or scl_inter is no number")
    return slope, intercept


def _to_mm(header: Nifti1Header) -> float:
    """Return how many mm the header's unit of length has."""
    code = int(header["xyzt_units"]) & 7
    if code not in _LENGTHS:
        raise ScanError(Reason.BAD_GEOMETRY, "its unit of length is unknown")
    return _LENGTHS[code]


def _forms(header: Nifti1Header) -> tuple[NiftiSource, bool]:
    """Return the forms in mm, and whether the qform was left out because it is no rotation."""
    codes = int(header["sform_code"]), int(header["qform_code"])
    if not all(code in _FORM_CODES for code in codes):
        raise ScanError(Reason.DAMAGED, "a form code is none of the standard's")
    sform = np.array(header.get_sform(), dtype=np.float64) if codes[0] else None
    qform = _qform(header) if codes[1] else None
    for form in (sform, qform):
        if form is not None:
            form[:3] *= _to_mm(header)
    if qform is None and codes[1]:
        if sform is None:
            raise ScanError(Reason.BAD_GEOMETRY, "its qform is no rotation")
        return NiftiSource(sform, codes[0], None, 0), True
    single = qform is not None and header["quatern_b"].dtype.itemsize == 4
    quaternion = _quaternion(header) if single else None
    return NiftiSource(sform, codes[0], qform, codes[1], quaternion), False


def _quaternion(header: Nifti1Header) -> tuple[float, float, float]:
    b, c, d = (float(header[f"quatern_{letter}"]) for letter in "bcd")
    return b, c, d


def _qform(header: Nifti1Header) -> NDArray[np.float64] | None:
    """Return the qform as nifti1_io reads it; None where quaternion or spacing can't be one.

    nibabel takes more quaternions for half a turn than ITK and others who use nifti1_io, which
    came with the standard. pixdim[0] says by its sign which way k grows (nifti1.h).
    """
    bcd = np.array(_quaternion(header))
    spacing = np.array(header["pixdim"][1:4], dtype=np.float64)
    offset = [float(header[f"qoffset_{axis}"]) for axis in "xyz"]
    single = header["quatern_b"].dtype.itemsize == 4
    if not (np.isfinite([*bcd, *spacing, *offset]).all() and spacing.min() > 0):
        return None
    if np.abs(bcd).max() > 2 or bcd @ bcd > 1 + (TOO_LONG if single else TOO_LONG_DOUBLE):
        return None
    qform = np.eye(4)
    qform[:3, :3] = rotations(bcd[None], HALF_TURN if single else HALF_TURN_DOUBLE)[0] * spacing
    qform[:3, 2] *= -1 if header["pixdim"][0] < 0 else 1
    qform[:3, 3] = offset
    return qform


def _affine(
    header: Nifti1Header,
    source: NiftiSource,
    shape: tuple[int, int, int],
    orientation: str | None,
) -> tuple[NDArray[np.float64], tuple[Flag, ...]]:
    """Return the affine: sform before qform; `orientation` only where there is neither."""
    differ = False
    if source.sform is not None:
        affine = source.sform
        differ = source.qform is not None and _apart(source.sform, source.qform, shape)
    elif source.qform is not None:
        affine = source.qform
    elif orientation is None:
        raise ScanError(Reason.ORIENTATION_UNKNOWN, "the file does not say how its axes lie")
    else:
        spacing = np.abs(np.asarray(header["pixdim"][1:4], dtype=np.float64)) * _to_mm(header)
        affine = affine_from_codes(orientation, spacing, shape)
        return affine, (Flag.ORIENTATION_GIVEN,)
    affine, flags = straighten(affine, shape)
    return affine, (Flag.FORMS_DISAGREE, *flags) if differ else flags


def _apart(
    one: NDArray[np.float64], other: NDArray[np.float64], shape: tuple[int, int, int]
) -> bool:
    """Whether two affines place a corner of the volume differently."""
    corners = np.array(list(itertools.product(*((0, n - 1) for n in shape), [1])))
    with np.errstate(over="ignore", invalid="ignore"):
        far = np.linalg.norm((corners @ (one - other).T)[:, :3], axis=1).max()
    return not far <= FORMS_DISAGREE_MM
