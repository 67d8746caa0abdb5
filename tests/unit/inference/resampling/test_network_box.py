"""The box around the foreground of the network's image."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scanloom.cards.card import Crop, NetworkGrid
from scanloom.core import ScanError
from scanloom.inference.geometry import plan_grid
from scanloom.inference.resampling.image import largest_box, network_bounds
from support.model_cards import grid

SHAPE = (9, 10, 11)


def image() -> torch.Tensor:
    """Return an image of 10 at one voxel, 3 at another, 1 and -1 at others, else 0."""
    values = torch.zeros(1, *SHAPE)
    values[0, 4, 5, 6], values[0, 3, 5, 8] = 10.0, 3.0
    values[0, 1, 2, 3], values[0, 0, 9, 0] = 1.0, -1.0
    return values


def test_foreground_decides() -> None:
    positive = Crop("positive", "network")

    assert network_bounds(image(), Crop("nonzero", "network")) == [(0, 5), (2, 10), (0, 9)]
    assert network_bounds(image(), positive) == [(1, 5), (2, 6), (3, 9)]
    assert network_bounds(image(), Crop("positive", "network", above=0.2)) == [
        (3, 5),
        (5, 6),
        (6, 9),
    ]
    assert network_bounds(image(), Crop("positive", "network", above=0.3)) == [
        (4, 5),
        (5, 6),
        (6, 7),
    ]


def test_margin_ends_at_the_grid() -> None:
    crop = Crop("positive", "network", margin=3, above=0.2)

    assert network_bounds(image(), crop) == [(0, 8), (2, 9), (3, 11)]


def test_without_foreground_there_is_no_box() -> None:
    """nnU-Net then sees the whole scan, MONAI nothing: that is refused."""
    assert network_bounds(torch.zeros(1, *SHAPE), Crop("nonzero", "network")) is None
    with pytest.raises(ScanError, match="IMPLAUSIBLE"):
        network_bounds(torch.zeros(1, *SHAPE), Crop("positive", "network"))


def test_the_largest_box_is_that_of_the_scan_on_the_grid() -> None:
    requested = NetworkGrid("LIA", (1.0, 1.0, 1.0), alignment="centre", shape=(64, 64, 64))
    plan = plan_grid(grid((20, 10, 30), (2.0, 1.0, 3.0), "RAS"), requested)

    def largest(crop: Crop) -> tuple[int, int, int]:
        return largest_box(plan, replace(requested, crop=crop))

    assert largest_box(plan, requested) == (64, 64, 64)
    assert largest(Crop("positive", "network")) == (39, 64, 10)
    assert largest(Crop("positive", "network", margin=3)) == (45, 64, 16)


def test_a_margin_beyond_the_grid_and_multiples() -> None:
    """MONAI: an odd voxel is added at the end."""
    beyond = Crop("positive", "network", margin=3, above=0.2, beyond=True)
    multiple = Crop("positive", "network", above=0.2, multiple=(5, 4, 2))

    assert network_bounds(image(), beyond) == [(0, 8), (2, 9), (3, 12)]
    assert network_bounds(image(), multiple) == [(2, 7), (4, 8), (6, 10)]
