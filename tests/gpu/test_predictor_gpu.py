"""On CUDA: float32 equals the CPU, half nearly so, and equal runs give equal bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scanloom.cards.card import ModelCard, NetworkGrid, Threshold
from scanloom.core import ComputeOptions, Flag, Volume
from scanloom.inference.device import choose_batch
from scanloom.inference.geometry import plan_grid
from scanloom.inference.predictor import TorchPredictor
from scanloom.inference.resampling.resample import to_network
from support import model_cards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return model_cards.card(model_cards.small_weights(tmp_path_factory.mktemp("model"), seed=1))


def scan(dtype: str = "int16", **how: Any) -> Volume:
    shape = (61, 57, 33)
    grid = model_cards.grid(shape, (1.3, 1.2, 2.6), **how)
    array = np.asfortranarray(np.clip(model_cards.smooth_scan(shape), 0, 250).astype(dtype))
    return Volume(array, grid, "HU", "CT")


CHANGES: dict[str, dict[str, Any]] = {
    "scores": {},
    "labels": {"restore": "labels"},
    "thresholds": {
        "activation": "sigmoid",
        "decision": Threshold(0.5),
        "structures": model_cards.structures(3),
    },
}


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("tilt", [0.0, 12.0])
@pytest.mark.parametrize("codes", ["LPS", "PIR"])
def test_labels_equal_those_of_the_cpu(
    card: ModelCard, changes: str, tilt: float, codes: str
) -> None:
    card, volume = replace(card, **CHANGES[changes]), scan(codes=codes, tilt=tilt)
    cpu = TorchPredictor(card, device="cpu").predict(volume)
    for precision, least in (("float32", 0.9995), ("half", 0.99)):
        cuda = TorchPredictor(
            card, device="cuda", compute=ComputeOptions(precision=precision)
        ).predict(volume)
        for ours, theirs in zip(cuda.layers, cpu.layers, strict=True):
            equal = float(np.mean(ours.labels == theirs.labels))
            print(f"{changes}, {codes}, tilt {tilt}, {precision}: {equal:.4%} equal")
            assert equal >= least


@pytest.mark.parametrize("precision", ["float32", "half"])
def test_equal_runs_give_equal_bytes(card: ModelCard, precision: str) -> None:
    volume = scan(turn=6)

    first, second = (
        TorchPredictor(card, device="cuda", compute=ComputeOptions(precision=precision))
        .predict(volume)
        .layers[0]
        .labels
        for _ in range(2)
    )

    assert first.tobytes() == second.tobytes()


def test_a_scan_is_shown_as_on_the_cpu() -> None:
    for dtype in ("int16", "uint16", "uint8", "float64", ">i2"):
        volume = scan(dtype, tilt=9)
        plan = plan_grid(volume.grid, NetworkGrid("RAS", (1.5, 1.5, 1.5)))
        here = to_network(volume.array, plan, torch.device("cpu"))
        on_device = to_network(volume.array, plan, torch.device("cuda"))
        torch.testing.assert_close(on_device.cpu(), here, atol=1e-3, rtol=0)


def test_auto_takes_the_device_and_half(card: ModelCard) -> None:
    predictor = TorchPredictor(card)

    assert predictor.device.device.type == "cuda"
    assert predictor.precision.name == "float16"
    assert choose_batch((96, 96, 96), predictor.device.device, torch.float16) >= 1


def test_half_that_overflows_gives_way_to_float32(card: ModelCard, tmp_path: Path) -> None:
    """300 x 300 is more than half can say: the labels are those of float32, and it is said."""
    path = model_cards.loud_weights(tmp_path, card.weights.file, (300.0, 300.0))
    loud = replace(card, weights=model_cards.card(path).weights)
    exact = TorchPredictor(
        loud, device="cuda", compute=ComputeOptions(precision="float32")
    ).predict(scan())

    segmentation = TorchPredictor(
        loud, device="cuda", compute=ComputeOptions(precision="half")
    ).predict(scan())

    assert (segmentation.flags, segmentation.precision) == ((Flag.HALF_OVERFLOWED,), "float32")
    np.testing.assert_array_equal(segmentation.layers[0].labels, exact.layers[0].labels)


def test_weights_beyond_half_are_taken_in_float32(card: ModelCard, tmp_path: Path) -> None:
    path = model_cards.loud_weights(tmp_path, card.weights.file, (1.0, 1.0), bias=1e5)
    loud = replace(card, weights=model_cards.card(path).weights)

    predictor = TorchPredictor(loud, device="cuda", compute=ComputeOptions(precision="half"))

    assert predictor.precision_name == "float32"
    assert predictor.predict(scan()).flags == (Flag.HALF_OVERFLOWED,)
