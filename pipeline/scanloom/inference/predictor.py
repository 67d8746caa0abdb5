"""A trained network, kept warm on a device, that labels one scan after another."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from scanloom.cards.card import Argmax, ModelCard, Threshold, with_small_removed
from scanloom.cards.check import check_directions
from scanloom.cards.networks import ONNX_GRAPH
from scanloom.cards.requested import describe_changes, requested_card
from scanloom.core import (
    ComputeOptions,
    Flag,
    Grid,
    Layer,
    Reason,
    ScanError,
    Segmentation,
    StepTimer,
    Volume,
    counted,
)
from scanloom.core.engines import EngineChoice, EngineRecords
from scanloom.core.segmentation import Uncertainty
from scanloom.inference.device import (
    ASKED_FOR,
    PlacedModel,
    PrecisionChoice,
    choose_batch,
    choose_device,
    choose_precision,
    dtype_name,
    is_out_of_memory,
    own_settings,
    return_free_memory,
    share_memory,
)
from scanloom.inference.engines.selection import EngineSelector, ScanWindows, TorchModel
from scanloom.inference.geometry import NetworkPlan, as_nifti, plan_grid
from scanloom.inference.memory import (
    Budget,
    MemoryPlan,
    fallback_plans,
    first_fitting,
    network_image_bytes,
    room,
    uncertainty_bytes,
)
from scanloom.inference.network.loading import TrainedNetworks, load_network, wrong_half
from scanloom.inference.resampling.image import (
    GridBox,
    ModelInput,
    NetworkImage,
    SharedScan,
    largest_box,
    network_image,
    source_box,
    uncrop,
)
from scanloom.inference.restore.decisions import Labels, only_numbers
from scanloom.inference.restore.restorers import (
    LabelRestorer,
    Restorer,
    choose_backend,
    make_restorer,
    uncertainty_restorer,
)
from scanloom.inference.sliding_window import (
    BatchSize,
    Fold,
    ScorePlanes,
    SlidingWindow,
    place_networks,
    window_size,
)
from scanloom.ops.label_maps import paste_labels
from scanloom.ops.measure import centroids
from scanloom.ops.uncertainty import change_maps

logger = logging.getLogger(__name__)

_SAME_POSITION_MM = 0.01
"""Largest distance between corresponding voxels of two channels."""


class TorchPredictor(PlacedModel):
    """One model on one device; the network is loaded once.

    Parameters
    ----------
    card : ModelCard
        The model.
    compute : ComputeOptions
        How the network is run. Windows of air below a card's `air_below` are skipped.
    device : str
        "auto", "cpu", "cuda", "cuda:N", "mps", "xpu" or "xpu:N".
    memory_limit : int, optional
        Bytes that the whole process may use; None for the machine's memory.
    planned_cases : int
        Scans that will be labelled: whether it pays to prepare an engine depends on it.
    records : EngineRecords, optional
        Decisions for the output folder of the results.

    Attributes
    ----------
    device : DeviceChoice
        The device, and the reason for its choice.
    precision : PrecisionChoice
        The type in which the network calculates, and the reason. A scan on which half precision
        overflows is labelled in float32; its segmentation has a flag for it.

    Raises
    ------
    ScanError
        DEVICE_UNAVAILABLE if the device does not exist; MODEL_NETWORK, MODEL_HASH, MODEL_WEIGHTS,
        MODEL_UNSAFE, MODEL_DAMAGED or NOT_FINITE if network or weights are invalid;
        MODEL_UNSUPPORTED if this version does not support the card.
    """

    @own_settings()
    def __init__(
        self,
        card: ModelCard,
        compute: ComputeOptions = ComputeOptions(),
        *,
        device: str = "auto",
        memory_limit: int | None = None,
        planned_cases: int = 1,
        records: EngineRecords | None = None,
    ) -> None:
        requested = requested_card(card, compute)
        self.changes, card = describe_changes(card, requested), requested
        check_supported(card)
        background = isinstance(card.decision, Argmax)
        simple = background and not card.before and len(card.channels) == 1
        self.skip_air = compute.skip_air and simple
        self.card, self.compute, self.memory_limit = card, compute, memory_limit
        self.device = choose_device(device)
        share_memory(self.device.device)
        self.precision = choose_precision(compute.precision, self.device.device, card.precisions)
        if card.network.name == ONNX_GRAPH:
            self.precision = PrecisionChoice(torch.float32, "an ONNX graph has types of its own")
        loaded = load_network(card, self.precision.dtype)
        self.overflows = loaded.dtype is not self.precision.dtype
        if self.overflows:
            why = f"the model's weights overflow {self.precision.name}"
            self.precision = PrecisionChoice(loaded.dtype, why)
        elif loaded.dtype is not torch.float32 and (
            wrong := wrong_half(card, loaded, self.device.device)
        ):
            loaded = load_network(card, torch.float32)
            self.precision = PrecisionChoice(torch.float32, wrong, wrong=True)
        if self.precision.wrong:
            logger.warning("%s runs in float32: %s", card.name, self.precision.why)
        self.networks = TrainedNetworks(card, loaded)
        place_networks(loaded, self.device.device)
        self.engines = EngineSelector(
            card,
            compute.engine,
            lambda: load_network(card, torch.float32),
            precision=(compute.precision, self.precision.name),
            planned_cases=planned_cases,
            records=records,
        )
        if card.restore == "scores" and compute.compiled_restore:
            # Compiled now, not during the first scan
            rounded = card.window.sums == "float16"
            choose_backend(card.decision, card.n_outputs, self.device.device, rounded=rounded)

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
        """Label a scan.

        Parameters
        ----------
        volume : Volume
            The scan; for a model with several input channels, the first of them.
        clock : StepTimer, optional
            Times the steps "resample", "network", "restore" and "clean".
        further_channels : sequence of Volume
            The other input channels, in the card's order, on the same grid.
        previous : Segmentation, optional
            Result of the card's stage, if its structures are further channels.
        shared : SharedScan, optional
            Keeps the resampled scan for further models; the caller finishes it.
        uncertainty : bool
            Whether maps of the labels' uncertainty are returned too.

        Returns
        -------
        Segmentation
            On the scan's own grid: one layer, or one per structure if structures may overlap.

        Raises
        ------
        ScanError
            OUT_OF_MEMORY if the device is too small; IMPLAUSIBLE if the scan is too small for the
            card's padding; MODEL_NETWORK if the network has fewer output channels than the card, or
            an ONNX graph with argmax more; CHANNELS if the number of input channels is wrong, or
            their grids differ; NOT_FINITE if the scan overflows in the card's intensity steps, or a
            score is NaN or infinite in float32 too.
        """
        clock, volumes = clock or StepTimer(), (volume, *further_channels)
        check_channels(volumes, self.card)
        scan = ModelInput(volumes, None if previous is None else previous.layers[0].labels)
        with clock.step("resample"):
            box = source_box(volumes, self.card.grid.crop)
            scan = scan if box is None else scan.crop(box)
            seen = scan.volumes[0]
            plan = plan_grid(seen.grid, as_nifti(self.card.grid, seen))
            kept = shared is not None and shared.holds(self.card, self.device_name)
            if self.device.device.type == "cuda" and not kept:
                scan = scan.stage(plan.lead)  # while another scan has the device
            task = Task(scan, plan, clock, shared, uncertainty)
        with clock.device_turn(), torch.inference_mode():
            prediction = self._predict_without_overflow(task)
        with clock.step("clean"):
            shape = volume.grid.shape
            maps, uncertain = prediction.maps, prediction.uncertainty
            if box is not None:
                maps = [paste_labels(labels, box, shape) for labels in maps]
                uncertain = change_maps(uncertain, lambda values: paste_labels(values, box, shape))
            maps = [self._clean(labels, "after", volume.grid) for labels in maps]
            prediction = replace(prediction, maps=maps, uncertainty=uncertain)
            result = prediction.segmentation(self.card, volume)
            return with_direction_flag(replace(result, changes=self.changes), self.card)

    def _predict_without_overflow(self, task: Task) -> Prediction:
        """Return label maps, repeated in float32 if half precision overflows."""
        first = self.precision
        overflowed = self.overflows
        for dtype in dict.fromkeys((first.dtype, torch.float32)):
            if dtype is not first.dtype:
                task.clock.note("ladder", f"float32, as {first.name} overflowed")
                overflowed = True
            try:
                prediction = self._predict_with_fallback(task, dtype)
            except FloatingPointError:
                continue  # here the error, and the arrays that its frames held, are freed
            flags = [Flag.HALF_OVERFLOWED] if overflowed else []
            if first.wrong:
                flags.append(Flag.HALF_WRONG)
            # a scan that overflows does so on every machine: not a difference of this one
            used = first.name if overflowed else dtype_name(prediction.memory_plan.dtype)
            if prediction.memory_plan.device != self.device.device:
                flags.append(Flag.DEVICE_TOO_SMALL)
            if self.departs(used):
                flags.append(Flag.OTHER_ENGINE)
            return replace(prediction, flags=tuple(flags), engine=self.engine)
        raise ScanError(Reason.NOT_FINITE, "scores of the network are NaN or infinite")

    def memory_plans(
        self,
        volume: Volume,
        plan: NetworkPlan,
        dtype: torch.dtype | None = None,
        reserved: int = 0,
    ) -> tuple[list[MemoryPlan], list[str]]:
        """Return the memory plans from the first that fits, and the changes that lead to it.

        `dtype` is the type in which the network calculates, by default that of `precision`;
        `reserved` are bytes of the device that stay free.

        Raises
        ------
        ScanError
            OUT_OF_MEMORY if no plan fits by the estimate.
        """
        device, dtype = self.device.device, dtype or self.precision.dtype
        seen = largest_box(plan, self.card.grid)
        windows = choose_batch(window_size(self.card.window, seen), device, dtype)
        automatic = device.type != "cpu" and self.device.why != ASKED_FOR
        fallbacks = [torch.device("cpu")] if automatic else []
        plans = fallback_plans(device, dtype, Budget(windows), fallbacks)
        available = room(device, self.memory_limit, reserved)
        return first_fitting(plans, self.card, plan, volume.array.dtype.itemsize, available)

    def _plans_with_sharing(
        self, task: Task, dtype: torch.dtype
    ) -> tuple[list[MemoryPlan], list[str]]:
        """Return the memory plans as `memory_plans`; a shared scan is freed if memory is scarce."""
        volume, plan = task.scan.volumes[0], task.plan
        for_uncertainty = (
            uncertainty_bytes(self.card, plan, self.n_members) if task.uncertainty else 0
        )
        if task.shared is not None:
            copied = task.shared.is_shared(self.card, self.device_name)
            reserved = for_uncertainty + (network_image_bytes(self.card, plan) if copied else 0)
            with suppress(ScanError):
                plans, changes = self.memory_plans(volume, plan, dtype, reserved)
                if not changes:
                    return plans, changes
            task.shared.release()
        return self.memory_plans(volume, plan, dtype, for_uncertainty)

    def _predict_with_fallback(self, task: Task, dtype: torch.dtype) -> Prediction:
        """Return label maps, made with the first memory plan for which memory suffices."""
        clock = task.clock
        plans, changes = self._plans_with_sharing(task, dtype)
        for change in changes:
            clock.note("ladder", change)
        for memory_plan in plans:
            if memory_plan is not plans[0]:
                clock.note("ladder", memory_plan.change)
            if memory_plan.device != self.device.device:
                # By estimate or by experience: some hundred times slower, which a note does not say
                logger.warning("%s runs on the CPU: %s is too small", self.name, self.device_name)
            try:
                return self._label(task, memory_plan)
            except Exception as exc:  # an engine's library has errors of its own
                if not is_out_of_memory(exc):
                    raise
            # here the error, and the arrays that its frames held, are freed
            if task.shared is not None:
                task.shared.release()
            if memory_plan.device.type == "cuda":
                self.free_engines()
                torch.cuda.empty_cache()
        detail = f"{self.device.device.type} has too little memory for this scan"
        raise ScanError(Reason.OUT_OF_MEMORY, detail)

    def free_engines(self) -> None:
        """Free what engines keep for scans of other shapes, such as the memory of CUDA graphs."""
        self.engines.forget_prepared()

    @property
    def engine(self) -> EngineChoice:
        """The library that runs the network, and the reason for its choice."""
        return self.engines.choice

    def departs(self, precision: str) -> bool:
        """Return whether the last scan was run otherwise than OUT's record says, or requested."""
        return self.engines.departs(precision)

    @property
    def n_members(self) -> int:
        """Number of networks whose scores are averaged."""
        return 1 + len(self.card.folds)

    def _label(self, task: Task, memory_plan: MemoryPlan) -> Prediction:
        """Return label maps on the source grid, and their uncertainty if requested."""
        plan, clock, expected = task.plan, task.clock, self.card.n_outputs
        restorer, uncertain = self.restorer(plan, memory_plan.device), None
        if task.uncertainty:
            uncertain = uncertainty_restorer(plan, self.card, self.n_members)
        planes, box = self.scores(task, memory_plan)
        if isinstance(restorer, LabelRestorer) and self.card.grid.padded:
            restorer.box = box  # labels are cleaned with those of padding, as the network saw it
        else:
            planes, box = on_whole_grid(planes, box, plan), None
        while True:
            with clock.step("network"):
                block = next(planes, None)
            if block is None:
                break
            channels = block.scores.shape[1]
            # only a graph can have more than its card was checked to name: with argmax, voxels of
            # a class without a name would go to the best of the others
            argmax = isinstance(self.card.decision, Argmax)
            graph = self.card.network.name == ONNX_GRAPH
            if channels < expected or (graph and argmax and channels > expected):
                detail = f"the network has {channels} output channels, the card {expected}"
                raise ScanError(Reason.MODEL_NETWORK, detail)
            with clock.step("restore"):
                restorer.add(block)
                if uncertain is not None:
                    for each in on_whole_grid(iter([block]), box, plan):
                        uncertain.add(each)
        with clock.step("restore"):
            maps = restorer.finish(lambda decided: self._clean(decided, "before", plan.network))
            uncertainty = None if uncertain is None else uncertain.finish()
        return Prediction(maps, memory_plan, uncertainty=uncertainty)

    def restorer(self, plan: NetworkPlan, device: torch.device) -> Restorer:
        """Return what decides the labels on the scan's grid, from scores on a device."""
        return make_restorer(plan, self.card, device, fused=self.compute.compiled_restore)

    def scores(
        self, task: Task, memory_plan: MemoryPlan
    ) -> tuple[Iterator[ScorePlanes], GridBox | None]:
        """Resample the scan; return an iterator over the network's scores, and the box of them.

        The box is a part of the network grid; None for the grid itself.
        """
        with task.clock.step("resample"):
            image = network_image(
                task.scan,
                task.plan,
                self.card,
                (memory_plan.device, memory_plan.budget.slab),
                skip_air=self.skip_air,
                shared=task.shared,
            )
        folds = self._folds(image, task, memory_plan)
        if memory_plan.device.type == "cpu":
            return_free_memory()  # such as weights of networks that an engine runs
        return self._planes(image, task, memory_plan, folds), image.box

    def _folds(self, image: NetworkImage, task: Task, memory_plan: MemoryPlan) -> list[Fold]:
        """Return the card's networks, as run by the chosen engine; by torch if memory is scarce."""
        dtype, device = memory_plan.dtype, memory_plan.device
        if memory_plan.change:
            self.engines.run_by_torch("memory was scarce")
            return place_networks(self.networks.load(dtype), device)
        windows = ScanWindows(image.image, self.card.window, task.plan, memory_plan.budget.windows)
        runs = self.engines.prepared_runs(windows, dtype, device)
        if runs is None:
            loaded = self.networks.load(dtype)
            folds = place_networks(loaded, device)
            model = TorchModel(self.card, loaded, [fold.network for fold in folds], device)
            runs = self.engines.runs(model, windows, task.clock)
            if runs is None:
                return folds
            self.networks.release(dtype)
        described = self.networks.describe(dtype)
        heads = [each.head and each.head.to(device) for each in (described, *described.folds)]
        return [Fold(run, head) for run, head in zip(runs, heads, strict=True)]

    def _planes(
        self,
        image: NetworkImage,
        task: Task,
        memory_plan: MemoryPlan,
        folds: Sequence[Fold],
    ) -> Iterator[ScorePlanes]:
        """Yield the network's scores; note skipped windows, and a reduced batch."""
        plan, clock = task.plan, task.clock
        budget, batch = memory_plan.budget, BatchSize(memory_plan.budget.windows)
        precision = dtype_name(memory_plan.dtype)
        sliding_window = SlidingWindow(
            folds,
            self.card.window,
            dtype=self.networks.describe(memory_plan.dtype).takes,
            batch=batch,
            activation=self.card.activation,
            slab=budget.slab,
            sums=torch.device("cpu") if budget.scores == "host" else None,
            on_windows=clock.window_reporter(self.name, str(memory_plan.device), precision),
            keep_members=task.uncertainty,
            share_uniform=self.compute.skip_air,
        )
        axis = plan.network_axis(plan.lead)
        yield from sliding_window.slide(image.image, axis, image.seen)
        if passed := str(sliding_window.passed):
            clock.note("skip air", passed)
        if batch.count < budget.windows:
            clock.note("ladder", f"windows {batch.count}")

    def _clean(self, labels: Labels, when: str, grid: Grid) -> Labels:
        """Return the label map on a grid after the card's cleaning."""
        from scanloom.ops.components import clean

        rules = with_small_removed(self.card.cleaning, self.compute.remove_small, "after")
        return clean(labels, rules, grid.voxel_volume, when)


@dataclass(frozen=True, eq=False)
class Task:
    """A scan to label, grids, timer, the resampled scan that later models share, and requests."""

    scan: ModelInput
    plan: NetworkPlan
    clock: StepTimer
    shared: SharedScan | None = None
    uncertainty: bool = False


@dataclass(frozen=True, eq=False)
class Prediction:
    """Label maps, the memory plan with which they were made, and properties of the result."""

    maps: list[Labels]
    memory_plan: MemoryPlan
    flags: tuple[Flag, ...] = ()
    uncertainty: Uncertainty | None = None
    engine: EngineChoice | None = None

    def segmentation(self, card: ModelCard, volume: Volume) -> Segmentation:
        """Return the label maps as layers of a card's structures, on a scan's grid."""
        if not isinstance(card.decision, Threshold):
            numbers, labels = {s.number for s in card.structures}, self.maps[0]
            argmax = isinstance(card.decision, Argmax)
            largest = card.n_outputs - 1 if argmax else np.iinfo(labels.dtype).max
            layers = [Layer(only_numbers(labels, numbers, largest), card.structures)]
        else:
            layers = [Layer(self.maps[s.number - 1], (s,)) for s in card.structures]
        reordered = as_nifti(card.grid, volume) is not card.grid
        presented = (Flag.AXES_AS_NIFTI,) if reordered else ()
        return Segmentation(
            card.name,
            tuple(layers),
            volume.grid,
            card.version,
            uncertainty=self.uncertainty,
            device=str(self.memory_plan.device),
            precision=dtype_name(self.memory_plan.dtype),
            engine=self.engine,
            flags=(*card.flags, *self.flags, *presented),
        )


def on_whole_grid(
    planes: Iterator[ScorePlanes], box: GridBox | None, plan: NetworkPlan
) -> Iterator[ScorePlanes]:
    """Return the planes of the whole network grid from those of a box; None for the grid."""
    if box is None:
        return planes
    return uncrop(planes, box, plan.network_axis(plan.lead), plan.network.shape)


def with_direction_flag(result: Segmentation, card: ModelCard) -> Segmentation:
    """Return a result, flagged if its structures lie otherwise than the card says."""
    directions = card.reference_directions
    found = check_directions(centroids(result), directions) if directions else ()
    return replace(result, flags=tuple(dict.fromkeys((*result.flags, *found))))


def check_supported(card: ModelCard) -> None:
    """Refuse cards that this version does not support."""
    if card.restore == "scores" and any(rule.when == "before" for rule in card.cleaning):
        detail = "connected components can't be selected before labels are decided"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)


def check_channels(volumes: Sequence[Volume], card: ModelCard) -> None:
    """Refuse scans that are not the card's input channels."""
    if len(volumes) != len(card.channels):
        detail = (
            f"{card.name} takes {counted(len(card.channels), 'input channel')}, got {len(volumes)}"
        )
        raise ScanError(Reason.CHANNELS, detail)
    for volume, channel in zip(volumes[1:], card.channels[1:], strict=True):
        if not volume.grid.matches(volumes[0].grid, _SAME_POSITION_MM):
            detail = f"{channel.name} and the first channel have different grids"
            raise ScanError(Reason.CHANNELS, detail)
