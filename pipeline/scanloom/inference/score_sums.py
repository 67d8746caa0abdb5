"""Weighted sums of the scores of overlapping windows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scanloom.inference.geometry import Shape

_CHANNELS_AT_ONCE = 16
"""Channels of a window's scores that are converted to float32 at a time."""


class ScoreAccumulator:
    """Weighted sums of the planes that windows still overlap.

    Parameters
    ----------
    axis : int
        Axis across the planes.
    size : (x, y, z)
        Size of a window.
    padded : (channels, X, Y, Z) tensor
        The padded image.
    device : torch.device
        Device of the sums; scores may be on another device.
    """

    def __init__(self, axis: int, size: Shape, padded: torch.Tensor, device: torch.device) -> None:
        self.axis, self.first, self.device = axis, 0, device
        shape = [size[x] if x == axis else n for x, n in enumerate(padded.shape[1:])]
        self._count = torch.zeros((1, *shape), device=device)
        self._sum = self._count[:0]  # the first window gives the number of classes

    @property
    def plane_bytes(self) -> int:
        """Bytes of the scores of one plane."""
        return self._sum.nbytes // self._sum.shape[self.axis + 1]

    def add(self, scores: torch.Tensor, weight: torch.Tensor, corner: Shape) -> None:
        """Add a window's scores (C, x, y, z); the window spans the planes of the sums."""
        if len(self._sum) == 0:
            shape = (len(scores), *self._count.shape[1:])
            self._sum = torch.zeros(shape, device=self.device)
        start = [0 if x == self.axis else n for x, n in enumerate(corner)]
        box = (slice(None), *window_slices((start[0], start[1], start[2]), weight.shape))
        accumulate(self._sum[box], self._count[box], scores.to(self.device), weight)

    def means(
        self, first: int, last: int, crop: list[slice], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the cropped means of planes `first` to before `last` on a device.

        The sums are divided in place, so each plane can be requested only once.

        Returns
        -------
        (means, empty)
            Means (N, C, ., .), and a mask (N, 1, ., .) of the voxels that no window covers; None
            if windows cover all voxels.
        """
        selected = slice(first - self.first, last - self.first)
        sums, counts = (
            planes.movedim(self.axis + 1, 0)[selected][:, :, crop[0], crop[1]]
            for planes in (self._sum, self._count)
        )
        empty = counts == 0
        if not bool(empty.any()):
            return sums.div_(counts).to(device), None
        return sums.div_(counts.masked_fill(empty, 1.0)).to(device), empty.to(device)

    def advance(self, following: int) -> None:
        """Drop the planes before `following` and append as many new ones."""
        shift = following - self.first
        for slab in (self._sum, self._count):
            planes = slab.movedim(self.axis + 1, 0)
            size = len(planes)
            for n in range(0, size - shift, max(shift, 1)):  # source and target do not overlap
                count = min(shift, size - shift - n)
                planes[n : n + count] = planes[n + shift : n + shift + count]
            planes[max(size - shift, 0) :] = 0
        self.first = following


def accumulate(
    sums: torch.Tensor, counts: torch.Tensor, scores: torch.Tensor, weight: torch.Tensor
) -> None:
    """Add weighted scores and the weights, in place.

    Parameters
    ----------
    sums : (C, x, y, z) float32 tensor
        Sums of scores at the window's voxels.
    counts : (1, x, y, z) float32 tensor
        Sums of weights.
    scores : (C, x, y, z) tensor
        Scores of the window, of any floating type.
    weight : (x, y, z) float32 tensor
        Weights of the window.
    """
    chunks = (torch.split(values, _CHANNELS_AT_ONCE) for values in (sums, scores))
    for total, chunk in zip(*chunks, strict=True):
        total.addcmul_(chunk.to(torch.float32), weight)
    counts.add_(weight)


def window_slices(corner: Shape, size: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of a window."""
    return tuple(slice(n, n + roi) for n, roi in zip(corner, size, strict=True))
