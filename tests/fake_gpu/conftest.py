"""Stand-in devices, and a small model with a scan for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from scanloom.cards.card import ModelCard
from scanloom.core import Segmentation, Volume
from scanloom.inference.predictor import TorchPredictor
from support import model_cards
from support.fake_cuda import StandIn, stand_in


@pytest.fixture
def fake() -> Iterator[StandIn]:
    """Yield two stand-in devices of 80 GB."""
    with stand_in(devices=2) as devices:
        yield devices


@pytest.fixture(scope="package")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return model_cards.card(model_cards.small_weights(tmp_path_factory.mktemp("model"), seed=1))


def scan(shape: tuple[int, int, int]) -> Volume:
    """Return a CT of blobs, of 1.3 x 1.2 x 2.6 mm."""
    array = np.clip(model_cards.smooth_scan(shape), 0, 250).astype("int16")
    grid = model_cards.grid(shape, (1.3, 1.2, 2.6))
    return Volume(np.asfortranarray(array), grid, "HU", "CT")


@pytest.fixture(scope="package")
def volume() -> Volume:
    """Return a scan with 5 rows of windows of the model."""
    return scan((61, 57, 33))


@pytest.fixture(scope="package")
def small_volume() -> Volume:
    """Return a scan with 9 windows of the model, in a row."""
    return scan((48, 48, 10))


@pytest.fixture(scope="package")
def expected(card: ModelCard, volume: Volume) -> Segmentation:
    return TorchPredictor(card, device="cpu").predict(volume)


@pytest.fixture(scope="package")
def small_expected(card: ModelCard, small_volume: Volume) -> Segmentation:
    return TorchPredictor(card, device="cpu").predict(small_volume)
