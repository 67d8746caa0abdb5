"""Write multi-frame objects for tests: enhanced, legacy converted, nuclear; and mosaics."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset, dcmwrite

from support.write_dicom import Coding, Geometry, Words, dataset_of, uid

ENHANCED = {
    "CT": "1.2.840.10008.5.1.4.1.1.2.1",
    "MR": "1.2.840.10008.5.1.4.1.1.4.1",
    "PT": "1.2.840.10008.5.1.4.1.1.130",
    "NM": "1.2.840.10008.5.1.4.1.1.20",
}
CT, MR = Words("CT"), Words("MR")
LEGACY_CT = "1.2.840.10008.5.1.4.1.1.2.2"
_SINGLE = (
    *("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "SliceThickness"),
    *("RescaleSlope", "RescaleIntercept", "RescaleType", "InstanceNumber"),
)


@dataclass(frozen=True, eq=False)
class Frame:
    """One frame to write.

    Parameters
    ----------
    pixels : (I, J) array
        Stored samples.
    geometry : Geometry
    k : int
        Slice of the geometry.
    content : dict
        FrameContent attributes other than position and number.
    groups : dict of str to dict
        Further functional groups: a single item by keyword.
    slope, intercept : str
    """

    pixels: NDArray[Any]
    geometry: Geometry
    k: int
    content: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    slope: str = "1"
    intercept: str = "-1024"


def frames_of(stored: NDArray[Any], geometry: Geometry, **more: Any) -> list[Frame]:
    """Return the slices of an array (I, J, K) as frames."""
    return [Frame(stored[:, :, k], geometry, k, **more) for k in range(stored.shape[2])]


def write_enhanced(
    path: Path,
    frames: Sequence[Frame],
    words: Words = CT,
    edit: Callable[[Dataset], None] | None = None,
    shared: bool = True,
    number: int = 1,
) -> None:
    """Write frames in the given order as one enhanced object.

    Parameters
    ----------
    edit : function of dataset
        Edits the data set before it is written.
    shared : bool
        Whether common attributes are written to the shared group, else to each frame's.
    number : int
        Number of the object in its series.
    """
    first = frames[0]
    planes = np.stack([frame.pixels.T for frame in frames])
    ds = dataset_of(planes[0], np.zeros(3), first.geometry, Coding(), words)
    for keyword in _SINGLE:
        ds.pop(keyword, None)
    ds.SOPClassUID = ds.file_meta.MediaStorageSOPClassUID = ENHANCED[words.modality]
    ds.SOPInstanceUID = uid(words.name, "object", number)
    ds.file_meta.MediaStorageSOPInstanceUID = ds.SOPInstanceUID
    ds.InstanceNumber, ds.ImageType = number, ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"]
    ds.NumberOfFrames = len(frames)
    ds.PixelData = planes.astype("<i2").tobytes()
    common = item()
    if shared:
        _add_plane(common, first)
    ds.SharedFunctionalGroupsSequence = [common]
    ds.PerFrameFunctionalGroupsSequence = [_group(frame, shared, words) for frame in frames]
    if edit is not None:
        edit(ds)
    path.parent.mkdir(parents=True, exist_ok=True)
    dcmwrite(path, ds, enforce_file_format=True)


def item(**attributes: Any) -> Dataset:
    """Return a dataset with these attributes."""
    dataset = Dataset()
    for keyword, value in attributes.items():
        setattr(dataset, keyword, value)
    return dataset


def _add_plane(group: Dataset, frame: Frame) -> None:
    geometry = frame.geometry
    cosines = [f"{v:.9g}" for v in (*geometry.across, *geometry.down)]
    group.PlaneOrientationSequence = [item(ImageOrientationPatient=cosines)]
    spacing = [f"{v:.9g}" for v in geometry.spacing]
    group.PixelMeasuresSequence = [item(PixelSpacing=spacing, SliceThickness="1")]


def _group(frame: Frame, shared: bool, words: Words) -> Dataset:
    group = Dataset()
    content = {"StackID": "1", "FrameAcquisitionNumber": 1} | frame.content
    group.FrameContentSequence = [item(**content)]
    position = [f"{v:.9g}" for v in frame.geometry.position(frame.k)]
    group.PlanePositionSequence = [item(ImagePositionPatient=position)]
    if not shared:
        _add_plane(group, frame)
    rescale = item(RescaleSlope=frame.slope, RescaleIntercept=frame.intercept)
    rescale.RescaleType = "HU" if words.modality == "CT" else "US"
    group.PixelValueTransformationSequence = [rescale]
    for keyword, content in frame.groups.items():
        setattr(group, keyword, [item(**content)])
    return group


def write_nuclear(
    path: Path, stored: NDArray[Any], geometry: Geometry, order: Sequence[int], between: str
) -> None:
    """Write reconstructed nuclear medicine slices, with SliceVector in this order (from 1).

    The detector has the position of slice 1; `between` is SpacingBetweenSlices.
    """
    planes = np.stack([stored[:, :, n - 1].T for n in order])
    ds = dataset_of(planes[0], np.zeros(3), geometry, Coding(), Words("NM"))
    for keyword in ("ImagePositionPatient", "ImageOrientationPatient"):
        ds.pop(keyword, None)
    ds.SOPClassUID = ds.file_meta.MediaStorageSOPClassUID = ENHANCED["NM"]
    ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = uid("nuclear")
    ds.ImageType = ["ORIGINAL", "PRIMARY", "RECON TOMO", "EMISSION"]
    ds.NumberOfFrames, ds.SliceVector = len(order), list(order)
    ds.FrameIncrementPointer = 0x00540080
    ds.SpacingBetweenSlices = between
    detector = item(ImagePositionPatient=[f"{v:.9g}" for v in geometry.position(0)])
    detector.ImageOrientationPatient = [f"{v:.9g}" for v in (*geometry.across, *geometry.down)]
    ds.DetectorInformationSequence = [detector]
    ds.PixelData = planes.astype("<i2").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    dcmwrite(path, ds, enforce_file_format=True)


def write_mosaic(
    path: Path,
    stored: NDArray[Any],
    geometry: Geometry,
    words: Words = MR,
    *,
    downwards: bool = False,
    csa: bool = True,
    number: int = 1,
) -> None:
    """Write a Siemens mosaic of an array (I, J, K).

    The tiles ascend along row x column direction, or descend from the last slice (`downwards`).
    The position is, as Siemens writes it, the plane's corner around the first tile's centre.
    """
    columns, rows, count = stored.shape
    across = int(np.ceil(np.sqrt(count)))
    plane = np.zeros((rows * across, columns * across), np.int16)
    ks = range(count)[::-1] if downwards else range(count)
    for n, k in enumerate(ks):
        top, column = n // across * rows, n % across * columns
        plane[top : top + rows, column : column + columns] = stored[:, :, k].T
    first = geometry.position(ks[0])
    shift = np.array(geometry.across) * geometry.spacing[1] * columns * (across - 1) / 2
    shift = shift + np.array(geometry.down) * geometry.spacing[0] * rows * (across - 1) / 2
    ds = dataset_of(plane, first - shift, geometry, Coding(), words)
    ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = uid(words.name, "mosaic", number)
    ds.InstanceNumber = ds.AcquisitionNumber = number
    ds.ImageType = ["ORIGINAL", "PRIMARY", "M", "ND", "MOSAIC"]
    ds.SpacingBetweenSlices = f"{geometry.step:g}"
    if csa:
        normal = geometry.normal * (-1 if downwards else 1)
        values = {
            "NumberOfImagesInMosaic": ("US", [str(count)]),
            "SliceNormalVector": ("FD", [f"{v:.8f}" for v in normal]),
        }
        ds.add_new(0x00290010, "LO", "SIEMENS CSA HEADER")
        ds.add_new(0x00291010, "OB", csa_header(values))
    path.parent.mkdir(parents=True, exist_ok=True)
    dcmwrite(path, ds, enforce_file_format=True)


def csa_header(values: dict[str, tuple[str, list[str]]]) -> bytes:
    """Return a CSA2 header, as described in nibabel's doc/source/dicom/siemens_csa.rst."""
    blocks = [b"SV10\4\3\2\1", struct.pack("<II", len(values), 77)]
    for name, (vr, items) in values.items():
        head = name.encode().ljust(64, b"\0"), len(items), vr.encode().ljust(4, b"\0")
        blocks.append(struct.pack("<64si4s3i", *head, 0, len(items), 77))
        for text in items:
            data = text.encode() + b"\0"
            blocks.append(struct.pack("<4i", len(data), len(data), 77, len(data)))
            blocks.append(data + b"\0" * (-len(data) % 4))
    content = b"".join(blocks)
    return content + b"\0" * (len(content) % 2)
