"""Source slices that lie between planes of the network grid, as the planes arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.inference.geometry import NetworkPlan
from scanloom.inference.resampling.resample import LinearWeights, other_axes
from scanloom.inference.restore.cpu import Coordinates

CPU_SLAB_BYTES = 2 * 1024**2
"""Bytes of one class of a slab of source slices on a CPU: it fits the caches."""
GPU_SLAB_BYTES = 128 * 1024**2
"""Bytes of one class of a slab of source slices on a GPU, which needs large amounts of work."""

Maps = Sequence[NDArray[Any]]
Restore = Callable[[torch.Tensor, Coordinates, Maps], None]


class SourceSlices:
    """Takes planes of values and restores the source slices between them, each slice once.

    Parameters
    ----------
    plan : NetworkPlan
        Source grid and network grid.
    maps : sequence of (I, J, K) arrays
        Output on the source grid, I fastest in memory.
    restore : callable
        Writes the voxels of neighbouring source slices, from planes (P, C, B, D), coordinates as of
        `cpu.label`, and views (S, J, I) of the maps.
    """

    def __init__(self, plan: NetworkPlan, maps: Maps, restore: Restore) -> None:
        self._plan, self._maps, self._restore = plan, maps, restore
        lead = plan.network_axis(plan.lead)
        self._positions = np.clip(plan.to_network(plan.lead), 0.0, plan.network.shape[lead] - 1.0)
        slices = np.arange(len(self._positions))
        self._pending = slices if plan.scale[lead] > 0 else slices[::-1]  # in order of the planes
        self._last_plane: torch.Tensor | None = None

    @property
    def complete(self) -> bool:
        """Whether all slices are restored."""
        return len(self._pending) == 0

    def add(self, planes: torch.Tensor, first: int) -> None:
        """Take the next planes (P, C, B, D), whose first has the index `first`.

        Planes are ascending, without a gap; they may be overwritten afterwards.
        """
        last = first + len(planes) - 1
        positions = self._positions[self._pending]
        between = int(np.searchsorted(positions, first, side="left"))  # after the previous planes
        ready = int(np.searchsorted(np.ceil(positions), last, side="right"))
        if between and self._last_plane is not None:
            seam = torch.cat((self._last_plane, planes[:1]))
            self._write(self._pending[:between], seam, first - 1)
        if ready > between:
            self._write(self._pending[between:ready], planes, first)
        self._pending = self._pending[ready:]
        self._last_plane = None if self.complete else planes[-1:].clone()

    def _write(self, slices: NDArray[np.int64], planes: torch.Tensor, first: int) -> None:
        """Restore neighbouring source slices from the planes around them, from `first` on."""
        plan = self._plan
        b, c = other_axes(plan.lead)  # source axes, in the order of `out`
        lines = slices if any(plan.lean) else slices[:1]
        at = [self._positions[slices] - first]
        at += [np.stack([plan.to_network(axis, int(s)) for s in lines]) for axis in (b, c)]
        if plan.network_axis(b) > plan.network_axis(c):
            planes = planes.transpose(2, 3)
        low, high = int(slices.min()), int(slices.max()) + 1
        direction = 1 if slices[-1] >= slices[0] else -1
        out = [np.moveaxis(m.T, 2 - plan.lead, 0)[low:high][::direction] for m in self._maps]
        if len(lines) == 1:
            planes, at, out = _in_memory_order(planes, at, out)
        self._restore(planes, (at[0], at[1], at[2]), out)


def slabs_of_slices(
    planes: torch.Tensor, at: Coordinates, classes: int = 1
) -> Iterator[tuple[slice, list[LinearWeights]]]:
    """Yield neighbouring source slices, few at once, with their interpolation weights.

    Weights are those across planes (P, C, B, D), and along both axes of a plane. `classes` are
    interpolated at once.
    """
    along, rows, columns = at[0], np.atleast_2d(at[1]), np.atleast_2d(at[2])
    lines = max(len(rows), len(columns))
    max_bytes = CPU_SLAB_BYTES if planes.device.type == "cpu" else GPU_SLAB_BYTES
    step = (
        1
        if lines > 1
        else max(1, max_bytes // max(1, 4 * classes * rows.shape[1] * columns.shape[1]))
    )
    for start in range(0, len(along), step):
        line = rows[start % len(rows)], columns[start % len(columns)]
        slab = (along[start : start + step], *line)
        weights = [
            LinearWeights(coordinates, size, planes.device)
            for coordinates, size in zip(slab, (planes.shape[0], *planes.shape[2:]), strict=True)
        ]
        yield slice(start, start + step), weights


def interpolate(values: torch.Tensor, weights: Sequence[LinearWeights]) -> torch.Tensor:
    """Return the values (P, B, D) of one class at the source's voxels, float32 (S, J, I).

    Planes are transposed while they are small, so that whole rows are selected: selecting elements
    within rows is ten times slower.
    """
    across, b, c = weights
    values = across.along(values, 0)
    values = c.along(values.transpose(1, 2).contiguous(), 1)
    return b.along(values.transpose(1, 2).contiguous(), 1)


def _in_memory_order(
    scores: torch.Tensor, at: list[NDArray[np.float64]], out: list[NDArray[Any]]
) -> tuple[torch.Tensor, list[NDArray[np.float64]], list[NDArray[Any]]]:
    """Return the arguments with the three axes in the order of the scores in memory."""
    strides = [scores.stride(dim) for dim in (0, 2, 3)]
    a, b, c = sorted(range(3), key=lambda axis: -strides[axis])
    dims = [(0, 2, 3)[axis] for axis in (a, b, c)]
    permuted = scores.permute(dims[0], 1, dims[1], dims[2])
    lines = [np.atleast_2d(at[axis]) for axis in (a, b, c)]
    return permuted, [lines[0][0], *lines[1:]], [m.transpose(a, b, c) for m in out]
