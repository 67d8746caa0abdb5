"""Scans and labels on their way: in parts, beside the device, and right whatever happens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scanloom.cards.card import ModelCard
from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions, Segmentation, StepTimer, Volume
from scanloom.inference import transfers
from scanloom.inference.predictor import TorchPredictor
from support.fake_cuda import TO_DEVICE, TO_HOST, StandIn, memory_faults
from support.nnunet_folders import write_model

FLOAT32 = ComputeOptions(precision="float32", engine="torch")


@pytest.fixture
def planes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scans be sent plane by plane, and hardly any labels be on their way at once."""
    monkeypatch.setattr(transfers, "SLAB_BYTES", 1)
    monkeypatch.setattr(transfers, "_MOST_WAITING_BYTES", 4000)


@pytest.mark.usefixtures("planes")
@pytest.mark.parametrize("order", ["<i2", ">i2", "<f4"])
def test_labels_of_a_scan_in_parts_are_those_of_the_cpu(
    fake: StandIn, card: ModelCard, volume: Volume, expected: Segmentation, order: str
) -> None:
    scan = replace(volume, array=volume.array.astype(order))
    [layer] = TorchPredictor(card, FLOAT32, device="cuda").predict(scan).layers

    np.testing.assert_array_equal(layer.labels, expected.layers[0].labels)


@pytest.mark.thorough
@pytest.mark.usefixtures("planes")
def test_labels_of_nnunet_in_parts_are_those_of_the_cpu(
    fake: StandIn, small_volume: Volume, tmp_path: Path
) -> None:
    """Its intensity steps change the scan as it arrives, before it is resampled."""
    card = load_card(write_model(tmp_path))
    [expected] = TorchPredictor(card, FLOAT32, device="cpu").predict(small_volume).layers

    [layer] = TorchPredictor(card, FLOAT32, device="cuda").predict(small_volume).layers

    assert len(np.unique(layer.labels)) > 1
    assert np.mean(layer.labels == expected.labels) > 0.999
    assert fake.ledger.calls[TO_DEVICE] > small_volume.array.shape[2]


def test_a_scan_is_in_page_locked_memory_before_its_turn(
    fake: StandIn, card: ModelCard, volume: Volume
) -> None:
    predictor, held = TorchPredictor(card, FLOAT32, device="cuda"), []
    predictor.predict(volume)
    fake.clear()

    @contextmanager
    def turn() -> Iterator[None]:
        until = time.monotonic() + 60
        while fake.pinned_bytes < volume.array.nbytes and time.monotonic() < until:
            time.sleep(0.01)
        held.append((fake.pinned_bytes, fake.ledger.operations))
        yield

    predictor.predict(volume, StepTimer(device_turn=turn))

    [(pinned, operations)] = held
    assert pinned >= volume.array.nbytes
    assert operations == 0


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("planes")
@pytest.mark.parametrize("share", [0.0, 0.05, 0.1, 0.9, 0.999])
def test_a_scan_is_sent_again_after_memory_ran_out(
    fake: StandIn,
    card: ModelCard,
    small_volume: Volume,
    small_expected: Segmentation,
    share: float,
) -> None:
    predictor = TorchPredictor(card, FLOAT32, device="cuda")
    for _ in range(2):  # what is kept for later scans is kept by the second
        fake.clear()
        predictor.predict(small_volume)
    operations, before = fake.ledger.operations, fake.allocated

    fake.fail(memory_faults()["torch"], after=int(share * operations))
    [layer] = predictor.predict(small_volume).layers

    np.testing.assert_array_equal(layer.labels, small_expected.layers[0].labels)
    assert fake.allocated == before
    assert fake.ledger.sizes[TO_HOST] > 0
