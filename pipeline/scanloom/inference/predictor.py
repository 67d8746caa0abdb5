"""A trained network, kept warm on a device, that labels one scan after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from scanloom.cards.card import Argmax, ModelCard
from scanloom.core import Clock, Flag, Layer, Reason, ScanError, Segmentation, Volume
from scanloom.inference.device import (
    ASKED_FOR,
    PrecisionChoice,
    choose_batch,
    choose_device,
    choose_precision,
    is_out_of_memory,
    same_bytes,
)
from scanloom.inference.finite import all_finite
from scanloom.inference.geometry import NetworkPlan, plan_grid
from scanloom.inference.intensity import apply_steps
from scanloom.inference.ladder import Rung, fitting, room, rungs
from scanloom.inference.loaded import LoadedNetwork, load_network
from scanloom.inference.memory import Budget
from scanloom.inference.resample import to_network
from scanloom.inference.restore import LabelRestorer, Labels, ScoreRestorer, choose_way
from scanloom.inference.windows import BatchSize, ScorePlanes, Slider, window_size

SAME_PLACE = 0.01
"""mm between voxels of two channels that are taken for one."""


@dataclass(frozen=True, eq=False)
class _Made:
    """Label maps of all structures, in which way they were made, and what must be known of it."""

    maps: list[Labels]
    rung: Rung
    flags: tuple[Flag, ...]


class Predictor:
    """One model on one device; the network is loaded once.

    Parameters
    ----------
    card : ModelCard
        The model.
    device : str
        "auto", "cpu", "cuda" or "cuda:N".
    precision : str
        "auto", "float32" or "half".
    memory_limit : int, optional
        Bytes that the whole process may take; None for what the machine has.
    body_box : bool
        Whether windows of air are passed over where the card says what air is.
    fused_restore : bool
        Whether compiled kernels bring labels back where they are at hand, else plain torch.

    Attributes
    ----------
    device : DeviceChoice
        Where it works, and why there.
    precision : PrecisionChoice
        How it calculates, and why so. A scan on which half precision overflows is labelled in
        float32; its segmentation says so.

    Raises
    ------
    ScanError
        DEVICE_UNAVAILABLE if the device is not there; MODEL_NETWORK, MODEL_HASH, MODEL_WEIGHTS,
        MODEL_UNSAFE, MODEL_DAMAGED or NOT_FINITE if network and weights don't make a model;
        MODEL_UNSUPPORTED or CHANNELS if the card asks for what this version can't do.
    """

    def __init__(
        self,
        card: ModelCard,
        *,
        device: str = "auto",
        precision: str = "auto",
        memory_limit: int | None = None,
        body_box: bool = True,
        fused_restore: bool = True,
    ) -> None:
        _check(card)
        background = isinstance(card.decision, Argmax)
        self.body_box = body_box and background and not card.before and len(card.channels) == 1
        self.card, self.memory_limit, self.fused_restore = card, memory_limit, fused_restore
        self.device = choose_device(device)
        self.precision = choose_precision(precision, self.device.device, card.precisions)
        loaded = load_network(card, self.precision.dtype)
        self._overflows = loaded.dtype is not self.precision.dtype
        if self._overflows:
            why = f"the model's weights overflow {self.precision.name}"
            self.precision = PrecisionChoice(loaded.dtype, why)
        loaded.network.to(self.device.device)
        self._loaded = {loaded.dtype: loaded}
        if (
            card.restore == "scores" and fused_restore
        ):  # compiled now, not in the midst of the first scan
            choose_way(card.decision, card.n_outputs, self.device.device)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.card.name

    @property
    def device_name(self) -> str:
        """Where it works: "cpu", "cuda:0"."""
        return str(self.device.device)

    @property
    def precision_name(self) -> str:
        """In which numbers it calculates: "float32", "float16"."""
        return self.precision.name

    def predict(
        self, volume: Volume, clock: Clock | None = None, *, others: Sequence[Volume] = ()
    ) -> Segmentation:
        """Label a scan.

        Parameters
        ----------
        volume : Volume
            The scan; of a model with several input channels, the first.
        clock : Clock, optional
            Is told of the steps "resample", "network", "restore" and "clean".
        others : sequence of Volume
            The other input channels, in the card's order, on the same grid.

        Returns
        -------
        Segmentation
            On the scan's own grid: one layer, or one a structure where structures may overlap.

        Raises
        ------
        ScanError
            OUT_OF_MEMORY if the device is too small; IMPLAUSIBLE if the scan is too small for the
            card's padding; MODEL_NETWORK if the network gives fewer channels than the card names;
            CHANNELS if there are more or fewer input channels, or they lie on another grid;
            NOT_FINITE if the scan overflows in the card's intensity steps, or a score is NaN or
            infinite in float32 too.
        """
        clock = clock or Clock()
        volumes = (volume, *others)
        _check_channels(volumes, self.card)
        with same_bytes(), torch.inference_mode():
            made = self._in_finite_numbers(volumes, clock)
        with clock.step("clean"):
            maps = [self._clean(m, "after") for m in made.maps]
            return self._segmentation(replace(made, maps=maps), volume)

    def _in_finite_numbers(self, volumes: Sequence[Volume], clock: Clock) -> _Made:
        """Return label maps; where half precision overflowed, those of float32."""
        first = self.precision
        overflowed = self._overflows
        for dtype in dict.fromkeys((first.dtype, torch.float32)):
            if dtype is not first.dtype:
                clock.note("ladder", f"float32, as {first.name} overflowed")
                overflowed = True
            try:
                maps, rung = self._down_the_ladder(volumes, dtype, clock)
            except FloatingPointError:
                continue  # the error, and all that its frames held, is gone
            return _Made(maps, rung, (Flag.HALF_OVERFLOWED,) if overflowed else ())
        detail = "the network gives scores that are NaN or infinite"
        raise ScanError(Reason.NOT_FINITE, detail)

    def ways(
        self, volume: Volume, plan: NetworkPlan, dtype: torch.dtype | None = None
    ) -> tuple[list[Rung], list[str]]:
        """Return the ways of labelling from the first that fits, and the steps down to it.

        `dtype` is the type in which the network calculates, by default that of `precision`.

        Raises
        ------
        ScanError
            OUT_OF_MEMORY if none fits by the estimate.
        """
        device, dtype = self.device.device, dtype or self.precision.dtype
        windows = choose_batch(window_size(self.card.window, plan.network.shape), device, dtype)
        chosen = device.type != "cpu" and self.device.why != ASKED_FOR
        others = [torch.device("cpu")] if chosen else []
        asked = rungs(device, dtype, Budget(windows), others)
        left = room(device, self.memory_limit)
        return fitting(asked, self.card, plan, volume.array.dtype.itemsize, left)

    def _down_the_ladder(
        self, volumes: Sequence[Volume], dtype: torch.dtype, clock: Clock
    ) -> tuple[list[Labels], Rung]:
        """Return label maps, made in the first way for which memory suffices, and that way."""
        plan = plan_grid(volumes[0].grid, self.card.grid)
        ways, changes = self.ways(volumes[0], plan, dtype)
        for change in changes:
            clock.note("ladder", change)
        for rung in ways:
            if rung is not ways[0]:
                clock.note("ladder", rung.change)
            try:
                return self._label(volumes, plan, rung, clock), rung
            except (RuntimeError, MemoryError, ScanError) as exc:
                if not is_out_of_memory(exc):
                    raise
            # here the error, and all that its frames held, is gone
            if rung.device.type == "cuda":
                torch.cuda.empty_cache()
        detail = f"{self.device.device.type} has too little for this scan"
        raise ScanError(Reason.OUT_OF_MEMORY, detail)

    def _label(
        self, volumes: Sequence[Volume], plan: NetworkPlan, rung: Rung, clock: Clock
    ) -> list[Labels]:
        """Return label maps on the source grid."""
        card = self.card
        with clock.step("resample"):
            slab = rung.budget.slab
            channels = [to_network(v.array, plan, rung.device, card.before, slab) for v in volumes]
            seen = None
            if self.body_box and card.air_below is not None:
                seen = channels[0] >= card.air_below
            channels = [apply_steps(channel, card.after) for channel in channels]
            if not all(map(all_finite, channels)):
                detail = "the scan's intensities overflow in the steps before the network"
                raise ScanError(Reason.NOT_FINITE, detail)
            image = channels[0][None] if len(channels) == 1 else torch.stack(channels)
            del channels
            self._wait()
        if card.restore == "scores":
            fused = self.fused_restore
            scores = ScoreRestorer(plan, card.decision, card.n_outputs, fused=fused)
            self._run(self._planes((image, seen), plan, rung, clock), scores.add, clock)
            return scores.labels
        labels = LabelRestorer(plan, card.decision, card.n_outputs)
        self._run(self._planes((image, seen), plan, rung, clock), labels.add, clock)
        with clock.step("restore"):
            return labels.finish(lambda found: self._clean(found, "before"))

    def _run(
        self, planes: Iterator[ScorePlanes], take: Callable[[ScorePlanes], None], clock: Clock
    ) -> None:
        """Move the network over its grid and hand on its planes."""
        while True:
            with clock.step("network"):
                block = next(planes, None)
                self._wait()
            if block is None:
                return
            found, named = block.scores.shape[1], self.card.n_outputs
            if found < named:
                detail = f"it gives {found} channels, the card names {named}"
                raise ScanError(Reason.MODEL_NETWORK, detail)
            with clock.step("restore"):
                take(block)

    def _planes(
        self,
        images: tuple[torch.Tensor, torch.Tensor | None],
        plan: NetworkPlan,
        rung: Rung,
        clock: Clock,
    ) -> Iterator[ScorePlanes]:
        """Yield the network's scores; tell if fewer windows had to do, or were passed over."""
        image, seen = images
        budget, batch = rung.budget, BatchSize(rung.budget.windows)
        loaded = self._network_in(rung.dtype)
        slider = Slider(
            network=loaded.network.to(rung.device),
            window=self.card.window,
            dtype=loaded.takes,
            batch=batch,
            activation=self.card.activation,
            slab=budget.slab,
            sums=torch.device("cpu") if budget.scores == "host" else None,
            head=loaded.head and loaded.head.to(rung.device),
        )
        yield from slider.slide(image, plan.network_axis(plan.lead), seen)
        if seen is not None:
            passed = slider.passed
            clock.note("body box", f"{passed.skipped} of {passed.windows} windows were air")
        if batch.count < budget.windows:
            clock.note("ladder", f"windows {batch.count}")

    def _network_in(self, dtype: torch.dtype) -> LoadedNetwork:
        """Return the network in a type of numbers; it is kept once it was needed.

        Loaded from the card's file again: what was rounded to half precision does not come back.
        """
        if dtype not in self._loaded:
            self._loaded[dtype] = load_network(self.card, dtype)
        return self._loaded[dtype]

    def _wait(self) -> None:
        """Let the device finish what it was given, so that seconds belong to their step."""
        if self.device.device.type == "cuda":
            torch.cuda.synchronize(self.device.device)

    def _clean(self, labels: Labels, when: str) -> Labels:
        """Return the label map after the card's cleaning."""
        from scanloom.ops.components import keep_largest

        for rule in self.card.cleaning:
            if rule.when == when:
                labels = keep_largest(labels, rule)
        return labels

    def _segmentation(self, made: _Made, volume: Volume) -> Segmentation:
        """Return label maps as layers of structures."""
        structures, maps = self.card.structures, made.maps
        if isinstance(self.card.decision, Argmax):
            layers = [Layer(_only(maps[0], {s.number for s in structures}), structures)]
        else:
            layers = [Layer(maps[s.number - 1], (s,)) for s in structures]
        return Segmentation(
            self.name,
            tuple(layers),
            volume.grid,
            self.card.version,
            device=str(made.rung.device),
            precision=PrecisionChoice(made.rung.dtype, "").name,
            flags=made.flags,
        )


def _only(labels: Labels, numbers: set[int]) -> Labels:
    """Return the label map without channels that the card names no structure for."""
    highest = max(numbers)
    table = np.zeros(np.iinfo(labels.dtype).max + 1, labels.dtype)
    table[list(numbers)] = list(numbers)
    whole = numbers == set(range(1, highest + 1)) and int(labels.max()) <= highest
    return labels if whole else table[labels]


def _check(card: ModelCard) -> None:
    """Refuse what a card can say and this version can't do."""
    if card.restore == "scores" and any(rule.when == "before" for rule in card.cleaning):
        detail = "parts can't be kept before labels are decided"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
    if card.grid.mode != "linear":
        raise ScanError(Reason.MODEL_UNSUPPORTED, "it wants its scans by nearest neighbour")


def _check_channels(volumes: Sequence[Volume], card: ModelCard) -> None:
    """Refuse scans that are not the card's input channels."""
    if len(volumes) != len(card.channels):
        detail = f"{card.name} wants {len(card.channels)} input channels, there are {len(volumes)}"
        raise ScanError(Reason.CHANNELS, detail)
    for volume, channel in zip(volumes[1:], card.channels[1:], strict=True):
        if not volume.grid.matches(volumes[0].grid, SAME_PLACE):
            raise ScanError(Reason.CHANNELS, f"{channel.name} lies on another grid than the first")
