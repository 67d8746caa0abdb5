"""Sampling coordinates in the order of operations of MONAI's AffineTransform.

It normalises indices to -1 .. 1, multiplies (torch's affine_grid), and takes the result back to
indices (torch's grid_sample), in float64. The last bit decides about nearest neighbours at exact
ratios, and whether an interpolated value is exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


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
    unnormalized = torch.from_numpy(np.linalg.inv(_normalizer(shape)))
    theta = torch.from_numpy(_normalizer(size)) @ torch.from_numpy(step) @ unnormalized
    return theta[[2, 1, 0, 3]][:, [2, 1, 0, 3]][:3].T


def sampling_base(size: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the centres of `size` voxels between -1 and 1, as in torch's affine_grid."""
    ends = torch.linspace(-1, 1, size, dtype=torch.float64, device=device)
    return ends * (size - 1) / size if size > 1 else torch.zeros(1, dtype=ends.dtype, device=device)


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
    grid = (base @ sampling_theta(size, step, shape))[:, 2 - axis].numpy()
    return np.asarray(((grid + 1) * float(size[axis]) - 1) / 2)
