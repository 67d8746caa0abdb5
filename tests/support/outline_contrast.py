"""Contrast of outlines to the tissue below them, by pixels of two pictures."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import binary_erosion, maximum_filter

REACH = 5
"""Square in pixels around a pixel of an edge that its outline with its casing covers."""


def luminance(picture: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return the relative luminance (H, W) of sRGB pixels (H, W, 3) (WCAG 2.2)."""
    share = np.asarray(picture, float)[..., :3] / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return np.asarray(linear @ (0.2126, 0.7152, 0.0722))


def contrasts(
    scan: NDArray[np.generic], drawn: NDArray[np.generic], labels: NDArray[np.integer]
) -> dict[int, NDArray[np.float64]]:
    """Return, by label, the contrast at each pixel of its edge.

    It is the greatest within `REACH` between a pixel as drawn and the same pixel of the scan alone.
    Labels with fewer than 20 such pixels are left out.
    """
    before, after = luminance(scan) + 0.05, luminance(drawn) + 0.05
    greatest = maximum_filter(np.maximum(after / before, before / after), REACH)
    found = {}
    for number in np.unique(labels[labels > 0]).tolist():
        inside = labels == number
        edge = inside & ~binary_erosion(inside, border_value=1)
        if np.count_nonzero(edge) >= 20:
            found[number] = greatest[edge]
    return found
