"""What was written, decoded again by other means than the writers' and compared voxel by voxel.

NIfTI is inflated by zlib and laid out by its header, byte by byte, plane by plane; SimpleITK says
where it lies, and decodes the rectangular copy of a sheared one.
DICOM SEG is decoded by `readback_seg`. A difference fails the case: nothing wrong is published.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import struct
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Case, Grid, Segmentation, Volume
from scanloom.io import names
from scanloom.io.readback_seg import check_segs
from scanloom.io.readback_slices import check_slices, histogram, mismatch
from scanloom.io.scan import DicomSource, NiftiSource, Scan, Source
from scanloom.io.seg_source import can_refer

NEAR = 1e-3
"""mm by which a position may be off: a NIfTI header holds float32, good for 1e-4 mm at 1 m."""

LEANING = 0.05
"""Share of a voxel by which a form made of a quaternion may be off: it has no room for a shear."""

Counts = dict[tuple[str, str], int]
Planes = Iterator[NDArray[Any]]


def read_back(folder: Path, segmentations: Sequence[Segmentation], scan: Scan, case: Case) -> None:
    """Compare all that was written for a case with what should have been.

    Parameters
    ----------
    folder : Path
        The case folder in the making, with measurements.
    segmentations, scan, case
        What the writers were given.

    Raises
    ------
    ScanError
        WRITE_MISMATCH at the first difference.
    """
    models = [s.model for s in segmentations]
    refers = isinstance(scan.source, DicomSource) and can_refer(scan.source)
    _check_names(folder, _expected(segmentations, case, refers=refers))
    counts: Counts = {}
    for segmentation in segmentations:
        counts |= _check_label_maps(folder, segmentation, scan.source, models)
        if case.outputs.split:
            _check_masks(folder, segmentation, scan.source, models)
    _check_legend(folder, segmentations)
    _check_measurements(folder, counts, scan.volume)
    if case.outputs.image:
        with _decoding(names.IMAGE):
            image = _decode(folder / names.IMAGE, scan.volume.grid, scan.source)
            deque(_same(image, scan.volume.array, names.IMAGE), maxlen=0)
    if isinstance(scan.source, DicomSource) and refers:
        for segmentation in segmentations:
            with _decoding("DICOM SEG"):
                check_segs(folder, segmentation, scan.source, case, models)


def _expected(segmentations: Sequence[Segmentation], case: Case, *, refers: bool) -> set[str]:
    """Return the names of all files with voxels."""
    models = [s.model for s in segmentations]
    found = {names.IMAGE} if case.outputs.image else set()
    for s in segmentations:
        stems: list[names.Stem] = ["segmentation"]
        stems += ["segmentation_rect"] if s.grid.sheared else []
        files = range(len(s.layers) if case.outputs.seg == "labelmap" else 1)
        for stem in stems:
            found |= {names.label_map_name(stem, s.model, models, n) for n in range(len(s.layers))}
            if refers:
                found |= {names.seg_name(stem, s.model, models, n) for n in files}
        if case.outputs.split:
            found |= {names.split_name(x.label, s.model, models) for x in s.structures}
    return found


def _check_names(folder: Path, expected: set[str]) -> None:
    written = {
        p.relative_to(folder).as_posix()
        for p in folder.rglob("*")
        if p.name.endswith((".nii.gz", ".dcm"))
    }
    if written != expected:
        raise mismatch(f"{sorted(written ^ expected)} missing or not expected")


def _check_label_maps(
    folder: Path, segmentation: Segmentation, source: Source, models: Sequence[str]
) -> Counts:
    """Compare the label maps of one model; return how many voxels each structure has in them."""
    counts: Counts = {}
    for n, layer in enumerate(segmentation.layers):
        name = names.label_map_name("segmentation", segmentation.model, models, n)
        with _decoding(name):
            planes = _decode(folder / name, segmentation.grid, source)
            found = histogram(_same(planes, layer.labels, name), layer.labels.dtype)
        counts |= {(segmentation.model, s.label): int(found[s.number]) for s in layer.structures}
        if segmentation.grid.sheared:
            name = names.label_map_name("segmentation_rect", segmentation.model, models, n)
            with _decoding(name):
                rect, affine = _itk_array(folder / name), _itk_affine(folder / name)
                check_slices(rect, affine, layer.labels, segmentation.grid, name)
    return counts


def _check_masks(
    folder: Path, segmentation: Segmentation, source: Source, models: Sequence[str]
) -> None:
    for layer in segmentation.layers:
        for structure in layer.structures:
            name = names.split_name(structure.label, segmentation.model, models)
            with _decoding(name):
                mask = _decode(folder / name, segmentation.grid, source)
                deque(_same(mask, layer.labels == structure.number, name), maxlen=0)


def _check_legend(folder: Path, segmentations: Sequence[Segmentation]) -> None:
    """Compare which number is what, in which file."""
    models = [s.model for s in segmentations]
    with _decoding(names.SEGMENTS):
        files = json.loads((folder / names.SEGMENTS).read_text(encoding="utf-8"))["files"]
        written = {
            (file["file"], x["number"]): (x["label"], x["type"]["value"])
            for file in files
            for x in file["structures"]
        }
    expected = {
        (names.label_map_name("segmentation", s.model, models, n), x.number): (
            x.label,
            x.type.value,
        )
        for s in segmentations
        for n, layer in enumerate(s.layers)
        for x in layer.structures
    }
    if written != expected:
        raise mismatch(f"{names.SEGMENTS} names other structures")


def _check_measurements(folder: Path, counts: Counts, volume: Volume) -> None:
    """Compare voxels and volumes of both tables with the label maps that were decoded."""
    with _decoding(names.MEASUREMENTS_CSV):
        with (folder / names.MEASUREMENTS_CSV).open(encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file))
        document = json.loads((folder / names.MEASUREMENTS_JSON).read_text(encoding="utf-8"))
        for rows in (table, document["measurements"]):
            measured = {(r["model"], r["label"]): int(r["voxels"]) for r in rows}
            if len(rows) != len(measured) or measured != counts:
                raise mismatch("measured voxels are not those of the label map")
            for row in rows:
                ml = int(row["voxels"]) * volume.grid.voxel_volume / 1000
                if not np.isclose(float(row["volume_ml"]), ml, rtol=1e-6, atol=0):
                    raise mismatch(f"the volume of {row['label']} is not that of its voxels")


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Take whatever a decoder raises for a file that differs from what was meant."""
    from pydicom.errors import BytesLengthException, InvalidDicomError

    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        BytesLengthException,
        EOFError,
        InvalidDicomError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
        gzip.BadGzipFile,
        struct.error,
        zlib.error,
    ) as exc:
        raise mismatch(f"{name} can't be decoded ({type(exc).__name__})") from exc


def _same(written: Planes, meant: NDArray[Any], name: str) -> Planes:
    """Compare planes (J, I) with an array (I, J, K) by value, and hand them on."""
    for one, other in zip(written, meant.T, strict=True):
        nan = bool(one.dtype.kind == "f" and other.dtype.kind == "f")
        if not np.array_equal(one, other, equal_nan=nan):
            raise mismatch(f"{name} holds other voxels")
        yield one


# --- NIfTI --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Forms:
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


def _decode(path: Path, grid: Grid, source: Source) -> Planes:
    """Yield a NIfTI's planes (J, I) after its geometry was compared with the grid's.

    Never all at once: the labels themselves are the most that is held.
    """
    forms = _forms(path)
    if forms.shape != grid.shape:
        raise mismatch(f"{path.name} has another shape")
    _check_whole(path, forms)
    _check_forms(forms, grid, source, path.name)
    if not grid.sheared:
        affine = _itk_affine(path)
        if not _forms_differ(source, grid) and _apart(affine, grid.affine, grid) > _loose(grid):
            raise mismatch(f"{path.name} lies elsewhere for ITK")
    i, j, k = grid.shape
    size = i * j * forms.dtype.itemsize
    with gzip.open(path) as file:
        file.read(forms.offset)
        for _ in range(k):
            yield np.frombuffer(file.read(size), forms.dtype).reshape(j, i)
        if file.read(1):  # to the end, where the check sum is
            raise mismatch(f"{path.name} is too long")


def _check_whole(path: Path, forms: _Forms) -> None:
    """Compare the length that the gzip says at its end: ITK reads a file that was cut as zeros."""
    with path.open("rb") as file:
        file.seek(-4, os.SEEK_END)
        length = struct.unpack("<I", file.read())[0]  # RFC 1952: ISIZE, modulo 2^32
    if length != (forms.offset + math.prod(forms.shape) * forms.dtype.itemsize) % 2**32:
        raise mismatch(f"{path.name} is cut")


def _itk_array(path: Path) -> NDArray[Any]:
    """Return voxels (I, J, K) as SimpleITK reads them."""
    import SimpleITK as sitk  # noqa: N813

    return np.asarray(sitk.GetArrayFromImage(sitk.ReadImage(path)).T)


def _itk_affine(path: Path) -> NDArray[np.float64]:
    """Return voxel index to RAS mm as SimpleITK reads it."""
    import SimpleITK as sitk  # noqa: N813

    reader = sitk.ImageFileReader()
    reader.SetFileName(path)
    reader.ReadImageInformation()
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(reader.GetDirection(), (3, 3)) * reader.GetSpacing()
    affine[:3, 3] = reader.GetOrigin()
    return np.asarray(np.diag((-1.0, -1.0, 1.0, 1.0)) @ affine)


def _check_forms(forms: _Forms, grid: Grid, source: Source, name: str) -> None:
    if isinstance(source, NiftiSource) and source.sform_code + source.qform_code > 0:
        codes = (source.sform_code, source.qform_code)
        pairs = [(forms.sform, source.sform, NEAR), (forms.qform, source.qform, _loose(grid))]
    elif grid.sheared:
        codes, pairs = (1, 0), [(forms.sform, grid.affine, NEAR)]
    else:
        codes = (1, 1)
        pairs = [(forms.sform, grid.affine, NEAR), (forms.qform, grid.affine, _loose(grid))]
    if (forms.sform_code, forms.qform_code) != codes:
        raise mismatch(f"{name} has other form codes")
    for written, meant, limit in pairs:
        if meant is not None and _apart(written, meant, grid) > limit:
            raise mismatch(f"{name} lies elsewhere")


def _forms(path: Path) -> _Forms:
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
    return _Forms(
        shape=(dim[1], dim[2], dim[3]),
        dtype=np.dtype(_TYPES[struct.unpack_from("<h", raw, 70)[0]]),
        offset=int(struct.unpack_from("<f", raw, 108)[0]),
        sform=sform,
        sform_code=struct.unpack_from("<h", raw, 254)[0],
        qform=_qform(struct.unpack_from("<6f", raw, 256), pixdim),
        qform_code=struct.unpack_from("<h", raw, 252)[0],
    )


def _qform(quaternion: tuple[float, ...], pixdim: tuple[float, ...]) -> NDArray[np.float64]:
    """Return method 2 of nifti1.h: a rotation (b, c, d), an offset, and pixdim with its sign."""
    b, c, d, *offset = quaternion
    a = np.sqrt(max(0.0, 1.0 - (b * b + c * c + d * d)))
    rotation = [
        [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
        [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
        [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c],
    ]
    form = np.eye(4)
    form[:3, :3] = np.array(rotation) * (pixdim[1], pixdim[2], pixdim[3] * (pixdim[0] or 1.0))
    form[:3, 3] = offset
    return form


def _forms_differ(source: Source, grid: Grid) -> bool:
    """Whether a NIfTI source's own forms contradict each other, so that readers differ too."""
    if not isinstance(source, NiftiSource) or source.sform is None or source.qform is None:
        return False
    return _apart(source.sform, source.qform, grid) > _loose(grid)


def _apart(one: NDArray[Any], other: NDArray[Any], grid: Grid) -> float:
    """Return the largest distance, mm, that two affines put between one corner of the grid."""
    corners = np.array([[i, j, k, 1] for i in (0, 1) for j in (0, 1) for k in (0, 1)])
    corners = corners * (*(n - 1 for n in grid.shape), 1)
    return float(np.linalg.norm((corners @ (one - other).T)[:, :3], axis=1).max())


def _loose(grid: Grid) -> float:
    return max(NEAR, LEANING * min(grid.spacing))
