"""Cubic spline interpolation along one axis, as a banded matrix.

A spline is separable, and linear in the samples: a volume is interpolated by one matrix product per
axis, on any device. The matrices are those of SciPy's spline of order 3 with mode "nearest", which
scikit-image's resize uses: edges are continued by 12 voxels before the spline is fitted.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage

_EDGE_VOXELS = 12
"""Voxels by which SciPy continues an axis at both ends."""
_ROWS = 64
"""Rows of a matrix that are multiplied at once, with the columns in which they are not 0."""
_SMALLEST_WEIGHT = 1e-13
"""Smaller weights are dropped: they change a value by less than float64 rounds it."""


def cubic_matrix(at: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return the weights (N, size) of an axis' samples at the coordinates `at` (N,)."""
    samples = np.pad(np.eye(size), ((_EDGE_VOXELS, _EDGE_VOXELS), (0, 0)), mode="edge")
    coefficients = ndimage.spline_filter1d(samples, order=3, axis=0, mode="nearest")
    last = len(coefficients) - 1
    inside = np.clip(at + _EDGE_VOXELS, 0.0, last)
    below = np.floor(inside).astype(np.int64)
    t = (inside - below)[:, None]
    u = 1.0 - t
    weights = (u**3 / 6, (4 - 6 * t**2 + 3 * t**3) / 6, (4 - 6 * u**2 + 3 * u**3) / 6, t**3 / 6)
    matrix = np.zeros((len(at), size))
    for step, weight in enumerate(weights):
        matrix += weight * coefficients[np.clip(below + step - 1, 0, last)]
    matrix[np.abs(matrix) < _SMALLEST_WEIGHT] = 0.0
    return matrix


def selection_matrix(at: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return a matrix (N, size) that selects the samples at whole coordinates."""
    return np.eye(size)[at.astype(np.int64)]


class BandedMatrix:
    """A matrix whose rows are 0 except near a diagonal.

    Parameters
    ----------
    matrix : (N, M) float64 array
        The matrix.
    device : torch.device
        Device of the values. float64 is used except on MPS, which has float32 only.

    Attributes
    ----------
    first, last : int
        Range of the columns that are not 0, with `last`.
    """

    def __init__(self, matrix: NDArray[np.float64], device: torch.device) -> None:
        columns = np.flatnonzero(matrix.any(axis=0))
        self.first, self.last = int(columns[0]), int(columns[-1])
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self._blocks = []
        for start in range(0, len(matrix), _ROWS):
            rows = matrix[start : start + _ROWS, self.first :]
            used = np.flatnonzero(rows.any(axis=0))
            low, high = int(used[0]), int(used[-1]) + 1
            block = torch.from_numpy(np.ascontiguousarray(rows[:, low:high]))
            self._blocks.append((low, high, block.to(device, self.dtype)))

    def along_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return the product with the second last axis of `values`, from column `first` on."""
        parts = [block @ values[..., low:high, :] for low, high, block in self._blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
