"""The restoring kernels on a real device, compared with float64 matrices and plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from scanloom.cards.card import Argmax
from scanloom.inference.resampling.resample import LinearWeights
from scanloom.inference.restore import cuda
from scanloom.inference.restore.restorers import decide_torch
from support import restore_cases
from support.restore_cases import smooth, spread

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]

CASES = restore_cases.cases()
SHAPE = (90, 256, 256)


@pytest.fixture(scope="module")
def device() -> torch.device:
    current = torch.device("cuda", torch.cuda.current_device())
    choice = cuda.available(current)
    if choice.why == "Triton is not installed":
        pytest.skip(choice.why)
    assert choice.usable, choice.why
    return current


def labels_of(scores: torch.Tensor) -> NDArray[np.uint8]:
    sizes = (scores.shape[0], *scores.shape[2:])
    s, j, i = (spread(size, count) for size, count in zip(sizes, SHAPE, strict=True))
    out = np.full(SHAPE, restore_cases.POISON, np.uint8)
    cuda.label(scores, (s, j, i), Argmax(), [out])
    return out


@pytest.mark.parametrize("name", CASES)
def test_labels_are_those_of_scores_brought_back(device: torch.device, name: str) -> None:
    labels = restore_cases.labelled(CASES[name], device)

    assert restore_cases.wrong(CASES[name], labels) == 0
    if name == "ties":
        assert (labels[0] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("classes", [25, 118])
def test_labels_equal_those_of_plain_torch(
    device: torch.device, classes: int, dtype: torch.dtype
) -> None:
    """At a size that fills a device; rounding may decide one voxel in ten thousand."""
    scores = smooth(60, classes, 119, 119, dtype)
    cpu = torch.device("cpu")
    sizes = (scores.shape[0], *scores.shape[2:])
    taps = [LinearWeights(spread(n, m), n, cpu) for n, m in zip(sizes, SHAPE, strict=True)]

    ours = labels_of(scores.to(device))

    (theirs,) = decide_torch(scores, taps, Argmax())
    equal = float(np.mean(ours == theirs.numpy()))
    print(f"{classes} classes, {dtype}: {equal:.5%} equal")
    assert equal >= 0.9999


def test_equal_scores_give_equal_bytes(device: torch.device) -> None:
    scores = smooth(60, 25, 119, 119, torch.float16).to(device)

    assert labels_of(scores).tobytes() == labels_of(scores).tobytes()


def test_scores_of_all_classes_are_never_on_the_scans_voxels(device: torch.device) -> None:
    """The device holds in addition only labels and a word per block: less than two label maps."""
    scores = smooth(60, 25, 119, 119, torch.float16).to(device)
    labels_of(scores)  # compiled now
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)

    labels_of(scores)

    assert torch.cuda.max_memory_allocated(device) - before < 2 * np.prod(SHAPE)
