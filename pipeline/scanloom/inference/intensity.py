"""Applies intensity steps of a model card in float32, with the formulas of MONAI and nnU-Net."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scanloom.cards.intensity import (
    Clip,
    IntensityStep,
    Normalize,
    Round,
    ScaleHistogram,
    ScaleMinMax,
    ScaleQuantiles,
    ScaleRange,
    Truncate,
)
from scanloom.inference.histograms import BYTE, scale_histogram, scale_quantiles


def apply_steps(
    image: torch.Tensor, steps: Sequence[IntensityStep], foreground: torch.Tensor | None = None
) -> torch.Tensor:
    """Return an image after all steps, in their order.

    Parameters
    ----------
    image : float32 tensor of any shape
        One channel; may be overwritten.
    steps : sequence of IntensityStep
        Steps of the model card.
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
    return image


def scale_range(image: torch.Tensor, step: ScaleRange) -> torch.Tensor:
    """Map [a_min, a_max] to [b_min, b_max] (MONAI ScaleIntensityRange)."""
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
