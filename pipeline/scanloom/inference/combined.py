"""Models of several networks: parts are painted over each other, a stage before is run as a graph.

A previous stage crops the scan, or adds channels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.cards.card import ModelCard, with_small_removed
from scanloom.cards.graph import Node, needed_parts, numbers_in, stage_graph
from scanloom.cards.requested import describe_changes, requested_card
from scanloom.core import (
    ComputeOptions,
    Flag,
    Layer,
    Segmentation,
    StepTimer,
    Volume,
)
from scanloom.core.engines import EngineChoice, EngineRecords, all_engines
from scanloom.core.segmentation import Uncertainty
from scanloom.inference.device import PlacedModel, is_out_of_memory, own_settings
from scanloom.inference.geometry import NetworkPlan, part_grid, plan_grid, steps_after
from scanloom.inference.graph import GraphRun, made_after
from scanloom.inference.predictor import TorchPredictor, with_direction_flag
from scanloom.inference.resampling.image import ModelInput, SharedScan, network_image
from scanloom.inference.resampling.resample import SLAB_BYTES
from scanloom.inference.restore.decisions import Labels
from scanloom.inference.restore.restorers import restore_labels
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
) -> ModelPredictor:
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
) -> ModelPredictor:
    """Return the predictor of a model, whose networks are made by `load`."""
    requested = requested_card(card, compute)  # which may be another model
    needed, changes = needed_parts(requested, structures), describe_changes(card, requested)
    uncleaned = replace(compute, remove_small=0.0)  # what is cleaned is the united label map
    if needed.stage is not None:
        nodes, (first, own) = stage_graph(needed)
        predictors: tuple[ModelPredictor, ModelPredictor]
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
        predictors: tuple[ModelPredictor, ModelPredictor],
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

    @own_settings()
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
            whole = replace(
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
            return with_direction_flag(whole, card)

    def _resample(
        self, volumes: Sequence[Volume], plan: NetworkPlan, clock: StepTimer
    ) -> list[Volume]:
        """Return the scan as its parts see it."""
        card = replace(self.card, after=steps_after(plan, self.card))
        grid, scan = part_grid(plan, card), ModelInput(tuple(volumes))
        with clock.device_turn(), clock.step("resample"), torch.inference_mode():
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


ModelPredictor = TorchPredictor | StagedPredictor | PaintedPredictor
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
