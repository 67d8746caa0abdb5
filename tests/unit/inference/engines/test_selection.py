"""An engine is used if its labels are those of torch and it is faster, as measured on a scan."""

from __future__ import annotations

import copy
import gc
import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, get_args

import numpy as np
import pytest
import torch

from scanloom.cards.card import ModelCard, Threshold, Window
from scanloom.core import ComputeOptions, Reason, ScanError, StepTimer, Volume
from scanloom.inference.engines import cache, selection
from scanloom.inference.engines.cache import EngineTrial, all_trials, exports_folder
from scanloom.inference.engines.protocol import (
    EngineUnfitError,
    NetworkRequest,
    Run,
)
from scanloom.inference.engines.selection import ENGINES, compare_labels
from scanloom.inference.predictor import TorchPredictor
from scanloom.options import Engine
from support import model_cards

Change = Callable[[torch.Tensor], torch.Tensor]


class FakeEngine:
    """Torch itself, with its scores changed and its passes delayed: an engine to be judged."""

    name: ClassVar[str] = "openvino"
    package: ClassVar[str] = "openvino"
    automatic: ClassVar[bool] = True

    def __init__(self, change: Change = torch.clone, faster: bool = True) -> None:
        self.change, self.faster = change, faster
        self.prepared = 0

    def version(self) -> str | None:
        return "1.0"

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        return dtype is torch.float32

    def prepare(self, request: NetworkRequest) -> Run:
        self.prepared += 1
        network = copy.deepcopy(request.build())
        known: dict[bytes, torch.Tensor] = {}

        def run(windows: torch.Tensor) -> torch.Tensor:
            if not self.faster:
                time.sleep(0.2)
            key = windows.numpy().tobytes()
            if key not in known:
                known[key] = self.change(network(windows))
            return known[key].clone()

        return run


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return model_cards.card(model_cards.small_weights(tmp_path_factory.mktemp("model"), seed=1))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "user_cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(selection, "ENGINES", {"openvino": selection.ENGINES["openvino"]})


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeEngine]:
    def install(change: Change = torch.clone, faster: bool = True) -> FakeEngine:
        fake = FakeEngine(change, faster)
        monkeypatch.setitem(selection.ENGINES, "openvino", fake)
        return fake

    return install


def scan(
    shape: tuple[int, int, int] = (33, 30, 18),
    spacing: tuple[float, float, float] = (1.3, 1.2, 2.6),
) -> Volume:
    grid = model_cards.grid(shape, spacing)
    return Volume(model_cards.smooth_scan(shape), grid, "HU", "CT")


def predictor(card: ModelCard, engine: str = "auto", cases: int = 1000) -> TorchPredictor:
    compute = ComputeOptions(precision="float32", engine=engine)  # type: ignore[arg-type]  # words
    return TorchPredictor(card, compute, device="cpu", planned_cases=cases)


def test_each_name_of_the_options_has_its_engine() -> None:
    """In the same order, which is that of "auto"."""
    assert [engine.name for engine in ENGINES.values()] == list(ENGINES)
    assert ["auto", "torch", *ENGINES] == list(get_args(Engine))


def test_a_faster_engine_with_equal_labels_is_used(card, engine) -> None:
    fake = engine()
    first, clock = predictor(card), StepTimer()
    labels = first.predict(scan(), clock).layers[0].labels

    assert (first.engine.name, first.engine.version) == ("openvino", "1.0")
    assert "100.0000 % of voxels equal" in first.engine.measured
    assert first.engine.why == "measured here"
    assert "engine" in clock.steps
    assert np.array_equal(labels, predictor(card, "torch").predict(scan()).layers[0].labels)
    (trial,) = all_trials()
    assert trial.used
    prepared = fake.prepared

    again, clock = predictor(card), StepTimer()
    again.predict(scan(), clock)
    again.predict(scan(), clock)
    assert again.engine == first.engine
    assert fake.prepared == prepared + 1  # not measured again, prepared once


def test_torch_keeps_no_weights_of_what_an_engine_runs(card, engine) -> None:
    """They are loaded again for the runs of torch: labels are the same."""
    engine()
    model, reference = predictor(card), predictor(card, "torch")
    labels = reference.predict(scan()).layers[0].labels
    loaded = weakref.ref(model.networks.load(torch.float32).network)
    for _ in range(2):
        assert np.array_equal(model.predict(scan()).layers[0].labels, labels)
        gc.collect()  # MONAI's constructor leaves a cycle
        assert loaded() is None
        described = model.networks.describe(torch.float32)
        assert list(described.network.parameters()) == []
    assert list(model.networks.load(torch.float32).network.parameters()) != []
    assert np.array_equal(model.predict(scan()).layers[0].labels, labels)
    assert list(reference.networks.describe(torch.float32).network.parameters()) != []


def test_an_engine_that_changes_labels_is_not_used(card, engine, caplog) -> None:
    engine(lambda scores: scores.flip(1))
    measured = predictor(card)
    labels = measured.predict(scan()).layers[0].labels
    assert measured.engine.name == "torch"
    assert "labels differ" in measured.engine.measured
    assert np.array_equal(labels, predictor(card, "torch").predict(scan()).layers[0].labels)

    with caplog.at_level(logging.WARNING):
        forced = predictor(card, "openvino")
        assert np.array_equal(labels, forced.predict(scan()).layers[0].labels)
    assert forced.engine.name == "torch"
    assert "torch is used instead of openvino: its labels differ from torch's" in caplog.text


def test_a_slower_engine_is_used_on_request_only(card, engine) -> None:
    engine(faster=False)
    measured = predictor(card)
    measured.predict(scan())
    assert measured.engine.name == "torch"
    forced = predictor(card, "openvino")
    forced.predict(scan())
    assert forced.engine.name == "openvino"


def test_an_engine_that_fails_is_not_used(card, engine) -> None:
    def fail(request: NetworkRequest) -> Run:
        raise EngineUnfitError("the library lacks an operation")

    engine().prepare = fail
    measured = predictor(card)
    measured.predict(scan())
    assert measured.engine.name == "torch"
    assert "the library lacks an operation" in measured.engine.measured
    assert [trial.failed for trial in all_trials()] == ["the library lacks an operation"]


def test_few_windows_are_not_worth_a_measurement(card, engine) -> None:
    fake = engine()
    unmeasured, clock = predictor(card, cases=1), StepTimer()
    unmeasured.predict(scan(), clock)
    assert unmeasured.engine.name == "torch"
    assert fake.prepared == 0
    assert "engine" not in clock.steps
    assert not exports_folder().exists()


def test_whole_scans_are_run_by_torch(card, engine) -> None:
    engine()
    unmeasured = predictor(replace(card, window=Window(None)))
    unmeasured.predict(scan((16, 16, 16), (2.0, 2.0, 2.0)))
    assert "whole scan" in unmeasured.engine.why


def test_an_engine_that_is_not_installed_is_refused(card, engine) -> None:
    engine().version = lambda: None
    with pytest.raises(ScanError, match="pip install openvino") as caught:
        predictor(card, "openvino")
    assert caught.value.reason is Reason.DEVICE_UNAVAILABLE
    only_torch = predictor(card)
    only_torch.predict(scan())
    assert only_torch.engine.measured == "no other engine is installed"


def test_another_version_is_measured_again(card, engine) -> None:
    engine()
    predictor(card).predict(scan())
    newer = engine()
    newer.version = lambda: "2.0"
    predictor(card).predict(scan())
    assert newer.prepared > 1
    assert len(all_trials()) == 2


def test_another_decision_is_measured_again(card, engine) -> None:
    """Of a threshold that no score reaches, all labels are equal, whatever the scores are."""
    engine(lambda scores: scores.flip(1))
    nothing = predictor(replace(card, decision=Threshold(1e9), restore="labels"))
    nothing.predict(scan())
    assert nothing.engine.name == "openvino"

    same_network = predictor(card)
    same_network.predict(scan())
    assert same_network.engine.name == "torch"
    assert "labels differ" in same_network.engine.measured


def test_a_damaged_verdict_is_measured_again(card, engine) -> None:
    engine()
    predictor(card).predict(scan())
    (path,) = (exports_folder() / "verdicts").glob("*.json")
    path.write_text(path.read_text()[:-5])
    predictor(card).predict(scan())
    assert len(all_trials()) == 1


def test_voxels_are_equal_if_all_their_labels_are() -> None:
    """Many label maps, most of them empty, would hide a structure that is lost."""
    lost = torch.zeros((4, 10, 10, 10), dtype=torch.uint8)
    found = lost.clone()
    found[2, 0] = 3
    assert compare_labels([found], [lost], voxel_ml=1.0) == (0.9, 0.0)


MEASURED = EngineTrial(
    *("m", "openvino", "1", "float32", 2),
    equal=0.9999,
    dice=0.998,
    torch_s=1.0,
    engine_s=0.5,
    weights="0" * 64,
    place="a processor",
)


@pytest.mark.parametrize(
    ("change", "used"),
    [
        ({}, True),
        ({"equal": 0.99989}, False),
        ({"engine_s": 0.95}, False),
        ({"engine_s": 0.89}, True),
        ({"failed": "no"}, False),
        ({"precision": "bfloat16", "equal": 0.99}, True),
        ({"precision": "bfloat16", "dice": 0.9979}, False),
        ({"precision": "bfloat16", "dice": None}, False),
    ],
)
def test_limits_of_verdicts(change: dict[str, object], used: bool) -> None:
    assert replace(MEASURED, **change).used is used


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({"dice": 0.95, "torch_dice": 0.951}, True),
        ({"dice": 0.95, "torch_dice": 0.953}, False),
        ({"dice": 0.998, "torch_dice": 1.0}, True),
        ({"dice": 0.95}, False),
        ({"dice": 0.95, "torch_dice": 0.95, "failed": "no"}, False),
    ],
)
def test_a_request_is_followed_if_torch_loses_as_much(
    change: dict[str, object], taken: bool
) -> None:
    measured = replace(MEASURED, precision="bfloat16", **change)
    assert measured.as_torch is taken
    assert measured.used is (taken and measured.dice == 0.998)
