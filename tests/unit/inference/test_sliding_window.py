"""Windows lie where MONAI's lie and are blended as MONAI blends them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scanloom.cards.card import Window
from scanloom.core import Reason, ScanError
from scanloom.inference.sliding_window import (
    BatchSize,
    Fold,
    ScorePlanes,
    SlidingWindow,
    window_layout,
)

Shape = tuple[int, int, int]


def sweep(slider: SlidingWindow, image: torch.Tensor, axis: int) -> torch.Tensor:
    """Return all scores (C, X, Y, Z); planes must come in order, each once."""
    # planes are good until the next come
    blocks = [ScorePlanes(b.first, b.scores.clone()) for b in slider.slide(image[None], axis)]
    assert [b.first for b in blocks] == [
        sum(len(b.scores) for b in blocks[:n]) for n in range(len(blocks))
    ]
    return torch.cat([b.scores for b in blocks]).movedim(0, axis + 1)


class Blurred(nn.Module):
    """A network whose scores depend on where the window lies."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 3, 3, padding=1)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        return self.conv(windows) + windows.mean(dim=(2, 3, 4), keepdim=True)


sizes = st.integers(3, 20)
windows = st.builds(
    Window,
    st.tuples(st.integers(2, 9), st.integers(2, 9), st.integers(2, 9)),
    st.sampled_from([0.0, 0.25, 0.5, 0.7]),
    st.sampled_from(["constant", "gaussian"]),
    padding=st.sampled_from(["constant", "replicate"]),
    padding_value=st.sampled_from([0.0, -1.5]),
)


@pytest.mark.thorough
@settings(max_examples=60)
@given(st.tuples(sizes, sizes, sizes), windows, st.integers(0, 2), st.integers(1, 5))
def test_scores_equal_monais(shape: Shape, window: Window, axis: int, batch: int) -> None:
    """Any grid, window, overlap, padding; along any axis; any number of windows at once."""
    from monai.inferers import sliding_window_inference

    torch.manual_seed(0)
    network, image = Blurred(), torch.randn(shape)
    with torch.inference_mode():
        ours = sweep(SlidingWindow([Fold(network)], window, batch=BatchSize(batch)), image, axis)
        theirs = sliding_window_inference(
            image[None, None],
            window.size,
            batch,
            network,
            window.overlap,
            window.blending,
            window.sigma_scale,
            window.padding,
            window.padding_value if window.padding == "constant" else 0.0,
        )
    torch.testing.assert_close(ours, theirs[0], atol=1e-5, rtol=1e-5)


def test_left_and_right_change_places_in_a_mirrored_scan() -> None:
    """A mirrored scan has the mirrored scores, its channels of left and right exchanged."""
    torch.manual_seed(0)
    network, image = Blurred(), torch.randn(9, 8, 7)
    window = Window((6, 6, 6), 0.5, "gaussian", mirror=(0,), mirrored_channels=(0, 2, 1))
    assert not window.sums_features
    with torch.inference_mode():
        scores = sweep(SlidingWindow([Fold(network)], window, batch=BatchSize(2)), image, 2)
        mirrored = sweep(
            SlidingWindow([Fold(network)], window, batch=BatchSize(2)), image.flip(0), 2
        )
        alone = sweep(SlidingWindow([Fold(network)], replace(window, mirror=())), image, 2)
    torch.testing.assert_close(mirrored, scores.flip(1)[[0, 2, 1]])
    assert (alone - scores).abs().max() > 0.01


def test_reflected_padding_equals_monais() -> None:
    from monai.inferers import sliding_window_inference

    torch.manual_seed(0)
    network, image = Blurred(), torch.randn(9, 12, 20)
    window = Window((12, 12, 12), 0.5, padding="reflect")
    with torch.inference_mode():
        ours = sweep(SlidingWindow([Fold(network)], window), image, 0)
        theirs = sliding_window_inference(
            image[None, None], (12, 12, 12), 1, network, 0.5, padding_mode="reflect"
        )
    torch.testing.assert_close(ours, theirs[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ScanError) as error:
        sweep(SlidingWindow([Fold(network)], Window((40, 12, 12), padding="reflect")), image, 0)
    assert error.value.reason is Reason.IMPLAUSIBLE


@pytest.mark.parametrize(
    ("activation", "function"), [("softmax", lambda s: s.softmax(0)), ("sigmoid", torch.sigmoid)]
)
def test_activation_follows_blending(activation: str, function: Any) -> None:
    torch.manual_seed(0)
    network, image = Blurred(), torch.randn(9, 12, 20)
    window = Window((8, 8, 8), 0.5)
    with torch.inference_mode():
        plain = sweep(SlidingWindow([Fold(network)], window), image, 2)
        active = sweep(SlidingWindow([Fold(network)], window, activation=activation), image, 2)
    torch.testing.assert_close(active, function(plain))


@pytest.mark.parametrize("overlap", [0.91, 0.9999, 1.0, -0.1, float("nan")])
@pytest.mark.parametrize("starts", ["fixed", "even"])
def test_no_card_has_windows_without_end(overlap: float, starts: Any) -> None:
    with pytest.raises(ValueError, match=r"overlap must be from 0 to 0\.9"):
        Window((96, 96, 96), overlap=overlap, starts=starts)


@pytest.mark.parametrize("overlap", [0.0, 0.9])
def test_a_scan_of_too_many_windows_is_refused_before_it_is_run(overlap: float) -> None:
    """A step of one voxel is within every limit of the overlap, and has no end either."""
    with pytest.raises(ScanError) as caught:
        window_layout(Window((1, 1, 1), overlap=overlap), (512, 512, 300), 2)

    assert caught.value.reason is Reason.TOO_LARGE
    assert "78,643,200 windows of 1 x 1 x 1 voxels; 1,000,000 are the limit" in caught.value.detail
    assert window_layout(Window((96, 96, 96), overlap=0.9), (512, 512, 300), 2).count < 1_000_000


def test_whole_grid_at_once() -> None:
    torch.manual_seed(0)
    network, image = Blurred(), torch.randn(9, 12, 20)
    with torch.inference_mode():
        scores = sweep(SlidingWindow([Fold(network)], Window(None)), image, 1)
        torch.testing.assert_close(scores, network(image[None, None])[0])


@pytest.mark.parametrize("size", [None, (4, 4, 4), (20, 20, 20)])
def test_a_network_that_works_in_place_changes_no_image(size: Shape | None) -> None:
    """Windows are copies: the network changes neither the scan nor the next window."""

    def spoils(windows: torch.Tensor) -> torch.Tensor:
        return windows.mul_(-3).add_(1)

    image = torch.randn(9, 8, 10)
    before = image.clone()

    scores = sweep(SlidingWindow([Fold(spoils)], Window(size, 0.5)), image, 2)

    assert torch.equal(image, before)
    torch.testing.assert_close(scores[0], before * -3 + 1)


class SmallDevice(nn.Module):
    """Runs out of memory with more than `most` windows."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.tried = most, []

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        self.tried.append(len(windows))
        if len(windows) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        return windows * 2


def test_fewer_windows_at_once_where_memory_runs_out() -> None:
    image, network = torch.randn(16, 16, 16), SmallDevice(most=2)
    slider = SlidingWindow([Fold(network)], Window((4, 4, 4), 0.0), batch=BatchSize(8))

    scores = sweep(slider, image, 2)

    torch.testing.assert_close(scores[0], image * 2)
    assert network.tried[:4] == [8, 4, 2, 2]
    assert max(network.tried[2:]) == 2


def test_a_device_too_small_for_one_window() -> None:
    slider = SlidingWindow([Fold(SmallDevice(most=0))], Window((4, 4, 4)), batch=BatchSize(4))

    with pytest.raises(ScanError) as error:
        sweep(slider, torch.randn(8, 8, 8), 2)

    assert error.value.reason is Reason.OUT_OF_MEMORY


@pytest.mark.parametrize("spoil", [lambda w: w[:, :, 1:], lambda w: w[0], lambda w: w[:, 0]])
def test_output_of_another_shape_is_refused(spoil: Any) -> None:
    with pytest.raises(ScanError) as error:
        sweep(SlidingWindow([Fold(spoil)], Window((4, 4, 4))), torch.randn(8, 8, 8), 2)

    assert error.value.reason is Reason.MODEL_NETWORK


def test_only_the_planes_of_a_window_hold_sums() -> None:
    """Planes leave before later windows are looked at."""
    seen: list[int] = []

    def counts(windows: torch.Tensor) -> torch.Tensor:
        seen.append(len(windows))
        return windows

    planes = SlidingWindow([Fold(counts)], Window((4, 4, 4), 0.5)).slide(
        torch.randn(1, 4, 4, 12), 2
    )
    first = next(planes)

    assert seen == [1]
    assert first.scores.shape == (2, 1, 4, 4)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_windows_of_air_are_passed_over(axis: int) -> None:
    """Windows with a voxel in or beside them have the same scores; the rest is background."""
    torch.manual_seed(0)
    network, image = Blurred(), torch.zeros(24, 20, 28)
    image[9:12, 7:9, 10:15] = torch.rand(3, 2, 5) + 1
    slider = SlidingWindow([Fold(network)], Window((6, 6, 6), 0.5))
    with torch.inference_mode():
        whole = sweep(SlidingWindow([Fold(network)], Window((6, 6, 6), 0.5)), image, axis)
        skipping = torch.cat([b.scores.clone() for b in slider.slide(image[None], axis, image > 0)])
    skipping = skipping.movedim(0, axis + 1)

    assert 0 < slider.passed.skipped < slider.passed.windows
    near = (slice(None), slice(8, 13), slice(6, 10), slice(9, 16))
    torch.testing.assert_close(skipping[near], whole[near])
    assert (skipping[:, 20:, 16:, 24:].argmax(dim=0) == 0).all()


def test_a_scan_of_nothing_but_air_is_background() -> None:
    slider = SlidingWindow([Fold(Blurred())], Window((4, 4, 4), 0.0))
    image = torch.zeros(8, 8, 8)
    with torch.inference_mode():
        scores = torch.cat([b.scores.clone() for b in slider.slide(image[None], 2, image > 0)])

    assert slider.passed.skipped == slider.passed.windows - 1
    assert (scores[4:].argmax(dim=1) == 0).all()


class Counted(nn.Module):
    """A network with borders of its own, which counts the windows that it gets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 1))
        self.windows = 0

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        self.windows += len(windows)
        scores: torch.Tensor = self.layers(windows)
        return scores


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sums", ["float32", "float16"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("axis", [0, 2])
def test_windows_of_one_value_share_their_scores(axis: int, batch: int, sums: Any) -> None:
    """Two channels with other backgrounds, and one with two of them: scores are the same bits.

    Of windows in batches the last bits differ, as between any batches.
    """
    image = torch.zeros(2, 24, 20, 28)
    image[1] = -1.5
    image[0, :, :, 20:] = 0.25
    image[:, 9:12, 7:9, 10:15] = torch.rand(2, 3, 2, 5) + 1
    window = Window((6, 6, 6), 0.5, "gaussian", mirror=(1,), sums=sums)
    results = []
    for share in (False, True):
        networks = [Counted(), Counted()]
        slider = SlidingWindow(
            [Fold(network) for network in networks],
            window,
            batch=BatchSize(batch),
            share_uniform=share,
        )
        with torch.inference_mode():
            scores = torch.cat([b.scores.clone() for b in slider.slide(image, axis)])
        results.append((scores, *(network.windows for network in networks), slider.passed))

    (whole, all_windows, _, _), (sharing, run, of_fold, passed) = results
    if batch == 1:
        assert torch.equal(whole, sharing)
    torch.testing.assert_close(whole, sharing, rtol=1e-3 if sums == "float16" else 1e-6, atol=1e-6)
    assert all_windows == 2 * passed.windows
    assert run == of_fold == 2 * (passed.windows - passed.shared)
    assert passed.shared > passed.windows / 3
    assert str(passed) == f"{passed.shared} of {passed.windows} windows shared scores"


def test_a_window_of_several_values_is_run() -> None:
    """A single other voxel, and a value that one of two channels has only."""
    image = torch.zeros(2, 8, 4, 4)
    image[1, 5, 1, 2] = 1e-30
    network = Counted()
    slider = SlidingWindow([Fold(network)], Window((4, 4, 4), 0.0), share_uniform=True)

    with torch.inference_mode():
        list(slider.slide(image, 2))

    assert (network.windows, slider.passed.shared) == (2, 0)
