"""Weighted sums of the scores of overlapping windows."""

from __future__ import annotations

import torch

from scanloom.inference.geometry import Shape
from scanloom.inference.windows.layout import WindowLayout, window_slices

_CHANNELS_AT_ONCE = 16
"""Channels of a window's scores that are weighted at a time."""
_CACHED_VALUES = 1 << 18
"""Values that a processor's cache holds in two types."""


class ScoreAccumulator:
    """Weighted sums of the planes that windows still overlap.

    Parameters
    ----------
    layout : WindowLayout
        Windows of the padded image.
    weight : (x, y, z) tensor
        Weights of a window's voxels. Sums have its type and device; scores may be on another
        device.

    Attributes
    ----------
    axis : 0, 1 or 2
        Axis across the planes.
    first : int
        Index of the first plane in the padded image.
    whole : bool
        Whether sums of all planes are kept, until the last window.
    """

    def __init__(self, layout: WindowLayout, weight: torch.Tensor) -> None:
        self.axis, self.first = layout.axis, 0
        self._weight = weight
        self._size = layout.size
        self._single = layout.count == 1 and bool((weight == 1).all())
        shape = [layout.planes if x == self.axis else n for x, n in enumerate(layout.padded)]
        self.whole = layout.together == 0
        self._count = weight.new_zeros((1, *shape))
        self._sum = self._count[:0]  # the first window gives the number of classes

    @property
    def device(self) -> torch.device:
        """Device of the sums."""
        return self._weight.device

    @property
    def plane_bytes(self) -> int:
        """Bytes of the scores of one plane."""
        return self._sum.nbytes // self._sum.shape[self.axis + 1]

    def add(self, scores: torch.Tensor, corner: Shape) -> None:
        """Add a window's scores (C, x, y, z), which may be overwritten."""
        alike = (scores.device, scores.dtype) == (self.device, self._weight.dtype)
        if self._single and alike:  # the only scores of a voxel are their mean
            self._sum = scores
            self._count.fill_(1)
            return
        if len(self._sum) == 0:
            self._sum = self._count.new_zeros((len(scores), *self._count.shape[1:]))
        x, y, z = (n - self.first if axis == self.axis else n for axis, n in enumerate(corner))
        box = (slice(None), *window_slices((x, y, z), self._size))
        accumulate(self._sum[box], self._count[box], scores.to(self.device), self._weight)

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

    Half sums are rounded as by nnU-Net: scores are weighted in their own type, and overwritten.

    Parameters
    ----------
    sums : (C, x, y, z) float32 or float16 tensor
        Sums of scores at the window's voxels.
    counts : (1, x, y, z) tensor
        Sums of weights, of the same type.
    scores : (C, x, y, z) tensor
        Scores of the window, of any floating type.
    weight : (x, y, z) tensor
        Weights of the window, of the type of the sums.
    """
    if sums.dtype is torch.float32:
        chunks = (torch.split(values, _CHANNELS_AT_ONCE) for values in (sums, scores))
        for total, chunk in zip(*chunks, strict=True):
            total.addcmul_(chunk.to(torch.float32), weight)
    else:
        _add_half(sums, scores, weight)
    counts.add_(weight)


def _add_half(sums: torch.Tensor, scores: torch.Tensor, weight: torch.Tensor) -> None:
    """Add weighted scores to half sums, in place; scores of a wider type are not rounded first.

    On a CPU, torch adds types that differ one value at a time. A part that its cache holds is
    converted, added to and converted back in a twentieth of the time, with the same bits.
    """
    if scores.dtype is sums.dtype or not sums.is_cpu:
        sums.add_(scores.mul_(weight))
        return
    wide = torch.promote_types(scores.dtype, sums.dtype)
    step = max(1, _CACHED_VALUES // max(1, weight[0].numel()))
    for total, own in zip(sums, scores, strict=True):
        parts = (torch.split(values, step) for values in (total, own, weight))
        for part, score, factor in zip(*parts, strict=True):
            part.copy_(part.to(wide).add_(score.mul_(factor).to(wide)))
