"""CUDA graphs belong to a device, and their results to the caller."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from scanloom.cards.card import ModelCard
from scanloom.core import ComputeOptions, Segmentation, Volume
from scanloom.inference.engines import cache
from scanloom.inference.engines.cudagraphs_engine import ENGINE
from scanloom.inference.engines.protocol import EngineUnfitError, NetworkRequest
from scanloom.inference.predictor import TorchPredictor
from support import fake_cuda
from support.fake_cuda import StandIn

SHAPE = (2, 1, 8, 8, 8)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv3d(3, 2, 1)).eval()


def request(device: str) -> NetworkRequest:
    return NetworkRequest(build, ("net",), SHAPE, torch.float32, torch.device(device), 1)


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_graph_computes_what_torch_computes_on_its_device(fake: StandIn, device: str) -> None:
    first, second = torch.randn(2, *SHAPE)
    with torch.inference_mode():
        run = ENGINE.prepare(request(device))
        scores = [run(windows.to(device)) for windows in (first, second)]
        expected = [build()(windows) for windows in (first, second)]

    # The first scores outlive the second replay, which writes to the same addresses
    for ours, theirs in zip(scores, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
    assert torch.cuda.current_device() == 0


def test_fewer_windows_run_without_the_graph(fake: StandIn) -> None:
    windows = torch.randn(SHAPE)[:1]
    with torch.inference_mode():
        scores = ENGINE.prepare(request("cuda"))(windows.to("cuda"))

        torch.testing.assert_close(scores.cpu(), build()(windows))


def test_a_graph_that_computes_something_else_is_refused(
    fake: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_cuda.CUDAGraph, "replay", lambda graph: graph.recorded[-1][3].zero_())

    with torch.inference_mode(), pytest.raises(EngineUnfitError, match="other scores"):
        ENGINE.prepare(request("cuda"))


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_model_runs_as_graphs_and_none_of_its_batches_is_padded(
    fake: StandIn,
    card: ModelCard,
    small_volume: Volume,
    small_expected: Segmentation,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row of 9 windows is a batch of 9, with at most 16 in a batch."""
    monkeypatch.setattr(cache, "user_cache_folder", lambda: tmp_path)
    compute = ComputeOptions(precision="float32", engine="cudagraphs")
    predictor = TorchPredictor(card, compute, device=device)
    predictor.predict(small_volume)
    assert predictor.engine.name == "cudagraphs"
    replays = []
    replay = fake_cuda.CUDAGraph.replay
    monkeypatch.setattr(
        fake_cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph))
    )

    [layer] = predictor.predict(small_volume).layers

    assert len(replays) == 1
    np.testing.assert_array_equal(layer.labels, small_expected.layers[0].labels)
