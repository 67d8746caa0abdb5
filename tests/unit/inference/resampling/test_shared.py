"""Models of one network grid share one resampling; labels are those of each model alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from scanloom.cards.card import Clip, ModelCard, NetworkGrid, ScaleRange, Stage, Truncate
from scanloom.core import StepTimer, Volume
from scanloom.inference.combined import make_predictor
from scanloom.inference.memory import MemoryLimits
from scanloom.inference.predictor import TorchPredictor
from scanloom.inference.resampling import image as image_module
from scanloom.inference.resampling.image import SharedScan, sharing_key
from support import model_cards

STEPS = (
    (ScaleRange(-200.0, 200.0, 0.0, 1.0, clip=True),),
    (Clip(-150.0, 150.0), ScaleRange(-150.0, 150.0, 0.0, 1.0)),  # in place
    (ScaleRange(-300.0, 300.0, 0.0, 1.0, clip=True),),
)


@pytest.fixture
def models(tmp_path: Path) -> list[ModelCard]:
    cards = []
    for n, steps in enumerate(STEPS):
        (folder := tmp_path / str(n)).mkdir()
        weights = model_cards.small_weights(folder, seed=n)
        cards.append(model_cards.card(weights, name=f"model-{n}", after=steps))
    return cards


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each resampling."""
    resamplings: list[int] = []
    to_network = image_module.to_network

    def counted(*args: object, **keywords: object) -> object:
        resamplings.append(1)
        return to_network(*args, **keywords)

    monkeypatch.setattr(image_module, "to_network", counted)
    return resamplings


def scan() -> Volume:
    grid = model_cards.grid((40, 36, 30), (1.5, 1.5, 2.5), "LPS", turn=4.0)
    return Volume(model_cards.smooth_scan(grid.shape), grid, "HU", "CT")


def predict(predictor: TorchPredictor, volume: Volume, shared: SharedScan) -> NDArray[Any]:
    labels = predictor.predict(volume, shared=shared).layers[0].labels
    shared.finish(predictor.card, "cpu")
    return labels


def predictors_of(cards: list[ModelCard]) -> list[TorchPredictor]:
    return [TorchPredictor(card, device="cpu") for card in cards]


@pytest.mark.thorough
def test_one_resampling_and_the_same_labels(models: list[ModelCard], calls: list[int]) -> None:
    volume, predictors = scan(), predictors_of(models)
    alone = [predictor.predict(volume).layers[0].labels for predictor in predictors]
    assert len(calls) == 3
    shared = SharedScan((card, "cpu") for card in models)

    together = [predict(each, volume, shared) for each in predictors]

    assert len(calls) == 4
    for labels, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(labels, expected)
    assert len({labels.tobytes() for labels in alone}) == 3
    assert not shared._kept  # freed with the last user


def test_only_equal_images_are_shared(models: list[ModelCard], calls: list[int]) -> None:
    first, second, third = models
    other_grid = replace(second, grid=NetworkGrid("RAS", (3.0, 3.0, 3.0)))
    integers = replace(third, after=(Truncate(), *third.after))
    before = replace(first, name="before", before=(Clip(-500.0, 500.0),))
    cards = [first, other_grid, integers, before]
    assert len({sharing_key(card) for card in cards}) == 4
    shared = SharedScan((card, "cpu") for card in cards)
    for predictor in predictors_of(cards):
        predict(predictor, scan(), shared)
    assert len(calls) == 4
    assert not shared._kept


def test_a_model_of_several_shares_nothing(models: list[ModelCard]) -> None:
    composite = replace(models[0], parts=tuple(models[1:]))
    assert sharing_key(composite) is None
    shared = SharedScan([(composite, "cpu"), (composite, "cpu")])
    assert not shared.is_shared(composite, "cpu")


def test_a_model_that_crops_by_itself_sees_its_crop(models: list[ModelCard]) -> None:
    """Not the whole scan that is kept for others of the same network grid."""
    array = np.full_like(scan().array, -1000)
    array[12:24, 12:24, 10:20] = scan().array[12:24, 12:24, 10:20]
    volume, rough = replace(scan(), array=array), models[1]
    stage = Stage(rough, "crop", (rough.structures[0].label,))
    cropping = make_predictor(replace(models[2], stage=stage), device="cpu")
    expected = cropping.predict(volume).layers[0].labels
    assert 0 < expected.any(axis=(1, 2)).sum() < len(expected)
    shared = SharedScan((card, "cpu") for card in models[:2])
    predict(TorchPredictor(rough, device="cpu"), volume, shared)

    labels = cropping.predict(volume, shared=shared).layers[0].labels

    np.testing.assert_array_equal(labels, expected)


def test_nothing_is_kept_where_memory_is_scarce(
    models: list[ModelCard], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharing never costs windows at once: a scan is resampled again instead."""
    from scanloom.inference import predictor as module

    volume, predictors = scan(), predictors_of(models[:2])
    needed: list[int] = []

    def just_enough(*arguments: object) -> MemoryLimits:
        reserved = int(arguments[2])
        needed.append(reserved)
        return MemoryLimits(0 if reserved else None)

    monkeypatch.setattr(module, "room", just_enough)
    shared, clock = SharedScan((card, "cpu") for card in models[:2]), StepTimer()
    for predictor in predictors:
        predictor.predict(volume, clock, shared=shared)
        shared.finish(predictor.card, "cpu")
    assert needed[0] > 0
    assert set(needed[1:]) == {0}
    assert len(calls) == 2
    assert "ladder" not in clock.notes
