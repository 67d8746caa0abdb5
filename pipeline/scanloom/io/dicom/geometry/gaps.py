"""Interpolate missing slices of a stack from their neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.io.dicom.geometry.slices import Slice


def fill_gaps(
    values: NDArray[Any], slices: Sequence[Slice | None], padding: float | None = None
) -> None:
    """Interpolate missing slices linearly between the nearest present ones, in place.

    Parameters
    ----------
    values : (I, J, K) array
        Changed in place; integers are rounded.
    slices : sequence of Slice or None
        The slice at each index k, None if it is missing; the first and the last are present.
    padding : float or None
        Value of pixels without a measurement. A pixel that is padding in either neighbour
        becomes padding.
    """
    present = [k for k, slice_ in enumerate(slices) if slice_ is not None]
    for lower, upper in itertools.pairwise(present):
        if upper - lower > 1:
            _fill_between(values, lower, upper, padding)


def _fill_between(values: NDArray[Any], lower: int, upper: int, padding: float | None) -> None:
    before, after = values[:, :, lower], values[:, :, upper]
    is_padding = (before == padding) | (after == padding) if padding is not None else None
    for k in range(lower + 1, upper):
        weight = (k - lower) / (upper - lower)
        interpolated = before * (1 - weight) + after * weight
        if values.dtype.kind in "iu":
            interpolated = np.rint(interpolated)
        if is_padding is not None:
            interpolated[is_padding] = padding
        values[:, :, k] = interpolated
