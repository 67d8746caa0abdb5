"""Maps of uncertainty on the source grid, from the scores that decide the labels.

They are computed where labels are decided: on the source grid from interpolated scores, slab by
slab, or on the network grid and then mapped back by nearest neighbour. No array of classes x source
voxels is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.cards.card import Argmax, ModelCard
from scanloom.core.segmentation import UNCERTAINTY_STEPS, Uncertainty
from scanloom.inference.geometry import NetworkPlan
from scanloom.inference.restore.area import AreaResampler
from scanloom.inference.restore.cpu import Coordinates
from scanloom.inference.restore.decisions import Labels, decide_on_grid, label_type, map_count
from scanloom.inference.restore.restorers import (
    choose_backend,
    clear_uncovered,
    restore_labels,
)
from scanloom.inference.restore.slices import Maps, SourceSlices, interpolate, slabs_of_slices
from scanloom.inference.sliding_window import ScorePlanes

STACK_BYTES = 32 * 1024**2
"""Bytes of planes of all networks that are restored at once, at least one plane."""
MEMBER_LABEL_BYTES = 16 * 1024**2
"""Bytes of one network's labels of some source slices, at least one slice."""


class UncertaintyRestorer(Protocol):
    """Takes planes of scores, as restorers of labels do, and returns maps of uncertainty."""

    def add(self, planes: ScorePlanes) -> None:
        """Take the next planes."""

    def finish(self) -> Uncertainty:
        """Return the maps on the source grid."""


def uncertainty_restorer(plan: NetworkPlan, card: ModelCard, members: int) -> UncertaintyRestorer:
    """Return the restorer of the uncertainty of a model.

    Parameters
    ----------
    plan : NetworkPlan
        Source grid and network grid.
    card : ModelCard
        The model.
    members : int
        Number of networks whose scores are averaged.
    """
    if plan.mode == "area":
        return _FromArea(plan, card, members)
    return (_FromScores if card.restore == "scores" else _FromLabels)(plan, card, members)


def uncertainty_bytes(voxels: int, planes: tuple[int, int], members: int) -> tuple[int, int]:
    """Return the bytes of the maps of a scan, and of the work on a device.

    Parameters
    ----------
    voxels : int
        Voxels of the scan.
    planes : (int, int)
        Bytes of the scores of one plane of the network grid, and number of planes.
    members : int
        Number of networks whose scores are averaged.
    """
    maps = voxels * _n_maps(members)
    plane, count = planes
    arrays = _n_stacked(members) + 1
    stack = min(max(STACK_BYTES, plane * arrays), plane * arrays * count)
    return maps, 2 * stack + (members + 1) * min(MEMBER_LABEL_BYTES, 2 * voxels)


def entropy(scores: Iterable[torch.Tensor], card: ModelCard) -> torch.Tensor:
    """Return the entropy of class probabilities, 0 to 1; classes are visited one by one.

    Parameters
    ----------
    scores : iterable of float tensors
        Scores of each class, after the card's activation. Without activation they are taken as
        logits.
    card : ModelCard
        With argmax, the entropy over all classes, divided by its maximum, the logarithm of their
        number. Otherwise, of channels that overlap, the largest binary entropy in bits.
    """
    if not isinstance(card.decision, Argmax) or card.activation == "sigmoid":
        return _largest_binary(scores, card.activation)
    parts = _of_logits(scores) if card.activation is None else _of_probabilities(scores)
    return (parts / math.log(max(card.n_outputs, 2))).clamp_(0.0, 1.0)


def _largest_binary(scores: Iterable[torch.Tensor], activation: str | None) -> torch.Tensor:
    largest: torch.Tensor | None = None
    for values in scores:
        p = values.to(torch.float32).sigmoid() if activation is None else values.to(torch.float32)
        p = p.clamp(0.0, 1.0)
        bits = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)) / math.log(2)
        largest = bits if largest is None else torch.maximum(largest, bits)
    return _not_none(largest)


def _of_probabilities(scores: Iterable[torch.Tensor]) -> torch.Tensor:
    total: torch.Tensor | None = None
    for values in scores:
        p = values.to(torch.float32).clamp(min=0.0)
        part = -torch.xlogy(p, p)
        total = part if total is None else total.add_(part)
    return _not_none(total)


def _of_logits(scores: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the entropy of the softmax: log of the sum of exp, minus the mean score."""
    highest = sums = weighted = None
    for values in scores:
        x = values.to(torch.float32)
        if highest is None or sums is None or weighted is None:
            highest, sums, weighted = x.clone(), torch.ones_like(x), x.clone()
            continue
        above = torch.maximum(highest, x)
        old, new = (highest - above).exp_(), (x - above).exp_()
        sums, weighted = sums.mul_(old).add_(new), weighted.mul_(old).add_(new * x)
        highest = above
    sums = _not_none(sums)
    return sums.log() + _not_none(highest) - _not_none(weighted) / sums


def _not_none(values: torch.Tensor | None) -> torch.Tensor:
    if values is None:
        raise ValueError("a model has at least one class")
    return values


def _n_maps(members: int) -> int:
    return 2 if members > 1 else 1


def _n_stacked(members: int) -> int:
    """Return the number of score arrays in a stack: the mean, and each network's own."""
    return 1 + members if members > 1 else 1


def _to_steps(values: torch.Tensor) -> NDArray[np.uint8]:
    return (values * UNCERTAINTY_STEPS).round_().to(torch.uint8).cpu().numpy()


class _Base:
    """Properties of a model for restorers of uncertainty, and the arrangement of its scores."""

    def __init__(self, plan: NetworkPlan, card: ModelCard, members: int) -> None:
        self._plan, self._card, self._members = plan, card, members
        self._classes, self._rounded = card.n_outputs, card.window.sums == "float16"

    def _stacks(self, planes: ScorePlanes) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first, stack) of few planes at once: mean scores, each network's own, `known`.

        A stack has shape (N, arrays x classes + 1, B, D).
        """
        mean = planes.scores[:, : self._classes]
        own = [each[:, : self._classes] for each in planes.members]
        arrays = [mean, *(own or [mean] * (_n_stacked(self._members) - 1))]
        known = planes.known
        known = torch.ones_like(mean[:, :1]) if known is None else known.to(mean.dtype)
        step = max(1, STACK_BYTES // max(1, len(arrays) * mean[0].nbytes))
        for start in range(0, len(mean), step):
            part = slice(start, start + step)
            stack = torch.cat([*(array[part] for array in arrays), known[part]], dim=1)
            yield planes.first + start, stack

    def _scores(self, stack: torch.Tensor, member: int) -> torch.Tensor:
        """Return the scores of one network of a stack; the mean is number 0."""
        return stack[:, member * self._classes : (member + 1) * self._classes]

    def _on_grid(self, stack: torch.Tensor) -> list[NDArray[np.uint8]]:
        """Return the maps (N, B, D) of a stack, on its own grid."""
        found = entropy(self._scores(stack, 0).unbind(1), self._card)
        maps = [_to_steps(found * stack[:, -1])]
        if self._members > 1:
            decided = decide_on_grid(self._scores(stack, 0), self._card.decision)
            differ = torch.zeros(decided.shape[1:], device=stack.device)
            for member in range(1, self._members + 1):
                own = decide_on_grid(self._scores(stack, member), self._card.decision)
                differ += (own != decided).any(dim=0)
            maps.append(_to_steps(differ / self._members))
        return maps


class _FromScores(_Base):
    """Computes the maps from scores that are interpolated on the source grid."""

    def __init__(self, plan: NetworkPlan, card: ModelCard, members: int) -> None:
        super().__init__(plan, card, members)
        count = _n_maps(members)
        self._maps = [np.zeros(plan.source.shape, np.uint8, order="F") for _ in range(count)]
        self._slices = SourceSlices(plan, self._maps, self._restore)

    def add(self, planes: ScorePlanes) -> None:
        for first, stack in self._stacks(planes):
            self._slices.add(stack, first)

    def finish(self) -> Uncertainty:
        clear_uncovered(self._maps, self._plan)
        return Uncertainty(*self._maps)

    def _restore(self, stack: torch.Tensor, at: Coordinates, out: Maps) -> None:
        for part, weights in slabs_of_slices(stack, at):
            scores = (interpolate(stack[:, n], weights) for n in range(self._classes))
            found = entropy(scores, self._card)
            out[0][part] = _to_steps(found * interpolate(stack[:, -1], weights).clamp_(0.0, 1.0))
        if self._members > 1:
            self._disagreement(stack, at, out[1])

    def _disagreement(self, stack: torch.Tensor, at: Coordinates, out: NDArray[Any]) -> None:
        """Write the share of networks whose own labels differ from the result."""
        decision = self._card.decision
        dtype, count = label_type(decision, self._classes), map_count(decision, self._classes)
        slice_bytes = max(1, count * np.dtype(dtype).itemsize * math.prod(out.shape[1:]))
        step = max(1, MEMBER_LABEL_BYTES // slice_bytes)
        for start in range(0, len(out), step):
            part = slice(start, start + step)
            lines = [axis[part] if axis.ndim == 2 and len(axis) > 1 else axis for axis in at[1:]]
            some = (at[0][part], lines[0], lines[1])
            shape = out[part].shape
            decided = self._labels(stack, 0, some, shape)
            differ = np.zeros(shape, np.float32)
            for member in range(1, self._members + 1):
                own = self._labels(stack, member, some, shape)
                differ += np.any([a != b for a, b in zip(own, decided, strict=True)], axis=0)
            out[part] = np.rint(differ * (UNCERTAINTY_STEPS / self._members))

    def _labels(
        self, stack: torch.Tensor, member: int, at: Coordinates, shape: tuple[int, ...]
    ) -> list[Labels]:
        """Return the labels of one network at source voxels."""
        decision, scores = self._card.decision, self._scores(stack, member)
        backend = choose_backend(
            decision, self._classes, scores.device, scores.dtype, rounded=self._rounded
        )
        dtype = label_type(decision, self._classes)
        labels = [np.zeros(shape, dtype) for _ in range(map_count(decision, self._classes))]
        backend.label(scores, at, decision, labels, rounded=self._rounded)
        return labels


class _FromLabels(_Base):
    """Computes the maps on the network grid and maps them back by nearest neighbour."""

    def __init__(self, plan: NetworkPlan, card: ModelCard, members: int) -> None:
        super().__init__(plan, card, members)
        self._planes: list[list[NDArray[np.uint8]]] = [[] for _ in range(_n_maps(members))]

    def add(self, planes: ScorePlanes) -> None:
        for _, stack in self._stacks(planes):
            for known, found in zip(self._planes, self._on_grid(stack), strict=True):
                known.append(found)

    def finish(self) -> Uncertainty:
        axis = self._plan.network_axis(self._plan.lead)
        whole = (np.moveaxis(np.concatenate(planes), 0, axis) for planes in self._planes)
        host = torch.device("cpu")
        return Uncertainty(*(restore_labels(values.copy(), self._plan, host) for values in whole))


class _FromArea(_Base):
    """Computes the maps on the source grid from scores that are resampled by area."""

    def __init__(self, plan: NetworkPlan, card: ModelCard, members: int) -> None:
        super().__init__(plan, card, members)
        self._resampler = AreaResampler(plan)

    def add(self, planes: ScorePlanes) -> None:
        for _, stack in self._stacks(planes):
            self._resampler.add(stack)

    def finish(self) -> Uncertainty:
        count = _n_maps(self._members)
        maps = [np.zeros(self._plan.source.shape, np.uint8, order="F") for _ in range(count)]
        for stack, views in self._resampler.slabs(maps):
            for view, found in zip(views, self._on_grid(stack), strict=True):
                view[:] = found
        return Uncertainty(*maps)
