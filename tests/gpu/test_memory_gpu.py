"""On a device that is too small: fewer windows at once, the same labels; else a named reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from scanloom.cards.card import Window
from scanloom.core import Reason, ScanError, Volume
from scanloom.inference.predictor import TorchPredictor
from scanloom.inference.sliding_window import BatchSize, Fold, SlidingWindow
from support import model_cards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]


@pytest.fixture(autouse=True)
def whole_device_afterwards() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def limit(bytes_: float) -> None:
    """Let torch have so much of the device."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, bytes_ / total))


def scores_and_peak(slider: SlidingWindow, image: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return all scores on the host, and the most memory that torch held meanwhile."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        scores = torch.cat([block.scores.cpu() for block in slider.slide(image[None], 2)])
    return scores, torch.cuda.max_memory_reserved()


def slider(windows: int) -> SlidingWindow:
    """Return a network whose windows take about 100 MB each."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv3d(1, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(32, 3, 1)
    ).cuda()
    return SlidingWindow([Fold(network)], Window((96, 96, 96), 0.25), batch=BatchSize(windows))


def test_fewer_windows_at_once_give_the_same_scores() -> None:
    image = torch.randn(150, 150, 100, device="cuda")
    expected, peak_of_one = scores_and_peak(slider(1), image)
    _, all_at_once = scores_and_peak(slider(8), image)
    assert all_at_once > 2 * peak_of_one, "the limit would prove nothing"
    limited = slider(8)

    limit((peak_of_one + all_at_once) / 2)
    scores, _ = scores_and_peak(limited, image)

    assert limited.batch.count < 8
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=0)


def test_a_device_too_small_for_one_window_is_named(tmp_path: Path) -> None:
    card = model_cards.card(model_cards.small_weights(tmp_path), window=Window((96, 96, 96)))
    grid = model_cards.grid((96, 96, 96), (2.0, 2.0, 2.0))
    volume = Volume(np.zeros(grid.shape, np.int16, order="F"), grid, "HU", "CT")
    predictor = TorchPredictor(card, device="cuda")

    limit(torch.cuda.memory_reserved() + 8 * 2**20)
    with pytest.raises(ScanError) as caught:
        predictor.predict(volume)

    assert caught.value.reason is Reason.OUT_OF_MEMORY
    limit(np.inf)
    assert predictor.predict(volume).layers  # the next scan is none the worse
