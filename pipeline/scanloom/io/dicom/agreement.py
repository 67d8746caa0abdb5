"""Whether tilt and spacing in a header agree with the positions of slices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scanloom.io.dicom import tags
from scanloom.io.dicom.headers import Header
from scanloom.io.dicom.slices import to_float

TILT_DEGREES = 1.0
"""Difference of GantryDetectorTilt and the slices' lean that is a contradiction, not rounding."""
SPACING_SHARE = 0.02
"""The same of SpacingBetweenSlices, as a share of the distance of slices."""
_TILT, _BETWEEN = tags.GANTRY_DETECTOR_TILT, tags.SPACING_BETWEEN_SLICES


def contradicts(header: Header, step: NDArray[np.float64], normal: NDArray[np.float64]) -> bool:
    """Whether a header's words on tilt and spacing are not what the positions say.

    SliceThickness is none of them: slices may overlap, or leave gaps.
    """
    along, length = abs(float(step @ normal)), float(np.linalg.norm(step))
    lean = float(np.degrees(np.arccos(min(along / length, 1.0))))
    tilt, between = (_said(header, tag) for tag in (_TILT, _BETWEEN))
    if tilt is not None and abs(abs(tilt) - lean) > TILT_DEGREES:
        return True
    if between is None or between == 0:
        return False
    # Some measure it along the normal, some along the table
    return min(abs(abs(between) - d) / d for d in (along, length)) > SPACING_SHARE


def _said(header: Header, tag: int) -> float | None:
    try:
        number = to_float(header.elements.text(tag))
    except ValueError:
        return None
    return number if np.isfinite(number) else None
