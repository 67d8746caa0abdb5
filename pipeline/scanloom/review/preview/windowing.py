"""Intensity windows of pictures: the range from black to white."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Measurement, Volume

LUNG_MEDIAN_HU = -400.0
"""Median in HU below which a structure is mostly air."""
MAX_SAMPLE_VOXELS = 500_000
"""Number of voxels that estimate the percentiles accurately enough for a picture."""


@dataclass(frozen=True)
class Window:
    """The intensities shown as black and as white, and their description for a reader."""

    low: float
    high: float
    text: str

    def gray(self, values: NDArray[Any]) -> NDArray[np.uint8]:
        """Return the brightness of values, 0 to 255, in the same shape; NaN is black."""
        shown = np.where(np.isnan(values), self.low, values).clip(self.low, self.high)
        return np.asarray((shown - self.low) / (self.high - self.low) * 255 + 0.5, dtype=np.uint8)


def hounsfield(width: int, level: int) -> Window:
    """Return a CT window by its width and level in HU."""
    return Window(level - width / 2, level + width / 2, f"window W {width} L {level} HU")


SOFT_TISSUE = hounsfield(400, 40)
LUNG = hounsfield(1500, -600)


def choose_window(volume: Volume, largest: Measurement | None) -> Window:
    """Choose the window that suits the largest structure.

    Parameters
    ----------
    volume : Volume
        The scan.
    largest : Measurement or None
        The measurement of the largest structure; None if no structure was found.

    Returns
    -------
    Window
        For CT in HU the lung or the soft tissue window; otherwise the range from the 1st to the
        99th percentile of all voxels that are not padding.
    """
    if volume.unit == "HU":
        airy = (
            largest is not None and largest.median is not None and largest.median < LUNG_MEDIAN_HU
        )
        return LUNG if airy else SOFT_TISSUE
    values = _sample(volume)
    low, high = (float(v) for v in np.percentile(values, (1, 99))) if values.size else (0.0, 1.0)
    if high - low <= 1e-6 * max(abs(low), abs(high)):  # a constant image is shown grey
        half = max(0.5, 0.01 * abs(low))
        low, high = low - half, low + half
    unit = f" {volume.unit}" if volume.unit != "unknown" else ""
    return Window(low, high, f"window {low:.4g} to {high:.4g}{unit}")


def _sample(volume: Volume) -> NDArray[Any]:
    """Return the finite voxels, without padding, of an evenly spaced subset of the scan."""
    step = max(1, round((volume.array.size / MAX_SAMPLE_VOXELS) ** (1 / 3)))
    i, j, k = (slice((n - 1) % step // 2, None, step) for n in volume.array.shape)
    values = volume.array[i, j, k].astype(np.float64).ravel()
    values = values[np.isfinite(values)]
    return values if volume.padding is None else values[~volume.is_padding(values)]
