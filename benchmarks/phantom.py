"""A scan that is drawn: ellipsoids of different density in a body, and scores that suit them.

Everything follows from formulas, so that the same scan exists on any grid and its true labels are
known. No patient's data is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

AIR, BODY = -1000.0, 40.0  # HU
NOISE = 8.0  # HU, standard deviation
EDGE = 6.0  # mm: scores grow no further beyond that depth
BODY_RADII = (0.46, 0.36, 0.75)  # of the field of view: the ends of the scan cut the body

Array = NDArray[Any]


@dataclass(frozen=True)
class Ball:
    """An ellipsoid along the axes, in mm from the corner of the field of view."""

    centre: tuple[float, float, float]
    radii: tuple[float, float, float]


@dataclass(frozen=True)
class Phantom:
    """A field of view with numbered structures in it.

    Parameters
    ----------
    extent : (x, y, z)
        mm.
    balls : tuple of Ball
        Structure n is number n - 1 of them.
    """

    extent: tuple[float, float, float]
    balls: tuple[Ball, ...]

    @property
    def hounsfield(self) -> Array:
        """HU by label, 0 the body; densities go over and under that of the body."""
        count = len(self.balls)
        steps = np.linspace(-700, 950, count)
        step = 1650 / max(count - 1, 1)
        near = np.abs(steps - BODY) < step / 2
        steps = np.where(near, BODY + step / 2, steps)
        return np.concatenate(([BODY], steps)).astype(np.float32)


def phantom(extent: tuple[float, float, float], structures: int, seed: int = 9) -> Phantom:
    """Place structures of radius 18 to 50 mm (less where there are many) within the body."""
    rng = np.random.RandomState(seed)  # its stream is frozen: the same scan with every NumPy
    size = min(1.0, (25 / structures) ** (1 / 3))
    balls = []
    for n in range(structures):
        radii = rng.uniform(18, 50, size=3) * size
        angle = 2 * np.pi * rng.uniform()
        away = 0.36 * np.sqrt(rng.uniform())
        x = extent[0] * (0.5 + away * np.cos(angle))
        y = extent[1] * (0.5 + away * 0.75 * np.sin(angle))
        z = extent[2] * (n + rng.uniform(0.3, 0.7)) / structures  # each height has its share
        balls.append(Ball((x, y, z), (radii[0], radii[1], radii[2])))
    return Phantom(extent, tuple(balls))


def depths(
    drawn: Phantom, spacing: tuple[float, float, float], shape: tuple[int, int, int]
) -> Iterator[tuple[int, tuple[slice, ...], Array]]:
    """Yield each structure's number, a box around it, and the depth in mm (about) within the box.

    Voxel (0, 0, 0) has its centre half a voxel from the corner; depths are negative outside.
    """
    axes = [(np.arange(n) + 0.5) * s for n, s in zip(shape, spacing, strict=True)]
    for number, ball in enumerate(drawn.balls, start=1):
        box, squares = [], []
        for axis, c, r in zip(axes, ball.centre, ball.radii, strict=True):
            low, high = np.searchsorted(axis, (c - r - EDGE, c + r + EDGE))
            box.append(slice(low, high))
            squares.append((((axis[low:high] - c) / r) ** 2).astype(np.float32))
        grown = squares[0][:, None, None] + squares[1][None, :, None] + squares[2][None, None, :]
        yield number, tuple(box), (1 - np.sqrt(grown)) * np.float32(min(ball.radii))


def draw_labels(
    drawn: Phantom, spacing: tuple[float, float, float], shape: tuple[int, int, int]
) -> Array:
    """Return the true labels (I, J, K), I fastest in memory."""
    labels = np.zeros(shape, np.uint8, order="F")
    deepest = np.zeros(shape, np.float32, order="F")
    for number, box, depth in depths(drawn, spacing, shape):
        won = depth > deepest[box]
        labels[box][won] = number
        deepest[box][won] = depth[won]
    return labels


def draw_scan(drawn: Phantom, labels: Array, seed: int = 9) -> Array:
    """Return a CT of the phantom: int16 HU (I, J, K), I fastest in memory."""
    rng = np.random.default_rng(seed)
    shape = labels.shape
    scan = np.empty(shape, np.int16, order="F")
    ends = [
        ((np.arange(n) + 0.5) / n - 0.5) ** 2 / r**2 for n, r in zip(shape, BODY_RADII, strict=True)
    ]
    flat = ends[0][:, None] + ends[1][None, :]
    for k in range(shape[2]):
        inside = flat + ends[2][k] < 1
        hu = np.where(inside, drawn.hounsfield[labels[..., k]], AIR)
        grain = rng.standard_normal(shape[:2], dtype=np.float32)
        scan[..., k] = np.clip(np.round(hu + NOISE * grain), -1024, 3071)
    return scan


def draw_scores(
    drawn: Phantom,
    spacing: tuple[float, float, float],
    shape: tuple[int, int, int],
    seed: int = 9,
) -> Array:
    """Return scores in half precision, as planes of a network: (Z, C, X, Y), background first.

    Where a structure is not near, its score is well below the background's, as trained networks
    have it; all scores carry noise.
    """
    rng = np.random.default_rng(seed)
    x, y, z = shape
    scores = np.empty((z, len(drawn.balls) + 1, x, y), np.float16)
    for plane in scores:
        plane[:] = rng.standard_normal(plane.shape, dtype=np.float32) * 0.3
        plane[1:] -= EDGE
    for number, box, depth in depths(drawn, spacing, shape):
        near = scores[box[2], number, box[0], box[1]]
        near += (np.clip(depth, -EDGE, EDGE) + EDGE).transpose(2, 0, 1).astype(np.float16)
    return scores


def write_nifti(scan: Array, spacing: tuple[float, float, float], path: Path) -> None:
    """Write the scan lying as `write_dicom` lays it: i to the left, j to the back, k up."""
    import nibabel as nib

    affine = np.diag((-spacing[0], -spacing[1], spacing[2], 1.0))
    image = nib.Nifti1Image(scan, affine)
    image.set_sform(affine, code=1)
    image.set_qform(affine, code=1)
    image.header.set_xyzt_units("mm")
    image.to_filename(path)


def write_dicom(scan: Array, spacing: tuple[float, float, float], folder: Path) -> None:
    """Write a CT series, explicit little endian, 16 bits, uncompressed."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian

    folder.mkdir(parents=True, exist_ok=True)
    root = "2.25.7777777"
    for k in range(scan.shape[2]):
        ds = Dataset()
        ds.SpecificCharacterSet = "ISO_IR 100"
        ds.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
        ds.SOPClassUID, ds.SOPInstanceUID = CTImageStorage, f"{root}.1.{k + 1}"
        ds.StudyDate = ds.SeriesDate = ds.ContentDate = ds.AcquisitionDate = "20260101"
        ds.StudyTime = ds.SeriesTime = ds.ContentTime = ds.AcquisitionTime = "120000"
        ds.AccessionNumber, ds.ReferringPhysicianName = "", ""
        ds.Modality, ds.Manufacturer, ds.ManufacturerModelName = "CT", "scanloom", "phantom"
        ds.StudyDescription, ds.SeriesDescription = "Drawn", "Ellipsoids"
        ds.PatientName, ds.PatientID = "Phantom^Ellipsoids", "SCANLOOM-BENCH"
        ds.PatientBirthDate, ds.PatientSex = "", "O"
        ds.BodyPartExamined, ds.PatientPosition = "ABDOMEN", "HFS"
        ds.KVP, ds.SliceThickness = "120", str(spacing[2])
        ds.StudyInstanceUID, ds.SeriesInstanceUID = f"{root}.2", f"{root}.3.{scan.shape[2]}"
        ds.FrameOfReferenceUID, ds.PositionReferenceIndicator = f"{root}.4", ""
        ds.StudyID, ds.SeriesNumber, ds.InstanceNumber = "1", "2", str(scan.shape[2] - k)
        ds.ImagePositionPatient = [0, 0, round(k * spacing[2], 4)]
        ds.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        ds.PixelSpacing = [spacing[1], spacing[0]]
        ds.SamplesPerPixel, ds.PhotometricInterpretation = 1, "MONOCHROME2"
        ds.Columns, ds.Rows = scan.shape[0], scan.shape[1]
        ds.BitsAllocated, ds.BitsStored, ds.HighBit, ds.PixelRepresentation = 16, 12, 11, 0
        ds.RescaleIntercept, ds.RescaleSlope, ds.RescaleType = "-1024", "1", "HU"
        ds.PixelData = (scan[:, :, k].T.astype(np.int32) + 1024).astype("<u2").tobytes()
        ds["PixelData"].VR = "OW"
        ds.file_meta = FileMetaDataset()
        ds.file_meta.MediaStorageSOPClassUID = CTImageStorage
        ds.file_meta.MediaStorageSOPInstanceUID = ds.SOPInstanceUID
        ds.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        ds.save_as(folder / f"{scan.shape[2] - k:05d}.dcm", enforce_file_format=True)
