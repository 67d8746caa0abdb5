"""The amount of work of a network for a scan, from the scan's grid alone."""

from __future__ import annotations

import math

from scanloom.cards.card import ModelCard
from scanloom.core import Grid
from scanloom.inference.geometry import plan_grid
from scanloom.inference.windows.layout import window_layout


def window_values(card: ModelCard, grid: Grid) -> int:
    """Return the number of voxels that networks process for a scan.

    Windows of air are included; a window counts once for each network and each flip.
    """
    plan = plan_grid(grid, card.grid)
    layout = window_layout(card.window, plan.network.shape, plan.network_axis(plan.lead))
    passes = (1 + len(card.folds)) * (1 << len(card.window.mirror))
    return layout.count * math.prod(layout.size) * passes
