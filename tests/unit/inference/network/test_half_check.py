"""Half precision is used only if a window of the model's own network has float32's scores."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from scanloom.cards.card import ModelCard
from scanloom.core import ComputeOptions, Flag, Volume
from scanloom.inference import device, predictor
from scanloom.inference.engines import cache
from scanloom.inference.network.loading import (
    LARGEST_ERROR,
    LoadedNetwork,
    half_error,
    load_network,
    wrong_half,
)
from scanloom.inference.predictor import TorchPredictor
from support import model_cards

CPU = torch.device("cpu")
SIZE = (32, 32, 16)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return model_cards.card(model_cards.small_weights(tmp_path_factory.mktemp("model"), seed=1))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "user_cache_folder", lambda: tmp_path / "cache")


def faulty(loaded: LoadedNetwork) -> LoadedNetwork:
    """Return a network whose convolutions of several channels are wrong, as with cuDNN 9.10."""
    for module in loaded.network.modules():
        if isinstance(module, nn.Conv3d) and module.in_channels > 1:
            module.register_forward_hook(lambda *call: call[2].roll(1, dims=1))
    return loaded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_told_from_a_fault(card: ModelCard, dtype: torch.dtype) -> None:
    error = half_error(card, load_network(card, dtype), CPU, SIZE)
    assert 0.0 < error < LARGEST_ERROR / 3
    assert half_error(card, faulty(load_network(card, dtype)), CPU, SIZE) > 2 * LARGEST_ERROR


def test_a_comparison_is_kept(card: ModelCard, tmp_path: Path) -> None:
    loaded = load_network(card, torch.bfloat16)
    assert wrong_half(card, loaded, CPU) == ""
    (kept,) = tmp_path.glob("cache/engines/half/*.json")
    kept.write_text(json.dumps({"error": 1.0}))
    assert wrong_half(card, loaded, CPU) == "bfloat16 was wrong by 1 in a window here"
    kept.write_text("{")
    assert wrong_half(card, loaded, CPU) == ""


@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_whose_half_precision_is_wrong_runs_in_float32(
    wrong: bool,
    card: ModelCard,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The library's fault is made here: the network itself is loaded as ever."""

    def load(card: ModelCard, dtype: torch.dtype) -> LoadedNetwork:
        loaded = load_network(card, dtype)
        return faulty(loaded) if wrong and dtype is torch.bfloat16 else loaded

    monkeypatch.setattr(predictor, "load_network", load)
    monkeypatch.setattr(device, "bfloat16_units", lambda: "AVX512-BF16")
    shape = (33, 30, 18)
    volume = Volume(
        model_cards.smooth_scan(shape), model_cards.grid(shape, (1.3, 1.2, 2.6)), "HU", "CT"
    )
    with caplog.at_level(logging.WARNING):
        model = TorchPredictor(card, ComputeOptions(precision="half", engine="torch"), device="cpu")
    segmentation = model.predict(volume)
    exact = TorchPredictor(card, ComputeOptions(precision="float32", engine="torch"), device="cpu")
    labels = exact.predict(volume).layers[0].labels
    assert model.precision_name == segmentation.precision == ("float32" if wrong else "bfloat16")
    assert (Flag.HALF_WRONG in segmentation.flags) is wrong
    assert ("runs in float32: bfloat16 was wrong" in caplog.text) is wrong
    assert not wrong or np.array_equal(segmentation.layers[0].labels, labels)
