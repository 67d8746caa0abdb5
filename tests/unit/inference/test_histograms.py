"""Intensity steps of brainchop against plain loops over sorted voxels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from scanloom.cards.card import Round, ScaleHistogram, ScaleQuantiles
from scanloom.inference.intensity import apply_steps

SHAPE = (20, 17, 13)


def scan(negative: float = 0.0, seed: int = 0) -> NDArray[np.float32]:
    """Return a skewed image with zeros, in which a fraction of the voxels is negative."""
    random = np.random.default_rng(seed)
    values = random.gamma(2.0, 150.0, SHAPE)
    values[random.random(SHAPE) < 0.4] = 0.0
    values[random.random(SHAPE) < negative] = -77.0
    return values.astype(np.float32)


def expected_scale(image: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the image after niimath's scale, bin by bin."""
    values = image.astype(np.float64).ravel()
    low = values.min()
    if low < 0 and (values < 0).mean() < 0.02:
        low = 0.0
    width = (values.max() - low) / 1000
    bins = [min(max(int((v - low) / width), 0), 999) for v in values]
    voxels = [bins.count(n) for n in range(1000)]
    rank = len(values) - int(0.02 * np.count_nonzero(values))
    below, last = 0, 0
    while last < 999:
        below += voxels[last]
        if below + voxels[last + 1] >= rank:
            break
        last += 1
    return np.clip((image.astype(np.float64) - low) * 255 / (last * width), 0, 255)


@pytest.mark.parametrize("negative", [0.0, 0.01, 0.1])
def test_scale_ends_below_the_brightest_voxels(negative: float) -> None:
    image = scan(negative)

    scaled = apply_steps(torch.from_numpy(image), (ScaleHistogram(),))

    np.testing.assert_allclose(scaled.numpy(), expected_scale(image), rtol=1e-6, atol=1e-6)
    assert float(scaled.max()) == 255.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("steps", [(ScaleHistogram(), Round()), (ScaleQuantiles(0.05, 0.95),)])
def test_a_value_that_is_not_finite_is_not_hidden(value: float, steps: tuple[Any, ...]) -> None:
    """The scan is refused after all steps, of which some would limit it."""
    image = torch.from_numpy(scan())
    image[3, 4, 5] = value

    changed = apply_steps(image, (*steps, ScaleQuantiles(0.02, 0.98, clip=True)))

    assert bool(changed.isnan().all())


@pytest.mark.parametrize("value", [0.0, 7.0])
def test_a_scan_without_contrast_stays(value: float) -> None:
    image = torch.full(SHAPE, value)

    scaled = apply_steps(image.clone(), (ScaleHistogram(),))

    assert torch.equal(scaled, image)


def test_rounding_takes_the_even_number_of_two() -> None:
    image = torch.tensor([0.5, 1.5, 2.5, 254.5, 255.4, 300.0, -3.0])

    assert apply_steps(image, (Round(),)).tolist() == [0, 2, 2, 254, 255, 255, 0]


@pytest.mark.parametrize("quantiles", [(0.02, 0.98), (0.05, 0.95), (0.0, 1.0), (0.333, 0.5)])
def test_interpolated_quantiles_are_numpys(quantiles: tuple[float, float]) -> None:
    image = np.clip(scan().round(), 0, 255)
    low, high = np.quantile(image, quantiles)

    step = ScaleQuantiles(*quantiles, added=1e-3, clip=True, interpolated=True)
    scaled = apply_steps(torch.from_numpy(image), (step,))

    expected = np.clip((image - low) / (high - low + 1e-3), 0, 1)
    np.testing.assert_allclose(scaled.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("quantiles", [(0.05, 0.95), (0.0, 1.0), (0.333, 0.5)])
def test_other_quantiles_are_voxels(quantiles: tuple[float, float]) -> None:
    """The lower one at rank floor(n q), the upper one at ceil(n q) - 1, as in brainchop."""
    image = np.clip(scan(seed=1).round(), 0, 255)
    ordered = np.sort(image.ravel())
    low = ordered[math.floor(len(ordered) * quantiles[0])]
    high = ordered[math.ceil(len(ordered) * quantiles[1]) - 1]

    scaled = apply_steps(torch.from_numpy(image), (ScaleQuantiles(*quantiles),))

    np.testing.assert_allclose(scaled.numpy(), (image - low) / (high - low), rtol=1e-6)


def test_equal_quantiles_do_not_divide_by_zero() -> None:
    image = torch.full(SHAPE, 9.0)

    assert torch.equal(apply_steps(image, (ScaleQuantiles(0.05, 0.95),)), torch.zeros(SHAPE))
