"""Decisions from scores to labels, as all backends need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.cards.card import Argmax, Decision, Paint, Threshold, label_bytes
from scanloom.ops.label_maps import keep_numbers

Labels = NDArray[Any]
Clean = Callable[[Labels], Labels]
"""Function that cleans a label map on the network grid."""


def label_type(decision: Decision, classes: int) -> type[np.uint8] | type[np.uint16]:
    """Return the smallest type for the labels of `classes` channels."""
    return np.uint8 if label_bytes(decision, classes) == 1 else np.uint16


def map_count(decision: Decision, classes: int) -> int:
    """Return the number of label maps: with a threshold one per channel, else one."""
    return classes if isinstance(decision, Threshold) else 1


def lowest_score(decision: Threshold | Paint) -> float:
    """Return the smallest float32 score with which a voxel belongs to a structure."""
    # A strict comparison is one with the next larger number: kernels know `>=` only
    if isinstance(decision, Paint) and not decision.inclusive:
        return float(np.nextafter(np.float32(decision.value), np.float32(np.inf)))
    return decision.value


def painted(decision: Threshold | Paint, classes: int) -> Iterator[tuple[int, int, int]]:
    """Yield (channel, label, label map) in the order in which channels are labelled."""
    if isinstance(decision, Threshold):
        yield from ((channel, channel + 1, channel) for channel in range(classes))
    else:
        yield from ((channel, number, 0) for channel, number in decision.regions)


def decide_on_grid(scores: torch.Tensor, decision: Decision) -> torch.Tensor:
    """Return the labels (maps, N, B, C) of scores (N, classes, B, C), on the scores' own grid."""
    classes = scores.shape[1]
    if isinstance(decision, Argmax):
        dtype = torch.uint8 if classes <= 255 else torch.int32
        return torch.argmax(scores, dim=1)[None].to(dtype)
    dtype = torch.uint8 if label_bytes(decision, classes) == 1 else torch.int32
    shape = (map_count(decision, classes), scores.shape[0], *scores.shape[2:])
    labels, lowest = torch.zeros(shape, dtype=dtype, device=scores.device), lowest_score(decision)
    for channel, number, which in painted(decision, classes):
        labels[which][scores[:, channel].to(torch.float32) >= lowest] = number
    return labels


def only_numbers(labels: NDArray[Any], numbers: set[int], largest: int) -> NDArray[Any]:
    """Return the label map without the channels that have no structure in the card.

    `largest` is the largest number that the label map may have.
    """
    # Numbers are consecutive in nearly all cards: then no voxel is looked up
    highest = max(numbers)
    if numbers == set(range(1, highest + 1)) and (
        largest <= highest or int(labels.max()) <= highest
    ):
        return labels
    return keep_numbers(labels, numbers)
