"""Share of a preview that is empty."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from scipy.ndimage import maximum_filter

PAGE = (13, 15, 19)
SPACING = 20
"""Distance in pixels from text or a picture up to which the page is spacing, not empty."""


def empty_share(path: str | Path) -> float:
    """Return the share of the pixels that are further than `SPACING` from anything drawn."""
    with Image.open(path) as image:
        drawn = (np.asarray(image.convert("RGB")) != PAGE).any(axis=-1)
    return float(1 - maximum_filter(drawn, 2 * SPACING + 1).mean())
