"""Tell intensities that no CT in Hounsfield units has: label maps, pictures, wrong rescale values.

The rules refuse no scan for its anatomy. Air, fat, noise and padding give nearly every CT values
below 0, and then only the scale is checked: few values are below -4096. In a CT that is scaled by
10, air is near -10000. A crop of dense tissue without such values still differs from other images:

- Noise spreads its values over several HU, unlike those of a mask, or intensities from 0 to 1.
- Its lowest value is rare. The background of label maps, of MR and PET, and of pictures with 256
  grey values is a large share of voxels with the value 0.

In a CT whose RescaleIntercept of -1024 was lost, soft tissue is near 1024 and little below 0. No
other scan has half of its dense voxels there. If it was subtracted twice, air is near -2024, and no
tissue but the densest bone is above -500.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NOT_NEGATIVE = -2.0
"""Limit above which no value counts as negative; it includes intensities from -1 to 1."""
LEAST_RANGE_HU = 5.0
"""Smallest range of 98 % of the values; the noise of CT has a standard deviation of 3 to 50 HU."""
COMMON_LOWEST = 0.05
"""Share of voxels from which on the lowest value is a background, not the tail of noise."""
SHIFTED_HU = (900.0, 1200.0)
"""Fat and soft tissue in a CT without its RescaleIntercept of -1024."""
DENSE_HU = 300.0
"""Limit above which lie all tissues of such a CT but lung."""
FEW_BELOW_HU = -200.0
"""Limit below which 1 % of the voxels lie wherever there is air."""
TWICE_HU = (-1300.0, -500.0)
"""Limits of the 5th and 95th percentile in a CT with its RescaleIntercept subtracted twice."""
HIGHEST_HU = 30_000.0
"""Limit above which less than 1 % of the values lie: metal on an extended scale reaches it."""
IMPOSSIBLE_HU = 1e6
"""Limit of any value: those of 16 bits are far below."""
LOWEST_HU = -4096.0
"""Lower limit of values other than padding: that of 12 bits, with a margin for other slopes."""


def find_impossible(array: NDArray[Any]) -> str | None:
    """Return why a value of a scan can't be in Hounsfield units, None if all may be.

    Values far below are padding; NaN and infinities are refused elsewhere.

    Parameters
    ----------
    array : (I, J, K) array
        All intensities of a scan.
    """
    highest = float(array.max()) if array.size else 0.0
    if not IMPOSSIBLE_HU < highest < np.inf:
        return None
    return f"the largest value is {highest:.6g}"


def find_foreign_scale(sample: NDArray[Any]) -> str | None:
    """Return why intensities can't be Hounsfield units, None if they may be.

    Parameters
    ----------
    sample : (N,) array
        Finite intensities of a scan without its declared padding.
    """
    if not sample.size:
        return None
    lowest = float(sample.min())
    if (last := float(np.percentile(sample, 99))) > HIGHEST_HU:
        return f"1 % of the values are above {last:.6g}"
    inner = sample[sample > lowest]  # padding that no header declares is the lowest value
    if lowest > NOT_NEGATIVE:
        found = _without_negative(lowest, inner, 1 - inner.size / sample.size)
        return found or _shifted(inner)
    if inner.size and (fifth := float(np.percentile(inner, 5))) < LOWEST_HU:
        return f"5 % of the values are below {fifth:.6g}"
    return _shifted(inner) or _shifted_twice(inner)


def _without_negative(lowest: float, inner: NDArray[Any], share: float) -> str | None:
    """Return why intensities without values below 0 can't be Hounsfield units, None if they may.

    Parameters
    ----------
    lowest : float
        The lowest value.
    inner : (N,) array
        All higher values.
    share : float
        Share of the voxels that have the lowest value.
    """
    if not inner.size:
        return f"all voxels have the value {lowest:g}"
    low, high = (float(value) for value in np.percentile(inner, (1, 99)))
    if high - low < LEAST_RANGE_HU:
        return f"98 % of the values above the lowest lie between {low:.4g} and {high:.4g}"
    if share >= COMMON_LOWEST:
        return f"no value is below 0, and {share:.0%} of the voxels have the lowest, {lowest:g}"
    return None


def _shifted(inner: NDArray[Any]) -> str | None:
    """Return why intensities seem to lack a RescaleIntercept of -1024, None if they may not."""
    dense = inner[inner > DENSE_HU]
    low, high = SHIFTED_HU
    between = dense[(dense >= low) & (dense <= high)]
    if not dense.size or between.size < 0.5 * dense.size or between.size < 0.1 * inner.size:
        return None
    if float(np.percentile(inner, 1)) < FEW_BELOW_HU:
        return None
    share = between.size / inner.size
    return f"{share:.0%} of the values lie between {low:g} and {high:g}, and few below 0"


def _shifted_twice(inner: NDArray[Any]) -> str | None:
    """Return why a RescaleIntercept of -1024 seems to be subtracted twice, None if it may not."""
    if not inner.size:
        return None
    low, high = (float(value) for value in np.percentile(inner, (5, 95)))
    if low > TWICE_HU[0] or high > TWICE_HU[1]:
        return None
    return f"90 % of the values lie between {low:.6g} and {high:.6g}"
