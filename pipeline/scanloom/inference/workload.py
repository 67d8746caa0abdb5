"""The amount of work of a network for a scan, from the scan's grid alone."""

from __future__ import annotations

import math

from scanloom.cards.card import ModelCard
from scanloom.core import Grid
from scanloom.inference.geometry import plan_grid
from scanloom.inference.sliding_window import window_size, window_starts


def window_values(card: ModelCard, grid: Grid) -> int:
    """Return the number of voxels in all sliding windows of a scan, including windows of air."""
    shape = plan_grid(grid, card.grid).network.shape
    size = window_size(card.window, shape)
    counts = (
        len(window_starts(max(length, roi), roi, card.window.overlap))
        for length, roi in zip(shape, size, strict=True)
    )
    return math.prod(counts) * math.prod(size)
