"""Scores and scans that are not finite give no labels; half precision gives way to float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from scanloom.cards.card import ModelCard, Normalize, ScaleMinMax, Threshold
from scanloom.core import ComputeOptions, Flag, Reason, ScanError, StepTimer, Volume
from scanloom.inference.device import all_finite, bfloat16_units
from scanloom.inference.predictor import TorchPredictor
from support import model_cards

LOUD = (2.0**127, 1.998)
"""3.4e38 in float32; the second is 2 in bfloat16, and the product infinite."""
needs_units = pytest.mark.skipif(
    bfloat16_units() is None, reason="half precision on a CPU needs AVX512-BF16"
)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return model_cards.card(model_cards.small_weights(tmp_path_factory.mktemp("model"), seed=1))


def with_weights(card: ModelCard, path: Path, **changes: Any) -> ModelCard:
    """Return the card with other weights."""
    return replace(card, weights=model_cards.card(path).weights, **changes)


def changed(card: ModelCard, folder: Path, **factors: float) -> ModelCard:
    """Return the card with the last layer's weight or bias multiplied."""
    state = load_file(card.weights.file)
    for name, factor in factors.items():
        state[f"model.2.conv.{name}"] *= factor
    save_file(state, folder / "changed.pt")
    return with_weights(card, folder / "changed.pt")


def scan(dtype: str = "int16", factor: float = 1.0) -> Volume:
    shape = (33, 30, 18)
    array = model_cards.smooth_scan(shape).astype(dtype) * np.array(factor, dtype)
    grid = model_cards.grid(shape, (1.3, 1.2, 2.6))
    return Volume(np.asfortranarray(array), grid, "HU", "CT")


def refused(card: ModelCard, volume: Volume) -> ScanError:
    with pytest.raises(ScanError) as error:
        TorchPredictor(card, device="cpu").predict(volume)
    assert error.value.reason is Reason.NOT_FINITE
    return error.value


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_one_value_that_is_not_finite_is_found(wrong: float, position: str) -> None:
    """Anywhere, and among planes that are cut out of others."""
    values = torch.zeros((5, 7, 6, 4))
    cut = values.movedim(1, 0)[1:6][:, :, 1:5]
    assert all_finite(cut)
    cut[{"first": (0, 0, 0, 0), "middle": (2, 3, 1, 2), "last": (-1, -1, -1, -1)}[position]] = wrong
    assert not all_finite(cut)


def test_large_values_are_finite() -> None:
    assert all_finite(torch.full((8, 8), 3e38))
    assert not all_finite(torch.tensor([3e38, 3e38, -np.inf]))
    assert not all_finite(torch.tensor([np.inf, -np.inf]))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(
    card: ModelCard, wrong: float, tmp_path: Path
) -> None:
    """Before any scan: all of them would get background."""
    with pytest.raises(ScanError) as error:
        TorchPredictor(changed(card, tmp_path, bias=wrong))
    assert error.value.reason is Reason.NOT_FINITE
    assert "1 of the model's tensors" in error.value.detail


@pytest.mark.parametrize("restore", ["scores", "labels"])
@pytest.mark.parametrize("decision", ["argmax", "threshold"])
def test_scores_that_overflow_give_no_labels(
    card: ModelCard, restore: Any, decision: str, tmp_path: Path
) -> None:
    wrong = replace(changed(card, tmp_path, weight=3e38), restore=restore)
    if decision == "threshold":
        wrong = replace(
            wrong,
            activation="sigmoid",
            decision=Threshold(),
            structures=model_cards.structures(3),
        )

    assert "scores" in refused(wrong, scan()).detail


@pytest.mark.parametrize(
    ("steps", "dtype", "factor"),
    [
        ((Normalize(),), "float32", 1e35),  # its variance overflows
        ((ScaleMinMax(),), "float32", 3e35),  # its range does
        ((Normalize(),), "float64", 1e300),  # no float32 holds it
    ],
)
def test_a_scan_that_overflows_gives_no_labels(
    card: ModelCard, steps: Any, dtype: str, factor: float
) -> None:
    assert (
        "the scan's intensities" in refused(replace(card, after=steps), scan(dtype, factor)).detail
    )


def test_large_scores_are_no_fault(card: ModelCard, tmp_path: Path) -> None:
    """Their sum overflows, none of them does; labels are those of smaller ones."""
    large = replace(changed(card, tmp_path, weight=1e37, bias=1e37), activation=None)

    labels = TorchPredictor(large).predict(scan()).layers[0].labels

    plain = TorchPredictor(replace(card, activation=None)).predict(scan()).layers[0].labels
    assert (labels == plain).mean() > 0.999


@needs_units
def test_half_precision_that_overflows_gives_way_to_float32(
    card: ModelCard, tmp_path: Path
) -> None:
    """For this scan, and it is said: the labels are those of float32."""
    loud = with_weights(card, model_cards.loud_weights(tmp_path, card.weights.file, LOUD))
    exact = TorchPredictor(loud, compute=ComputeOptions(precision="float32")).predict(scan())
    predictor, clock = (
        TorchPredictor(loud, device="cpu", compute=ComputeOptions(precision="half")),
        StepTimer(),
    )
    assert predictor.precision_name == "bfloat16"

    for _ in range(2):
        segmentation = predictor.predict(scan(), clock)

        assert segmentation.flags == (Flag.HALF_OVERFLOWED,)
        assert (segmentation.device, segmentation.precision) == ("cpu", "float32")
        np.testing.assert_array_equal(segmentation.layers[0].labels, exact.layers[0].labels)
    assert clock.notes["ladder"] == ["float32, as bfloat16 overflowed"]
    assert (exact.flags, exact.precision) == ((), "float32")


@needs_units
def test_half_precision_that_does_not_overflow_says_so(card: ModelCard) -> None:
    segmentation = TorchPredictor(
        card, device="cpu", compute=ComputeOptions(precision="half")
    ).predict(scan())

    assert (segmentation.flags, segmentation.precision) == ((), "bfloat16")


@needs_units
def test_weights_that_half_precision_can_not_hold_stay_float32(
    card: ModelCard, tmp_path: Path
) -> None:
    weights = model_cards.loud_weights(tmp_path, card.weights.file, (1.0, 1.0), bias=3.4e38)
    predictor = TorchPredictor(
        with_weights(card, weights), device="cpu", compute=ComputeOptions(precision="half")
    )

    segmentation = predictor.predict(scan())

    assert predictor.precision_name == segmentation.precision == "float32"
    assert "overflow bfloat16" in predictor.precision.why
    assert segmentation.flags == (Flag.HALF_OVERFLOWED,)


@needs_units
def test_overflow_in_float32_too_is_refused(card: ModelCard, tmp_path: Path) -> None:
    loud = with_weights(
        card, model_cards.loud_weights(tmp_path, card.weights.file, (2.0**127, 2.0))
    )
    with pytest.raises(ScanError) as error:
        TorchPredictor(loud, device="cpu", compute=ComputeOptions(precision="half")).predict(scan())
    assert error.value.reason is Reason.NOT_FINITE


@needs_units
def test_changed_weights_are_refused_by_the_fallback(card: ModelCard, tmp_path: Path) -> None:
    """Float32 weights come from the file that was loaded before."""
    path = model_cards.loud_weights(tmp_path, card.weights.file, LOUD)
    predictor = TorchPredictor(
        with_weights(card, path), device="cpu", compute=ComputeOptions(precision="half")
    )
    path.write_bytes(Path(card.weights.file).read_bytes())

    with pytest.raises(ScanError) as error:
        predictor.predict(scan())

    assert error.value.reason is Reason.MODEL_HASH
