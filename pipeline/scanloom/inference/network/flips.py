"""Mean of a network's scores over flips of its input (test-time augmentation by mirroring)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch


def flip_combinations(axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all combinations of at least one axis, in the order of nnU-Net."""
    return [
        combination
        for count in range(1, len(axes) + 1)
        for combination in itertools.combinations(axes, count)
    ]


def mean_over_flips(
    network: Callable[[torch.Tensor], torch.Tensor], windows: torch.Tensor, axes: Sequence[int]
) -> torch.Tensor:
    """Return the mean of a network's scores over all combinations of flips.

    Scores are summed in their own type, then divided, as by nnU-Net.

    Parameters
    ----------
    network : callable
        Maps (N, channels, x, y, z) to scores (N, C, x, y, z); may work in place.
    windows : (N, channels, x, y, z) tensor
        Input of the network; not changed if `axes` are given.
    axes : sequence of int
        Axes of the windows, 0 to 2; empty for no flip.
    """
    if not axes:
        return network(windows)
    scores = network(windows.clone())
    combinations = flip_combinations(axes)
    for combination in combinations:
        dims = [axis + 2 for axis in combination]
        scores += network(windows.flip(dims)).flip(dims)
    scores /= len(combinations) + 1
    return scores
