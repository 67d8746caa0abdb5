"""Weighted sums are those of torch's own arithmetic, in each type, bit for bit."""

from __future__ import annotations

import pytest
import torch

from scanloom.inference import sliding_window as module
from scanloom.inference.sliding_window import accumulate


@pytest.mark.parametrize("scores_type", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cached", [1, 200, 1 << 18])
def test_half_sums_are_rounded_once_as_by_nnunet(
    scores_type: torch.dtype, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nnU-Net writes `logits[part] += prediction * gaussian` with half logits and gaussian."""
    monkeypatch.setattr(module, "_CACHED_VALUES", cached)
    torch.manual_seed(0)
    whole = torch.randn(5, 20, 13, 11).half()
    box = (slice(None), slice(3, 17), slice(2, 11), slice(1, 9))
    weight = torch.rand(14, 9, 8).half()
    scores = (50 * torch.randn(5, 14, 9, 8)).to(scores_type)
    expected, counts = whole.clone(), torch.zeros(1, 14, 9, 8).half()
    prediction = scores.clone()
    prediction *= weight
    expected[box] += prediction

    accumulate(whole[box], counts, scores, weight)

    assert torch.equal(whole, expected)
    assert torch.equal(counts[0], weight)


def test_a_sum_of_half_scores_may_overflow_as_nnunets() -> None:
    sums, counts = torch.full((1, 2, 2, 2), 60_000.0).half(), torch.zeros(1, 2, 2, 2).half()
    accumulate(sums, counts, torch.full((1, 2, 2, 2), 60_000.0), torch.ones(2, 2, 2).half())
    assert bool(sums.isinf().all())
