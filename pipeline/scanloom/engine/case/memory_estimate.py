"""Memory estimate of a case, from the scan's header and the models' cards alone.

Only headers are read, and no array of the scan's size is allocated. Each stage holds the scan and,
from restore on, label maps; other data live in one stage only. The peak is the largest stage, plus
the interpreter and libraries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from scanloom.cards.card import ModelCard
from scanloom.cards.requested import needed_parts, networks
from scanloom.core import Grid, Outputs, Reason, ScanError, format_bytes
from scanloom.core.relations import NO_RELATIONS, Relations
from scanloom.engine.case.relations import predictions_of, running_order, sharing_groups
from scanloom.engine.case.writers import estimate_writers

if TYPE_CHECKING:
    from scanloom.inference.memory import MemoryEstimate

BASE_PROCESS_BYTES = 720 * 1024**2
"""Interpreter, torch, a small network, compiled kernels, writers and readers: measured with torch
2.13 for CPU in a process that has finished a case."""
DECODER_BYTES = 96 * 1024**2
"""While a scan is read: headers, and memory of decoders and gunzip."""
MEASUREMENT_BYTES = 128 * 1024**2
"""Histograms and slabs of connected parts."""


@dataclass(frozen=True)
class CaseEstimate:
    """Bytes that a case holds at once, by stage.

    Parameters
    ----------
    host : mapping of str to int
        Bytes of "load", "resample", "network", "restore", "clean", "measure", "write" and
        "readback", scan and label maps included.
    device : mapping of str to int
        Bytes of each step on a device with its own memory.
    base : int
        Memory of the process itself: interpreter, libraries, weights.
    """

    host: Mapping[str, int]
    device: Mapping[str, int] = field(default_factory=dict)
    base: int = BASE_PROCESS_BYTES

    @property
    def peak(self) -> int:
        """Peak memory of the process, in bytes."""
        return self.base + max(self.host.values(), default=0)

    def largest_stage_without(self, *excluded: str) -> int:
        """Return the bytes of the largest stage but some, without the process itself."""
        return max((n for name, n in self.host.items() if name not in excluded), default=0)

    @property
    def largest_stage(self) -> str:
        """Name of the stage that needs most memory."""
        return max(self.host, key=lambda name: self.host[name])


@dataclass(frozen=True)
class Placement:
    """Device and precision of a model, as `TorchPredictor` names them."""

    device: str = "cpu"
    precision: str = "float32"
    windows: int = 1


def estimate_case(
    grid: Grid,
    dtype: DTypeLike,
    cards: Sequence[ModelCard],
    outputs: Outputs | None = None,
    placement: Placement | None = None,
    relations: Relations = NO_RELATIONS,
) -> CaseEstimate:
    """Estimate the memory of a case.

    Parameters
    ----------
    grid : Grid
        Grid of the scan.
    dtype : dtype
        Data type of its voxels after rescale.
    cards : sequence of ModelCard
        The models, one after another.
    outputs : Outputs, optional
        Files to write.
    placement : Placement, optional
        Device and precision of the networks.
    relations : Relations, optional
        Relations between the models; a model counts as if it saw the whole scan.

    Returns
    -------
    CaseEstimate
        Compare `peak` with a limit.
    """
    voxels, stored = math.prod(grid.shape), np.dtype(dtype).itemsize
    scan = voxels * stored
    raw = 2 * voxels if np.dtype(dtype).kind == "f" else 0  # before rescale
    host, device = {"load": scan + raw + DECODER_BYTES}, dict[str, int]()
    held = 0  # label maps of the previous models
    labels = relations.labels_to_compute((outputs or Outputs()).structures)
    reduced = [needed_parts(card, labels) for card in cards]
    run = _Run(reduced, relations, placement, "uncertainty" in (outputs or Outputs()).also)
    for need, maps in _needs(grid, stored, run):
        for step, count in need.host.items():
            host[step] = max(host.get(step, 0), scan + held + count)
        for step, count in need.device.items():
            device[step] = max(device.get(step, 0), count)
        held += maps
    if relations:  # a restricted copy of a model's label maps, and united ones
        held += 2 * voxels * len(relations.unite)
        largest = max(card.n_maps * card.label_bytes for card in cards)
        host["relate"] = scan + held + voxels * (largest if relations.restrict_to else 0)
    written = estimate_writers(grid, cards, outputs or Outputs())
    host["measure"] = scan + held + MEASUREMENT_BYTES
    host["write"] = scan + held + written
    host["readback"] = scan + held + written
    return CaseEstimate(host, device, base_bytes(cards))


def base_bytes(cards: Sequence[ModelCard]) -> int:
    """Return the bytes of a process with these models before its first case.

    A file with weights is read while the networks of the model's other folds are in memory.
    """
    models = largest = 0
    for card in cards:
        for network in networks(card):
            sizes = [each.file.stat().st_size for each in (network.weights, *network.folds)]
            models += sum(sizes)
            largest = max(largest, *sizes)
    return BASE_PROCESS_BYTES + models + largest


def check_memory(estimate: CaseEstimate, limit: int | None) -> None:
    """Refuse a case that does not fit, before any allocation.

    Parameters
    ----------
    estimate : CaseEstimate
        Estimate with the smallest possible plan.
    limit : int or None
        Bytes for the whole process; None for no limit.

    Raises
    ------
    ScanError
        OUT_OF_MEMORY with both figures.
    """
    if limit is not None and estimate.peak > limit:
        need = f"needs {format_bytes(estimate.peak)} in the step {estimate.largest_stage}"
        source = "`segment --memory-limit` or a workflow's `memory_limit`"
        detail = f"{need}, limit {format_bytes(limit)} by {source}"
        raise ScanError(Reason.OUT_OF_MEMORY, detail)


@dataclass(frozen=True)
class _Run:
    """The models of a case, how they run, and whether maps of uncertainty are requested."""

    cards: Sequence[ModelCard]
    relations: Relations
    placement: Placement | None
    uncertainty: bool


def _needs(grid: Grid, stored: int, run: _Run) -> Iterator[tuple[MemoryEstimate, int]]:
    """Yield what each model or ensemble needs, and the bytes of its label maps, as they run.

    A scan on the network grid that further models need stays on the device; not in the smallest
    plan, without a placement.
    """
    cards, relations, placement = run.cards, run.relations, run.placement
    predictions = predictions_of([card.name for card in cards], relations)
    groups = sharing_groups(predictions, cards)
    ordered = running_order(predictions, relations, groups)
    first_of = {groups[p.name]: cards[p.members[0]] for p in reversed(ordered)}
    for n, prediction in enumerate(ordered):
        first, *further = (cards[member] for member in prediction.members)
        kept = {groups[p.name] for p in ordered[: n + 1]} & {
            groups[p.name] for p in ordered[n + 1 :]
        }
        images = [first_of[group] for group in kept] + [first] * bool(further)
        shared = sum(_image_bytes(grid, card) for card in images) if placement else 0
        where = placement or Placement()
        need = _sum([_network(grid, stored, card, where) for card in (first, *further)])
        maps = first.n_maps * math.prod(grid.shape) * first.label_bytes
        if run.uncertainty:
            members = len(further) + 1 if further else 1 + len(first.folds)
            need = _with_image(need, _uncertainty_bytes(grid, first, members))
            maps += 2 * math.prod(grid.shape)
        yield _with_image(need, shared), maps


def _sum(needs: Sequence[MemoryEstimate]) -> MemoryEstimate:
    """Return the memory of models that run at the same time."""
    first, *further = needs
    for need in further:
        host = {step: count + need.host[step] for step, count in first.host.items()}
        device = {step: count + need.device[step] for step, count in first.device.items()}
        first = replace(first, host=host, device=device)
    return first


def _with_image(need: MemoryEstimate, image: int) -> MemoryEstimate:
    """Return an estimate with the bytes of an image that is kept while a model runs."""
    if need.device:
        return replace(need, device={step: count + image for step, count in need.device.items()})
    return replace(need, host={step: count + image for step, count in need.host.items()})


def _uncertainty_bytes(grid: Grid, card: ModelCard, members: int) -> int:
    from scanloom.inference.memory import uncertainty_bytes_of  # torch comes in here

    return uncertainty_bytes_of(card, grid, members)


def _image_bytes(grid: Grid, card: ModelCard) -> int:
    from scanloom.inference.memory import shared_image_bytes  # torch comes in here

    return shared_image_bytes(card, grid)


def _network(grid: Grid, stored: int, card: ModelCard, placement: Placement) -> MemoryEstimate:
    from scanloom.inference.memory import estimate_placed  # torch comes in here

    where = (placement.device, placement.precision)
    return estimate_placed(card, grid, stored, where, placement.windows)
