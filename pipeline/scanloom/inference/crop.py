"""The box of the network grid that the network sees; voxels outside are background."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.cards.card import Crop
from scanloom.inference.geometry import NetworkPlan, Shape

_SAME_POSITION = 1e-6
"""Largest rounding error of a coordinate, in voxels."""


@dataclass(frozen=True)
class Box:
    """Voxels `first` to before `stop` of a grid of a given shape."""

    first: Shape
    stop: Shape
    grid: Shape

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        """Slices of the box along the three axes."""
        x, y, z = (slice(a, b) for a, b in zip(self.first, self.stop, strict=True))
        return x, y, z

    def fill(self, labels: NDArray[Any]) -> NDArray[Any]:
        """Return labels of the box on the whole grid, with background around."""
        whole = np.zeros(self.grid, labels.dtype, order="F")
        whole[self.slices] = labels
        return whole


def find_box(image: torch.Tensor, crop: Crop) -> Box:
    """Return the box around the foreground of an image (channels, X, Y, Z).

    It is the whole image if there is no foreground.
    """
    if crop.foreground == "nonzero":
        mask = (image != 0).any(dim=0)
    else:
        mask = (image > float(image.max()) * crop.above).any(dim=0)
    x, y, z = mask.shape
    first, stop = [0, 0, 0], [x, y, z]
    for axis in range(3):
        others = tuple(n for n in range(3) if n != axis)
        at = mask.amax(dim=others).nonzero()
        if len(at):
            first[axis] = max(int(at[0]) - crop.margin, 0)
            stop[axis] = min(int(at[-1]) + 1 + crop.margin, stop[axis])
    return Box((first[0], first[1], first[2]), (stop[0], stop[1], stop[2]), (x, y, z))


def largest_box(plan: NetworkPlan, crop: Crop | None) -> Shape:
    """Return the shape of the largest box that a scan can have on its network grid.

    Voxels outside the scan are empty with alignment "centre", so the box is not around them.
    """
    if crop is None or crop.grid != "network" or plan.alignment != "centre":
        return plan.network.shape
    size = list(plan.network.shape)
    for axis in range(3):
        at, last = plan.to_source(axis), plan.source.shape[axis] - 1
        inside = (at >= -_SAME_POSITION) & (at <= last + _SAME_POSITION)
        x = plan.network_axis(axis)
        size[x] = min(size[x], int(inside.sum()) + 2 * crop.margin) or size[x]
    return size[0], size[1], size[2]
