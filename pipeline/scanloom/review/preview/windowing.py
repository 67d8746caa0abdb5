"""Intensity windows of pictures: the range from black to white."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUCLEAR = ("PT", "NM")
"""Modalities that are shown inverted: high uptake is black."""


@dataclass(frozen=True)
class Window:
    """The intensities at the ends of the grey scale, and their description for a reader.

    `inverted` means that the lowest intensity is white.
    """

    low: float
    high: float
    text: str
    inverted: bool = False

    def gray(self, values: NDArray[Any]) -> NDArray[np.uint8]:
        """Return the brightness of values, 0 to 255, in the same shape; NaN counts as lowest."""
        shown = np.where(np.isnan(values), self.low, values).clip(self.low, self.high)
        gray = np.asarray((shown - self.low) / (self.high - self.low) * 255 + 0.5, dtype=np.uint8)
        return 255 - gray if self.inverted else gray


def hounsfield(width: int, level: int) -> Window:
    """Return a CT window by its width and level in HU."""
    return Window(level - width / 2, level + width / 2, f"W {width} L {level} HU")


SOFT_TISSUE = hounsfield(400, 40)
LUNG = hounsfield(1500, -600)
HIGHEST_SUV = 7.0
"""SUV that is shown black: usual in reading FDG."""


def choose_window(
    values: NDArray[Any], modality: str | None, unit: str, suv_factor: float | None = None
) -> Window:
    """Choose a window.

    Parameters
    ----------
    values : (N,) array
        Finite intensities inside the body.
    modality : str or None
        Modality of the scan, stated or assumed.
    unit : str
        Unit of the intensities; with "HU" the soft tissue window is chosen.
    suv_factor : float or None
        Standardised uptake value of an intensity of 1, if known.

    Returns
    -------
    Window
        For CT in HU the soft tissue window; for PET from 0 to an SUV of 7, inverted, or to the
        99.5th percentile if SUVs are unknown; otherwise from the 0.5th to the 99.5th percentile.
    """
    if unit == "HU":
        return SOFT_TISSUE
    if suv_factor is not None:
        text = f"SUV 0 to {HIGHEST_SUV:g}, inverted"
        return Window(0.0, HIGHEST_SUV / suv_factor, text, inverted=True)
    low, high = (float(v) for v in np.percentile(values, (0.5, 99.5))) if values.size else (0, 1)
    inverted = modality in NUCLEAR
    if inverted and high > 0:
        low = 0.0
    if high - low <= 1e-6 * max(abs(low), abs(high)):  # a constant image is shown grey
        half = max(0.5, 0.01 * abs(low))
        low, high = low - half, low + half
    suffix = f" {unit}" if unit != "unknown" else ""
    text = f"{low:.4g} to {high:.4g}{suffix}{', inverted' if inverted else ''}"
    return Window(low, high, text, inverted)
