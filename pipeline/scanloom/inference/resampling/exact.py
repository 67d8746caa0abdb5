"""Computes single voxels of the network grid in float64, in other programs' order of operations.

Linear interpolation in float32 is exact to 1e-4 of a scan's values, which is enough except where
the last bit decides: whether a value is exactly 0 (`Normalize.nonzero`, `Crop`), or just below an
integer (`Truncate`). Only these few voxels are computed again, in the order of operations of the
program that the model was trained with. They are computed on the host: a GPU rounds in another
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.cards.card import ModelCard
from scanloom.cards.intensity import IntensityStep, Normalize, ScaleRange, Truncate
from scanloom.inference.geometry import NetworkPlan, Shape
from scanloom.inference.resampling.sampling_grid import sampling_base, sampling_theta

Decisive = float | Literal["integers"]
"""A value, or values, at which the last bit decides."""

NEAR = 1e-3
"""Largest distance from a decisive value of voxels that are computed again."""
_SAME_INDEX = 1e-6
"""Largest rounding error of a coordinate, in voxels."""
_VOXELS_AT_ONCE = 1_000_000

Float64 = NDArray[np.float64]
Index = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def decisive_values(card: ModelCard) -> Decisive | None:
    """Return the values at which the last bit decides, for the card's steps after resampling."""
    crop = card.grid.crop
    if card.after and isinstance(card.after[0], Truncate):
        return "integers"
    for n, step in enumerate(card.after):
        if isinstance(step, Normalize) and step.nonzero:
            return _becomes_zero(card.after[:n])
    if crop is not None and crop.grid == "network":
        return _becomes_zero(card.after if crop.steps is None else card.after[: crop.steps])
    return None


def _becomes_zero(steps: Sequence[IntensityStep]) -> float | None:
    """Return the intensity that steps map to 0; None if rounding in the steps decides that."""
    if not steps:
        return 0.0
    first = steps[0]
    if len(steps) == 1 and isinstance(first, ScaleRange) and not first.b_min:
        return first.a_min
    return None


def correct(
    values: torch.Tensor, scan: NDArray[Any], plan: NetworkPlan, decisive: Decisive
) -> None:
    """Compute the voxels that are close to a decisive value again, in place.

    Parameters
    ----------
    values : (X, Y, Z) float32 tensor
        The linearly resampled scan.
    scan : (I, J, K) array
        The scan, on the host.
    plan : NetworkPlan
        Source grid and network grid.
    decisive : float or "integers"
        Values at which the last bit decides.
    """
    if not plan.resampled:
        return
    nearest = values.round() if decisive == "integers" else decisive
    near = (values - nearest).abs() < NEAR
    if decisive == 0.0 and not any(plan.lean):
        near &= torch.from_numpy(_reached(scan != 0, plan)).to(values.device)
    oriented = orient(scan, plan)
    compute = _scipy if plan.alignment == "ends" else _monai(oriented.shape, plan)
    places = near.nonzero().cpu().numpy()
    del near
    for start in range(0, len(places), _VOXELS_AT_ONCE):
        x, y, z = places[start : start + _VOXELS_AT_ONCE].T
        exact = compute(oriented, (x, y, z), plan.network.shape)
        if decisive == "integers":  # float32 would round up what is just below
            exact = np.trunc(exact)
        index = tuple(torch.from_numpy(axis).to(values.device) for axis in (x, y, z))
        values[index] = torch.from_numpy(exact.astype(np.float32)).to(values.device)


def orient(array: NDArray[Any], plan: NetworkPlan) -> NDArray[Any]:
    """Return a view of a scan's voxels with the axes of the network."""
    turned = array.transpose(plan.follows)
    return turned[tuple(slice(None, None, -1 if back else None) for back in plan.flipped)]


def _monai(size: Shape, plan: NetworkPlan) -> Callable[[NDArray[Any], Index, Shape], Float64]:
    """Return the interpolation of MONAI's AffineTransform: affine_grid, then grid_sample."""
    theta = sampling_theta(size, plan.step, plan.network.shape)
    bases = [sampling_base(n) for n in plan.network.shape]

    def interpolate(oriented: NDArray[Any], index: Index, _: Shape) -> Float64:
        x, y, z = (base[torch.from_numpy(at)] for base, at in zip(bases, index, strict=True))
        grid = torch.stack((z, y, x, torch.ones_like(x)), dim=-1) @ theta
        ends = [float(n) for n in size]
        at = [
            np.clip(((grid[:, 2 - n].numpy() + 1) * ends[n] - 1) / 2, 0.0, ends[n] - 1)
            for n in range(3)
        ]
        low = [np.floor(a) for a in at]
        taps = [((b + 1 - a), (a - b)) for a, b in zip(at, low, strict=True)]
        total = np.zeros(len(at[0]))
        for i, j, k in np.ndindex(2, 2, 2):
            weight = taps[2][k] * taps[1][j] * taps[0][i]
            total += _voxels(oriented, low, (i, j, k)) * weight
        return total

    return interpolate


def _scipy(oriented: NDArray[Any], index: Index, shape: Shape) -> Float64:
    """Interpolate as scipy.ndimage.zoom of order 1 does, with mode "nearest"."""
    at = [
        a * ((n - 1) / (m - 1) if m > 1 else 1.0)
        for a, n, m in zip(index, oriented.shape, shape, strict=True)
    ]
    low = [np.floor(a) for a in at]
    taps = [(1.0 - (a - b), a - b) for a, b in zip(at, low, strict=True)]
    total = np.zeros(len(at[0]))
    for i, j, k in np.ndindex(2, 2, 2):
        total += _voxels(oriented, low, (i, j, k)) * taps[0][i] * taps[1][j] * taps[2][k]
    return total


def _voxels(array: NDArray[Any], low: Sequence[Float64], corner: Sequence[int]) -> Float64:
    """Return the voxels at a corner of the cells whose first voxels are `low`, as float64."""
    i, j, k = (
        np.minimum(at.astype(np.int64) + step, n - 1)
        for at, step, n in zip(low, corner, array.shape, strict=True)
    )
    return np.asarray(array[i, j, k], dtype=np.float64)


def _reached(mask: NDArray[np.bool_], plan: NetworkPlan) -> NDArray[np.bool_]:
    """Return which network voxels (X, Y, Z) read a voxel of a mask (I, J, K)."""
    for axis in range(3):
        last = mask.shape[axis] - 1
        at = np.clip(plan.to_source(axis), 0, last)
        low = np.floor(at - _SAME_INDEX).astype(np.int64)
        high = np.ceil(at + _SAME_INDEX).astype(np.int64)
        steps = (np.clip(index, 0, last) for index in (low, low + 1, high))
        first, second, third = (mask.take(index, axis) for index in steps)
        mask = first | second | third
    return mask.transpose(plan.follows)
