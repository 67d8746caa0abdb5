"""Which intensities a picture shows: from black to white."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Measurement, Volume

LUNG_BELOW = -400.0
"""HU: a structure of which half lies below is mostly air."""
SAMPLE_VOXELS = 500_000
"""So many voxels tell the percentiles well enough for a picture."""


@dataclass(frozen=True)
class Window:
    """The intensities shown black and white, and how to say so."""

    low: float
    high: float
    text: str

    def gray(self, values: NDArray[Any]) -> NDArray[np.uint8]:
        """Return brightness from 0 to 255; what is no number is black."""
        shown = np.where(np.isnan(values), self.low, values).clip(self.low, self.high)
        return np.asarray((shown - self.low) / (self.high - self.low) * 255 + 0.5, dtype=np.uint8)


def hounsfield(width: int, level: int) -> Window:
    """Return a CT window as radiologists name it."""
    return Window(level - width / 2, level + width / 2, f"window W {width} L {level} HU")


SOFT_TISSUE = hounsfield(400, 40)
LUNG = hounsfield(1500, -600)


def choose_window(volume: Volume, largest: Measurement | None) -> Window:
    """Choose the window in which the largest structure shows best.

    Parameters
    ----------
    volume : Volume
        The scan.
    largest : Measurement or None
        Of the largest structure; None where nothing was found.

    Returns
    -------
    Window
        For CT in HU the lung or the soft tissue window, else from the 1st to the 99th percentile of
        the voxels that are not padding.
    """
    if volume.unit == "HU":
        airy = largest is not None and largest.median is not None and largest.median < LUNG_BELOW
        return LUNG if airy else SOFT_TISSUE
    values = _sample(volume)
    low, high = (float(v) for v in np.percentile(values, (1, 99))) if values.size else (0.0, 1.0)
    if high - low <= 1e-6 * max(abs(low), abs(high)):  # one value: shown grey
        half = max(0.5, 0.01 * abs(low))
        low, high = low - half, low + half
    unit = f" {volume.unit}" if volume.unit != "unknown" else ""
    return Window(low, high, f"window {low:.4g} to {high:.4g}{unit}")


def _sample(volume: Volume) -> NDArray[Any]:
    """Return some of the voxels that are finite and not padding, evenly from all of the scan."""
    step = max(1, round((volume.array.size / SAMPLE_VOXELS) ** (1 / 3)))
    i, j, k = (slice((n - 1) % step // 2, None, step) for n in volume.array.shape)
    values = volume.array[i, j, k].astype(np.float64).ravel()
    values = values[np.isfinite(values)]
    return values if volume.padding is None else values[~volume.is_padding(values)]
