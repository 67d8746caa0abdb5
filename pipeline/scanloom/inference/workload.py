"""The amount of work of a network for a scan, from the scan's grid alone."""

from __future__ import annotations

import math
from dataclasses import replace

from scanloom.cards.card import ModelCard
from scanloom.core import Grid
from scanloom.inference.geometry import grid_for_parts, plan_grid
from scanloom.inference.resampling.crop import largest_box
from scanloom.inference.windows.layout import window_layout


def window_values(card: ModelCard, grid: Grid) -> int:
    """Return the number of voxels that networks process for a scan.

    Windows of air are included; a window counts once for each network and each flip. A crop to the
    structures of another model, which is not known beforehand, is not taken into account.
    """
    if card.stage is not None:
        return window_values(card.stage.card, grid) + window_values(replace(card, stage=None), grid)
    if card.parts:
        inner = grid_for_parts(grid, card)
        return sum(window_values(part, inner) for part in card.parts)
    plan = plan_grid(grid, card.grid)
    shape = largest_box(plan, card.grid.crop)
    layout = window_layout(card.window, shape, plan.network_axis(plan.lead))
    passes = (1 + len(card.folds)) * (1 << len(card.window.mirror))
    return layout.count * math.prod(layout.size) * passes
