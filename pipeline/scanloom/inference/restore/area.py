"""Decides labels on the source grid from scores that are resampled by area."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.cards.card import Decision
from scanloom.inference.geometry import NetworkPlan
from scanloom.inference.resampling.area import area_matrix
from scanloom.inference.restore.decisions import decide_on_grid, label_type, map_count
from scanloom.inference.sliding_window import ScorePlanes

_SLAB_BYTES = 64 * 1024**2
"""Largest size of the resampled scores of some source slices."""


class AreaRestorer:
    """Takes planes of scores, resamples them by area and decides labels on the source's voxels.

    All scores are kept until the last plane: networks on a grid of fixed shape are small.

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
        self._planes: list[torch.Tensor] = []

    def add(self, planes: ScorePlanes) -> None:
        """Take the next planes across the network axis that follows ``plan.lead``."""
        self._planes.append(planes.scores[:, : self._classes].to(torch.float32, copy=True))

    def finish(self) -> list[NDArray[Any]]:
        """Return the label maps (I, J, K) on the source grid, I fastest in memory."""
        plan, scores = self._plan, torch.cat(self._planes)
        lead = plan.lead
        x, y = (n for n in range(3) if n != plan.network_axis(lead))
        b, c = plan.follows[x], plan.follows[y]
        rows, columns = self._matrix(b, scores.device), self._matrix(c, scores.device)
        dtype = label_type(self._decision, self._classes)
        count = map_count(self._decision, self._classes)
        labels = [np.zeros(plan.source.shape, dtype, order="F") for _ in range(count)]
        across = self._matrix(lead, scores.device)
        slab = max(1, _SLAB_BYTES // (4 * self._classes * len(rows) * len(columns)))
        for start in range(0, len(across), slab):
            values = torch.einsum("sn,nkbc->skbc", across[start : start + slab], scores)
            values = rows @ values @ columns.T
            for label_map, found in zip(
                labels, decide_on_grid(values, self._decision), strict=True
            ):
                ordered = found.cpu().numpy().astype(dtype)
                if b > c:
                    ordered = ordered.swapaxes(1, 2)
                np.moveaxis(label_map, lead, 0)[start : start + slab] = ordered
        return labels

    def _matrix(self, axis: int, device: torch.device) -> torch.Tensor:
        """Return the weights of the network's voxels for the source voxels along an axis."""
        plan = self._plan
        x, count = plan.network_axis(axis), plan.source.shape[axis]
        matrix = area_matrix(np.arange(count), count, plan.network.shape[x])
        if plan.flipped[x]:
            matrix = matrix[::-1].copy()
        return torch.from_numpy(matrix.astype(np.float32)).to(device)
