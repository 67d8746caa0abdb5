"""Faults of a device: each message of lacking memory leads to fewer windows, not to an error."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scanloom.cards.card import ModelCard
from scanloom.core import ComputeOptions, Flag, Reason, ScanError, Segmentation, StepTimer, Volume
from scanloom.core.process import blame
from scanloom.inference.engines import selection
from scanloom.inference.engines.cudagraphs_engine import CudaGraphs
from scanloom.inference.engines.protocol import NetworkRequest, Run
from scanloom.inference.predictor import TorchPredictor
from support.fake_cuda import StandIn, memory_faults

MESSAGES = memory_faults()
FLOAT32 = ComputeOptions(precision="float32", engine="torch")


@pytest.fixture
def predictor(fake: StandIn, card: ModelCard, small_volume: Volume) -> TorchPredictor:
    """Return a predictor that has labelled a scan."""
    predictor = TorchPredictor(card, FLOAT32, device="cuda")
    predictor.predict(small_volume)
    fake.clear()
    return predictor


@pytest.mark.parametrize("name", MESSAGES)
def test_lacking_memory_is_recognised(name: str) -> None:
    assert blame(MESSAGES[name]()).reason is Reason.OUT_OF_MEMORY


def test_a_fault_of_the_device_is_not_lacking_memory() -> None:
    kind: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)

    fault = blame(kind("CUDA error: an illegal memory access was encountered"))

    assert fault.reason is not Reason.OUT_OF_MEMORY


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "share"), [*((name, 0.5) for name in MESSAGES), ("driver", 0.01), ("triton", 0.99)]
)
def test_a_scan_is_labelled_although_memory_ran_out(
    fake: StandIn,
    predictor: TorchPredictor,
    small_volume: Volume,
    small_expected: Segmentation,
    name: str,
    share: float,
) -> None:
    """During resampling, the network and the way back."""
    predictor.predict(small_volume)  # once more: weights of windows and splines are kept
    operations = fake.ledger.operations
    before = fake.allocated
    clock = StepTimer()

    fake.fail(MESSAGES[name], after=int(share * operations))
    [layer] = predictor.predict(small_volume, clock).layers

    np.testing.assert_array_equal(layer.labels, small_expected.layers[0].labels)
    assert "windows" in str(clock.notes["ladder"])
    assert fake.allocated == before


@pytest.mark.thorough
def test_memory_that_never_suffices_is_a_named_reason(
    fake: StandIn, predictor: TorchPredictor, small_volume: Volume, small_expected: Segmentation
) -> None:
    before = fake.allocated
    fake.fail(MESSAGES["cudnn alloc"], times=10**9)
    with pytest.raises(ScanError) as caught:
        predictor.predict(small_volume)
    assert caught.value.reason is Reason.OUT_OF_MEMORY

    del caught
    fake.fail(MESSAGES["cudnn alloc"], times=0)
    assert fake.allocated == before
    [layer] = predictor.predict(small_volume).layers
    np.testing.assert_array_equal(layer.labels, small_expected.layers[0].labels)


def test_beside_another_process_fewer_windows_run_at_once(
    fake: StandIn, predictor: TorchPredictor, small_volume: Volume, small_expected: Segmentation
) -> None:
    predictor.predict(small_volume)
    whole, kept = fake.peak[0], fake.allocated
    fake.others = fake.memory - (kept + (whole - kept) * 3 // 4)
    clock = StepTimer()

    [layer] = predictor.predict(small_volume, clock).layers

    assert clock.notes["ladder"]
    np.testing.assert_array_equal(layer.labels, small_expected.layers[0].labels)


class Broken(CudaGraphs):
    """An engine that fails at the fifth batch: three are its trial, and each scan is one."""

    def __init__(self) -> None:
        self.left = 4

    def prepare(self, request: NetworkRequest) -> Run:
        run = super().prepare(request)

        def broken(windows: torch.Tensor) -> torch.Tensor:
            self.left -= 1
            if self.left < 0:
                raise ValueError("a library's own error")
            return run(windows)

        return broken


class Observed(CudaGraphs):
    """An engine whose last prepared network is known, and kept by others only."""

    run: weakref.ReferenceType[Run]

    def prepare(self, request: NetworkRequest) -> Run:
        run = super().prepare(request)
        self.run = weakref.ref(run)
        return run


def test_where_memory_runs_out_an_engine_keeps_none_for_other_scans(
    fake: StandIn,
    card: ModelCard,
    small_volume: Volume,
    small_expected: Segmentation,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A graph for each shape of scans would leave too little for any of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # its trial is not that of other tests
    monkeypatch.setitem(selection.ENGINES, "cudagraphs", engine := Observed())
    compute = ComputeOptions(precision="float32", engine="cudagraphs")
    predictor = TorchPredictor(card, compute, device="cuda")
    predictor.predict(small_volume)
    assert engine.run() is not None

    fake.fail(MESSAGES["driver"], after=5)
    [layer] = predictor.predict(small_volume).layers

    gc.collect()
    assert engine.run() is None
    np.testing.assert_array_equal(layer.labels, small_expected.layers[0].labels)
    assert predictor.predict(small_volume).engine == predictor.engine
    assert predictor.engine.name == "cudagraphs"


def test_torch_takes_over_from_an_engine_that_fails(
    fake: StandIn,
    card: ModelCard,
    small_volume: Volume,
    small_expected: Segmentation,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    monkeypatch.setitem(selection.ENGINES, "cudagraphs", Broken())
    compute = ComputeOptions(precision="float32", engine="cudagraphs")
    predictor = TorchPredictor(card, compute, device="cuda")
    first = predictor.predict(small_volume)
    assert first.engine is not None
    assert first.engine.name == "cudagraphs"
    for _ in range(2):  # the engine fails, then it is not used
        segmentation = predictor.predict(small_volume)

        assert segmentation.engine is not None
        assert segmentation.engine.name == "torch"
        assert segmentation.engine.why == "instead of cudagraphs: ValueError while it ran"
        assert Flag.OTHER_ENGINE in segmentation.flags
        np.testing.assert_array_equal(
            segmentation.layers[0].labels, small_expected.layers[0].labels
        )
    assert "torch is used instead of cudagraphs" in caplog.text
