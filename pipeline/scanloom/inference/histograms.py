"""Intensity steps that depend on a scan's histogram, as brainchop applies them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch

from scanloom.cards.intensity import ScaleHistogram, ScaleQuantiles

BYTE: Final = 255.0
"""Largest intensity after `ScaleHistogram` and `Round`."""
_BINS: Final = 1000
_FEW_NEGATIVE: Final = 0.02
"""Fraction of negative voxels below which the minimum counts as 0."""
_SMALLEST: Final = 1e-15
"""Smallest absolute intensity that is not 0."""
_VALUES_AT_ONCE: Final = 1 << 22


def scale_histogram(image: torch.Tensor, step: ScaleHistogram) -> torch.Tensor:
    """Map intensities up to the end of the histogram to 0 to 255 (niimath, in float64)."""
    low, high = (float(end) for end in image.aminmax())
    count = image.numel()
    if low < 0.0 and int((image < 0.0).sum()) < _FEW_NEGATIVE * count:
        low = 0.0
    width = (high - low) / _BINS
    if not width > 0.0 or math.isinf(width):
        return image
    histogram = torch.zeros(_BINS, dtype=torch.int64, device=image.device)
    flat = image.flatten()
    for values in torch.split(flat, _VALUES_AT_ONCE):
        bins = ((values.double() - low) / width).clamp_(0, _BINS - 1).long()
        histogram += torch.bincount(bins, minlength=_BINS)
    nonzero = int((flat.abs() >= _SMALLEST).sum())
    rank = count - int(step.brightest * nonzero)
    reached = (histogram.cumsum(0)[1:] >= rank).nonzero()  # by the bin and the one after it
    last = int(reached[0]) if len(reached) else _BINS - 1
    scale = BYTE / (last * width) if last else 1.0
    out = torch.empty_like(flat)
    for values, part in zip(
        torch.split(flat, _VALUES_AT_ONCE), torch.split(out, _VALUES_AT_ONCE), strict=True
    ):
        part.copy_(((values.double() - low) * scale).clamp_(0.0, BYTE))
    return out.view(image.shape)


def scale_quantiles(image: torch.Tensor, step: ScaleQuantiles) -> torch.Tensor:
    """Map two quantiles of an image of whole numbers, 0 to 255, to 0 and 1."""
    levels = int(BYTE) + 1
    histogram = torch.zeros(levels, dtype=torch.int64, device=image.device)
    for values in torch.split(image.flatten(), _VALUES_AT_ONCE):
        histogram += torch.bincount(values.clamp(0, BYTE).long(), minlength=levels)[:levels]
    cumulative, count = histogram.cumsum(0), image.numel()

    def value(rank: int) -> float:
        """Return the intensity of a rank, from 0, in ascending order."""
        return float(min(int((cumulative <= rank).sum()), int(BYTE)))

    if step.interpolated:
        low, high = (_between(value, q * (count - 1)) for q in (step.low, step.high))
    else:
        low, high = value(int(count * step.low)), value(math.ceil(count * step.high) - 1)
    width = high - low + step.added
    image = (image - low).div_(width if width > 0.0 else 1.0)
    return image.clamp_(0.0, 1.0) if step.clip else image


def _between(value: Callable[[int], float], rank: float) -> float:
    """Return the value of a fractional rank."""
    below = math.floor(rank)
    first, second = value(below), value(below + 1)
    return first + (second - first) * (rank - below)
