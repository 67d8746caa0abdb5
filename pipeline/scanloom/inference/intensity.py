"""Applies intensity steps of a model card in float32, with the formulas of MONAI and nnU-Net."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from scanloom.cards.card import (
    Clip,
    IntensityStep,
    Normalize,
    Round,
    ScaleHistogram,
    ScaleMinMax,
    ScalePercentiles,
    ScaleQuantiles,
    ScaleRange,
    Truncate,
)
from scanloom.inference.device import all_finite

BYTE: Final = 255.0
"""Largest intensity after `ScaleHistogram` and `Round`."""
_BINS: Final = 1000
_FEW_NEGATIVE: Final = 0.02
"""Fraction of negative voxels below which the minimum counts as 0."""
_SMALLEST: Final = 1e-15
"""Smallest absolute intensity that is not 0."""
_VALUES_AT_ONCE: Final = 1 << 22
_MAX_SORTED_BY_TORCH: Final = 1_000_000
"""Number of voxels above which MONAI takes NumPy's percentiles, which round in another way."""


def apply_steps(
    image: torch.Tensor, steps: Sequence[IntensityStep], foreground: torch.Tensor | None = None
) -> torch.Tensor:
    """Return an image after all steps, in their order.

    Parameters
    ----------
    image : float32 tensor of any shape
        One channel; may be overwritten.
    foreground : bool tensor of the image's shape, optional
        The voxels that `Normalize.filled` measures and changes; None for all.
    """
    for step in steps:
        match step:
            case ScaleRange():
                image = scale_range(image, step)
            case ScaleMinMax():
                image = scale_min_max(image, step)
            case Normalize():
                image = normalize(image, step, foreground if step.filled else None)
            case Clip():
                image = image.clamp_(step.low, step.high)
            case Truncate():
                image = image.trunc_()
            case ScaleHistogram():
                image = scale_histogram(image, step)
            case Round():
                image = image.round_().clamp_(0.0, BYTE)
            case ScaleQuantiles():
                image = scale_quantiles(image, step)
            case ScalePercentiles():
                low, high = percentiles(image, (step.lower, step.upper))
                scaling = ScaleRange(low, high, step.b_min, step.b_max, step.clip)
                image = scale_range(image, scaling)
    return image


def is_pointwise(step: IntensityStep) -> bool:
    """Return whether a step changes each voxel by its own value alone: parts may be passed."""
    if isinstance(step, Normalize):
        constant = step.subtrahend is not None and step.divisor is not None
        return constant and not (step.nonzero or step.filled)
    return isinstance(step, ScaleRange | Clip | Truncate | Round)


def scale_range(image: torch.Tensor, step: ScaleRange) -> torch.Tensor:
    """Map [a_min, a_max] to [b_min, b_max] (MONAI ScaleIntensityRange)."""
    # In MONAI's order of operations, in float32: another order gives other last bits
    width = step.a_max - step.a_min
    if width == 0.0:
        return image - step.a_min + (step.b_min or 0.0)
    image = (image - step.a_min).div_(width)
    if step.b_min is not None and step.b_max is not None:
        image = image.mul_(step.b_max - step.b_min).add_(step.b_min)
    if step.clip and (step.b_min is not None or step.b_max is not None):
        image = image.clamp_(step.b_min, step.b_max)
    return image


def scale_min_max(image: torch.Tensor, step: ScaleMinMax) -> torch.Tensor:
    """Map the image's own minimum and maximum to [minv, maxv] (MONAI ScaleIntensity)."""
    low, high = image.aminmax()
    if low == high:
        return image * step.minv
    return (image - low) / (high - low) * (step.maxv - step.minv) + step.minv


def normalize(
    image: torch.Tensor, step: Normalize, foreground: torch.Tensor | None = None
) -> torch.Tensor:
    """Subtract and divide, by default mean and population deviation (MONAI NormalizeIntensity).

    Only voxels of the foreground, if it is given, are measured and changed (nnU-Net).
    """
    # Air would shift mean and deviation: models trained so exclude it
    selected = foreground
    if step.nonzero:
        selected = image != 0 if foreground is None else foreground & (image != 0)
    values = image if selected is None else image[selected]
    if values.numel() == 0:
        return image
    offset = step.subtrahend if step.subtrahend is not None else float(values.mean())
    divisor = step.divisor if step.divisor is not None else float(values.std(unbiased=False))
    if step.smallest_divisor is not None:
        divisor = max(divisor, step.smallest_divisor)
    scaled = (image - offset) / (divisor or 1.0)
    return scaled if selected is None else torch.where(selected, scaled, image)


def percentiles(image: torch.Tensor, q: Sequence[float]) -> list[float]:
    """Return percentiles of an image, each a float32 value (MONAI percentile)."""
    percents = np.asarray(q, dtype=np.float64)
    if image.numel() > _MAX_SORTED_BY_TORCH:
        values = np.percentile(image.cpu().numpy(), percents).astype(np.float32)
        return [float(value) for value in values]
    fractions = torch.tensor(percents / 100.0, dtype=torch.float32, device=image.device)
    return [float(value) for value in torch.quantile(image.flatten(), fractions)]


def scale_histogram(image: torch.Tensor, step: ScaleHistogram) -> torch.Tensor:
    """Map intensities up to the end of the histogram to 0 to 255 (niimath, in float64)."""
    low, high = (float(end) for end in image.aminmax())
    count = image.numel()
    if not math.isfinite(high - low):  # later steps could hide it: the scan is refused after them
        return torch.full_like(image, math.nan)
    if low < 0.0 and int((image < 0.0).sum()) < _FEW_NEGATIVE * count:
        low = 0.0
    width = (high - low) / _BINS
    if not width > 0.0:
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
    for values, target in zip(
        torch.split(flat, _VALUES_AT_ONCE), torch.split(out, _VALUES_AT_ONCE), strict=True
    ):
        target.copy_(((values.double() - low) * scale).clamp_(0.0, BYTE))
    return out.view(image.shape)


def scale_quantiles(image: torch.Tensor, step: ScaleQuantiles) -> torch.Tensor:
    """Map two quantiles of an image of whole numbers, 0 to 255, to 0 and 1."""
    if not all_finite(image):  # NaN is in no bin: the scan is refused after all steps
        return torch.full_like(image, math.nan)
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
