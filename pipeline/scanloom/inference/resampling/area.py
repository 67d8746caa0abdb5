"""Resampling by area along one axis, as a matrix (PyTorch's adaptive average pooling)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def area_matrix(index: NDArray[np.int64], count: int, size: int) -> NDArray[np.float64]:
    """Return the weights (N, size) of an axis' samples for some of `count` areas of equal size.

    An area is the mean of all samples that it overlaps, each with the same weight.

    Parameters
    ----------
    index : (N,) int array
        The areas, of 0 to `count` - 1.
    count : int
        Number of areas on the axis.
    size : int
        Number of samples on the axis.
    """
    first = index * size // count
    last = -(-(index + 1) * size // count)  # rounded up
    samples = np.arange(size)
    inside = (samples >= first[:, None]) & (samples < last[:, None])
    return np.asarray(inside / (last - first)[:, None])
