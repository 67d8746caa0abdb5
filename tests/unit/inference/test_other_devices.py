"""Devices without float64, MPS and some XPUs, run networks and label as the CPU does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from scanloom.cards.card import NetworkGrid
from scanloom.core import ComputeOptions, Volume
from scanloom.inference import device as devices
from scanloom.inference.device import float64_device
from scanloom.inference.predictor import TorchPredictor
from support import model_cards
from support.plain_device import plain_device

FLOAT32 = ComputeOptions(precision="float32", engine="torch")


@pytest.fixture(params=["mps", "xpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of a device of which torch has one, without float64."""
    monkeypatch.setattr(devices, "device_count", lambda _: 1)
    monkeypatch.setattr(torch.xpu, "_lazy_init", lambda: None)
    properties = SimpleNamespace(has_fp64=False)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: properties)
    with plain_device(request.param):
        yield request.param


def test_the_stand_in_has_no_float64(device: str) -> None:
    with pytest.raises(TypeError, match="has no float64"):
        torch.zeros(3, dtype=torch.float64).to(device)
    with pytest.raises(TypeError, match="has no float64"):
        torch.zeros(3, dtype=torch.float64, device=device)
    with pytest.raises(RuntimeError, match="tensors on"):
        torch.zeros(3, device=device) + torch.zeros(3)
    assert (torch.ones(3, device=device) + 1).cpu().tolist() == [2.0, 2.0, 2.0]


GRIDS: dict[str, dict[str, Any]] = {
    "linear": {},
    "nearest": {"mode": "nearest"},
    "cubic": {"mode": "cubic", "alignment": "edges"},
}


@pytest.mark.parametrize("restore", ["scores", "labels"])
@pytest.mark.parametrize("grid", GRIDS)
def test_labels_are_those_of_the_cpu(grid: str, restore: str, device: str, tmp_path: Path) -> None:
    shape = (37, 33, 21)
    array = np.asfortranarray(model_cards.smooth_scan(shape))
    scan = Volume(array, model_cards.grid(shape, (1.3, 1.2, 2.6), "LPS"), "HU", "CT")
    card = replace(
        model_cards.card(model_cards.small_weights(tmp_path)),
        grid=NetworkGrid("RAS", (2.0, 2.0, 2.0), **GRIDS[grid]),
        restore=restore,
    )

    labels = [
        TorchPredictor(card, FLOAT32, device=name).predict(scan).layers[0].labels
        for name in ("cpu", device)
    ]

    assert len(np.unique(labels[0])) > 1
    np.testing.assert_array_equal(labels[0], labels[1])


def test_an_xpu_with_float64_prepares_scans_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    xpu = torch.device("xpu", 0)
    properties = SimpleNamespace(has_fp64=True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: properties)

    assert float64_device(xpu) == xpu
    assert float64_device(torch.device("mps", 0)) == torch.device("cpu")
    assert float64_device(torch.device("cuda", 0)) == torch.device("cuda", 0)
