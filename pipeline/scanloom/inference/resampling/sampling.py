"""Interpolation along one axis: sampling coordinates, areas and cubic splines.

Interpolation is separable: a volume takes one product with a matrix per axis, on any device.

Sampling coordinates are in the order of operations of MONAI's AffineTransform. It normalises
indices to -1 .. 1, multiplies (torch's affine_grid), and takes the result back to indices (torch's
grid_sample), in float64. The last bit decides about nearest neighbours at exact ratios, and whether
an interpolated value is exactly 0. They are computed on the host: a GPU rounds in another order.

An area is a mean as of PyTorch's adaptive average pooling. The matrices of splines are those of
SciPy's spline of order 3 with mode "nearest", which scikit-image's resize uses: edges are continued
by 12 voxels before the spline is fitted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage

from scanloom.inference.device import to_device

_EDGE_VOXELS = 12
"""Voxels by which SciPy continues an axis at both ends."""
_ROWS = 64
"""Rows of a matrix that are multiplied at once, with the columns in which they are not 0."""
_SMALLEST_WEIGHT = 1e-13
"""Smaller weights are dropped: they change a value by less than float64 rounds it."""


def sampling_theta(size: Sequence[int], step: NDArray[Any], shape: Sequence[int]) -> torch.Tensor:
    """Return the (4, 3) matrix from the base of `sampling_base` to torch's sampling grid.

    Parameters
    ----------
    size : (X, Y, Z)
        Shape of the input.
    step : (4, 4) array
        Maps an index of the result to an index of the input.
    shape : (X', Y', Z')
        Shape of the result.
    """
    # As batches of one, as MONAI has them: some processors round the product of two matrices
    # otherwise, and the last bit decides ties
    normal, back = (torch.from_numpy(_normalizer(n))[None] for n in (size, shape))
    theta: torch.Tensor = (normal @ torch.from_numpy(step)[None] @ torch.inverse(back))[0]
    return theta[[2, 1, 0, 3]][:, [2, 1, 0, 3]][:3].T


def sampling_base(size: int) -> torch.Tensor:
    """Return the centres of `size` voxels between -1 and 1, as in torch's affine_grid."""
    ends = torch.linspace(-1, 1, size, dtype=torch.float64)
    return ends * (size - 1) / size if size > 1 else torch.zeros(1, dtype=ends.dtype)


def grid_coordinates(grid: torch.Tensor, size: int) -> torch.Tensor:
    """Return the coordinates on an axis of `size` voxels from those of torch's sampling grid."""
    return ((grid + 1) * float(size) - 1) / 2


def nearest_index(at: torch.Tensor, size: int) -> torch.Tensor:
    """Return the nearest voxel of an axis, the even of two, as torch's grid_sample."""
    return at.round().clamp_(0, size - 1).long()


def _normalizer(shape: Sequence[int]) -> NDArray[np.float64]:
    """Return the affine from indices to -1 .. 1 between outer edges (MONAI normalize_transform)."""
    sizes = np.array(shape, dtype=np.float64)
    matrix = np.diag(np.append(2.0 / sizes, 1.0))
    matrix[:3, 3] = 1.0 / sizes - 1.0
    return matrix


def sampling_coordinates(
    size: Sequence[int], step: NDArray[Any], shape: Sequence[int], axis: int
) -> NDArray[np.float64]:
    """Return the coordinates along one axis of grids that share their axes.

    Parameters are those of `sampling_theta`; the result has ``shape[axis]`` coordinates.
    """
    at = sampling_base(shape[axis])
    base = torch.zeros((len(at), 4), dtype=at.dtype)
    base[:, 2 - axis], base[:, 3] = at, 1.0
    grid = base @ sampling_theta(size, step, shape)
    return grid_coordinates(grid[:, 2 - axis], size[axis]).numpy()


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
    # Whole samples, in integers: as PyTorch's adaptive pooling rounds
    first = index * size // count
    last = -(-(index + 1) * size // count)  # rounded up
    samples = np.arange(size)
    inside = (samples >= first[:, None]) & (samples < last[:, None])
    return np.asarray(inside / (last - first)[:, None])


def cubic_matrix(at: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return the weights (N, size) of an axis' samples at the coordinates `at` (N,)."""
    # The identity is filtered, so that columns are the responses of single samples
    samples = np.pad(np.eye(size), ((_EDGE_VOXELS, _EDGE_VOXELS), (0, 0)), mode="edge")
    coefficients = ndimage.spline_filter1d(samples, order=3, axis=0, mode="nearest")
    last = len(coefficients) - 1
    inside = np.clip(at + _EDGE_VOXELS, 0.0, last)
    below = np.floor(inside).astype(np.int64)
    t = (inside - below)[:, None]
    u = 1.0 - t
    # The cubic B-spline at distances 1 + t, t, u and 1 + u (u = 1 - t)
    weights = (u**3 / 6, (4 - 6 * t**2 + 3 * t**3) / 6, (4 - 6 * u**2 + 3 * u**3) / 6, t**3 / 6)
    matrix = np.zeros((len(at), size))
    for step, weight in enumerate(weights):
        matrix += weight * coefficients[np.clip(below + step - 1, 0, last)]
    matrix[np.abs(matrix) < _SMALLEST_WEIGHT] = 0.0
    return matrix


class BandedMatrix:
    """A matrix whose rows are 0 except near a diagonal.

    Parameters
    ----------
    matrix : (N, M) float64 array
        The matrix.
    device : torch.device
        Device of the values, which are multiplied in float64.

    Attributes
    ----------
    first, last : int
        Range of the columns that are not 0, with `last`.
    """

    def __init__(self, matrix: NDArray[np.float64], device: torch.device) -> None:
        columns = np.flatnonzero(matrix.any(axis=0))
        self.first, self.last = int(columns[0]), int(columns[-1])
        self._blocks = []
        for start in range(0, len(matrix), _ROWS):
            rows = matrix[start : start + _ROWS, self.first :]
            used = np.flatnonzero(rows.any(axis=0))
            low, high = int(used[0]), int(used[-1]) + 1
            block = to_device(np.ascontiguousarray(rows[:, low:high]), device)
            self._blocks.append((low, high, block))

    def along_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return the product with the second last axis of `values`, from column `first` on."""
        products = [block @ values[..., low:high, :] for low, high, block in self._blocks]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-2)


@functools.lru_cache(maxsize=12)  # four grids of three axes: they stay in memory
def cubic_bands(at: bytes, size: int, device: torch.device) -> BandedMatrix:
    """Return the matrix of a cubic spline on a device, kept for further scans of the same grid.

    Parameters
    ----------
    at : bytes
        Coordinates as for `cubic_matrix`, float64.
    """
    return BandedMatrix(cubic_matrix(np.frombuffer(at), size), device)
