"""Read-back of written files: decoded independently of the writers, compared voxel by voxel.

NIfTI is decoded by `nifti`, the rectangular copy of a sheared one by SimpleITK, DICOM SEG by
`dicom_seg`. A difference fails the case: nothing wrong is published.
"""

from __future__ import annotations

import csv
import gzip
import json
import struct
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Case, Segmentation, Volume
from scanloom.io.output import file_names
from scanloom.io.readback.dicom_seg import check_segs
from scanloom.io.readback.nifti import Planes, checked_planes, itk_affine, itk_array
from scanloom.io.readback.slices import check_rectangular, count_labels, mismatch_error
from scanloom.io.scan import DicomSource, Scan, Source

Counts = dict[tuple[str, str], int]


def check_names(folder: Path, expected: Collection[str]) -> None:
    """Compare the files of a case folder with the expected ones.

    Parameters
    ----------
    folder : Path
        The case folder being built.
    expected : collection of str
        Relative names. A file with voxels that is not among them is a fault too.

    Raises
    ------
    ScanError
        WRITE_MISMATCH, as all functions of this module.
    """
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    missing = set(expected) - files
    extra = {name for name in files if name.endswith((".nii.gz", ".dcm"))} - set(expected)
    if missing or extra:
        raise mismatch_error(f"{sorted(missing | extra)} missing or not expected")


def check_label_maps(folder: Path, segmentations: Sequence[Segmentation], source: Source) -> Counts:
    """Compare label maps and `segments.json`; return the voxels of each structure."""
    models = [s.model for s in segmentations]

    counts: Counts = {}
    for segmentation in segmentations:
        counts |= _check_label_maps(folder, segmentation, source, models)
    _check_legend(folder, segmentations)
    return counts


def check_masks(folder: Path, segmentations: Sequence[Segmentation], source: Source) -> None:
    """Compare the mask of each structure."""
    models = [s.model for s in segmentations]
    for segmentation in segmentations:
        _check_masks(folder, segmentation, source, models)


def check_image(folder: Path, scan: Scan) -> None:
    """Compare the copy of the scan."""
    with _decoding(file_names.IMAGE):
        image = checked_planes(folder / file_names.IMAGE, scan.volume.grid, scan.source)
        deque(_same(image, scan.volume.array, file_names.IMAGE), maxlen=0)


def check_dicom_segs(
    folder: Path, segmentations: Sequence[Segmentation], source: DicomSource, case: Case
) -> None:
    """Compare the DICOM SEG of each model."""
    models = [s.model for s in segmentations]
    for segmentation in segmentations:
        with _decoding("DICOM SEG"):
            check_segs(folder, segmentation, source, case, models)


def _check_label_maps(
    folder: Path, segmentation: Segmentation, source: Source, models: Sequence[str]
) -> Counts:
    """Compare the label maps of one model; return how many voxels each structure has in them."""
    counts: Counts = {}
    for n, layer in enumerate(segmentation.layers):
        name = file_names.label_map_name("segmentation", segmentation.model, models, n)
        with _decoding(name):
            planes = checked_planes(folder / name, segmentation.grid, source)
            voxels = count_labels(_same(planes, layer.labels, name), layer.labels.dtype)
        counts |= {(segmentation.model, s.label): int(voxels[s.number]) for s in layer.structures}
        if segmentation.grid.sheared:
            name = file_names.label_map_name("segmentation_rect", segmentation.model, models, n)
            with _decoding(name):
                rect, affine = itk_array(folder / name), itk_affine(folder / name)
                check_rectangular(rect, affine, layer.labels, segmentation.grid, name)
    return counts


def _check_masks(
    folder: Path, segmentation: Segmentation, source: Source, models: Sequence[str]
) -> None:
    for layer in segmentation.layers:
        for structure in layer.structures:
            name = file_names.mask_name(structure.label, segmentation.model, models)
            with _decoding(name):
                mask = checked_planes(folder / name, segmentation.grid, source)
                deque(_same(mask, layer.labels == structure.number, name), maxlen=0)


def _check_legend(folder: Path, segmentations: Sequence[Segmentation]) -> None:
    """Compare the structures and numbers of `segments.json`."""
    models = [s.model for s in segmentations]
    with _decoding(file_names.SEGMENTS):
        files = json.loads((folder / file_names.SEGMENTS).read_text(encoding="utf-8"))["files"]
        written = {
            (file["file"], x["number"]): (x["label"], x["type"]["value"])
            for file in files
            for x in file["structures"]
        }
    expected = {
        (file_names.label_map_name("segmentation", s.model, models, n), x.number): (
            x.label,
            x.type.value,
        )
        for s in segmentations
        for n, layer in enumerate(s.layers)
        for x in layer.structures
    }
    if written != expected:
        raise mismatch_error(f"{file_names.SEGMENTS} names other structures")


def check_measurements(folder: Path, counts: Counts, volume: Volume) -> None:
    """Compare voxels and volumes of both tables with the label maps that were decoded."""
    with _decoding(file_names.MEASUREMENTS_CSV):
        with (folder / file_names.MEASUREMENTS_CSV).open(encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file))
        document = json.loads((folder / file_names.MEASUREMENTS_JSON).read_text(encoding="utf-8"))
        for rows in (table, document["measurements"]):
            measured = {(r["model"], r["label"]): int(r["voxels"]) for r in rows}
            if len(rows) != len(measured) or measured != counts:
                raise mismatch_error("measured voxels are not those of the label map")
            for row in rows:
                ml = int(row["voxels"]) * volume.grid.voxel_volume / 1000
                if not np.isclose(float(row["volume_ml"]), ml, rtol=1e-6, atol=0):
                    raise mismatch_error(f"the volume of {row['label']} is not that of its voxels")


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Turn any exception of a decoder into WRITE_MISMATCH."""
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
        raise mismatch_error(f"{name} can't be decoded ({type(exc).__name__})") from exc


def _same(written: Planes, array: NDArray[Any], name: str) -> Planes:
    """Compare planes (J, I) with an array (I, J, K) by value, and yield them."""
    for plane, expected in zip(written, array.T, strict=True):
        nan = bool(plane.dtype.kind == "f" and expected.dtype.kind == "f")
        if not np.array_equal(plane, expected, equal_nan=nan):
            raise mismatch_error(f"{name} holds other voxels")
        yield plane
