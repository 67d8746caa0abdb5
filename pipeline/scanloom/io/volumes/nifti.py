"""Read NIfTI-1 and NIfTI-2: single files, compressed or not, and .hdr/.img pairs; and Analyze 7.5.

The standard gives sform and qform different meanings (qform: scanner coordinates; sform: those, or
an atlas that the scan was aligned with) and leaves the choice to the program. The sform is used, as
by nibabel and, since 5.2, by ITK; if the qform differs, the volume has the flag FORMS_DISAGREE.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Grid, Reason, ScanError
from scanloom.io.affines import MIN_VOXELS, affine_from_codes, check_plausible_size, orthogonalize
from scanloom.io.scan import NiftiSource, Source
from scanloom.io.system.compressed_streams import compression_of, decompressed_start
from scanloom.io.volumes.raw_voxels import (
    Coding,
    RawLayout,
    RawVolume,
    check_layout,
    foreign_errors,
    select_volume,
)

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1Header, Nifti1PairHeader


PAIR_SUFFIXES = (".hdr", ".hdr.gz")
NIFTI_SUFFIXES = (".nii", ".nii.gz", ".nii.bz2", ".nii.xz", ".nii.zst", *PAIR_SUFFIXES)
FORMS_DISAGREE_MM = 0.1
"""Largest distance between the corners of a volume by sform and by qform. Within a few milliradians
of half a turn, rounding of the quaternion may exceed it, but readers then differ by as much."""
NORM_TOLERANCE_FLOAT32, NORM_TOLERANCE_FLOAT64 = (
    3 * float(np.finfo(dtype).eps) for dtype in (np.float32, np.float64)
)
"""Largest excess of b² + c² + d² over 1: rounding, as nibabel tolerates it."""

_HEADER_BYTES = 540  # of NIfTI-2; of NIfTI-1 348
_MAGIC_END = 348  # byte
_HEADER_SIZES = tuple(n.to_bytes(4, order) for n in (348, 540) for order in ("little", "big"))
_UNITS_MM = {0: 1.0, 1: 1000.0, 2: 1.0, 3: 0.001}  # xyzt_units: unknown, m, mm, micrometre
_FORM_CODES = range(6)  # nifti1.h: NIFTI_XFORM_UNKNOWN to NIFTI_XFORM_TEMPLATE_OTHER
_CIFTI_INTENTS = range(3000, 3100)  # surfaces and connectivity (CIFTI-2)
_VECTOR_INTENTS = (*range(1004, 1011), 2003, 2004)  # matrices, vectors, quaternions, RGB(A) vectors


def nifti_companions(path: Path) -> tuple[Path, ...]:
    """Return the files of a NIfTI image: the file, and the .img of a .hdr."""
    name = path.name
    for suffix in (".hdr.gz", ".hdr"):
        if name.lower().endswith(suffix):
            stem = name[: -len(suffix)]
            for image_suffix in (".img", ".img.gz", ".IMG"):
                image = path.with_name(stem + image_suffix)
                if image.exists():
                    return path, image
    return (path,)


def parse_nifti(
    files: Sequence[Path], phase: int | None, orientation: str | None, limit: int
) -> RawVolume:
    """Parse the header of a NIfTI or Analyze image, for `VolumeFormat`.

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
    source, qform_refused = _forms(header)
    affine, flags = _affine(header, source, layout.shape, orientation)
    check_plausible_size(affine, layout.shape)
    flags = (Flag.FORMS_DISAGREE, *flags) if qform_refused else flags
    return RawVolume(layout, Grid(layout.shape, affine), flags, source)


def _read_header(path: Path) -> Nifti1Header:
    from nibabel.nifti1 import Nifti1Header, Nifti1PairHeader
    from nibabel.nifti2 import Nifti2Header, Nifti2PairHeader
    from nibabel.spatialimages import HeaderDataError
    from nibabel.wrapstruct import WrapStructError

    start = decompressed_start(path, _HEADER_BYTES)
    header_classes = {
        b"n+1\0": Nifti1Header,
        b"ni1\0": Nifti1PairHeader,
        b"n+2\0": Nifti2Header,
        b"ni2\0": Nifti2PairHeader,
    }
    # The magic number, of NIfTI-1 at the end of the header, of NIfTI-2 after its size
    header_class = header_classes.get(start[344:348]) or header_classes.get(start[4:8])
    if header_class is None:
        is_pair = path.name.lower().endswith(PAIR_SUFFIXES)
        if is_pair and (byte_order := analyze_byte_order(start)):
            return analyze_as_nifti(start, byte_order)
        truncated = start[:4] in _HEADER_SIZES and len(start) < _MAGIC_END
        reason = Reason.TRUNCATED if truncated else Reason.DAMAGED
        raise ScanError(reason, "the file has no NIfTI header")
    size = header_class.template_dtype.itemsize
    if len(start) < size:
        raise ScanError(Reason.TRUNCATED, "the file ends within the NIfTI header")
    try:
        return header_class.from_fileobj(io.BytesIO(start[:size] + bytes(4)), check=False)
    except (HeaderDataError, WrapStructError, ValueError, KeyError) as exc:
        detail = f"the NIfTI header is damaged ({type(exc).__name__})"
        raise ScanError(Reason.DAMAGED, detail) from exc


def _layout(header: Nifti1Header, files: Sequence[Path], phase: int | None) -> RawLayout:
    """Check dimensions and data type, and locate the requested volume."""
    # Before the dimensions, which are not those of a volume then
    if int(header["intent_code"]) in _CIFTI_INTENTS:
        raise ScanError(Reason.NOT_AN_IMAGE, "the file holds CIFTI data, not a volume")
    shape = _shape(header)
    volumes = math.prod(shape[3:])
    if math.prod(shape[4:]) > 1 and int(header["intent_code"]) in _VECTOR_INTENTS:
        raise ScanError(Reason.PIXEL_TYPE, "the voxels are vectors")
    if len(shape) < 3 or min(shape[:3]) < MIN_VOXELS:
        raise ScanError(Reason.TOO_FEW_SLICES, f"the image has {shape} voxels")
    volume = select_volume(volumes, phase)
    dtype = _dtype(header)
    is_pair = header["magic"].item() in (b"ni1", b"ni2")
    if len(files) < 2:
        files = nifti_companions(files[0])
    if is_pair and len(files) < 2:
        raise ScanError(Reason.NOT_FOUND, "the .img file of the .hdr is missing")
    offset = float(header["vox_offset"])
    min_offset = 0 if is_pair else header.template_dtype.itemsize
    if not min_offset <= offset < 1 << 40:
        raise ScanError(Reason.DAMAGED, "vox_offset of the NIfTI header is invalid")
    path = files[-1] if is_pair else files[0]
    slope, intercept = _scaling(header)
    coding: Coding = compression_of(path) or "raw"
    return RawLayout(
        path,
        coding,
        start=0,
        skip=int(offset),
        shape=(shape[0], shape[1], shape[2]),
        dtype=dtype,
        volumes=volumes,
        volume=volume,
        slope=slope,
        intercept=intercept,
    )


def _shape(header: Nifti1Header) -> tuple[int, ...]:
    dims = [int(n) for n in header["dim"]]
    if not 1 <= dims[0] <= 7 or min(dims[1 : dims[0] + 1]) < 1:
        raise ScanError(Reason.DAMAGED, "the dimensions of the NIfTI header are not positive")
    shape = dims[1 : dims[0] + 1]
    while len(shape) > 3 and shape[-1] == 1:
        shape.pop()
    return tuple(shape)


def _dtype(header: Nifti1Header) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(header.get_data_dtype())
    except (KeyError, TypeError) as exc:  # an unknown code
        raise ScanError(Reason.PIXEL_TYPE, "the data type code is unknown") from exc
    if dtype.kind not in "iuf" or dtype.itemsize > 8 or dtype.itemsize < 1:
        raise ScanError(Reason.PIXEL_TYPE, "the voxels are colours, complex or extended numbers")
    if dtype == np.float16:
        raise ScanError(Reason.PIXEL_TYPE, "the voxels are half-precision numbers")
    return dtype


def _scaling(header: Nifti1Header) -> tuple[float, float]:
    """Return scl_slope and scl_inter; a slope of 0 or NaN means none (NIfTI-1 standard)."""
    slope, intercept = float(header["scl_slope"]), float(header["scl_inter"])
    if slope == 0 or math.isnan(slope):
        return 1.0, 0.0
    if not (math.isfinite(slope) and math.isfinite(intercept)):
        raise ScanError(Reason.RESCALE, "scl_slope or scl_inter is not finite")
    return slope, intercept


def _unit_mm(header: Nifti1Header) -> float:
    """Return the header's unit of length in mm."""
    code = int(header["xyzt_units"]) & 7
    if code not in _UNITS_MM:
        raise ScanError(Reason.BAD_GEOMETRY, "the unit of length of the NIfTI header is unknown")
    return _UNITS_MM[code]


def _forms(header: Nifti1Header) -> tuple[NiftiSource, bool]:
    """Return the forms in mm, and whether the qform was left out as not being a rotation."""
    codes = int(header["sform_code"]), int(header["qform_code"])
    if not all(code in _FORM_CODES for code in codes):
        raise ScanError(Reason.DAMAGED, "the sform or qform code is not in the standard")
    sform = np.array(header.get_sform(), dtype=np.float64) if codes[0] else None
    qform = _qform(header) if codes[1] else None
    for form in (sform, qform):
        if form is not None:
            form[:3] *= _unit_mm(header)
    if qform is None and codes[1]:
        if sform is None:
            raise ScanError(Reason.BAD_GEOMETRY, "the qform is not a rotation")
        return NiftiSource(sform, codes[0], None, 0), True
    single = qform is not None and header["quatern_b"].dtype.itemsize == 4
    quaternion = _quaternion(header) if single else None
    return NiftiSource(sform, codes[0], qform, codes[1], quaternion), False


def _quaternion(header: Nifti1Header) -> tuple[float, float, float]:
    b, c, d = (float(header[f"quatern_{letter}"]) for letter in "bcd")
    return b, c, d


def _qform(header: Nifti1Header) -> NDArray[np.float64] | None:
    """Return the qform (4, 4) as nifti1_io reads it; None if quaternion or spacing is invalid.

    nibabel takes more quaternions as half a turn than ITK and other users of nifti1_io, the
    library of the standard. The sign of pixdim[0] is the direction of the third axis (nifti1.h).
    """
    bcd = np.array(_quaternion(header))
    spacing = np.array(header["pixdim"][1:4], dtype=np.float64)
    offset = [float(header[f"qoffset_{axis}"]) for axis in "xyz"]
    single = header["quatern_b"].dtype.itemsize == 4
    if not (np.isfinite([*bcd, *spacing, *offset]).all() and spacing.min() > 0):
        return None
    norm_tolerance = NORM_TOLERANCE_FLOAT32 if single else NORM_TOLERANCE_FLOAT64
    if np.abs(bcd).max() > 2 or bcd @ bcd > 1 + norm_tolerance:
        return None
    qform, half_turn = np.eye(4), HALF_TURN_FLOAT32 if single else HALF_TURN_FLOAT64
    qform[:3, :3] = rotations_from_quaternions(bcd[None], half_turn)[0] * spacing
    qform[:3, 2] *= -1 if header["pixdim"][0] < 0 else 1
    qform[:3, 3] = offset
    return qform


def _affine(
    header: Nifti1Header, source: NiftiSource, shape: tuple[int, int, int], orientation: str | None
) -> tuple[NDArray[np.float64], tuple[Flag, ...]]:
    """Return the affine (4, 4): the sform, else the qform, else by `orientation`."""
    disagree = False
    if source.sform is not None:
        affine = source.sform
        disagree = source.qform is not None and _corners_differ(source.sform, source.qform, shape)
    elif source.qform is not None:
        affine = source.qform
    elif orientation is None:
        raise ScanError(Reason.ORIENTATION_UNKNOWN, "the file has neither sform nor qform")
    else:
        spacing = np.abs(np.asarray(header["pixdim"][1:4], dtype=np.float64)) * _unit_mm(header)
        affine = affine_from_codes(orientation, spacing, shape)
        return affine, (Flag.ORIENTATION_GIVEN,)
    affine, flags = orthogonalize(affine, shape)
    return affine, (Flag.FORMS_DISAGREE, *flags) if disagree else flags


def _corners_differ(
    sform: NDArray[np.float64], qform: NDArray[np.float64], shape: tuple[int, int, int]
) -> bool:
    """Return whether a corner of the volume has different positions by two affines."""
    corners = np.array(list(itertools.product(*((0, n - 1) for n in shape), [1])))
    with np.errstate(over="ignore", invalid="ignore"):
        distance = np.linalg.norm((corners @ (sform - qform).T)[:, :3], axis=1).max()
    return not distance <= FORMS_DISAGREE_MM


# --- sform and qform of the NIfTI files of a case -------------------------------------------------

SCANNER_ANAT = 1
"""NIFTI_XFORM_SCANNER_ANAT: scanner-based anatomical coordinates."""


def has_own_forms(source: Source) -> bool:
    """Whether the scan is a NIfTI with an sform or a qform."""
    return isinstance(source, NiftiSource) and source.sform_code + source.qform_code > 0


def forms_for(grid: Grid, source: Source) -> NiftiSource:
    """Return sform and qform of a result on a grid: those of the scan, if it has any.

    A qform that float32 cannot represent is left out, so that all readers use the sform. A source
    without an sform then gets one with the affine and code of its qform.

    Returns
    -------
    NiftiSource
        It has a quaternion if it has a qform.
    """
    forms = NiftiSource(grid.affine, SCANNER_ANAT, grid.affine, SCANNER_ANAT)
    if isinstance(source, NiftiSource) and has_own_forms(source):
        forms = source
    elif grid.sheared:  # a quaternion cannot represent a shear
        return NiftiSource(grid.affine, SCANNER_ANAT, None, 0)
    if forms.qform is None or forms.quaternion is not None:
        return forms
    quaternion = quaternion_from_affine(forms.qform, grid.shape)
    if quaternion is not None:
        return replace(forms, quaternion=quaternion)
    if forms.sform is None:
        forms = replace(forms, sform=forms.qform, sform_code=forms.qform_code)
    return replace(forms, qform=None, qform_code=0)


# --- quaternions ----------------------------------------------------------------------------------
# Rotations as a NIfTI qform stores them: b, c, d of a unit quaternion, in float32.
#
# Readers compute a = sqrt(1 - b² - c² - d²) (nifti1.h). Within a few milliradians of half a turn,
# where the grids of most scans are, a is small and takes all the rounding of b, c and d. Then
# float32 has no quaternion near the true rotation, and readers differ in their threshold for a = 0.
# So a quaternion is accepted only if all of them read it well.

MAX_DISPLACEMENT_MM = 0.01
"""Largest distance between the corners of a grid by sform and by qform: a twentieth of 0.2 mm."""

HALF_TURN_FLOAT32 = 1e-7
"""1 - b² - c² - d² below which nifti1_io, and so ITK, takes a as 0."""

HALF_TURN_FLOAT64 = 1e-15
"""The same threshold for the float64 of NIfTI-2 (nifti2_io)."""

_HALF_TURN_NIBABEL = 3 * float(np.finfo(np.float32).eps)
_CORNERS = np.array(list(itertools.product((0, 1), repeat=3)))
_NEIGHBOURS = np.array(list(itertools.product((0, 1, -1), repeat=3)), np.float32)


def rotations_from_quaternions(
    bcd: NDArray[np.float64], half_turn: float = HALF_TURN_FLOAT32
) -> NDArray[np.float64]:
    """Return the rotations (N, 3, 3) that nifti1_io reads from quaternions (N, 3).

    If a counts as 0, (b, c, d) is normalised.
    """
    square = (bcd * bcd).sum(axis=1)
    is_half = 1 - square < half_turn
    length = np.where(is_half, np.sqrt(np.where(is_half, square, 1)), 1)
    return _matrices(np.sqrt(np.where(is_half, 0, 1 - square)), bcd / length[:, None])


def quaternion_from_affine(
    affine: NDArray[np.float64], shape: tuple[int, int, int]
) -> tuple[float, float, float] | None:
    """Return the b, c, d, each a float32, from which all readers get an affine most accurately.

    The third axis of a left-handed affine is reversed first (qfac -1).

    Parameters
    ----------
    affine : (4, 4) array
        Voxel index to mm.
    shape : (I, J, K)
        Shape of the grid whose corners are compared.

    Returns
    -------
    tuple of float or None
        None if a corner would be off by more than `MAX_DISPLACEMENT_MM` in a reader: no float32
        is near enough, or the affine is sheared.
    """
    from nibabel.quaternions import mat2quat

    linear = np.array(affine[:3, :3])
    if np.linalg.det(linear) < 0:
        linear[:, 2] *= -1
    spacing = np.linalg.norm(linear, axis=0)
    u, _, vt = np.linalg.svd(linear / spacing)
    # The nearest float32 and its neighbours: rounding of b, c and d may add up in a
    nearest = mat2quat(u @ vt)[1:].astype(np.float32)
    candidates = (nearest + _NEIGHBOURS * np.spacing(np.abs(nearest))).astype(np.float64)
    corners = (_CORNERS * (np.array(shape) - 1)).T
    errors = (_readings(candidates) * spacing.astype(np.float32) - linear) @ corners
    worst = np.linalg.norm(errors, axis=-2).max(axis=(0, -1))
    best = int(np.argmin(worst))
    b, c, d = map(float, candidates[best])
    return (b, c, d) if worst[best] <= MAX_DISPLACEMENT_MM else None


def _readings(bcd: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rotations (3, N, 3, 3) by nifti1_io, by nibabel and by the bare formula."""
    a_squared = 1 - (bcd * bcd).sum(axis=1)
    bare_a = np.sqrt(np.maximum(a_squared, 0))
    a = np.where(np.abs(a_squared) < _HALF_TURN_NIBABEL, 0, bare_a)
    length = np.sqrt(a * a + (bcd * bcd).sum(axis=1))
    nibabel = _matrices(a / length, bcd / length[:, None])
    return np.stack([rotations_from_quaternions(bcd), nibabel, _matrices(bare_a, bcd)])


def _matrices(a: NDArray[np.float64], bcd: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rotation matrices (N, 3, 3) of unit quaternions (nifti1.h, method 2)."""
    b, c, d = bcd.T
    rows = [
        [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
        [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
        [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c],
    ]
    return np.moveaxis(np.array(rows), -1, 0)


# --- Analyze 7.5 ----------------------------------------------------------------------------------
# A header becomes that of a NIfTI pair without an orientation. The `orient` field is not used:
# programs wrote 0 whatever the axes were. SPM stored a scale factor, and others an offset, in
# unused fields. Readers differ in whether they apply them, so a header with either is refused.

_ANALYZE_HEADER_BYTES = 348
_TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8"}
_XYZT_MM = 2  # NIFTI_XYZT_MM of xyzt_units
_SCALING_FIELDS = ("funused1", "funused2")


def analyze_byte_order(start: bytes) -> str | None:
    """Return the byte order of the Analyze header that the start of a file is; None if it isn't.

    In this order, header size and number of dimensions are valid.
    """
    for order in ("<", ">") if len(start) >= _ANALYZE_HEADER_BYTES else ():
        size = np.frombuffer(start, f"{order}i4", 1)[0]
        dimensions = np.frombuffer(start, f"{order}i2", 1, 40)[0]
        if size == _ANALYZE_HEADER_BYTES and 1 <= dimensions <= 7:
            return order
    return None


def analyze_as_nifti(start: bytes, order: str) -> Nifti1PairHeader:
    """Return an Analyze header as a NIfTI header with both form codes 0.

    Raises
    ------
    ScanError
        PIXEL_TYPE, RESCALE, BAD_GEOMETRY or DAMAGED.
    """
    from nibabel.analyze import AnalyzeHeader
    from nibabel.nifti1 import Nifti1PairHeader

    analyze = AnalyzeHeader(start[:_ANALYZE_HEADER_BYTES], endianness=order, check=False)
    code = int(analyze["datatype"])
    if code not in _TYPES:
        raise ScanError(Reason.PIXEL_TYPE, "the Analyze data type is not a plain number")
    slope, intercept = (float(analyze[name]) for name in _SCALING_FIELDS)
    if slope not in (0, 1) or intercept != 0:  # NaN is neither
        raise ScanError(Reason.RESCALE, "the Analyze header has a scale factor or an offset")
    units = bytes(analyze["vox_units"].item()).strip(b"\0 ").lower()
    if units not in (b"", b"mm"):
        raise ScanError(Reason.BAD_GEOMETRY, "the units of the Analyze header are not millimetres")
    header = Nifti1PairHeader(endianness=order, check=False)
    for name in ("dim", "datatype", "bitpix", "pixdim", "vox_offset"):
        header[name] = analyze[name]
    header["xyzt_units"] = _XYZT_MM
    return header
