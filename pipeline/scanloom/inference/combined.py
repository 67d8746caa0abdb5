"""Combines the results of several networks: parts are painted over each other, scores averaged.

A model with a previous stage, which crops the scan or adds channels, is run as a graph. Models of
equal structures and network grid are an ensemble: their scores are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.cards.card import SIGMOID_ABOVE_HALF, Argmax, ModelCard, with_small_removed
from scanloom.cards.graph import Node, needed_parts, numbers_in, stage_graph
from scanloom.cards.requested import describe_changes, requested_card
from scanloom.core import (
    ComputeOptions,
    Flag,
    Layer,
    Reason,
    ScanError,
    Segmentation,
    StepTimer,
    Volume,
)
from scanloom.core.engines import EngineChoice, EngineRecords, all_engines
from scanloom.core.segmentation import Uncertainty
from scanloom.inference.device import (
    PlacedModel,
    PrecisionChoice,
    deterministic,
    is_out_of_memory,
)
from scanloom.inference.geometry import NetworkPlan, part_grid, plan_grid, steps_after
from scanloom.inference.graph import GraphRun, made_after
from scanloom.inference.memory import Budget, MemoryPlan, estimate_network
from scanloom.inference.predictor import Task, TorchPredictor
from scanloom.inference.resampling.image import GridBox, ModelInput, SharedScan, network_image
from scanloom.inference.resampling.resample import SLAB_BYTES
from scanloom.inference.restore.decisions import Labels
from scanloom.inference.restore.restorers import MeanRestorer, Restorer, activate, restore_labels
from scanloom.inference.sliding_window import ScorePlanes
from scanloom.ops.components import clean
from scanloom.ops.uncertainty import change_maps, largest_uncertainty


def make_predictor(
    card: ModelCard,
    compute: ComputeOptions = ComputeOptions(),
    *,
    device: str = "auto",
    memory_limit: int | None = None,
    structures: Collection[str] = (),
    planned_cases: int = 1,
    records: EngineRecords | None = None,
) -> Model:
    """Return the predictor of a model; arguments and errors as `TorchPredictor`.

    `structures` are labels that are requested; by default, all. Other parts are not loaded.
    """
    load = partial(
        TorchPredictor,
        device=device,
        memory_limit=memory_limit,
        planned_cases=planned_cases,
        records=records,
    )
    return _predictor(card, compute, structures, load)


def _predictor(
    card: ModelCard,
    compute: ComputeOptions,
    structures: Collection[str],
    load: Callable[[ModelCard, ComputeOptions], TorchPredictor],
) -> Model:
    """Return the predictor of a model, whose networks are made by `load`."""
    requested = requested_card(card, compute)  # which may be another model
    needed, changes = needed_parts(requested, structures), describe_changes(card, requested)
    uncleaned = replace(compute, remove_small=0.0)  # what is cleaned is the united label map
    if needed.stage is not None:
        nodes, (first, own) = stage_graph(needed)
        predictors: tuple[Model, Model]
        if needed.stage.use == "channels":
            predictors = _predictor(first, compute, (), load), load(own, compute)
        else:
            rough = _predictor(first, uncleaned, needed.stage.labels, load)
            predictors = rough, _predictor(own, compute, (), load)
        return StagedPredictor(requested, changes, nodes, predictors)
    if needed.parts:
        parts = [load(part, uncleaned) for part in needed.parts]
        return PaintedPredictor(requested, changes, parts, compute.remove_small)
    return load(card, compute)


class StagedPredictor(PlacedModel):
    """A model with a previous stage: a graph of two nodes.

    The nodes are those of `stage_graph`, the changes by options from `describe_changes`.
    """

    def __init__(
        self,
        card: ModelCard,
        changes: str,
        nodes: tuple[Node, Node],
        predictors: tuple[Model, Model],
    ) -> None:
        self.card, self.changes, self._nodes, self.predictors = card, changes, nodes, predictors
        self.device, self.precision = predictors[1].device, predictors[1].precision

    @property
    def engine(self) -> EngineChoice:
        """The libraries that run its own networks, and the reasons."""
        return self.predictors[1].engine

    def predict(
        self,
        volume: Volume,
        clock: StepTimer | None = None,
        *,
        further_channels: Sequence[Volume] = (),
        previous: Segmentation | None = None,
        shared: SharedScan | None = None,
        uncertainty: bool = False,
    ) -> Segmentation:
        """Label a scan; arguments and errors as `TorchPredictor.predict`.

        Its uncertainty is that of the model itself, 0 outside a crop.
        """
        clock = clock or StepTimer()
        results = GraphRun(
            self._nodes,
            self.predictors,
            (volume, *further_channels),
            clock,
            uncertainty=uncertainty,
            shared=shared,
        ).run()
        first, result = results.values()
        if Flag.CROP_EMPTY in result.flags:
            clock.note("crop", "no structure that crops the scan was found")
            result = replace(result, flags=self.card.flags)
        return replace(made_after(first, result), changes=self.changes)


class PaintedPredictor(PlacedModel):
    """A model with parts, on one device; all networks are loaded once.

    Parts see the scan as it is resampled to the card's grid, once for all. Components of the united
    label map up to `remove_small` mm^3 are removed.
    """

    def __init__(
        self,
        card: ModelCard,
        changes: str,
        parts: Sequence[TorchPredictor],
        remove_small: float,
    ) -> None:
        self.card, self.changes, self.parts = card, changes, parts
        self._cleaning = with_small_removed(card.cleaning, remove_small, "before")
        self.device, self.precision = parts[0].device, parts[0].precision

    @property
    def engine(self) -> EngineChoice:
        """The libraries that run its networks, and the reasons."""
        return all_engines([part.engine for part in self.parts])

    def predict(
        self,
        volume: Volume,
        clock: StepTimer | None = None,
        *,
        further_channels: Sequence[Volume] = (),
        previous: Segmentation | None = None,
        shared: SharedScan | None = None,
        uncertainty: bool = False,
    ) -> Segmentation:
        """Label a scan; arguments and errors as `TorchPredictor.predict`.

        The uncertainty of a voxel is the largest of all parts that run.
        """
        clock, card = clock or StepTimer(), self.card
        plan = plan_grid(volume.grid, card.grid)
        resampled = self._resample((volume, *further_channels), plan, clock)
        grid, dtype = resampled[0].grid, np.uint8 if card.label_bytes == 1 else np.uint16
        labels, uncertain = np.zeros(grid.shape, dtype, order="F"), list[Uncertainty | None]()
        flags, engines = dict.fromkeys(card.flags), list[EngineChoice]()
        for part in self.parts:
            result = part.predict(
                resampled[0],
                clock,
                further_channels=resampled[1:],
                uncertainty=uncertainty,
            )
            with clock.step("restore"):
                paint_over(labels, result, numbers_in(card, part.card))
                uncertain = [largest_uncertainty([*uncertain, result.uncertainty])]
            flags |= dict.fromkeys(result.flags)
            engines.append(result.engine or part.engine)  # of this scan: another may be next
        with clock.step("clean"):
            labels = clean(labels, self._cleaning, grid.voxel_volume, "before")
        with clock.step("restore"):
            labels = restore_labels(labels, plan)
            restored = change_maps(uncertain[0], lambda values: restore_labels(values, plan))
        with clock.step("clean"):
            labels = clean(labels, card.cleaning, volume.grid.voxel_volume, "after")
        return replace(
            result,
            model=self.name,
            changes=self.changes,
            layers=(Layer(labels, card.structures),),
            grid=volume.grid,
            version=card.version,
            flags=tuple(flags),
            uncertainty=restored,
            engine=all_engines(engines),
        )

    def _resample(
        self, volumes: Sequence[Volume], plan: NetworkPlan, clock: StepTimer
    ) -> list[Volume]:
        """Return the scan as its parts see it."""
        card = replace(self.card, after=steps_after(plan, self.card))
        grid, scan = part_grid(plan, card), ModelInput(tuple(volumes))
        with (
            clock.device_turn(),
            clock.step("resample"),
            deterministic(),
            torch.inference_mode(),
        ):
            for device in dict.fromkeys((self.device.device, torch.device("cpu"))):
                try:
                    image = network_image(scan, plan, card, (device, SLAB_BYTES)).image.cpu()
                except (RuntimeError, MemoryError) as exc:
                    if device.type == "cpu" or not is_out_of_memory(exc):
                        raise
                    clock.note("ladder", "resampling on the CPU")
                    continue
                break
        return [
            Volume(channel.numpy(), grid, volume.unit, volume.modality)
            for channel, volume in zip(image, volumes, strict=True)
        ]


Model = TorchPredictor | StagedPredictor | PaintedPredictor
"""A predictor of one model."""


def paint_over(labels: Labels, result: Segmentation, table: NDArray[np.uint16]) -> None:
    """Write a part's structures over a label map of the whole model, in place.

    `table` has the number in the whole model for each number of the part, 0 for none.
    """
    table = table.astype(labels.dtype)
    for layer in result.layers:
        for plane in range(labels.shape[2]):  # no further array of the scan's size
            mapped = table[layer.labels[:, :, plane]]
            np.copyto(labels[:, :, plane], mapped, where=mapped != 0)


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
            return super().restorer(
                plan, device
            )  # linear, or decided before: means may be restored
        rounded = self.members[0].card.window.sums == "float16"
        decision, classes = self.card.decision, self.card.n_outputs
        return MeanRestorer(plan, decision, classes, self._activation, rounded=rounded)

    def scores(
        self,
        task: Task,
        plan: NetworkPlan,
        memory_plan: MemoryPlan,
        boxes: list[GridBox] | None = None,
    ) -> Iterator[ScorePlanes]:
        """Return an iterator over the mean scores of all models, on the whole network grid."""
        streams = [member.scores(task, plan, memory_plan) for member in self.members]
        if self._activation is not None:
            activation = self._activation
            streams = [probabilities(s, activation, self.card.n_outputs) for s in streams]
        return mean_of_planes(streams, self.card.n_outputs)


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
        parts = [slice(first - block.first, stop - block.first) for block in present]
        members, logits = [], []
        for block, part in zip(present, parts, strict=True):
            if block.scores.shape[1] < channels:
                detail = f"a network has {block.scores.shape[1]} output channels, not {channels}"
                raise ScanError(Reason.MODEL_NETWORK, detail)
            members.append(block.scores[part, :channels])
            logits += [each[part] for each in block.logits]
        total = members[0].clone()
        for scores in members[1:]:
            total.add_(scores)
        known = [b.known[p] for b, p in zip(present, parts, strict=True) if b.known is not None]
        together = torch.cat(known, dim=1).all(dim=1, keepdim=True) if known else None
        yield ScorePlanes(first, total.div_(len(present)), tuple(members), together, tuple(logits))
        for n, end in enumerate(ends):
            if end == stop:
                blocks[n] = next(streams[n], None)
        first = stop
