"""Averages the scores of several models, whose structures and network grid are equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch

from scanloom.cards.card import SIGMOID_ABOVE_HALF, Argmax, ModelCard
from scanloom.core import Reason, ScanError, Volume
from scanloom.core.engines import EngineChoice, all_engines
from scanloom.inference.device import PrecisionChoice
from scanloom.inference.geometry import NetworkPlan
from scanloom.inference.memory import Budget, MemoryPlan, estimate_network
from scanloom.inference.predictor import Task, TorchPredictor, on_whole_grid
from scanloom.inference.restore.restorers import MeanRestorer, Restorer, activate
from scanloom.inference.sliding_window import ScorePlanes


class Ensemble(TorchPredictor):
    """Models on one device whose probabilities are averaged: on the scan's grid if restored there.

    Folds of one model are another matter: their scores are averaged as they are, as nnU-Net does.

    Networks, windows and intensity steps after resampling may differ. The mean is decided and
    brought back to the scan's grid in the way that the models have in common.

    `scanloom.cards.graph.check_relations` tells whether models fit.
    """

    def __init__(self, name: str, members: Sequence[TorchPredictor]) -> None:
        first, self.members = members[0], members
        card, self._activation = first.card, activation_of_logits(first.card)
        if self._activation is not None:  # decided by float32 probabilities, not by logits
            decision = card.decision
            if not isinstance(decision, Argmax):
                decision = replace(decision, value=0.5)
            window = replace(card.window, sums="float32")
            card = replace(card, activation=self._activation, decision=decision, window=window)
        self.card = replace(
            card,
            name=name,
            version=", ".join(f"{each.card.name} {each.card.version}" for each in members),
            flags=tuple(dict.fromkeys(flag for each in members for flag in each.card.flags)),
            reference_directions=tuple(
                direction for each in members for direction in each.card.reference_directions
            ),
        )
        self.compute, self.device = first.compute, first.device
        self.memory_limit, self.skip_air = first.memory_limit, first.skip_air
        self.precision, self.changes = first.precision, first.changes
        if any(member.precision.dtype is not first.precision.dtype for member in members):
            self.precision = PrecisionChoice(torch.float32, "the models have different precisions")
        self.overflows = any(member.overflows for member in members)

    @property
    def engine(self) -> EngineChoice:
        """The libraries that run its networks, and the reasons."""
        return all_engines([member.engine for member in self.members])

    def free_engines(self) -> None:
        """Free what the engines of all members keep for scans of other shapes."""
        for member in self.members:
            member.free_engines()

    def departs(self, precision: str) -> bool:
        """Return whether a member was run otherwise than OUT's record says, or requested.

        The precision of the ensemble follows from that of its members.
        """
        return any(member.departs(member.precision_name) for member in self.members)

    @property
    def n_members(self) -> int:
        """Number of models, each with the mean of its folds."""
        return len(self.members)

    def memory_plans(
        self,
        volume: Volume,
        plan: NetworkPlan,
        dtype: torch.dtype | None = None,
        reserved: int = 0,
    ) -> tuple[list[MemoryPlan], list[str]]:
        """Return the memory plans as `TorchPredictor.memory_plans`, with room for all models."""
        dtype = dtype or self.precision.dtype
        for member in self.members[1:]:
            device = self.device.device
            need = estimate_network(member.card, plan, device, dtype, Budget())
            reserved += need.host_peak if device.type == "cpu" else need.device_peak
        return super().memory_plans(volume, plan, dtype, reserved)

    def restorer(self, plan: NetworkPlan, device: torch.device) -> Restorer:
        """Return the restorer of the mean of probabilities."""
        if self._activation is None or plan.mode == "area" or self.card.restore != "scores":
            return super().restorer(plan, device)  # linear, or decided before: means are restored
        rounded = self.members[0].card.window.sums == "float16"
        decision, classes = self.card.decision, self.card.n_outputs
        return MeanRestorer(plan, decision, classes, self._activation, rounded=rounded)

    def scores(self, task: Task, memory_plan: MemoryPlan) -> tuple[Iterator[ScorePlanes], None]:
        """Return an iterator over the mean scores of all models, on the whole network grid."""
        of_members = [member.scores(task, memory_plan) for member in self.members]
        streams = [on_whole_grid(planes, box, task.plan) for planes, box in of_members]
        if self._activation is not None:
            activation = self._activation
            streams = [probabilities(s, activation, self.card.n_outputs) for s in streams]
        return mean_of_planes(streams, self.card.n_outputs), None


def activation_of_logits(card: ModelCard) -> Literal["softmax", "sigmoid"] | None:
    """Return the function from a model's scores to probabilities; None if they are such.

    A model may decide by the largest of its logits, or by their sign, without an activation: its
    own labels are the same, but the mean of several models' logits is that of no probabilities.
    """
    if card.activation is not None:
        return None
    if isinstance(card.decision, Argmax):
        return "softmax"
    return "sigmoid" if card.decision.value in (0.0, SIGMOID_ABOVE_HALF) else None


def probabilities(
    planes: Iterator[ScorePlanes], activation: Literal["softmax", "sigmoid"], channels: int
) -> Iterator[ScorePlanes]:
    """Yield logits as float32 probabilities of the first classes."""
    for block in planes:
        logits = block.scores[:, :channels]
        scores = activate(logits.to(torch.float32), activation)
        yield replace(block, scores=scores, members=(), logits=(logits,))


def mean_of_planes(
    streams: Sequence[Iterator[ScorePlanes]], channels: int
) -> Iterator[ScorePlanes]:
    """Yield the mean of the scores of several models, whose blocks of planes may differ.

    Parameters
    ----------
    streams : sequence of iterator of ScorePlanes
        Each yields the planes of the whole network grid, ascending.
    channels : int
        Number of classes; further channels are left out.

    Raises
    ------
    ScanError
        MODEL_NETWORK if a model has fewer channels.
    """
    blocks = [next(stream, None) for stream in streams]
    first = 0
    while present := [block for block in blocks if block is not None]:
        ends = [block.first + len(block.scores) for block in present]
        stop = min(ends)
        overlaps = [slice(first - block.first, stop - block.first) for block in present]
        members, logits = [], []
        for block, overlap in zip(present, overlaps, strict=True):
            if block.scores.shape[1] < channels:
                detail = f"a network has {block.scores.shape[1]} output channels, not {channels}"
                raise ScanError(Reason.MODEL_NETWORK, detail)
            members.append(block.scores[overlap, :channels])
            logits += [each[overlap] for each in block.logits]
        total = members[0].clone()
        for scores in members[1:]:
            total.add_(scores)
        known = [b.known[p] for b, p in zip(present, overlaps, strict=True) if b.known is not None]
        together = torch.cat(known, dim=1).all(dim=1, keepdim=True) if known else None
        yield ScorePlanes(first, total.div_(len(present)), tuple(members), together, tuple(logits))
        for n, end in enumerate(ends):
            if end == stop:
                blocks[n] = next(streams[n], None)
        first = stop
