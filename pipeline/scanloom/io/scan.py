"""What reading a series gives: the volume, and what writers must know of where it came from."""

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
        SOPClassUID and SOPInstanceUID as they stand in the file, empty where they are missing.
    frame : int or None
        ReferencedFrameNumber, from 1; None where the object has but one frame.
    position : tuple of str
        ImagePositionPatient, LPS mm, decimal strings of at most 16 characters.
    """

    sop_class: str
    sop_instance: str
    frame: int | None
    position: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class DicomSource:
    """What a DICOM series was, for what is written to refer to it.

    It holds identity: nothing but a DICOM writer may look at it.

    Parameters
    ----------
    first : Dataset
        The header (without pixels) of one of its files, for what all of them share.
    slices : tuple of SourceSlice or None
        One for each k of the volume, in its order; None where a slice was interpolated.
    spacing, orientation : tuple of str
        PixelSpacing and ImageOrientationPatient of every slice, decimal strings.
    """

    first: Dataset
    slices: tuple[SourceSlice | None, ...]
    spacing: tuple[str, ...]
    orientation: tuple[str, ...]

    @property
    def can_refer(self) -> bool:
        """Whether a DICOM SEG can refer to these images.

        It must name study, series, frame of reference and each image (PS3.3 C.8.20, C.7.6.16.2.1).
        """
        existing = [image for image in self.slices if image is not None]
        uids = [uid for image in existing for uid in (image.sop_class, image.sop_instance)]
        distinct = {(image.sop_instance, image.frame) for image in existing}
        shared = [valid_uid(self.first, keyword) for keyword in SHARED_UIDS]
        valid = all(shared) and all(map(UID.fullmatch, uids))
        return valid and len(distinct) == len(existing) > 0


@dataclass(frozen=True, eq=False)
class NiftiSource:
    """The forms of a NIfTI header, for a result with the same ones.

    Parameters
    ----------
    sform, qform : (4, 4) array or None
        Voxel index to mm as stored; None where its code is 0.
    sform_code, qform_code : int
        0 to 5 (NIfTI-1 standard).
    quaternion : tuple of float or None
        b, c, d of the qform, each a float32, as they are to stand in the header: another rounding
        of the same rotation may be read as another one. None where float32 was not their type.
    """

    sform: NDArray[np.float64] | None
    sform_code: int
    qform: NDArray[np.float64] | None
    qform_code: int
    quaternion: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class ItkSource:
    """A NRRD or MetaImage file: nothing more to know."""


Source = DicomSource | NiftiSource | ItkSource


@dataclass(frozen=True, eq=False)
class Scan:
    """A volume with its source."""

    volume: Volume
    source: Source
