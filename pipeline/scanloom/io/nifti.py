"""Read NIfTI-1 and NIfTI-2: single files, gzipped or not, and .hdr/.img pairs."""

from __future__ import annotations

import io
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Grid, Reason, ScanError, Volume
from scanloom.io.plain import MIN_VOXELS, affine_from_codes, check_finite, unit_of
from scanloom.io.scan import NiftiSource, Scan

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1Header

NIFTI_SUFFIXES = (".nii", ".nii.gz", ".hdr", ".hdr.gz")
FORMS_DISAGREE_MM = 0.1
"""Forms that place a corner this differently differ by more than the rounding of quaternions."""
DEFLATE_LIMIT = 1032
"""Deflate makes nothing smaller than by this: a header that says more was cut or damaged."""

_HEADER_BYTES = 540  # of NIfTI-2; NIfTI-1 has 348
_MAGIC_END = 348
_HEADER_SIZES = tuple(n.to_bytes(4, order) for n in (348, 540) for order in ("little", "big"))
_PIECE = 1 << 20
_MILLIMETRES = (0, 2)  # xyzt_units: unknown, mm
_CIFTI = range(3000, 3100)  # intent codes of surfaces and connectivity (CIFTI-2)


@dataclass(frozen=True, eq=False)
class _Layout:
    """Where the voxels of one volume stand in the file."""

    path: Path
    offset: int
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]


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


def read_nifti(
    files: Sequence[Path],
    phase: int | None = None,
    orientation: str | None = None,
    modality: str | None = None,
) -> Scan:
    """Read one volume of a NIfTI image.

    Parameters
    ----------
    files : sequence of Path
        As `nifti_files` gives them.
    phase, orientation, modality
        As in `scanloom.load_volume`.

    Raises
    ------
    ScanError
        FOUR_D, PIXEL_TYPE, ORIENTATION_UNKNOWN, BAD_GEOMETRY, TOO_FEW_SLICES, RESCALE,
        TRUNCATED, DAMAGED, NOT_AN_IMAGE or UNREADABLE.
    """
    try:
        header = _read_header(files[0])
        layout = _layout(header, files, phase)
        source = _forms(header)
        affine, flags = _affine(header, source, layout.shape, orientation)
        grid = Grid(layout.shape, affine)
        values = _rescale(_read_voxels(layout), header)
    except (EOFError, zlib.error) as exc:
        reason = Reason.TRUNCATED if isinstance(exc, EOFError) else Reason.DAMAGED
        raise ScanError(reason, f"not readable as NIfTI ({type(exc).__name__})") from exc
    except OSError as exc:  # BadGzipFile is one
        reason = Reason.UNREADABLE if exc.errno else Reason.DAMAGED
        raise ScanError(reason, f"not readable as NIfTI ({type(exc).__name__})") from exc
    check_finite(values)
    return Scan(Volume(values, grid, unit_of(modality), modality, flags=flags), source)


def nifti_outline(
    files: Sequence[Path], phase: int | None = None, orientation: str | None = None
) -> tuple[Grid, np.dtype[Any]]:
    """Return grid and type that `read_nifti` would give, from the header alone; same errors."""
    try:
        header = _read_header(files[0])
        layout = _layout(header, files, phase)
        affine, _ = _affine(header, _forms(header), layout.shape, orientation)
    except (EOFError, zlib.error, OSError) as exc:
        detail = f"not readable as NIfTI ({type(exc).__name__})"
        raise ScanError(Reason.UNREADABLE, detail) from exc
    slope, intercept = float(header["scl_slope"]), float(header["scl_inter"])
    plain = slope == 0 or np.isnan(slope) or (slope, intercept) == (1, 0)
    return Grid(layout.shape, affine), layout.dtype if plain else np.dtype(np.float32)


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _open(path: Path) -> BinaryIO:
    """Open a file for reading forward; gzip is told by content and inflated in a thread."""
    if not _is_gzip(path):
        return path.open("rb")
    from isal import igzip_threaded

    return cast(BinaryIO, igzip_threaded.open(path, "rb", threads=1, block_size=_PIECE))


def _start(path: Path) -> bytes:
    """Return the first bytes of a file, inflated."""
    if not _is_gzip(path):
        with path.open("rb") as file:
            return file.read(_HEADER_BYTES)
    from isal import igzip

    with igzip.open(path, "rb") as packed:
        return cast(bytes, packed.read(_HEADER_BYTES))


def _read_header(path: Path) -> Nifti1Header:
    from nibabel.nifti1 import Nifti1Header, Nifti1PairHeader
    from nibabel.nifti2 import Nifti2Header, Nifti2PairHeader
    from nibabel.spatialimages import HeaderDataError
    from nibabel.wrapstruct import WrapStructError

    start = _start(path)
    kinds = {
        b"n+1\0": Nifti1Header,
        b"ni1\0": Nifti1PairHeader,
        b"n+2\0": Nifti2Header,
        b"ni2\0": Nifti2PairHeader,
    }
    kind = kinds.get(start[344:348]) or kinds.get(start[4:8])
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


def _layout(header: Nifti1Header, files: Sequence[Path], phase: int | None) -> _Layout:
    """Judge dimensions and data type, and find the volume that is meant."""
    if int(header["intent_code"]) in _CIFTI:
        raise ScanError(Reason.NOT_AN_IMAGE, "the file holds CIFTI data, no volume")
    shape = _shape(header)
    if len(shape) > 4:
        raise ScanError(Reason.PIXEL_TYPE, f"{len(shape)} dimensions: its voxels are vectors")
    if len(shape) < 3 or min(shape[:3]) < MIN_VOXELS:
        raise ScanError(Reason.TOO_FEW_SLICES, f"the image has {shape} voxels")
    volumes = shape[3] if len(shape) == 4 else 1
    if phase is None and volumes > 1:
        raise ScanError(Reason.FOUR_D, f"{volumes} volumes, numbered from 0")
    if not 0 <= (phase or 0) < volumes:
        raise ScanError(Reason.FOUR_D, f"{volumes} volumes from 0, number {phase} was asked for")
    dtype = _dtype(header)
    paired = header["magic"].item() in (b"ni1", b"ni2")
    if paired and len(files) < 2:
        raise ScanError(Reason.NOT_FOUND, "the .img file beside the .hdr is missing")
    count = shape[0] * shape[1] * shape[2]
    offset = float(header["vox_offset"])
    least = 0 if paired else header.template_dtype.itemsize
    if not least <= offset < 1 << 40:
        raise ScanError(Reason.DAMAGED, "the header says that the voxels begin inside it")
    begin = int(offset) + (phase or 0) * count * dtype.itemsize
    size = (shape[0], shape[1], shape[2])
    layout = _Layout(files[-1] if paired else files[0], begin, size, dtype)
    _check_size(layout, count * dtype.itemsize)
    return layout


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


def _check_size(layout: _Layout, nbytes: int) -> None:
    """Refuse before memory is asked for, if the file can't hold that many voxels."""
    held = layout.path.stat().st_size
    most = held * DEFLATE_LIMIT if _is_gzip(layout.path) else held
    if layout.offset + nbytes > most:
        raise ScanError(Reason.TRUNCATED, "the file ends before its last voxel")


def _forms(header: Nifti1Header) -> NiftiSource:
    from nibabel.spatialimages import HeaderDataError

    if int(header["xyzt_units"]) & 7 not in _MILLIMETRES:
        raise ScanError(Reason.BAD_GEOMETRY, "its lengths are not in millimetres")
    try:
        sform, sform_code = header.get_sform(coded=True)
        qform, qform_code = header.get_qform(coded=True)
    except (HeaderDataError, ValueError) as exc:
        raise ScanError(Reason.BAD_GEOMETRY, "its qform is no rotation") from exc
    return NiftiSource(sform, int(sform_code), qform, int(qform_code))


def _affine(
    header: Nifti1Header,
    source: NiftiSource,
    shape: tuple[int, int, int],
    orientation: str | None,
) -> tuple[NDArray[np.float64], tuple[Flag, ...]]:
    """Return the affine: sform before qform; `orientation` only where there is neither."""
    if source.sform is not None:
        differ = source.qform is not None and _apart(source.sform, source.qform, shape)
        return source.sform, (Flag.FORMS_DISAGREE,) if differ else ()
    if source.qform is not None:
        return source.qform, ()
    if orientation is None:
        raise ScanError(Reason.ORIENTATION_UNKNOWN, "both form codes of the NIfTI are 0")
    spacing = np.abs(np.asarray(header["pixdim"][1:4], dtype=np.float64))
    return affine_from_codes(orientation, spacing), (Flag.ORIENTATION_GIVEN,)


def _apart(
    one: NDArray[np.float64], other: NDArray[np.float64], shape: tuple[int, int, int]
) -> bool:
    """Whether two affines place a corner of the volume differently."""
    corners = np.array(list(itertools.product(*((0, n - 1) for n in shape), [1])))
    far = np.linalg.norm((corners @ (one - other).T)[:, :3], axis=1).max()
    return not far <= FORMS_DISAGREE_MM


def _read_voxels(layout: _Layout) -> NDArray[Any]:
    """Read the voxels straight into one array, (I, J, K) with I fastest."""
    values = np.empty(layout.shape[::-1], layout.dtype)
    view = memoryview(values.reshape(-1).view(np.uint8))
    with _open(layout.path) as file:
        _skip(file, layout.offset)
        done = 0
        while done < len(view):
            count = file.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise ScanError(Reason.TRUNCATED, "the file ends before its last voxel")
            done += count
        packed = _is_gzip(layout.path)
        while packed and file.read(_PIECE):
            pass  # to the end: only there does gzip check what it inflated
    if not values.dtype.isnative:
        values = values.byteswap(inplace=True).view(values.dtype.newbyteorder("="))
    return values.T


def _skip(file: BinaryIO, count: int) -> None:
    """Move forward; a gzip stream can't seek."""
    while count > 0:
        piece = file.read(min(count, _PIECE))
        if not piece:
            raise ScanError(Reason.TRUNCATED, "the file ends before its voxels")
        count -= len(piece)


def _rescale(values: NDArray[Any], header: Nifti1Header) -> NDArray[Any]:
    """Apply scl_slope and scl_inter; a slope of 0 or NaN means none (NIfTI-1 standard)."""
    slope, intercept = float(header["scl_slope"]), float(header["scl_inter"])
    if slope == 0 or np.isnan(slope):
        return values
    if not np.isfinite((slope, intercept)).all():
        raise ScanError(Reason.RESCALE, "scl_slope or scl_inter is no number")
    if (slope, intercept) == (1, 0):
        return values
    scaled = np.empty(values.shape, np.float32, order="F")
    for k in range(values.shape[2]):
        np.copyto(scaled[..., k], values[..., k] * slope + intercept, casting="same_kind")
    return scaled
