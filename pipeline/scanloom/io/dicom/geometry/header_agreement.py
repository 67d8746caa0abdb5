"""Compare tilt and spacing in a header with the positions of slices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scanloom.io.dicom import tags
from scanloom.io.dicom.geometry.slices import parse_decimal
from scanloom.io.dicom.header.header import Header

MAX_TILT_DIFFERENCE_DEG = 1.0
"""Larger differences of GantryDetectorTilt and the lean of the slices are not due to rounding."""
MAX_SPACING_DIFFERENCE = 0.02
"""The same for SpacingBetweenSlices, as a share of the slice distance."""


def header_disagrees(
    header: Header, step: NDArray[np.float64], normal: NDArray[np.float64]
) -> bool:
    """Return whether tilt or spacing in a header contradict the positions of slices.

    SliceThickness is not compared: slices may overlap, or leave gaps.

    Parameters
    ----------
    header : Header
        Of any slice.
    step : (3,) array
        From one slice to the next, LPS mm.
    normal : (3,) array
        Unit normal of the slices.
    """
    along, length = abs(float(step @ normal)), float(np.linalg.norm(step))
    lean = float(np.degrees(np.arccos(min(along / length, 1.0))))
    tilt = _finite_number(header, tags.GANTRY_DETECTOR_TILT)
    spacing = _finite_number(header, tags.SPACING_BETWEEN_SLICES)
    if tilt is not None and abs(abs(tilt) - lean) > MAX_TILT_DIFFERENCE_DEG:
        return True
    if spacing is None or spacing == 0:
        return False
    # Some scanners measure it along the normal, some along the table
    distances = (along, length)
    return min(abs(abs(spacing) - d) / d for d in distances) > MAX_SPACING_DIFFERENCE


def _finite_number(header: Header, tag: int) -> float | None:
    try:
        number = parse_decimal(header.elements.text(tag))
    except ValueError:
        return None
    return number if np.isfinite(number) else None
