"""Scores of sliding windows equal those of nnU-Net's predictor (nnunetv2 2.8.1), bit for bit."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from scanloom.cards.card import Window
from scanloom.inference.network.layers import PlaneNetwork
from scanloom.inference.sliding_window import Fold, SlidingWindow, even_starts, window_weights

pytestmark = pytest.mark.reference

SIZES = [(32, 40, 33), (8, 8, 8), (20, 64, 48), (96, 33, 17)]


def network_of(dimensions: int, seed: int) -> nn.Module:
    """Return a small network with instance norm; 4 classes."""
    torch.manual_seed(seed)
    convolution = nn.Conv3d if dimensions == 3 else nn.Conv2d
    norm = nn.InstanceNorm3d if dimensions == 3 else nn.InstanceNorm2d
    layers = (convolution(2, 8, 3, padding=1), norm(8), nn.LeakyReLU(), convolution(8, 4, 1))
    network = nn.Sequential(*layers)
    network[-1].weight.data *= 6
    return network.eval()


def theirs(networks: list[nn.Module], image: torch.Tensor, size: Any, mirror: Any) -> torch.Tensor:
    """Return the logits of nnUNetPredictor."""
    inference = pytest.importorskip("nnunetv2.inference.predict_from_raw_data")
    predictor = inference.nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    predictor.configuration_manager = SimpleNamespace(patch_size=list(size))
    predictor.label_manager = SimpleNamespace(num_segmentation_heads=4)
    predictor.network = copy.deepcopy(networks[0])
    predictor.list_of_parameters = [network.state_dict() for network in networks]
    predictor.allowed_mirroring_axes = mirror
    logits: torch.Tensor = predictor.predict_logits_from_preprocessed_data(image)
    return logits


@pytest.mark.parametrize("size", SIZES)
def test_starts_and_weights(size: Any) -> None:
    functions = pytest.importorskip("nnunetv2.inference.sliding_window_prediction")
    for step in (0.5, 0.8, 0.25, 0.1):
        shape = [n + 37 * axis for axis, n in enumerate(size)]
        expected = functions.compute_steps_for_sliding_window(shape, size, step)
        assert [even_starts(n, m, 1 - step) for n, m in zip(shape, size, strict=True)] == expected
    cpu = torch.device("cpu")
    expected = functions.compute_gaussian(size, value_scaling_factor=10, device=cpu)
    window = Window(size, 0.5, "gaussian_filter", sums="float16")
    assert torch.equal(window_weights(size, window, cpu), expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("mirror", [None, (0,), (0, 1, 2)])
@pytest.mark.parametrize("folds", [1, 3])
def test_three_dimensions(axis: int, mirror: Any, folds: int) -> None:
    networks = [network_of(3, n) for n in range(folds)]
    image = torch.randn(2, 40, 21, 33)
    window = Window(
        (16, 24, 16),
        0.5,
        "gaussian_filter",
        starts="even",
        sums="float16",
        mirror=mirror or (),
    )
    slider = SlidingWindow([Fold(network) for network in networks], window)
    with torch.inference_mode():
        ours = torch.cat([b.scores.clone() for b in slider.slide(image, axis)])

    assert torch.equal(ours.movedim(0, axis + 1), theirs(networks, image, (16, 24, 16), mirror))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("mirror", [None, (0, 1)])
def test_two_dimensions(axis: int, mirror: Any) -> None:
    network, image = network_of(2, 0), torch.randn(2, 7, 40, 33)
    window = Window(
        (1, 24, 48),
        0.5,
        "gaussian_filter",
        starts="even",
        sums="float16",
        mirror=(1, 2) if mirror else (),
        plane=0,
    )
    slider = SlidingWindow([Fold(PlaneNetwork(network, 0))], window)
    with torch.inference_mode():
        ours = torch.cat([b.scores.clone() for b in slider.slide(image, axis)])

    assert torch.equal(ours.movedim(0, axis + 1), theirs([network], image, (24, 48), mirror))
