"""Write DICOM series of any orientation for tests: valid files with known values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset, dcmwrite
from pydicom.dataset import FileMetaDataset
from pydicom.uid import UID, ExplicitVRLittleEndian, ImplicitVRLittleEndian, generate_uid

CT = "1.2.840.10008.5.1.4.1.1.2"
MR = "1.2.840.10008.5.1.4.1.1.4"

PLANES: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "axial": ((1, 0, 0), (0, 1, 0)),
    "axial, rows negated": ((-1, 0, 0), (0, 1, 0)),
    "axial, columns negated": ((1, 0, 0), (0, -1, 0)),
    "axial, both negated": ((-1, 0, 0), (0, -1, 0)),
    "axial, turned": ((0, 1, 0), (-1, 0, 0)),
    "coronal": ((1, 0, 0), (0, 0, -1)),
    "coronal, rows negated": ((-1, 0, 0), (0, 0, -1)),
    "coronal, columns negated": ((1, 0, 0), (0, 0, 1)),
    "coronal, both negated": ((-1, 0, 0), (0, 0, 1)),
    "sagittal": ((0, 1, 0), (0, 0, -1)),
    "sagittal, rows negated": ((0, -1, 0), (0, 0, -1)),
    "sagittal, columns negated": ((0, 1, 0), (0, 0, 1)),
    "sagittal, both negated": ((0, -1, 0), (0, 0, 1)),
    "oblique": ((0.96592583, 0.0, -0.25881905), (0.0, 1.0, 0.0)),
    "oblique, rows negated": ((-0.96592583, 0.0, 0.25881905), (0.0, 1.0, 0.0)),
    "oblique, columns negated": ((0.96592583, 0.0, -0.25881905), (0.0, -1.0, 0.0)),
    "oblique, both negated": ((-0.96592583, 0.0, 0.25881905), (0.0, -1.0, 0.0)),
    "doubly oblique": ((0.93969262, 0.0, -0.34202014), (0.11697778, 0.93969262, 0.32139380)),
}
"""Direction cosines along a row and down a column (LPS), by name."""

Edit = Callable[[int, Dataset], None]


@dataclass(frozen=True)
class Geometry:
    """Positions and orientation of slices, in LPS mm."""

    across: tuple[float, ...] = (1, 0, 0)
    down: tuple[float, ...] = (0, 1, 0)
    spacing: tuple[float, float] = (0.8, 0.7)  # between rows, between columns
    step: float = 2.5
    origin: tuple[float, ...] = (-31.25, 12.5, -101.75)
    tilt: float = 0.0  # mm that each slice is shifted down a column from the previous one
    tilt_across: float = 0.0  # the same along a row

    @property
    def normal(self) -> NDArray[np.float64]:
        """Row x column direction, along which k increases."""
        return np.cross(self.across, self.down)

    def position(self, k: float) -> NDArray[np.float64]:
        """Centre of the first pixel of slice k."""
        across, down = np.asarray(self.across, float), np.asarray(self.down, float)
        step = self.step * self.normal + self.tilt * down + self.tilt_across * across
        return np.asarray(self.origin) + k * step

    @property
    def affine(self) -> NDArray[np.float64]:
        """Index (column, row, slice) to RAS mm."""
        affine = np.eye(4)
        affine[:3, 0] = np.asarray(self.across) * self.spacing[1]
        affine[:3, 1] = np.asarray(self.down) * self.spacing[0]
        affine[:3, 2] = self.position(1) - self.position(0)
        affine[:3, 3] = self.origin
        return np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine


def plane(name: str, **changes: Any) -> Geometry:
    """Return the geometry of a plane of `PLANES`."""
    across, down = PLANES[name]
    return Geometry(across=across, down=down, **changes)


@dataclass(frozen=True)
class Coding:
    """Pixel format and transfer syntax."""

    allocated: int = 16
    stored: int = 16
    signed: bool = True
    slope: str = "1"
    intercept: str = "-1024"
    syntax: str = ExplicitVRLittleEndian


@dataclass(frozen=True)
class Words:
    """Header attributes other than geometry and coding."""

    modality: str = "CT"
    name: str = "series"  # seed of the UIDs
    study: str = "study"
    more: dict[str, Any] = field(default_factory=dict)


def add_overlays(ds: Dataset, bits: Iterable[int]) -> None:
    """Describe overlays in unused bits of the samples (PS3.3 C.9.2 of 2001, retired since)."""
    for n, bit in enumerate(bits):
        block = 0x6000 + 2 * n << 16
        ds.add_new(block | 0x0010, "US", ds.Rows)
        ds.add_new(block | 0x0011, "US", ds.Columns)
        ds.add_new(block | 0x0040, "CS", "G")
        ds.add_new(block | 0x0050, "SS", [1, 1])
        ds.add_new(block | 0x0100, "US", ds.BitsAllocated)
        ds.add_new(block | 0x0102, "US", bit)


def noise(shape: Sequence[int] = (24, 20, 6), seed: int = 0) -> NDArray[np.int16]:
    """Return stored values (I, J, K) whose flips and permutations all differ."""
    return np.random.default_rng(seed).integers(0, 2000, tuple(shape)).astype(np.int16)


def write_series(
    folder: Path,
    stored: NDArray[Any],
    geometry: Geometry = Geometry(),
    coding: Coding = Coding(),
    words: Words = Words(),
    edit: Edit | None = None,
) -> list[Path]:
    """Write one file per slice; file names and InstanceNumbers do not reveal the order.

    Parameters
    ----------
    stored : (I, J, K) array
        Stored samples: column, row, slice.
    edit : function of (k, dataset)
        Edits a data set before it is written.

    Returns
    -------
    list of Path
        Files in the order of k.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = stored.shape[2]
    numbers = np.random.default_rng(count).permutation(count) + 1
    paths = []
    for k in range(count):
        dataset = dataset_of(stored[:, :, k].T, geometry.position(k), geometry, coding, words)
        dataset.InstanceNumber = int(numbers[k])
        dataset.SOPInstanceUID = uid(words.name, "instance", k)
        dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
        if edit is not None:
            edit(k, dataset)
        paths.append(folder / f"{numbers[k]:04d}.dcm")
        dcmwrite(paths[-1], dataset, enforce_file_format=True)
    return paths


def uid(*seeds: object) -> UID:
    """Return the UID derived from these words."""
    return generate_uid(entropy_srcs=[str(seed) for seed in seeds])


def dataset_of(
    pixels: NDArray[Any],
    position: NDArray[np.float64],
    geometry: Geometry,
    coding: Coding,
    words: Words,
) -> Dataset:
    """Return one image; SOPInstanceUID and InstanceNumber are left to the caller."""
    ds = Dataset()
    ds.file_meta = FileMetaDataset()
    ds.file_meta.TransferSyntaxUID = UID(
        coding.syntax if coding.syntax == ImplicitVRLittleEndian else ExplicitVRLittleEndian
    )
    ds.SOPClassUID = CT if words.modality == "CT" else MR
    ds.file_meta.MediaStorageSOPClassUID = ds.SOPClassUID
    ds.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
    ds.StudyDate = ds.SeriesDate = ds.AcquisitionDate = ds.ContentDate = "20250102"
    ds.StudyTime = ds.SeriesTime = ds.AcquisitionTime = ds.ContentTime = "101500"
    ds.Modality = words.modality
    ds.Manufacturer, ds.ManufacturerModelName = "scanloom tests", "drawn"
    ds.PatientName, ds.PatientID = "Test^Nobody", "NOBODY"
    ds.PatientBirthDate = ds.PatientSex = ds.AccessionNumber = ds.ReferringPhysicianName = ""
    ds.PositionReferenceIndicator = ""
    ds.StudyID, ds.SeriesNumber, ds.AcquisitionNumber = "1", 1, 1
    ds.StudyInstanceUID, ds.SeriesInstanceUID = uid(words.study), uid(words.name)
    ds.FrameOfReferenceUID = uid(words.study, "frame of reference")
    ds.SliceThickness = f"{geometry.step:g}"
    ds.ImagePositionPatient = [f"{v:.9g}" for v in position]
    ds.ImageOrientationPatient = [f"{v:.9g}" for v in (*geometry.across, *geometry.down)]
    ds.PixelSpacing = [f"{v:.9g}" for v in geometry.spacing]
    ds.RescaleSlope, ds.RescaleIntercept = coding.slope, coding.intercept
    if words.modality == "CT":
        ds.RescaleType, ds.KVP = "HU", "120"
    _set_pixels(ds, pixels, coding)
    for keyword, value in words.more.items():
        setattr(ds, keyword, value)
    return ds


def _set_pixels(ds: Dataset, pixels: NDArray[Any], coding: Coding) -> None:
    kind = f"<{'i' if coding.signed else 'u'}{coding.allocated // 8}"
    ds.SamplesPerPixel, ds.PhotometricInterpretation = 1, "MONOCHROME2"
    ds.Rows, ds.Columns = pixels.shape
    ds.BitsAllocated, ds.BitsStored = coding.allocated, coding.stored
    ds.HighBit, ds.PixelRepresentation = coding.stored - 1, int(coding.signed)
    data = np.ascontiguousarray(pixels).astype(kind).tobytes()
    ds.PixelData = data + b"\0" * (len(data) % 2)
    ds["PixelData"].VR = "OB" if coding.allocated == 8 else "OW"
    if coding.syntax not in (ExplicitVRLittleEndian, ImplicitVRLittleEndian):
        ds.compress(UID(coding.syntax), generate_instance_uid=False)
