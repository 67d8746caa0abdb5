"""The grid on which the parts of a model see a scan that was resampled for all of them."""

from __future__ import annotations

import numpy as np

from scanloom.cards.card import ModelCard
from scanloom.cards.intensity import IntensityStep
from scanloom.core import Grid
from scanloom.inference.geometry import NetworkPlan, plan_grid
from scanloom.inference.resampling.alignment import nifti_spacing, wanted_spacing


def part_grid(plan: NetworkPlan, card: ModelCard) -> Grid:
    """Return the grid of the resampled scan as a scan of its own, in the network's axes.

    TotalSegmentator hands it on as a NIfTI file: its spacing is the requested one, although the
    voxels at the ends coincide, and has the precision of the file's header.
    """
    spacing = wanted_spacing(card.grid, nifti_spacing(plan.oriented)).astype(np.float32)
    return Grid(plan.network.shape, np.diag([*spacing.astype(np.float64), 1.0]))


def steps_after(plan: NetworkPlan, card: ModelCard) -> tuple[IntensityStep, ...]:
    """Return the steps after resampling: none for a scan that has exactly the card's spacing."""
    own = nifti_spacing(plan.oriented)
    wanted = np.array(card.grid.spacing or (), dtype=np.float64)
    return () if np.array_equal(own, wanted) else card.after


def grid_for_parts(grid: Grid, card: ModelCard) -> Grid:
    """Return the grid on which a card's parts see a scan with a `grid`."""
    return part_grid(plan_grid(grid, card.grid), card)
