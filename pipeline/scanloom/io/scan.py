"""A scan as it was read: its volume, and the properties of its source that writers need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Volume
from scanloom.io.dataset_text import UID, valid_uid

if TYPE_CHECKING:
    from pydicom import Dataset

SHARED_UIDS = ("StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID")
"""Keywords of the UIDs that a DICOM SEG shares with its source series."""


@dataclass(frozen=True)
class SourceSlice:
    """The image that a slice of the volume was read from.

    Parameters
    ----------
    sop_class, sop_instance : str
        SOPClassUID and SOPInstanceUID as stored in the file; empty if missing.
    frame : int or None
        ReferencedFrameNumber, from 1; None if the object has a single frame.
    position : tuple of str
        ImagePositionPatient, LPS mm, decimal strings of at most 16 characters.
    """

    sop_class: str
    sop_instance: str
    frame: int | None
    position: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class DicomSource:
    """Attributes of a DICOM series for the DICOM objects that refer to it.

    It holds patient identity: only DICOM writers may read it.

    Parameters
    ----------
    first : Dataset
        The header, without pixel data, of one of its files, for the attributes that all share.
    slices : tuple of SourceSlice or None
        The source of each slice of the volume, by k; None for a slice that was interpolated.
    spacing, orientation : tuple of str
        PixelSpacing and ImageOrientationPatient of every slice, decimal strings.
    """

    first: Dataset
    slices: tuple[SourceSlice | None, ...]
    spacing: tuple[str, ...]
    orientation: tuple[str, ...]

    @property
    def missing_uids(self) -> list[str]:
        """Keywords of the UIDs that DICOM objects must refer to and that are missing or not valid.

        They are those of study, series, frame of reference and each image (PS3.3 C.8.20,
        C.7.6.16.2.1): also SOPInstanceUID, if slices share one.
        """
        existing = [image for image in self.slices if image is not None]
        distinct = {(image.sop_instance, image.frame) for image in existing}
        missing = [keyword for keyword in SHARED_UIDS if not valid_uid(self.first, keyword)]
        if not all(UID.fullmatch(image.sop_class) for image in existing):
            missing.append("SOPClassUID")
        own = all(UID.fullmatch(image.sop_instance) for image in existing)
        if not own or len(distinct) < len(existing):
            missing.append("SOPInstanceUID")
        return missing

    @property
    def can_refer(self) -> bool:
        """Whether DICOM objects can refer to these images."""
        return not self.missing_uids


@dataclass(frozen=True, eq=False)
class NiftiSource:
    """The sform and qform of a NIfTI header, which the results repeat.

    Parameters
    ----------
    sform, qform : (4, 4) array or None
        Voxel index to mm as stored; None if the code is 0.
    sform_code, qform_code : int
        0 to 5 (NIfTI-1 standard).
    quaternion : tuple of float or None
        b, c, d of the qform, each a float32, as the results' headers must store them: rounded
        otherwise, the same rotation may be read as another. None if they were not float32.
    """

    sform: NDArray[np.float64] | None
    sform_code: int
    qform: NDArray[np.float64] | None
    qform_code: int
    quaternion: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class GridOnlySource:
    """A source of which writers need nothing but the grid, such as NRRD, MetaImage or MGH."""


Source = DicomSource | NiftiSource | GridOnlySource


@dataclass(frozen=True, eq=False)
class Scan:
    """A volume with its source."""

    volume: Volume
    source: Source
