"""Resamples the labels of a previous stage, which are input channels of the next one.

As in nnU-Net with batchgenerators 0.25.5: the indicator of each label is interpolated linearly, and
the largest decides. If several are equal, the nearest neighbour decides if it is one of them, else
the smallest label. Ties are exact equality in float64, so coordinates and weights are computed in
the order of operations of SciPy's `zoom`. Of the eight neighbours of a voxel nearly all have the
same label: only the others are computed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.inference.geometry import NetworkPlan

OUTSIDE = -1
"""Label of background outside the scan's foreground: for nnU-Net, a class of its own."""
_SLAB = 4_000_000
"""Voxels that are resampled at once."""

IntArray = NDArray[np.int32]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class _Taps:
    """Neighbours of the voxels of one axis: indices (2, N), weights (2, N), nearest (N)."""

    index: NDArray[np.intp]
    weight: Float64
    nearest: NDArray[np.intp]

    def part(self, first: int, last: int) -> _Taps:
        """Return the neighbours of voxels `first` to before `last`."""
        cut = slice(first, last)
        return _Taps(self.index[:, cut], self.weight[:, cut], self.nearest[cut])


def stage_channels(
    labels: NDArray[Any],
    foreground: NDArray[np.bool_],
    plan: NetworkPlan,
    numbers: tuple[int, ...],
    device: torch.device,
) -> torch.Tensor:
    """Return the structures of a previous stage as channels on the network grid.

    Parameters
    ----------
    labels : (I, J, K) integer array
        The label map of the previous stage, on the plan's source grid.
    foreground : (I, J, K) bool array
        The scan's foreground without holes. Background outside of it counts as another label.
    plan : NetworkPlan
        Source grid and network grid.
    numbers : tuple of int
        Numbers of the structures, in the order of the channels.
    device : torch.device
        Device of the result.

    Returns
    -------
    (len(numbers), X, Y, Z) float32 tensor
        1 in the structure, else 0.
    """
    marked = np.where((labels == 0) & ~foreground, OUTSIDE, labels).astype(np.int32)
    flips = tuple(slice(None, None, -1 if flipped else None) for flipped in plan.flipped)
    oriented = marked.transpose(plan.follows)[flips]
    resampled = resample_labels(oriented, plan.network.shape, plan.nearest[0])
    channels = torch.empty((len(numbers), *resampled.shape), device=device)
    values = torch.from_numpy(resampled).to(device)
    for channel, number in zip(channels, numbers, strict=True):
        torch.eq(values, number, out=channel)
    return channels


def resample_labels(
    labels: IntArray, shape: tuple[int, int, int], coarse: int | None = None
) -> IntArray:
    """Return a label map on a grid with the same outer edges.

    Parameters
    ----------
    labels : (x, y, z) int32 array
        The label map.
    shape : (X, Y, Z)
        Shape of the result.
    coarse : int or None
        Axis that is resampled by nearest neighbour.
    """
    if labels.shape == shape:
        return np.ascontiguousarray(labels)
    taps = [
        _taps(count, size, x == coarse)
        for x, (count, size) in enumerate(zip(shape, labels.shape, strict=True))
    ]
    out = np.empty(shape, np.int32)
    step = max(1, _SLAB // (shape[1] * shape[2]))
    for first in range(0, shape[0], step):
        last = min(first + step, shape[0])
        out[first:last] = _decide(labels, [taps[0].part(first, last), *taps[1:]])
    return out


def _taps(count: int, size: int, coarse: bool) -> _Taps:
    """Return the neighbours of `count` voxels on an axis of `size` voxels (SciPy `zoom`)."""
    at = np.clip((np.arange(count) + 0.5) * (size / count) - 0.5, 0.0, size - 1.0)
    nearest = np.minimum(np.floor(at + 0.5), size - 1).astype(np.intp)
    if coarse:
        ones = np.ones(count)
        return _Taps(np.stack((nearest, nearest)), np.stack((ones, 0 * ones)), nearest)
    low = np.floor(at)
    below = 1.0 - (at - low)
    index = np.stack((low, np.minimum(low + 1, size - 1))).astype(np.intp)
    return _Taps(index, np.stack((below, 1.0 - below)), nearest)


def _decide(labels: IntArray, taps: list[_Taps]) -> IntArray:
    """Return the labels of a block of voxels."""
    out = labels[np.ix_(*(tap.nearest for tap in taps))]
    corners = list(itertools.product((0, 1), repeat=3))
    mixed = np.zeros(out.shape, np.bool_)
    for corner in corners:
        index = [tap.index[side] for tap, side in zip(taps, corner, strict=True)]
        mixed |= labels[np.ix_(*index)] != out
    where = np.nonzero(mixed)
    if len(where[0]) == 0:
        return out
    found = np.empty((8, len(where[0])), np.int32)
    weight = np.empty((8, len(where[0])))
    for n, corner in enumerate(corners):  # in the order of memory, as SciPy adds them
        sides = list(zip(taps, corner, where, strict=True))
        found[n] = labels[tuple(tap.index[side][at] for tap, side, at in sides)]
        x, y, z = (tap.weight[side][at] for tap, side, at in sides)
        weight[n] = x * y * z
    out[where] = _largest(found, weight, out[where])
    return out


def _largest(found: IntArray, weight: Float64, nearest: IntArray) -> IntArray:
    """Return for each voxel the label with the largest sum of weights.

    `found` and `weight` (8, N) are labels and weights of a voxel's neighbours.
    """
    best = np.full(len(nearest), -1.0)
    label = np.zeros(len(nearest), np.int32)
    decides = np.zeros(len(nearest), np.bool_)  # whether the nearest label has the largest sum
    for candidate in found:
        score = np.zeros(len(nearest))
        for other, share in zip(found, weight, strict=True):
            score += np.where(other == candidate, share, 0.0)
        larger = score > best
        level = (score == best) & (candidate < label)
        decides = np.where(larger, False, decides) | (
            (score >= best) & (candidate == nearest) & (score > 0)
        )
        label = np.where(larger | level, candidate, label)
        best = np.maximum(best, score)
    return np.where(decides, nearest, label)
