"""A scan on a device: what crosses the bus, how often the host waits, and what stays allocated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from scanloom.cards.card import ModelCard, Threshold
from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions, Segmentation, Volume
from scanloom.inference.geometry import plan_grid
from scanloom.inference.predictor import TorchPredictor
from scanloom.inference.sliding_window import window_layout
from support import model_cards
from support.fake_cuda import BESIDE, TO_DEVICE, TO_HOST, StandIn
from support.nnunet_folders import write_model

SMALL_COPIES = 64 * 1024
"""Bytes of interpolation weights that may follow a scan to the device."""
ANSWERS = 4096
"""Bytes of yes and no that the host may read."""

CHANGES: dict[str, dict[str, Any]] = {
    "scores": {},
    "labels": {"restore": "labels"},
    "thresholds": {
        "activation": "sigmoid",
        "decision": Threshold(0.5),
        "structures": model_cards.structures(3),
    },
    "air": {"air_below": 20.0},
}


def rows_of(card: ModelCard, volume: Volume) -> int:
    """Return the number of rows of windows of a scan."""
    plan = plan_grid(volume.grid, card.grid)
    layout = window_layout(card.window, plan.network.shape, plan.network_axis(plan.lead), 8)
    return len(list(layout.rows()))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("changes", CHANGES)
def test_a_scan_crosses_the_bus_once_and_the_host_hardly_waits(
    fake: StandIn, card: ModelCard, volume: Volume, changes: str
) -> None:
    card = replace(card, **CHANGES[changes])
    predictor = TorchPredictor(
        card, ComputeOptions(precision="float32", engine="torch"), device="cuda"
    )
    predictor.predict(volume)
    before = fake.allocated
    fake.clear()

    segmentation = predictor.predict(volume)

    ledger = fake.ledger
    labels = sum(layer.labels.nbytes for layer in segmentation.layers)
    # Labels on the network grid are cleaned and resampled on the host
    if changes == "labels":
        labels = int(np.prod(plan_grid(volume.grid, card.grid).network.shape))
    assert ledger.waits <= 8 + rows_of(card, volume), str(ledger)
    assert ledger.sizes[TO_DEVICE] <= volume.array.nbytes + SMALL_COPIES, str(ledger)
    assert labels <= ledger.sizes[TO_HOST] <= labels + ANSWERS, str(ledger)
    assert ledger.floats_to_host == 0, str(ledger)
    assert fake.allocated == before


@pytest.mark.thorough
@pytest.mark.parametrize("folds", [("0",), ("0", "1")], ids=["one", "folds"])
def test_what_launches_a_scan_of_nnunet_waits_for_none_of_its_labels(
    fake: StandIn, volume: Volume, folds: tuple[str, ...], tmp_path: Path
) -> None:
    card = load_card(write_model(tmp_path, folds=folds))
    compute = ComputeOptions(precision="float32", engine="torch")
    predictor = TorchPredictor(card, compute, device="cuda")
    predictor.predict(volume)
    before = fake.allocated
    fake.clear()

    [layer] = predictor.predict(volume).layers

    ledger = fake.ledger
    labels = [kind for kind, site in ledger.sites if "write (event)" in site]
    assert set(labels) == {BESIDE}, str(ledger)
    assert ledger.waits <= 8 + rows_of(card, volume), str(ledger)
    assert ledger.sizes[TO_HOST] <= layer.labels.nbytes + ANSWERS, str(ledger)
    assert fake.allocated == before


def test_labels_are_those_of_the_cpu(
    fake: StandIn, card: ModelCard, volume: Volume, expected: Segmentation
) -> None:
    [layer] = expected.layers
    for precision, least in (("float32", 1.0), ("half", 0.999)):
        compute = ComputeOptions(precision=precision, engine="torch")
        [ours] = TorchPredictor(card, compute, device="cuda").predict(volume).layers

        assert np.mean(ours.labels == layer.labels) >= least


@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_nearest_neighbours_at_ties_are_those_of_the_cpu(
    fake: StandIn, card: ModelCard, volume: Volume, mode: Literal["linear", "nearest"]
) -> None:
    """Six planes of the scan lie in the middle of two voxels of the network."""
    card = replace(card, restore="labels", grid=replace(card.grid, mode=mode))

    here, on_device = (
        TorchPredictor(card, ComputeOptions(precision="float32", engine="torch"), device=device)
        .predict(volume)
        .layers[0]
        .labels
        for device in ("cpu", "cuda")
    )

    np.testing.assert_array_equal(on_device, here)


def test_a_predictor_that_is_gone_leaves_nothing_on_the_device(
    fake: StandIn, card: ModelCard, small_volume: Volume
) -> None:
    predictor = TorchPredictor(card, ComputeOptions(precision="float32"), device="cuda")
    predictor.predict(small_volume)
    assert fake.peak[0] > 0

    del predictor

    # Weights of windows and of splines are kept for the next predictor
    assert fake.allocated <= SMALL_COPIES


def test_a_scan_is_sent_in_its_own_type(
    fake: StandIn, card: ModelCard, small_volume: Volume
) -> None:
    swapped = replace(small_volume, array=small_volume.array.astype(">i2"))
    predictor = TorchPredictor(card, ComputeOptions(precision="float32"), device="cuda")
    predictor.predict(swapped)
    fake.clear()

    predictor.predict(swapped)

    assert fake.ledger.largest[TO_DEVICE] == swapped.array.nbytes


@pytest.mark.parametrize("number", [0, 1])
def test_each_device_has_its_own_scan(
    fake: StandIn,
    card: ModelCard,
    small_volume: Volume,
    small_expected: Segmentation,
    number: int,
) -> None:
    compute = ComputeOptions(precision="float32", engine="torch")
    predictor = TorchPredictor(card, compute, device=f"cuda:{number}")
    [layer] = predictor.predict(small_volume).layers

    assert fake.peak[number] > 0
    assert fake.peak[1 - number] == 0
    np.testing.assert_array_equal(layer.labels, small_expected.layers[0].labels)
    assert torch.cuda.current_device() == 0
