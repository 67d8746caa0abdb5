"""Missing slices of a stack, filled from the slices around them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.io.dicom.slices import Slice


def fill_gaps(
    values: NDArray[Any], slices: Sequence[Slice | None], padding: float | None = None
) -> None:
    """Interpolate the slices that are missing, linearly between those around them, in place.

    Parameters
    ----------
    values : (I, J, K) array
        Integers are rounded.
    slices : sequence of Slice or None
        One for each k, None where it is missing; the first and the last are there.
    padding : float or None
        A value that is no measurement: what is padding in one of the two slices is padding between.
    """
    known = [k for k, one in enumerate(slices) if one is not None]
    for low, high in itertools.pairwise(known):
        if high - low > 1:
            _fill_between(values, low, high, padding)


def _fill_between(values: NDArray[Any], low: int, high: int, padding: float | None) -> None:
    first, last = values[:, :, low], values[:, :, high]
    outside = (first == padding) | (last == padding) if padding is not None else None
    for k in range(low + 1, high):
        share = (k - low) / (high - low)
        mixed = first * (1 - share) + last * share
        if values.dtype.kind in "iu":
            mixed = np.rint(mixed)
        if outside is not None:
            mixed[outside] = padding
        values[:, :, k] = mixed
