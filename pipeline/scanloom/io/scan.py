"""What reading a series gives: the volume, and what writers must know of where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Volume

if TYPE_CHECKING:
    from pydicom import Dataset


@dataclass(frozen=True, eq=False)
class DicomSource:
    """The headers (without pixels) of a DICOM series, one for each k of the volume, in its order.

    They hold identity: nothing but a DICOM writer may look at them.
    """

    headers: tuple[Dataset, ...]


@dataclass(frozen=True, eq=False)
class NiftiSource:
    """The forms of a NIfTI header, for a result with the same ones.

    Parameters
    ----------
    sform, qform : (4, 4) array or None
        Voxel index to mm as stored; None where its code is 0.
    sform_code, qform_code : int
        0 to 5 (NIfTI-1 standard).
    """

    sform: NDArray[np.float64] | None
    sform_code: int
    qform: NDArray[np.float64] | None
    qform_code: int


@dataclass(frozen=True)
class ItkSource:
    """A NRRD or MetaImage file: nothing more to know."""


Source = DicomSource | NiftiSource | ItkSource


@dataclass(frozen=True, eq=False)
class Scan:
    """A volume with its source."""

    volume: Volume
    source: Source
