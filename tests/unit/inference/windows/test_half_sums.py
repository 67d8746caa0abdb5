"""Scores in half equal nnU-Net's definition bit for bit, in plain loops over windows and flips."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from scanloom.cards.card import NetworkGrid, NetworkSpec, Weights, Window
from scanloom.core import ComputeOptions, Volume
from scanloom.inference.intensity import apply_steps
from scanloom.inference.network.architectures import build_network
from scanloom.inference.network.layers import PlaneNetwork
from scanloom.inference.predictor import TorchPredictor
from scanloom.inference.sliding_window import BatchSize, Fold, SlidingWindow
from support import model_cards, nnunet_windows

Shape = tuple[int, int, int]


class Positioned(nn.Module):
    """Scores that depend on where a window lies; three classes."""

    def __init__(self, dimensions: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        convolution = nn.Conv3d if dimensions == 3 else nn.Conv2d
        self.conv = convolution(2, 3, 3, padding=1)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        space = tuple(range(2, windows.ndim))
        return 5 * self.conv(windows) + windows.mean(dim=space, keepdim=True)[:, :1]


def slide(slider: SlidingWindow, image: torch.Tensor, axis: int) -> torch.Tensor:
    """Return all scores (C, X, Y, Z)."""
    with torch.inference_mode():
        return torch.cat([b.scores.clone() for b in slider.slide(image, axis)]).movedim(0, axis + 1)


def nnunet_window(size: Shape, step: float = 0.5, mirror: Any = (), plane: Any = None) -> Window:
    return Window(
        size,
        1 - step,
        "gaussian_filter",
        starts="even",
        sums="float16",
        mirror=mirror,
        plane=plane,
    )


lengths = st.integers(3, 17)
flips = st.sampled_from([(), (0,), (1, 2), (0, 1, 2)])


@settings(max_examples=40)
@given(
    st.tuples(lengths, lengths, lengths),
    st.tuples(*[st.integers(3, 9)] * 3),
    st.sampled_from([0.5, 0.8, 0.3]),
    flips,
    st.integers(0, 2),
)
def test_windows_of_three_dimensions(
    shape: Shape, size: Shape, step: float, mirror: Any, axis: int
) -> None:
    """Any grid, window, step and flips; planes along any axis."""
    network, image = Positioned(3), torch.randn(2, *shape)

    scores = slide(
        SlidingWindow([Fold(network)], nnunet_window(size, step, mirror), slab=999), image, axis
    )

    with torch.inference_mode():
        expected = nnunet_windows.scores_of(network, image, size, step, mirror)
    assert scores.dtype is torch.float16
    assert torch.equal(scores, expected)


@pytest.mark.thorough
@settings(max_examples=30)
@given(st.tuples(lengths, lengths, lengths), st.tuples(*[st.integers(3, 9)] * 2), st.integers(0, 2))
def test_windows_of_two_dimensions(shape: Shape, size: tuple[int, int], axis: int) -> None:
    """Slices across the first axis, mirrored within the slice."""
    network, image = Positioned(2), torch.randn(2, *shape)
    window = nnunet_window((1, *size), mirror=(1, 2), plane=0)

    scores = slide(SlidingWindow([Fold(PlaneNetwork(network, 0))], window), image, axis)

    with torch.inference_mode():
        expected = nnunet_windows.scores_of(network, image, size, mirror=(0, 1))
    assert torch.equal(scores, expected)


@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.parametrize("count", [2, 5])
def test_mean_of_folds(axis: int, count: int) -> None:
    networks, image = [Positioned(3, n) for n in range(count)], torch.randn(2, 11, 12, 13)
    window = nnunet_window((6, 6, 6), mirror=(0,))
    folds = [Fold(network) for network in networks]

    scores = slide(SlidingWindow(folds, window), image, axis)

    with torch.inference_mode():
        each = [nnunet_windows.scores_of(n, image, (6, 6, 6), mirror=(0,)) for n in networks]
    assert torch.equal(scores, nnunet_windows.mean_of(each))


def test_mean_of_folds_in_float32_is_that_of_their_scores() -> None:
    networks, image = [Positioned(3, n) for n in range(3)], torch.randn(2, 11, 12, 13)
    window = Window((6, 6, 6), 0.5, "gaussian")
    folds = [Fold(network) for network in networks]

    scores = slide(SlidingWindow(folds, window, batch=BatchSize(3)), image, 1)

    each = [slide(SlidingWindow([Fold(network)], window), image, 1) for network in networks]
    torch.testing.assert_close(scores, torch.stack(each).mean(dim=0))


def test_flips_of_a_network_that_works_in_place() -> None:
    """Each flip sees the scan, not the previous pass's result."""

    def spoils(windows: torch.Tensor) -> torch.Tensor:
        return windows.mul_(-3).add_(1)

    image = torch.randn(1, 9, 8, 10)
    window = Window((4, 4, 4), 0.5, mirror=(0, 2))

    torch.testing.assert_close(
        slide(SlidingWindow([Fold(spoils)], window), image, 2), image * -3 + 1
    )


def test_infinite_half_scores_are_an_error() -> None:
    """Sums of 10 times the scores leave the range of half precision."""
    slider = SlidingWindow([Fold(lambda w: w * 10_000)], nnunet_window((4, 4, 4)))

    with pytest.raises(FloatingPointError):
        slide(slider, torch.full((1, 8, 8, 8), 3.0), 0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dimensions", [2, 3])
def test_labels_of_a_card_with_folds_flips_and_half_sums(dimensions: int, tmp_path: Path) -> None:
    """The test goes from files of weights to labels on the scan's own grid."""
    spec = NetworkSpec("UNet", {**model_cards.SMALL_UNET, "spatial_dims": dimensions})
    networks, files = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        networks.append(build_network(spec))
        files.append(tmp_path / f"{seed}.pt")
        save_file(networks[-1].state_dict(), files[-1])
    further = Weights(files[1], hashlib.sha256(files[1].read_bytes()).hexdigest())
    size, plane = ((16, 16, 16), None) if dimensions == 3 else ((16, 16, 1), 2)
    axes = (0, 1, 2) if dimensions == 3 else (0, 1)
    card = model_cards.card(
        files[0],
        network=spec,
        folds=(further,),
        grid=NetworkGrid(),
        window=nnunet_window(size, mirror=axes, plane=plane),
        activation=None,
    )
    array = model_cards.smooth_scan((19, 24, 21))
    volume = Volume(array, model_cards.grid(array.shape), "HU", "CT")

    predictor = TorchPredictor(card, ComputeOptions(precision="float32"), device="cpu")
    labels = predictor.predict(volume).layers[0].labels

    image = apply_steps(torch.from_numpy(array.astype(np.float32)), card.after)[None]
    order = (0, 1, 2, 3) if dimensions == 3 else (0, 3, 1, 2)  # slices come first
    inverse = np.argsort(order).tolist()
    with torch.inference_mode():
        each = [
            nnunet_windows.scores_of(n, image.permute(order), (16,) * dimensions, mirror=axes)
            for n in networks
        ]
    expected = nnunet_windows.mean_of(each).permute(inverse).argmax(dim=0).numpy()
    assert len(np.unique(expected)) > 1
    np.testing.assert_array_equal(labels, expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("plane", [0, 1, 2])
@pytest.mark.parametrize("blending", ["constant", "gaussian"])
def test_planes_equal_those_of_monais_slice_inferer(axis: int, plane: Any, blending: Any) -> None:
    from monai.inferers import SliceInferer

    network, image = Positioned(2), torch.randn(2, 13, 15, 9)
    size = [8, 8, 8]
    size[plane] = 1
    window = Window((size[0], size[1], size[2]), 0.3, blending, plane=plane)
    slider = SlidingWindow([Fold(PlaneNetwork(network, plane))], window, batch=BatchSize(7))
    inferer = SliceInferer(
        roi_size=(8, 8), spatial_dim=plane, overlap=0.3, mode=blending, sw_batch_size=2
    )

    scores = slide(slider, image, axis)

    with torch.inference_mode():
        expected = inferer(image[None], network)[0]
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
