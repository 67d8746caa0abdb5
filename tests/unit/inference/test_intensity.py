"""Intensities are changed as MONAI changes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from scanloom.cards.card import IntensityStep, Normalize, ScaleMinMax, ScalePercentiles, ScaleRange
from scanloom.inference.intensity import apply_steps, percentiles


def pairs() -> list[Any]:
    from monai.transforms import (
        NormalizeIntensity,
        ScaleIntensity,
        ScaleIntensityRange,
        ScaleIntensityRangePercentiles,
    )

    return [
        (ScaleRange(-57, 164, 0, 1, clip=True), ScaleIntensityRange(-57, 164, 0, 1, True)),
        (ScaleRange(-57, 164, -1, 1), ScaleIntensityRange(-57, 164, -1, 1)),
        (ScaleRange(-57, 164, None, None), ScaleIntensityRange(-57, 164)),
        (ScaleRange(0, 10, None, 1, clip=True), ScaleIntensityRange(0, 10, None, 1, True)),
        (ScaleRange(5, 5, 1, 2, clip=True), ScaleIntensityRange(5, 5, 1, 2, True)),
        (ScaleMinMax(), ScaleIntensity()),
        (ScaleMinMax(-2.0, 3.0), ScaleIntensity(-2.0, 3.0)),
        (Normalize(), NormalizeIntensity()),
        (Normalize(nonzero=True), NormalizeIntensity(nonzero=True)),
        (Normalize(100.0, 50.0), NormalizeIntensity(100.0, 50.0)),
        (Normalize(100.0, 50.0, nonzero=True), NormalizeIntensity(100.0, 50.0, nonzero=True)),
        (Normalize(divisor=2.0), NormalizeIntensity(divisor=2.0)),
        (
            ScalePercentiles(1, 99.5, 0, 1, clip=True),
            ScaleIntensityRangePercentiles(1, 99.5, 0, 1, clip=True),
        ),
        (ScalePercentiles(5, 80, None, None), ScaleIntensityRangePercentiles(5, 80, None, None)),
    ]


@pytest.mark.parametrize("number", range(14))
@pytest.mark.parametrize("kind", ["noise", "constant", "zero"])
@pytest.mark.filterwarnings("ignore:Divide by zero")
def test_steps_equal_monais(number: int, kind: str) -> None:
    ours, theirs = pairs()[number]
    values = np.random.default_rng(0).integers(-200, 200, (6, 7, 8)).astype(np.float32)
    values[:3] = 0
    image = torch.from_numpy(
        {"noise": values, "constant": values * 0 + 7, "zero": values * 0}[kind]
    )

    changed = apply_steps(image.clone(), [ours])

    expected = torch.as_tensor(np.asarray(theirs(image.clone()[None])[0]))
    torch.testing.assert_close(changed, expected, atol=1e-5, rtol=1e-6)


def test_steps_are_taken_in_their_order() -> None:
    steps: list[IntensityStep] = [ScaleRange(0, 10, 0, 1, clip=True), Normalize(0.5, 0.25)]
    image = torch.tensor([-5.0, 5.0, 20.0])

    assert torch.equal(apply_steps(image, steps), torch.tensor([-2.0, 0.0, 2.0]))


@pytest.mark.parametrize("shape", [(30, 31, 32), (101, 100, 100)], ids=["by torch", "by NumPy"])
@pytest.mark.parametrize("kind", ["whole numbers", "fractions"])
def test_percentiles_are_monais_to_the_last_bit(shape: tuple[int, int, int], kind: str) -> None:
    """MONAI rounds in float32 up to a million voxels, and in float64 above."""
    from monai.transforms.utils_pytorch_numpy_unification import percentile

    values = np.random.default_rng(1).normal(size=shape).astype(np.float32) * 300
    image = torch.from_numpy(np.round(values) if kind == "whole numbers" else values)
    q = [0.0, 0.5, 1.0, 33.3, 99.5, 100.0]

    assert percentiles(image, q) == [float(percentile(image[None], each)) for each in q]
