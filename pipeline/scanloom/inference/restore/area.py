"""Decides labels on the source grid from scores that are resampled by area."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.cards.card import Decision
from scanloom.inference.geometry import NetworkPlan
from scanloom.inference.resampling.sampling import area_matrix
from scanloom.inference.restore.decisions import Clean, decide_on_grid, label_type, map_count
from scanloom.inference.sliding_window import ScorePlanes

AREA_SLAB_BYTES = 64 * 1024**2
"""Largest size of the resampled scores of some source slices."""


class AreaResampler:
    """Takes planes of values on the network grid and resamples them by area to the source grid.

    All planes are kept until the last one: networks on a grid of fixed shape are small.

    Parameters
    ----------
    plan : NetworkPlan
        Source grid and network grid; not sheared.
    """

    def __init__(self, plan: NetworkPlan) -> None:
        self._plan = plan
        self._planes: list[torch.Tensor] = []

    def add(self, planes: torch.Tensor) -> None:
        """Take the next planes (N, C, B, D) across the network axis that follows ``plan.lead``."""
        self._planes.append(planes.to(torch.float32, copy=True))

    def slabs(
        self, maps: Sequence[NDArray[Any]]
    ) -> Iterator[tuple[torch.Tensor, list[NDArray[Any]]]]:
        """Yield values (S, C, J, I) of source slices, and views (S, J, I) of `maps` of them."""
        plan, values = self._plan, torch.cat(self._planes)
        self._planes.clear()
        lead = plan.lead
        x, y = (n for n in range(3) if n != plan.network_axis(lead))
        b, c = plan.follows[x], plan.follows[y]
        across, rows, columns = (self._matrix(axis, values.device) for axis in (lead, b, c))
        slab = max(1, AREA_SLAB_BYTES // (4 * values.shape[1] * len(rows) * len(columns)))
        for start in range(0, len(across), slab):
            part = slice(start, start + slab)
            views = [np.moveaxis(each, lead, 0)[part] for each in maps]
            if b > c:
                views = [view.swapaxes(1, 2) for view in views]
            resampled = torch.einsum("sn,nkbc->skbc", across[part], values)
            yield rows @ resampled @ columns.T, views

    def _matrix(self, axis: int, device: torch.device) -> torch.Tensor:
        """Return the weights of the network's voxels for the source voxels along an axis."""
        plan = self._plan
        x, count = plan.network_axis(axis), plan.source.shape[axis]
        matrix = area_matrix(np.arange(count), count, plan.network.shape[x])
        if plan.flipped[x]:
            matrix = matrix[::-1].copy()
        return torch.from_numpy(matrix.astype(np.float32)).to(device)


class AreaRestorer:
    """Takes planes of scores, resamples them by area and decides labels on the source's voxels.

    Parameters
    ----------
    plan : NetworkPlan
        Source grid and network grid; not sheared.
    decision : Decision
        The decision on the source grid.
    classes : int
        Number of channels to decide between.
    """

    def __init__(self, plan: NetworkPlan, decision: Decision, classes: int) -> None:
        self._plan, self._decision, self._classes = plan, decision, classes
        self._resampler = AreaResampler(plan)

    def add(self, planes: ScorePlanes) -> None:
        """Take the next planes across the network axis that follows ``plan.lead``."""
        self._resampler.add(planes.scores[:, : self._classes])

    def finish(self, _: Clean | None = None) -> list[NDArray[Any]]:
        """Return the label maps (I, J, K), I fastest in memory; cleaning does not apply."""
        dtype = label_type(self._decision, self._classes)
        count = map_count(self._decision, self._classes)
        shape = self._plan.source.shape
        labels = [np.zeros(shape, dtype, order="F") for _ in range(count)]
        for values, views in self._resampler.slabs(labels):
            for view, found in zip(views, decide_on_grid(values, self._decision), strict=True):
                view[:] = found.cpu().numpy()
        return labels
