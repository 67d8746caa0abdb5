"""Nearest neighbours are exact off ties, and those of MONAI at them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from scanloom.cards.card import NetworkGrid
from scanloom.core.grid import Shape
from scanloom.inference.geometry import plan_grid
from scanloom.inference.resampling.resample import nearest
from support import model_cards


def numbered(shape: Shape) -> Any:
    """Return an array in which each voxel has its own number."""
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


@pytest.mark.parametrize(
    "ratio", ["1/2", "2", "13/20", "13/10", "3/5", "3/2", "5/4", "1/6", "7/10"]
)
@pytest.mark.parametrize("count", [33, 61, 64])
def test_neighbours_are_those_of_exact_arithmetic(ratio: str, count: int) -> None:
    """At ties either neighbour is one of the nearest: rounding decides."""
    exact = [i * Fraction(ratio) for i in range(count)]
    size = int(exact[-1]) + 1
    for axis in range(3):
        step, shape = np.eye(4), [5, 5, 5]
        step[axis, axis], shape[axis] = float(Fraction(ratio)), size
        line = np.moveaxis(np.broadcast_to(np.arange(size), (5, 5, size)), 2, axis)
        shape[axis] = count

        taken = np.moveaxis(nearest(line, step, (shape[0], shape[1], shape[2])), axis, 2)

        assert (taken == taken[:1, :1]).all()
        for at, index in zip(exact, taken[0, 0].tolist(), strict=True):
            inside = min(at, Fraction(size - 1))
            assert abs(inside - index) <= Fraction(1, 2), (at, index)


@pytest.mark.parametrize("codes", ["LPS", "PIR", "RAS"])
@pytest.mark.parametrize(
    ("spacing", "target"),
    [
        ((1.3, 1.2, 2.6), (2.0, 2.0, 2.0)),
        ((1.0, 1.0, 3.0), (2.0, 2.0, 2.0)),
        ((0.5,) * 3, (1.0,) * 3),
    ],
)
@pytest.mark.parametrize("how", [{}, {"turn": 8}, {"tilt": 12.0}], ids=str)
def test_neighbours_are_those_of_monai(
    how: dict[str, float], spacing: Any, target: Any, codes: str
) -> None:
    """Both ways, on grids with many ties: straight, turned (rounding enters), and sheared."""
    from monai.networks.layers import AffineTransform

    grid = model_cards.grid((31, 27, 33), spacing, codes, **how)
    plan = plan_grid(grid, NetworkGrid("RAS", target))
    there = (plan.oriented.shape, plan.step, plan.network.shape)
    back = np.linalg.solve(plan.network.affine, plan.oriented.affine)

    for size, step, shape in (there, (plan.network.shape, back, plan.oriented.shape)):
        values = numbered(size)
        transform = AffineTransform(
            mode="nearest", padding_mode="border", align_corners=False, reverse_indexing=True
        )
        theirs = transform(
            torch.from_numpy(values)[None, None].to(torch.float64),
            torch.from_numpy(step),
            spatial_size=shape,
        )[0, 0]

        np.testing.assert_array_equal(nearest(values, step, shape), theirs.numpy())
