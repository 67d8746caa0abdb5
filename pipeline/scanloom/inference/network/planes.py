"""Adapts two-dimensional networks to windows of one plane."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from scanloom.cards.card import Window

_PROBE: Final = 64
"""Length of the input, in voxels, for a forward pass on the meta device if the card has no window
size."""


class PlaneNetwork(nn.Module):
    """A two-dimensional network that takes windows of one plane (MONAI SliceInferer).

    Parameters
    ----------
    network : Module
        Maps (N, channels, ., .) to scores (N, C, ., .).
    axis : 0, 1 or 2
        Axis across the planes, along which windows have 1 voxel.
    """

    def __init__(self, network: nn.Module, axis: int) -> None:
        super().__init__()
        self.network, self.dim = network, axis + 2

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the scores (N, C, x, y, z) of windows (N, channels, x, y, z)."""
        scores: torch.Tensor = self.network(windows.squeeze(self.dim))
        return scores.unsqueeze(self.dim)


def input_size(window: Window) -> tuple[int, ...]:
    """Return the size of the network's input: two numbers for a two-dimensional network.

    It is 64 voxels along each axis if the card gives no window size.
    """
    if window.size is None:
        return (_PROBE, _PROBE, _PROBE)
    return tuple(n for axis, n in enumerate(window.size) if axis != window.plane)
