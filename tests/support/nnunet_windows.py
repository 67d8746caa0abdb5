"""Sliding windows by nnU-Net's definition, in plain loops: a reference for small images."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import ndimage

Network = Callable[[torch.Tensor], torch.Tensor]


def starts(length: int, size: int, step: float) -> list[int]:
    """Return evenly spaced, rounded starts, at most `step` window sizes apart."""
    count = math.ceil((length - size) / (size * step)) + 1
    return [int(np.round((length - size) / max(count - 1, 1) * n)) for n in range(count)]


def gaussian(size: Sequence[int]) -> torch.Tensor:
    """Return a filtered point with a maximum of 10, in half; zeros become the smallest other."""
    point = np.zeros(tuple(size))
    point[tuple(n // 2 for n in size)] = 1
    weights = ndimage.gaussian_filter(point, [n / 8 for n in size], mode="constant")
    half = torch.from_numpy(weights / (weights.max() / 10)).half()
    half[half == 0] = half[half > 0].min()
    return half


def mirrored(network: Network, window: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """Return the mean over all flips of a (1, channels, ...) window."""
    total = network(window.clone())
    count = 1
    for number in range(1, len(axes) + 1):
        for flipped in itertools.combinations([axis + 2 for axis in axes], number):
            total = total + torch.flip(network(torch.flip(window, flipped)), flipped)
            count += 1
    return total / count


def scores_of(
    network: Network,
    image: torch.Tensor,
    size: Sequence[int],
    step: float = 0.5,
    mirror: Sequence[int] = (),
) -> torch.Tensor:
    """Return the scores (C, X, Y, Z) in half of an image (channels, X, Y, Z).

    With two sizes, windows are slices across the first axis, and so are flips counted.
    """
    missing = [0] * (4 - len(size) - 1)
    missing += [max(m - n, 0) for n, m in zip(image.shape[-len(size) :], size, strict=True)]
    widths = [(0, 0), *((n // 2, n - n // 2) for n in missing)]
    padded = torch.from_numpy(np.pad(image.numpy(), widths))
    weight = gaussian(size)
    corners = [starts(n, m, step) for n, m in zip(padded.shape[-len(size) :], size, strict=True)]
    slices = [[(i, i + 1) for i in range(padded.shape[1])]] if len(size) == 2 else []
    slices += [[(s, s + m) for s in line] for line, m in zip(corners, size, strict=True)]
    sums = counts = None
    for box in itertools.product(*slices):
        at = (slice(None), *(slice(*ends) for ends in box))
        window = padded[at].clone() if len(size) == 3 else padded[at][:, 0].clone()
        scores = mirrored(network, window[None], mirror)[0] * weight
        if sums is None or counts is None:
            sums = torch.zeros((len(scores), *padded.shape[1:]), dtype=torch.float16)
            counts = torch.zeros_like(sums[:1])
        scores = scores if len(size) == 3 else scores[:, None]
        # the sum of a half and a float32 is rounded once
        sums[at] = (sums[at].float() + scores.float()).half()
        counts[at] = (counts[at].float() + weight.float()).half()
    assert sums is not None
    assert counts is not None
    mean = (sums.float() / counts.float()).half()
    inside = (slice(n // 2, n // 2 + m) for n, m in zip(missing, image.shape[1:], strict=True))
    return mean[(slice(None), *inside)]


def mean_of(folds: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of scores in half, rounded after each step."""
    total = folds[0]
    for scores in folds[1:]:
        total = (total.float() + scores.float()).half()
    return (total.float() / len(folds)).half() if len(folds) > 1 else total
