"""Small scans with a source, and segmentations of them, for the tests of writers."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from pydicom import Dataset

from scanloom.core import (
    Case,
    Code,
    Flag,
    Grid,
    Layer,
    Measurement,
    Outputs,
    ScanError,
    Segmentation,
    Series,
    Structure,
    Volume,
)
from scanloom.engine.case.writers import WRITERS, write_files
from scanloom.engine.case.writers import read_back as read_content
from scanloom.io.dataset_text import decimal_strings
from scanloom.io.output.case_folder import CaseContent, Writer
from scanloom.io.output.measurements import write_measurements
from scanloom.io.scan import DicomSource, GridOnlySource, NiftiSource, Scan, SourceSlice
from scanloom.options import EXTRAS

SHAPE = (19, 14, 9)
SPACING = (1.25, 1.5, 2.5)
ORGAN = Code("123037004", "SCT", "Anatomical Structure")
LEFT_SIDE = Code("7771000", "SCT", "Left")
LPS = np.array((-1.0, -1.0, 1.0))

LIVER = Structure("liver", 1, "Liver", ORGAN, Code("10200004", "SCT", "Liver"), (150, 60, 40))
KIDNEY = Structure(
    "kidney_left",
    2,
    "Left kidney",
    ORGAN,
    Code("64033007", "SCT", "Kidney"),
    (30, 90, 200),
    LEFT_SIDE,
)
SPLEEN = Structure("spleen", 3, "Spleen", ORGAN, Code("78961009", "SCT", "Spleen"), (90, 10, 90))
STRUCTURES = (LIVER, KIDNEY, SPLEEN)


def directions(codes: str) -> np.ndarray:
    """Return the unit axes (3, 3) of axis codes, RAS, one a column."""
    columns = np.zeros((3, 3))
    for n, code in enumerate(codes):
        columns["RAS".index(OPPOSITE.get(code, code)), n] = 1 if code in "RAS" else -1
    return columns


OPPOSITE = {"L": "R", "P": "A", "I": "S"}
ORDERS = [
    "".join(codes)
    for codes in itertools.product("RLAPSI", repeat=3)
    if len({OPPOSITE.get(code, code) for code in codes}) == 3
]
"""All 48 ways to lay three axes along the patient's."""

RIGHT_HANDED = [codes for codes in ORDERS if np.linalg.det(directions(codes)) > 0]
"""The 24 of them that a stack of DICOM slices, in the order of their normal, can have."""


def turned(axes: np.ndarray, degrees: float = 20.0) -> np.ndarray:
    """Turn axes about (1, 2, 3): none lies along the patient's any more."""
    x, y, z = np.array((1.0, 2.0, 3.0)) / np.sqrt(14)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    angle = np.radians(degrees)
    return (np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross) @ axes


def grid_of(axes: np.ndarray, tilt: float = 0.0, shape: tuple[int, int, int] = SHAPE) -> Grid:
    """Return a grid with these axes; with `tilt` degrees, slices slide along J (gantry tilt)."""
    affine = np.eye(4)
    affine[:3, :3] = axes * SPACING
    affine[:3, 2] += np.tan(np.radians(tilt)) * SPACING[2] * axes[:, 1]
    affine[:3, 3] = (-31.5, 12.25, -40.75)
    return Grid(shape, affine)


def volume_of(grid: Grid) -> Volume:
    rng = np.random.default_rng(3)
    array = np.asfortranarray(rng.integers(-1000, 1000, grid.shape).astype(np.int16))
    return Volume(array, grid, "HU", "CT")


def dicom_scan(codes: str = "LPS", oblique: float = 0.0, tilt: float = 0.0) -> Scan:
    """Return a CT series as its reader would give it: a clean header, an image for each k."""
    grid = grid_of(turned(directions(codes), oblique), tilt)
    return Scan(volume_of(grid), source_of([_header(grid, k) for k in range(grid.shape[2])]))


def source_of(headers: Sequence[Dataset]) -> DicomSource:
    """Return the source that single images are, in this order."""
    first = headers[0]
    slices = (
        SourceSlice(h.SOPClassUID, h.SOPInstanceUID, None, tuple(map(str, h.ImagePositionPatient)))
        for h in headers
    )
    spacing, orientation = map(decimal_strings, (first.PixelSpacing, first.ImageOrientationPatient))
    return DicomSource(first, tuple(slices), tuple(spacing), tuple(orientation))


def with_slices(scan: Scan, **changes: object) -> Scan:
    """Return the scan with something of each source image changed."""
    source = scan.source
    assert isinstance(source, DicomSource)
    slices = tuple(
        replace(source_slice, **changes) for source_slice in source.slices if source_slice
    )
    return replace(scan, source=replace(source, slices=slices))


def _header(grid: Grid, k: int) -> Dataset:
    ds = Dataset()
    ds.SOPClassUID, ds.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.2", f"1.2.826.0.1.1.{k + 1}"
    ds.StudyInstanceUID, ds.SeriesInstanceUID = "1.2.826.0.1.2", "1.2.826.0.1.3"
    ds.FrameOfReferenceUID, ds.PositionReferenceIndicator = "1.2.826.0.1.4", ""
    ds.PatientName, ds.PatientID = "Doe^Test", "P0001"
    ds.PatientBirthDate, ds.PatientSex = "19700101", "O"
    ds.StudyDate, ds.StudyTime, ds.StudyID, ds.AccessionNumber = "20240102", "101112", "1", "A1"
    ds.ReferringPhysicianName, ds.Modality = "", "CT"
    ds.ContentDate, ds.ContentTime = "20240102", "101114"
    ds.Rows, ds.Columns = grid.shape[1], grid.shape[0]
    ds.PixelSpacing = [SPACING[1], SPACING[0]]
    ds.SliceThickness = 3.0  # thicker than the distance of slices, as often
    columns = grid.affine[:3, :2] / SPACING[:2] * LPS[:, None]
    ds.ImageOrientationPatient = [round(float(v), 9) for v in columns.T.ravel()]
    ds.ImagePositionPatient = [round(float(v), 6) for v in grid.world((0, 0, k)) * LPS]
    return ds


def nifti_scan(grid: Grid, sform: int = 1, qform: int = 0) -> Scan:
    """Return a NIfTI scan with these form codes."""
    forms = [grid.affine if code else None for code in (sform, qform)]
    return Scan(volume_of(grid), NiftiSource(forms[0], sform, forms[1], qform))


def itk_scan(grid: Grid) -> Scan:
    return Scan(volume_of(grid), GridOnlySource())


def labels_on(shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    """Return three structures without any symmetry, the first and last slices empty."""
    rng = np.random.default_rng(seed)
    labels = np.zeros(shape, np.uint8, order="F")
    i, j, k = np.indices(shape)
    for number in (1, 2, 3):
        centre = [rng.uniform(0.3, 0.7) * n for n in shape]
        radius = [rng.uniform(0.12, 0.3) * n for n in shape]
        inside = sum(((x - c) / r) ** 2 for x, c, r in zip((i, j, k), centre, radius, strict=True))
        labels[inside < 1] = number
    labels[0, 0, shape[2] // 2] = 3  # a corner, to tell the directions apart
    labels[..., 0] = labels[..., -1] = 0
    return labels


def segmentation_of(scan: Scan, model: str = "organs", seed: int = 0) -> Segmentation:
    """Return one layer with three structures."""
    layer = Layer(labels_on(scan.volume.grid.shape, seed), STRUCTURES)
    return Segmentation(model, (layer,), scan.volume.grid, "1.2.0")


def overlapping(scan: Scan, model: str = "regions") -> Segmentation:
    """Return three layers of one structure each, which overlap."""
    shape = scan.volume.grid.shape
    layers = []
    for structure in STRUCTURES:
        labels = (labels_on(shape, seed=structure.number) > 0) * np.uint8(structure.number)
        layers.append(Layer(np.asfortranarray(labels, np.uint8), (structure,)))
    return Segmentation(model, tuple(layers), scan.volume.grid, "0.1")


def subset_of(segmentation: Segmentation, *labels: str) -> Segmentation:
    """Return only some structures, their numbers as they were."""
    layers = []
    for layer in segmentation.layers:
        kept = tuple(s for s in layer.structures if s.label in labels)
        if kept:
            array = np.where(np.isin(layer.labels, [s.number for s in kept]), layer.labels, 0)
            layers.append(Layer(np.asfortranarray(array, layer.labels.dtype), kept))
    return replace(segmentation, layers=tuple(layers))


def case_with(**outputs: object) -> Case:
    return Case(
        id="a" * 26,
        series=Series("dicom", ()),
        outputs=Outputs(**outputs),
        source_hash="0" * 32,
        recipe="r" * 64,
    )


def _writers(case: Case) -> list[Writer]:
    """Return the writers of all files but the preview and the tables."""
    unwanted = {"preview", "measurements", *EXTRAS} - set(case.outputs.also)
    return [writer for writer in WRITERS if writer.name not in unwanted]


def write_results(
    folder: Path,
    segmentations: Sequence[Segmentation],
    scan: Scan,
    case: Case,
    flags: Sequence[Flag] = (),
) -> None:
    """Write all files with voxels, and their legend."""
    write_files(folder, CaseContent(case, scan, segmentations, (), flags), _writers(case))


def read_back(folder: Path, segmentations: Sequence[Segmentation], scan: Scan, case: Case) -> None:
    """Read back the files of `write_results` and `write_measurements`."""
    tables = [writer for writer in WRITERS if writer.name == "measurements"]
    read_content(folder, CaseContent(case, scan, segmentations), [*_writers(case), *tables])


def measured(segmentations: Sequence[Segmentation]) -> list[Measurement]:
    return [
        Measurement(
            s.model,
            x.label,
            x.number,
            count := int(np.count_nonzero(layer.labels == x.number)),
            count * s.grid.voxel_volume / 1000,
            "HU",
            *[None] * 7,
            None,
            0,
        )
        for s in segmentations
        for layer in s.layers
        for x in layer.structures
    ]


class Written:
    """A case folder with its expected content."""

    def __init__(self, folder: Path, scan: Scan, *segmentations: Segmentation, **o: object) -> None:
        self.folder, self.scan, self.segmentations = folder, scan, segmentations
        self.case = case_with(**o)
        write_results(folder, segmentations, scan, self.case, ())
        write_measurements(folder, measured(segmentations))

    def read_back(self) -> None:
        read_back(self.folder, self.segmentations, self.scan, self.case)

    def is_caught(self) -> bool:
        with pytest.raises(ScanError) as caught:
            self.read_back()
        return caught.value.code == "WRITE_MISMATCH"


# --- NIfTI headers alone, and where their readers put the corners ---------------------------------

CORNERS = np.array(list(itertools.product((0, 1), repeat=3)))


def header_with(shape: tuple[int, int, int] = (2, 2, 2), **fields: object) -> nib.Nifti1Header:
    """Return a header of a uint8 image in mm, with these fields."""
    header = nib.Nifti1Header(endianness="<")
    header.set_data_dtype(np.uint8)
    header.set_data_shape(shape)
    header.set_xyzt_units("mm")
    header["pixdim"][:4] = 1
    header["scl_slope"], header["magic"], header["vox_offset"] = 1, b"n+1", 352
    for name, value in fields.items():
        header[name] = value
    return header


def header_file(path: Path, header: nib.Nifti1Header | bytes) -> Path:
    """Write a header as the start of a file that has no voxels to speak of."""
    block = header if isinstance(header, bytes) else header.binaryblock + bytes(4)
    path.write_bytes(gzip.compress(block, 1) if path.suffix == ".gz" else block)
    return path


def by_itk(path: Path) -> np.ndarray:
    """Return voxel index to RAS mm as SimpleITK reads it from a header."""
    reader = sitk.ImageFileReader()
    reader.SetFileName(path)
    reader.ReadImageInformation()
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(reader.GetDirection(), (3, 3)) * reader.GetSpacing()
    affine[:3, 3] = reader.GetOrigin()
    return np.diag((-1.0, -1.0, 1.0, 1.0)) @ affine


def farthest(first: np.ndarray, second: np.ndarray, shape: tuple[int, int, int]) -> float:
    """Return the largest distance, mm, that two affines put between one corner of a grid."""
    corners = np.c_[CORNERS * (np.array(shape) - 1), np.ones(8)]
    return float(np.linalg.norm((corners @ (first - second).T)[:, :3], axis=1).max())
