"""`Volume`: one channel of a scan on its grid, as a reader returns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.core.grid import Grid
from scanloom.core.reasons import Flag

Unit = Literal["HU", "a.u.", "unknown"]
MODALITIES = ("CT", "MR", "PT", "NM")
"""Supported modalities (DICOM PS3.3 C.7.3.1.1.1); any other is unknown (None)."""


@dataclass(frozen=True, eq=False)
class Volume:
    """One channel of a scan.

    Parameters
    ----------
    array : (I, J, K) array
        Values after rescale, I fastest in memory (Fortran order), integer or floating.
    grid : Grid
        Shape and affine.
    unit : "HU", "a.u." or "unknown"
        HU only if the source states it.
    modality : str or None
        One of `MODALITIES`; None if the source does not state it.
    padding : float or None
        Value of voxels outside the scanner's field of view. Networks see it, statistics skip it.
    flags : tuple of Flag
        Corrections and assumptions of the reader.
    padding_limit : float or None
        The other end of the range if padding is a range of values.
    acquisition : "2D", "3D" or None
        Of a DICOM series: whether its slices were acquired together (MRAcquisitionType 3D), or one
        by one. None for volume files.
    """

    array: NDArray[np.generic]
    grid: Grid
    unit: Unit
    modality: str | None
    padding: float | None = None
    flags: tuple[Flag, ...] = ()
    padding_limit: float | None = None
    acquisition: Literal["2D", "3D"] | None = None

    def __post_init__(self) -> None:
        if self.array.shape != self.grid.shape:
            raise ValueError(f"array {self.array.shape} does not fit grid {self.grid.shape}")
        if self.array.dtype.kind not in "iuf":
            raise ValueError(f"array must hold numbers, got {self.array.dtype}")
        if self.modality is not None and self.modality not in MODALITIES:
            raise ValueError(f"modality must be one of {MODALITIES} or None, got {self.modality}")
        array = np.asfortranarray(self.array).view()
        array.flags.writeable = False
        object.__setattr__(self, "array", array)

    def is_padding(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return a mask, of the same shape, of the values that are padding."""
        if self.padding is None:
            return np.zeros(values.shape, np.bool_)
        if self.padding_limit is None:
            return np.asarray(values == self.padding)
        low, high = sorted((self.padding, self.padding_limit))
        return np.asarray((values >= low) & (values <= high))
