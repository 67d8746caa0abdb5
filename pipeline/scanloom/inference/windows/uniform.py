"""Windows in which each channel has a single value, such as air: a network is run for them once.

Clipped air, padding, and the background of an MR are the same value in every window, whatever the
intensity steps were. A network gives such windows the same scores, which are added to each of them:
labels are exactly those of running it for all. (With batches of several windows, on GPUs, the last
bits of scores depend on a window's batch, and so on which windows are left out.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from scanloom.inference.geometry import Shape
from scanloom.inference.windows.layout import window_slices

Values = tuple[float, ...]
"""The value of each channel."""
_SAMPLED = 8
"""Every so many voxels along each axis are compared first: few other windows pass."""


def uniform_windows(
    padded: torch.Tensor, corners: Sequence[Shape], size: Shape
) -> dict[Shape, Values]:
    """Return the values of those windows in which each channel has a single one, by corner.

    Parameters
    ----------
    padded : (channels, X, Y, Z) tensor
        The image.
    corners : sequence of (x, y, z)
        First voxels of the windows.
    size : (x, y, z)
        Size of a window.
    """
    uniform = {}
    for corner in corners:
        window = padded[:, *window_slices(corner, size)]
        values = window[:, :1, :1, :1]
        sampled = window[:, ::_SAMPLED, ::_SAMPLED, ::_SAMPLED]
        if bool((sampled == values).all()) and bool((window == values).all()):
            uniform[corner] = tuple(values.flatten().tolist())
    return uniform


class SharedScores:
    """Scores of uniform windows, from the first window to the last one with the same values.

    Parameters
    ----------
    uniform : mapping of (x, y, z) to tuple of float
        From `uniform_windows`.
    """

    def __init__(self, uniform: Mapping[Shape, Values]) -> None:
        self._uniform = uniform
        self._following = Counter(uniform.values())
        self._kept: dict[Values, torch.Tensor] = {}

    @property
    def saved(self) -> int:
        """Number of windows for which the network is not run."""
        return len(self._uniform) - len(set(self._uniform.values()))

    def batch(self, corners: Sequence[Shape], count: int) -> Sequence[Shape]:
        """Return the first corners, up to `count`, that the network is to be run for together."""
        known = set(self._kept)
        for n, corner in enumerate(corners[:count]):
            values = self._uniform.get(corner)
            if values in known:
                return corners[:n]
            if values is not None:
                known.add(values)
        return corners[:count]

    def keep(self, corner: Shape, scores: torch.Tensor) -> None:
        """Keep the scores (C, x, y, z) of a window if later windows have the same values."""
        values = self._uniform.get(corner)
        if values is not None:
            self._following[values] -= 1
            if self._following[values]:
                self._kept[values] = scores.clone()

    def take(self, corner: Shape) -> torch.Tensor:
        """Return the kept scores of a window's values, which the caller may overwrite."""
        values = self._uniform[corner]
        self._following[values] -= 1
        return self._kept[values].clone() if self._following[values] else self._kept.pop(values)
