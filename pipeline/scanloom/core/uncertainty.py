"""`Uncertainty`: maps of how certain the labels of a segmentation are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

STEPS = 255
"""Stored value of 1: maps are stored as integers from 0."""


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """Uncertainty of each voxel's label, in steps of 1 / `STEPS`.

    Parameters
    ----------
    entropy : (I, J, K) uint8 array
        Entropy of the class probabilities, from 0 (certain) to 1 (all classes equally probable);
        I fastest in memory.
    disagreement : (I, J, K) uint8 array or None
        Share of the model's networks whose own label differs from the result (variation ratio);
        None for a single network.
    """

    entropy: NDArray[np.uint8]
    disagreement: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        for name, values in self.maps():
            if values.ndim != 3 or values.dtype != np.uint8:
                shape = f"{values.shape} {values.dtype}"
                raise ValueError(f"{name} must be (I, J, K) of uint8, got {shape}")

    def maps(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield name and array of each map that there is."""
        yield "entropy", self.entropy
        if self.disagreement is not None:
            yield "disagreement", self.disagreement
