"""An ensemble's labels are those of the mean of MONAI's own scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from monai.inferers import sliding_window_inference
from monai.networks.nets.unet import UNet
from safetensors.torch import load_file

from scanloom.cards.card import ModelCard, ReferenceDirection, ScaleRange, Window
from scanloom.core import Flag, ScanError, Volume
from scanloom.inference.ensemble import Ensemble, mean_of_planes
from scanloom.inference.predictor import TorchPredictor
from scanloom.inference.resampling.image import SharedScan
from scanloom.inference.sliding_window import ScorePlanes
from support import model_cards

SHAPE = (40, 36, 28)
STEPS = (
    ScaleRange(-200.0, 200.0, 0.0, 1.0, clip=True),
    ScaleRange(-300.0, 250.0, 0.0, 1.0, clip=True),
)
WINDOWS = (Window((16, 16, 16), 0.5), Window((32, 24, 16), 0.25))


@pytest.fixture
def cards(tmp_path: Path) -> list[ModelCard]:
    """Two models that differ in weights, window and intensities."""
    models = []
    for n, (steps, window) in enumerate(zip(STEPS, WINDOWS, strict=True)):
        (folder := tmp_path / str(n)).mkdir()
        weights = model_cards.small_weights(folder, seed=n)
        models.append(model_cards.card(weights, name=f"model-{n}", after=(steps,), window=window))
    return models


def scan() -> Volume:
    """Return a scan on the network grid: nothing is resampled."""
    grid = model_cards.grid(SHAPE, (2.0, 2.0, 2.0))
    return Volume(model_cards.smooth_scan(SHAPE), grid, "HU", "CT")


def monai_scores(card: ModelCard, volume: Volume) -> torch.Tensor:
    network = UNet(**model_cards.SMALL_UNET).eval()
    network.load_state_dict(load_file(card.weights.file))
    [step] = card.after
    assert isinstance(step, ScaleRange)
    image = torch.from_numpy(volume.array.astype(np.float32))
    image = ((image - step.a_min) / (step.a_max - step.a_min)).clip(0.0, 1.0)
    window = card.window
    with torch.inference_mode():
        scores = sliding_window_inference(
            image[None, None], window.size, 1, network, window.overlap
        )
    return torch.softmax(torch.as_tensor(scores)[0], dim=0)


@pytest.mark.parametrize("restore", ["scores", "labels"])
def test_labels_are_those_of_the_mean(cards: list[ModelCard], restore: str) -> None:
    volume = scan()
    members = [TorchPredictor(replace(c, restore=restore), device="cpu") for c in cards]
    segmentation = Ensemble("mean", members).predict(volume)
    expected = sum(monai_scores(card, volume) for card in cards)
    assert isinstance(expected, torch.Tensor)
    equal = segmentation.layers[0].labels == expected.argmax(0).numpy()
    assert equal.mean() > 0.9999
    assert segmentation.model == "mean"
    assert segmentation.version == "model-0 1, model-1 1"
    alone = [member.predict(volume).layers[0].labels for member in members]
    assert all((segmentation.layers[0].labels != labels).any() for labels in alone)


def test_directions_are_those_of_all_members(cards: list[ModelCard]) -> None:
    start, end = ((s.label,) for s in cards[1].structures[:2])
    never = ReferenceDirection(start, end, (1.0, 2.0, 3.0), 1e-3, "")
    for directions, expected in (((), False), ((never,), True)):
        changed = replace(cards[1], reference_directions=directions)
        members = [TorchPredictor(card, device="cpu") for card in (cards[0], changed)]
        found = Ensemble("mean", members).predict(scan()).flags
        assert (Flag.DIRECTION_IMPLAUSIBLE in found) is expected


def test_members_share_a_scan_and_free_it(cards: list[ModelCard]) -> None:
    members = [TorchPredictor(card, device="cpu") for card in cards]
    shared = SharedScan((card, "cpu") for card in cards)
    ensemble = Ensemble("mean", members)
    segmentation = ensemble.predict(scan(), shared=shared)
    for card in cards:
        shared.finish(card, "cpu")
    np.testing.assert_array_equal(
        segmentation.layers[0].labels, ensemble.predict(scan()).layers[0].labels
    )
    assert not shared._kept


def blocks(scores: torch.Tensor, *sizes: int) -> Iterator[ScorePlanes]:
    """Yield planes in blocks, in memory that is reused as by a sliding window."""
    first = 0
    for size in sizes:
        block = scores[first : first + size].clone()
        yield ScorePlanes(first, block)
        block.fill_(torch.nan)
        first += size


def test_blocks_of_any_size_are_averaged() -> None:
    a, b, c = torch.rand(3, 9, 2, 4, 5).unbind()
    streams = [blocks(a, 9), blocks(b, 2, 4, 3), blocks(c, 1, 1, 7)]
    means = [(block.first, block.scores.clone()) for block in mean_of_planes(streams, 2)]
    assert [first for first, _ in means] == [0, 1, 2, 6]
    torch.testing.assert_close(torch.cat([scores for _, scores in means]), (a + b + c) / 3)


def test_a_network_of_fewer_classes_is_refused() -> None:
    a, b = torch.rand(2, 3, 3, 4, 5).unbind()
    with pytest.raises(ScanError, match="2 output channels, not 3"):
        list(mean_of_planes([blocks(a, 3), blocks(b[:, :2], 3)], 3))
