"""The network's grid and what it sees are MONAI's."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from scanloom.cards.card import NetworkGrid
from scanloom.core import Grid
from scanloom.inference.geometry import plan_grid
from scanloom.inference.resample import to_network
from support import model_cards

CPU = torch.device("cpu")
CODES = [
    "".join(axis[flip] for axis, flip in zip(order, flips, strict=True))
    for order in itertools.permutations(("RL", "AP", "SI"))
    for flips in itertools.product((0, 1), repeat=3)
]


def monai_sees(array: Any, grid: Grid, wanted: NetworkGrid) -> Any:
    """Return MONAI's MetaTensor after Orientation and Spacing."""
    from monai.data import MetaTensor
    from monai.transforms import Orientation, Spacing

    image = MetaTensor(torch.from_numpy(array.astype(np.float32))[None], torch.tensor(grid.affine))
    image = Orientation(wanted.orientation, labels=(("L", "R"), ("P", "A"), ("I", "S")))(image)
    return Spacing(wanted.spacing)(image) if wanted.spacing else image


@pytest.mark.parametrize("codes", CODES)
def test_network_sees_what_monai_shows_it(codes: str) -> None:
    """Shape, affine and values, for all 48 ways in which axes can lie."""
    grid = model_cards.grid((19, 23, 14), (1.1, 0.9, 2.5), codes, turn=8)
    array = model_cards.smooth_scan(grid.shape)
    wanted = NetworkGrid("RAS", (1.5, 1.5, 2.0))

    plan = plan_grid(grid, wanted)
    theirs = monai_sees(array, grid, wanted)

    assert plan.network.shape == theirs.shape[1:]
    np.testing.assert_allclose(plan.network.affine, theirs.affine.numpy(), atol=1e-9)
    ours = to_network(array, plan, CPU)
    np.testing.assert_allclose(ours.numpy(), theirs[0].numpy(), atol=1e-3)


@pytest.mark.parametrize("codes", ["RAS", "LPS", "RPI", "ALS"])
@pytest.mark.parametrize("tilt", [12.0, -20.0])
def test_a_tilted_stack_of_axial_slices_is_seen_as_monai_sees_it(codes: str, tilt: float) -> None:
    grid = model_cards.grid((19, 23, 14), (1.1, 0.9, 2.5), codes, turn=8, tilt=tilt)
    array = model_cards.smooth_scan(grid.shape)
    wanted = NetworkGrid("RAS", (1.5, 1.5, 2.0))

    plan = plan_grid(grid, wanted)
    theirs = monai_sees(array, grid, wanted)

    assert grid.shear_axis == 2
    assert not plan.network.sheared
    np.testing.assert_allclose(plan.network.affine, theirs.affine.numpy(), atol=1e-9)
    ours = to_network(array, plan, CPU)
    np.testing.assert_allclose(ours.numpy(), theirs[0].numpy(), atol=1e-3)


@pytest.mark.parametrize("shape", [(40, 44, 20), (41, 43, 21)])
@pytest.mark.parametrize("spacing", [(0.75, 0.75, 5.0), (1.4995, 1.5005, 2.0), (1.5, 1.5, 2.0)])
@pytest.mark.parametrize("turn", [0.0, 5.0])
def test_rounded_affines_and_spacings_are_judged_as_monai_judges_them(
    shape: tuple[int, int, int], spacing: tuple[float, float, float], turn: float
) -> None:
    """Directions rounded to float32, as NIfTI has them; spacings all but the wanted ones."""
    exact = model_cards.grid(shape, spacing, "LPS", turn=turn)
    grid = Grid(shape, exact.affine.astype(np.float32).astype(np.float64))
    array = model_cards.smooth_scan(shape)
    wanted = NetworkGrid("RAS", (1.5, 1.5, 2.0))

    plan = plan_grid(grid, wanted)
    theirs = monai_sees(array, grid, wanted)

    assert plan.network.shape == theirs.shape[1:]
    np.testing.assert_allclose(plan.network.affine, theirs.affine.numpy(), atol=1e-9)
    ours = to_network(array, plan, CPU)
    np.testing.assert_allclose(ours.numpy(), theirs[0].numpy(), atol=2e-2)
