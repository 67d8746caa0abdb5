"""What a reader gives: `Volume`, one channel of a scan on its grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.core.grid import Grid
from scanloom.core.reasons import Flag

Unit = Literal["HU", "a.u.", "unknown"]
MODALITIES = ("CT", "MR", "PT", "NM")
"""The modalities (DICOM PS3.3 C.7.3.1.1.1) that are told apart; anything else is unknown (None)."""


@dataclass(frozen=True, eq=False)
class Volume:
    """One channel of a scan.

    Parameters
    ----------
    array : (I, J, K) array
        Values after rescale, I fastest in memory (Fortran order), integer or floating.
    grid : Grid
        Where the voxels lie.
    unit : "HU", "a.u." or "unknown"
        HU only where the source says so.
    modality : str or None
        One of `MODALITIES`; None where the source does not say.
    padding : float or None
        The value that stands outside the scanner's field of view. Networks see it, statistics
        leave it out.
    flags : tuple of Flag
        What the reader had to do or to believe.
    padding_limit : float or None
        The other end of the range, where padding is a range of values.
    """

    array: NDArray[np.generic]
    grid: Grid
    unit: Unit
    modality: str | None
    padding: float | None = None
    flags: tuple[Flag, ...] = ()
    padding_limit: float | None = None

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
        """Return which values are padding, an array of the same shape."""
        if self.padding is None:
            return np.zeros(values.shape, np.bool_)
        if self.padding_limit is None:
            return np.asarray(values == self.padding)
        low, high = sorted((self.padding, self.padding_limit))
        return np.asarray((values >= low) & (values <= high))
