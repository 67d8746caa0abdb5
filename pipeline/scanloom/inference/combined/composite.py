"""Models of several networks: a rough one crops the scan, labels of parts are united."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.cards.card import ModelCard, Stage
from scanloom.cards.cleaning import with_small_removed
from scanloom.cards.parts import needed_parts, numbers_in
from scanloom.core import (
    ComputeOptions,
    Flag,
    Layer,
    Segmentation,
    StepTimer,
    Volume,
)
from scanloom.core.measurement import Box
from scanloom.inference.device import choose_device, deterministic, is_out_of_memory
from scanloom.inference.geometry import NetworkPlan, plan_grid
from scanloom.inference.predictor import TorchPredictor
from scanloom.inference.resample import SLAB_BYTES
from scanloom.inference.resampling.image import Scan, network_image
from scanloom.inference.resampling.parts import part_grid, steps_after
from scanloom.inference.resampling.shared import SharedScan
from scanloom.inference.restore.restorers import Labels, restore_labels
from scanloom.ops.boxes import (
    box_of_labels,
    crop_volume,
    enlarge_box,
    paste_segmentation,
    union_of_boxes,
)
from scanloom.ops.components import clean


def make_predictor(
    card: ModelCard,
    compute: ComputeOptions = ComputeOptions(),
    *,
    device: str = "auto",
    memory_limit: int | None = None,
    structures: Collection[str] = (),
) -> TorchPredictor | CompositePredictor:
    """Return the predictor of a model; arguments and errors as `TorchPredictor`.

    `structures` are labels that are requested; by default, all. Other parts are not loaded.
    """
    if card.parts or (card.stage is not None and card.stage.use == "crop"):
        card_and_options = (card, compute, structures)
        return CompositePredictor(*card_and_options, device=device, memory_limit=memory_limit)
    return TorchPredictor(card, compute, device=device, memory_limit=memory_limit)


class CompositePredictor:
    """A model with parts, on one device; all networks are loaded once.

    Parameters
    ----------
    card : ModelCard
        The model.
    compute : ComputeOptions
        How the networks are run.
    structures : collection of str
        Labels that are requested; empty for all. Parts without one are not run.
    device : str
        "auto", "cpu", "cuda" or "cuda:N".
    memory_limit : int, optional
        Bytes that the whole process may use; None for the machine's memory.

    Raises
    ------
    ScanError
        As `TorchPredictor`.
    """

    def __init__(
        self,
        card: ModelCard,
        compute: ComputeOptions = ComputeOptions(),
        structures: Collection[str] = (),
        *,
        device: str = "auto",
        memory_limit: int | None = None,
    ) -> None:
        self.card, self.compute = card, compute
        self.device = choose_device(device)
        united = replace(compute, remove_small=0.0)  # what is cleaned is the united label map
        self._rough = None
        if card.stage is not None:
            self._rough = make_predictor(
                *(card.stage.card, united),
                device=device,
                memory_limit=memory_limit,
                structures=card.stage.labels,
            )
        self.parts = tuple(
            TorchPredictor(part, united, device=device, memory_limit=memory_limit)
            for part in needed_parts(card, structures).parts
        )
        self.precision = self.parts[0].precision

    def __repr__(self) -> str:
        made = f"{self.name} {self.card.version}"
        return f"{type(self).__name__}({made}, {self.device_name}, {self.precision_name})"

    @property
    def name(self) -> str:
        """The model's name."""
        return self.card.name

    @property
    def device_name(self) -> str:
        """The device's name: "cpu", "cuda:0"."""
        return str(self.device.device)

    @property
    def precision_name(self) -> str:
        """The numeric type of the first network: "float32", "float16"."""
        return self.precision.name

    def predict(
        self,
        volume: Volume,
        clock: StepTimer | None = None,
        *,
        further_channels: Sequence[Volume] = (),
        shared: SharedScan | None = None,
    ) -> Segmentation:
        """Label a scan; arguments and errors as `TorchPredictor.predict`."""
        clock = clock or StepTimer()
        volumes = (volume, *further_channels)
        if self.card.stage is None or self._rough is None:
            return self._unite(volumes, clock)
        rough = self._rough.predict(volume, clock, further_channels=further_channels)
        box = box_of_stage(rough, self.card.stage)
        if box is None:
            clock.note("crop", "no structure that crops the scan was found")
            return self._result(self._background(volume), rough, volume)
        cropped = self._unite([crop_volume(each, box) for each in volumes], clock)
        return paste_segmentation(cropped, box, volume.grid)

    def _unite(self, volumes: Sequence[Volume], clock: StepTimer) -> Segmentation:
        """Return the united labels of all parts on the scan's grid."""
        plan = plan_grid(volumes[0].grid, self.card.grid)
        resampled, flags = self._resample(volumes, plan, clock), dict[Flag, None]()
        labels = self._background(resampled[0])
        for part in self.parts:
            result = part.predict(resampled[0], clock, further_channels=resampled[1:])
            with clock.step("restore"):
                paint_over(labels, result, numbers_in(self.card, part.card))
            flags |= dict.fromkeys(result.flags)
        rules = with_small_removed(self.card.cleaning, self.compute.remove_small, "before")
        with clock.step("clean"):
            labels = clean(labels, rules, resampled[0].grid.spacing, "before")
        with clock.step("restore"):
            labels = restore_labels(labels, plan, torch.device("cpu"))
        with clock.step("clean"):
            labels = clean(labels, self.card.cleaning, volumes[0].grid.spacing, "after")
        return self._result(labels, replace(result, flags=tuple(flags)), volumes[0])

    def _background(self, volume: Volume) -> Labels:
        """Return an empty label map of a scan."""
        dtype = np.uint8 if self.card.label_bytes == 1 else np.uint16
        return np.zeros(volume.grid.shape, dtype, order="F")

    def _result(self, labels: Labels, part: Segmentation, volume: Volume) -> Segmentation:
        """Return a label map as the model's segmentation, made as that of one of its networks."""
        return replace(
            part,
            model=self.name,
            layers=(Layer(labels, self.card.structures),),
            grid=volume.grid,
            version=self.card.version,
            flags=tuple(dict.fromkeys((*self.card.flags, *part.flags))),
        )

    def _resample(
        self, volumes: Sequence[Volume], plan: NetworkPlan, clock: StepTimer
    ) -> list[Volume]:
        """Return the scan as its parts see it, resampled once for all."""
        card = replace(self.card, after=steps_after(plan, self.card))
        grid, scan = part_grid(plan, card), Scan(tuple(volumes))
        with clock.step("resample"), deterministic(), torch.inference_mode():
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


def box_of_stage(rough: Segmentation, stage: Stage) -> Box | None:
    """Return the box of a rough model's structures with its margin; None if it found none.

    The margin is rounded down, with spacing in the precision of NIfTI's header (TotalSegmentator).
    """
    wanted = set(stage.labels) or {s.label for s in rough.structures}
    boxes = []
    for layer in rough.layers:
        numbers = [s.number for s in layer.structures if s.label in wanted]
        boxes.append(box_of_labels(layer.labels, numbers) if numbers else None)
    box = union_of_boxes(boxes)
    if box is None:
        return None
    spacing = np.array(rough.grid.spacing, dtype=np.float32)
    x, y, z = (int(n) for n in np.full(3, stage.margin) / spacing.astype(np.float64))
    return enlarge_box(box, (x, y, z), rough.grid.shape)


def paint_over(labels: Labels, result: Segmentation, table: NDArray[np.uint16]) -> None:
    """Write a part's structures over a label map of the whole model, in place.

    `table` has the number in the whole model for each number of the part, 0 for none.
    """
    table = table.astype(labels.dtype)
    for layer in result.layers:
        for plane in range(labels.shape[2]):  # no further array of the scan's size
            mapped = table[layer.labels[:, :, plane]]
            np.copyto(labels[:, :, plane], mapped, where=mapped != 0)
