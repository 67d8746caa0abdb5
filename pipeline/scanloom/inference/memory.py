"""Estimates the memory and the work of a network for a scan before anything is allocated.

The estimate follows the code step by step, from the shapes of scan, network grid and window. The
memory of the network itself is measured on the meta device, which allocates nothing. Interpreter
and libraries are not included.

If a scan does not fit, there is a sequence of memory plans, each smaller than the previous one:
fewer windows at once, scores in host memory, smaller slabs, then the next device. The first plan
that fits by the estimate is chosen before anything is allocated; the plans after it are used if the
estimate was too low.
"""

from __future__ import annotations

import json
import math
import os
import resource
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scanloom.cards.card import (
    Argmax,
    Clip,
    FillHoles,
    IntensityStep,
    ModelCard,
    NetworkSpec,
    Normalize,
    ScalePercentiles,
    ScaleRange,
    Truncate,
)
from scanloom.cards.graph import networks, stages
from scanloom.core import Grid, Reason, ScanError, format_bytes
from scanloom.core.process import memory_limits
from scanloom.inference.device import VALUES_PER_VOXEL, device_memory
from scanloom.inference.geometry import NetworkPlan, grid_for_parts, plan_grid
from scanloom.inference.network.architectures import MetaShapeRules, build_network, meta_dispatch
from scanloom.inference.network.layers import (
    MixedBfloat16,
    input_size,
    last_layer,
    replace_with_identity,
)
from scanloom.inference.resampling.image import largest_box
from scanloom.inference.resampling.resample import SLAB_BYTES
from scanloom.inference.restore.restorers import (
    AREA_SLAB_BYTES,
    CPU_SLAB_BYTES,
    GPU_SLAB_BYTES,
    uncertainty_map_bytes,
)
from scanloom.inference.sliding_window import HEAD_SLABS, window_layout

FLOAT_BYTES = 4
"""Bytes of a float32, in which scores are summed and scans resampled."""
CLASS_SLABS = 8
"""Slabs of one class that interpolation and the running maximum hold at once."""
SPLINE_PLANES = 48
"""Planes beyond a slab whose weights in a cubic spline are not negligible."""
COMPONENT_SLAB_BYTES = 64 * 1024**2
"""Bytes of a slab in which connected components are searched."""
ALLOCATOR_FACTOR = 1.1
"""Factor for the overhead of allocators: rounding, and blocks kept for reuse."""

SMALLER_SLAB_BYTES = (16 * 1024**2, 4 * 1024**2)
"""Bytes of the smaller slabs; an even smaller slab would nearly always be a single plane."""
MAX_UNFOLDED_VALUES = 20_480
"""Largest number of values per plane (batch, channels, x and y) of an input that is unfolded into
columns on a CPU: torch passes larger inputs to oneDNN."""
CHANNEL_BLOCK = 16
"""Size of oneDNN's blocks of channels: incomplete blocks are padded."""
BASE_PROCESS_BYTES = 784 * 1024**2
"""Interpreter, torch, a small network, compiled kernels, writers and readers: measured with torch
2.13 for CPU in a process that has finished a case."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory in bytes by step, on the host and on a device with its own memory.

    Parameters
    ----------
    host : mapping of str to int
        By step; without interpreter, libraries and earlier allocations.
    device : mapping of str to int
        By step; empty if the device is the host.
    """

    host: Mapping[str, int]
    device: Mapping[str, int] = field(default_factory=dict)

    @property
    def host_peak(self) -> int:
        """Largest memory of any step on the host."""
        return max(self.host.values(), default=0)

    @property
    def device_peak(self) -> int:
        """Largest memory of any step on the device."""
        return max(self.device.values(), default=0)


@dataclass(frozen=True)
class Budget:
    """Amounts of data that are processed at once; the memory fallback reduces them.

    Parameters
    ----------
    windows : int
        Windows in a batch.
    scores : "device" or "host"
        Where scores are summed.
    slab : int
        Bytes of the slabs in which a scan is resampled and scores are yielded.
    """

    windows: int = 1
    scores: Literal["device", "host"] = "device"
    slab: int = SLAB_BYTES


@dataclass(frozen=True)
class _Sizes:
    """Sizes of the arrays that several steps hold, in bytes except for `scan`."""

    scan: int  # number of voxels
    image: int  # the scan on the network grid, float32, all channels
    padded: int  # its padded copy, 0 if the window fits
    open: int  # sums of scores and weights of the planes that windows overlap, all folds
    own: int  # of these, sums that are the network's own scores, not a copy
    plane: int  # scores of one plane
    block: int  # scores that are copied to the device and yielded together
    head: int  # scores that a final layer computes at once
    window: int  # a batch of windows, weights of a window, copies and scores of flips
    maps: int  # label maps, all layers


def estimate_network(
    card: ModelCard,
    plan: NetworkPlan,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    budget: Budget = Budget(),
    stored: int = 2,
) -> MemoryEstimate:
    """Estimate the memory of labelling, without the scan itself, the weights and the libraries.

    Parameters
    ----------
    card : ModelCard
        The model; its weights are not read.
    plan : NetworkPlan
        Scan grid and network grid.
    device : torch.device
        Device of the network; it need not be available.
    dtype : torch.dtype
        Type in which the network calculates.
    budget : Budget
        Amounts of data that are processed at once.
    stored : int
        Bytes per voxel of the scan.

    Returns
    -------
    MemoryEstimate
        For the steps "resample", "network", "restore" and "clean".
    """
    sizes = _sizes(card, plan, dtype, budget)
    largest = largest_box(plan, card.grid)
    size = largest if card.window.size is None else input_size(card.window)
    forward = network_bytes(card.network, size, dtype, budget.windows, card.window.sums_features)
    image = sizes.image + sizes.padded
    # planes between two slabs; a slab that is activated; bounds of the classes by blocks
    yielded = 4 * sizes.plane + 2 * budget.slab + sizes.open // 16 + sizes.head
    if budget.scores == "host":
        yielded += sizes.block
    slab = CPU_SLAB_BYTES if device.type == "cpu" else GPU_SLAB_BYTES
    steps = {
        "resample": _preparation(card, plan, sizes, budget),
        "network": image + sizes.open - sizes.own + forward + yielded + sizes.window,
        "restore": image + sizes.open + yielded + CLASS_SLABS * slab,
    }
    if plan.mode == "area" and card.restore == "scores":
        # Scores of all planes, joined once, and slabs on the source grid
        scores = FLOAT_BYTES * card.n_outputs * math.prod(plan.network.shape)
        steps["network"] += scores
        steps["restore"] += 2 * scores + 3 * AREA_SLAB_BYTES
    clean = _cleaning(card, sizes.maps // card.n_maps)
    decided = 0
    if card.restore == "labels":
        # Labels of all planes, as integers, joined; copied to the host, cleaned and resampled there
        decided = 2 * FLOAT_BYTES * math.prod(plan.network.shape)
        steps["restore"] += 2 * decided
    if device.type == "cpu":
        host = {step: round(n * ALLOCATOR_FACTOR) + sizes.maps for step, n in steps.items()}
        return MemoryEstimate({**host, "clean": sizes.maps + clean})
    on_host, copied = sizes.open if budget.scores == "host" else 0, stored * sizes.scan
    copied += _sorted_on_host(card, plan)
    labels = {"network": sizes.maps + on_host, "restore": sizes.maps + on_host + decided}
    own = {step: round(n * ALLOCATOR_FACTOR) for step, n in steps.items()}
    own["resample"] += stored * sizes.scan
    for step in labels:
        own[step] -= on_host
    return MemoryEstimate({"resample": copied, **labels, "clean": sizes.maps + clean}, own)


@dataclass(frozen=True)
class Placement:
    """Device and precision of a model, as its predictor names them, and windows in a batch."""

    device: str = "cpu"
    precision: str = "float32"
    windows: int = 1


@dataclass(frozen=True)
class CaseEstimate:
    """Bytes that a process holds while it segments a case, and the work of the networks.

    Parameters
    ----------
    host : mapping of str to int
        Bytes of "load", "resample", "network", "restore", "clean", "measure", "write" and
        "readback", scan and label maps included.
    device : mapping of str to int
        Bytes of each step on a device with its own memory.
    base : int
        Memory of the process itself: interpreter, libraries, weights.
    values : int
        Voxels of all windows that pass through the networks; see `window_values`.
    placement : Placement or None
        Device and precision of the networks; None for the smallest plan on a CPU.
    """

    host: Mapping[str, int]
    device: Mapping[str, int]
    base: int
    values: int = 0
    placement: Placement | None = None

    @property
    def peak(self) -> int:
        """Peak memory of the process, in bytes."""
        return self.base + max(self.host.values(), default=0)


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


def estimate_prediction(
    cards: Sequence[ModelCard],
    grid: Grid,
    stored: int,
    placement: Placement | None,
    kept: Sequence[tuple[ModelCard, Grid]],
    *,
    uncertainty: bool,
) -> MemoryEstimate:
    """Estimate the memory of a model, or of the models of an ensemble, which run together.

    Parameters
    ----------
    cards : sequence of ModelCard
        The model, or those of the ensemble.
    grid : Grid
        Grid of the scan, or of the crop of it that they see.
    stored : int
        Bytes of its stored voxels, each.
    placement : Placement or None
        Device and precision; None for the smallest plan on a CPU.
    kept : sequence of (ModelCard, Grid)
        One of the models, and the grid that it sees, for each scan on a network grid that further
        models need: it stays on the device. Not in the smallest plan.
    uncertainty : bool
        Whether maps of uncertainty are requested.
    """
    first, *further = cards
    needs = [_estimate_placed(card, grid, stored, placement or Placement()) for card in cards]
    host = {step: sum(need.host[step] for need in needs) for step in needs[0].host}
    device = {step: sum(need.device[step] for need in needs) for step in needs[0].device}
    images = [*kept, *([(first, grid)] if further else [])] if placement else []
    held = sum(network_image_bytes(card, plan_grid(seen, card.grid)) for card, seen in images)
    if uncertainty:
        seen = grid_for_parts(grid, first)
        held += sum(
            uncertainty_bytes(
                network,
                plan_grid(seen, network.grid),
                len(cards) if further else 1 + len(network.folds),
            )
            for network in first.parts or (first,)
        )
    if device:
        device = {step: count + held for step, count in device.items()}
    else:
        host = {step: count + held for step, count in host.items()}
    return MemoryEstimate(host, device)


def _estimate_placed(
    card: ModelCard, grid: Grid, stored: int, placement: Placement
) -> MemoryEstimate:
    """Estimate the memory of a model with its previous stage, or with its parts."""
    device, dtype = torch.device(placement.device), getattr(torch, placement.precision)
    budget, estimates = Budget(placement.windows), []
    for each in stages(card):
        held, seen = 0, grid_for_parts(grid, each)
        if each.parts:  # the resampled scan stays on the host while parts run
            own, held = _resampled_for_parts(each, grid)
            estimates.append(own)
        for network in each.parts or (each,):
            plan, size = plan_grid(seen, network.grid), FLOAT_BYTES if each.parts else stored
            need = estimate_network(network, plan, device, dtype, budget, size)
            host = {step: n + held for step, n in need.host.items()}
            estimates.append(MemoryEstimate(host, need.device))
    # Networks run one after another: the largest of each step
    return MemoryEstimate(
        _largest(estimate.host for estimate in estimates),
        _largest(estimate.device for estimate in estimates),
    )


def _largest(estimates: Iterable[Mapping[str, int]]) -> dict[str, int]:
    largest = dict[str, int]()
    for steps in estimates:
        largest.update({step: max(n, largest.get(step, 0)) for step, n in steps.items()})
    return largest


def _resampled_for_parts(card: ModelCard, grid: Grid) -> tuple[MemoryEstimate, int]:
    """Return the memory of a model with parts without them, and what it holds while they run.

    It holds the resampled scan, and the label map on that grid.
    """
    plan = plan_grid(grid, card.grid)
    voxels, source = math.prod(plan.network.shape), math.prod(grid.shape)
    scan, labels = FLOAT_BYTES * voxels * len(card.channels), card.label_bytes * voxels
    steps = {
        "resample": scan + len(card.channels) * _resampling(card, plan, Budget()),
        "restore": labels + 3 * card.label_bytes * source,
        "clean": labels + card.label_bytes * source + _cleaning(card, labels),
    }
    return MemoryEstimate(steps), scan + labels


def network_image_bytes(card: ModelCard, plan: NetworkPlan) -> int:
    """Return the bytes of a scan on the network grid, all channels."""
    return FLOAT_BYTES * len(card.channels) * math.prod(plan.network.shape)


def uncertainty_bytes(card: ModelCard, plan: NetworkPlan, members: int) -> int:
    """Return the bytes of maps of uncertainty, and of the scores of `members` networks for them."""
    axis = plan.network_axis(plan.lead)
    sizes = [n for x, n in enumerate(plan.network.shape) if x != axis]
    plane = FLOAT_BYTES * card.n_outputs * math.prod(sizes)
    planes = (plane, plan.network.shape[axis])
    maps, work = uncertainty_map_bytes(math.prod(plan.source.shape), planes, members)
    block = min(HEAD_SLABS * max(SLAB_BYTES, plane), math.prod(planes))
    kept = members * block if members > 1 else 0
    return maps + work + kept


def _sizes(card: ModelCard, plan: NetworkPlan, dtype: torch.dtype, budget: Budget) -> _Sizes:
    axis, window = plan.network_axis(plan.lead), card.window
    largest = largest_box(plan, card.grid)
    layout = window_layout(window, largest, axis, budget.windows)
    channels, folds = card.n_inputs, 1 + len(card.folds)
    sum_bytes = FLOAT_BYTES if window.sums == "float32" else 2
    whole, voxels, padded = map(math.prod, (plan.network.shape, largest, layout.padded))
    plane_voxels = padded // layout.padded[axis]
    # a smaller box is yielded in planes of the whole grid
    yielded = max(plane_voxels, whole // plan.network.shape[axis])
    last = last_layer(card.network, input_size(window)) if window.sums_features else None
    features = last[1] if last else card.n_outputs
    plane, summed = (sum_bytes * plane_voxels * n for n in (card.n_outputs, features))
    head = min(max(HEAD_SLABS * budget.slab, plane), layout.planes * plane)
    block = min(max(budget.slab, summed), layout.planes * summed)
    values = math.prod(layout.size) * budget.windows
    score_bytes = FLOAT_BYTES if dtype is torch.bfloat16 else dtype.itemsize
    own = layout.count == 1 and window.blending == "constant" and score_bytes == sum_bytes
    own &= budget.scores == "device"
    flips = 2 * values * score_bytes * (features + channels) if window.mirror else 0
    shared = math.prod(layout.size) * score_bytes * features if layout.count > 2 else 0
    return _Sizes(
        scan=math.prod(plan.source.shape),
        image=FLOAT_BYTES * len(card.channels) * max(whole, voxels),
        padded=FLOAT_BYTES * channels * padded if padded > voxels else 0,
        open=folds * layout.planes * (summed + sum_bytes * plane_voxels),
        own=folds * layout.planes * summed if own else 0,
        plane=sum_bytes * yielded * card.n_outputs,
        block=block * min(folds, 2),
        head=head * min(folds, 2) if last else 0,
        window=FLOAT_BYTES * math.prod(layout.size)
        + channels * values * (FLOAT_BYTES + dtype.itemsize)
        + flips
        + shared,
        maps=math.prod(plan.source.shape) * card.n_maps * card.label_bytes,
    )


def _preparation(card: ModelCard, plan: NetworkPlan, sizes: _Sizes, budget: Budget) -> int:
    """Return the bytes of resampling and intensity steps; several channels are copied once."""
    channels = card.n_inputs
    per_channel = sizes.image // channels
    before = sizes.image - per_channel  # the channels that are resampled already
    crop = card.grid.crop
    cut = bool(card.grid.fits) or (crop is not None and crop.padded)  # into a further copy
    copies = max(_copies(card.after), 1 + cut)
    steps = max(_resampling(card, plan, budget), per_channel * copies) + before
    return max(steps, 2 * sizes.image) if channels > 1 else steps


def _resampling(card: ModelCard, plan: NetworkPlan, budget: Budget) -> int:
    """Return the bytes of the resampling: the result, and slabs of source and network planes."""
    voxels, source = math.prod(plan.network.shape), math.prod(plan.source.shape)
    result = FLOAT_BYTES * voxels
    plane = FLOAT_BYTES * source // plan.source.shape[plan.lead]
    ratio = plan.source.shape[plan.lead] / plan.network.shape[plan.network_axis(plan.lead)]
    planes = 1 if any(plan.lean) else max(1, budget.slab // (2 * plane))
    planes = min(planes, plan.network.shape[plan.network_axis(plan.lead)])
    steps = max(((*channel.steps, *card.before) for channel in card.channels), key=_copies)
    before = FLOAT_BYTES * source * _copies(steps) if steps else 0
    if plan.mode == "cubic":  # in float64, from the planes that a spline reaches
        taken = min(round(planes * ratio) + SPLINE_PLANES, plan.source.shape[plan.lead])
        return result + (3 * taken + 8 * planes) * plane + before
    return result + round(planes * plane * (3 + ratio)) + 2 * plane + before


def _copies(steps: tuple[IntensityStep, ...]) -> int:
    """Return the number of float32 copies of an image that the intensity steps hold at once."""
    copies = 1
    for n, step in enumerate(steps):
        simple = isinstance(step, ScaleRange | Clip | Truncate)  # others copy once more, and mask
        masked = isinstance(step, Normalize) and (step.nonzero or step.filled)
        copies = max(copies, (2 if simple else 4) + (n > 0) + masked)
    return copies


def _sorted_on_host(card: ModelCard, plan: NetworkPlan) -> int:
    """Return the bytes of the copies of which percentiles are taken, with a GPU too."""
    sorted_voxels = [0]
    for steps, grid in (
        *(((*channel.steps, *card.before), plan.source) for channel in card.channels),
        (card.after, plan.network),
    ):
        if any(isinstance(step, ScalePercentiles) for step in steps):
            sorted_voxels.append(math.prod(grid.shape))
    return 2 * FLOAT_BYTES * max(sorted_voxels)


def _cleaning(card: ModelCard, map_bytes: int) -> int:
    """Return the bytes of the card's cleaning, without the label maps themselves."""
    numbers = {s.number for s in card.structures}
    gaps = isinstance(card.decision, Argmax) and len(numbers) < max(numbers)
    fills = any(isinstance(rule, FillHoles) for rule in card.cleaning)  # what is not the structure
    copies = bool(card.cleaning) + gaps + 3 * fills
    return map_bytes * copies + (COMPONENT_SLAB_BYTES if card.cleaning else 0)


def window_values(card: ModelCard, grid: Grid) -> int:
    """Return the number of voxels that networks process for a scan.

    Windows of air are included; a window counts once for each network and each flip. `grid` is that
    of the scan or of a crop of it: the crop of a previous stage is not known in advance, and not
    taken into account.
    """
    values = 0
    for each in stages(card):
        seen = grid_for_parts(grid, each)
        for network in each.parts or (each,):
            plan = plan_grid(seen, network.grid)
            shape = largest_box(plan, network.grid)
            layout = window_layout(network.window, shape, plan.network_axis(plan.lead))
            passes = (1 + len(network.folds)) * (1 << len(network.window.mirror))
            values += layout.count * math.prod(layout.size) * passes
    return values


@dataclass(frozen=True)
class MemoryLimits:
    """Memory that may be allocated.

    Parameters
    ----------
    host, device : int or None
        Bytes in addition to those already allocated; None for no limit.
    """

    host: int | None = None
    device: int | None = None

    def holds(self, need: MemoryEstimate) -> bool:
        """Return whether an estimate fits."""
        return not (
            (self.host is not None and need.host_peak > self.host)
            or (self.device is not None and need.device_peak > self.device)
        )


@dataclass(frozen=True)
class MemoryPlan:
    """A memory plan: device, numeric type and budget.

    `change` describes the difference from the previous plan; empty for the first.
    """

    device: torch.device
    dtype: torch.dtype
    budget: Budget
    change: str = ""


def fallback_plans(
    device: torch.device,
    dtype: torch.dtype,
    budget: Budget,
    fallbacks: Sequence[torch.device] = (),
) -> Iterator[MemoryPlan]:
    """Yield all memory plans, from the requested one to the smallest.

    `fallbacks` are the devices to try last; empty if the device was requested by name.
    """
    yield (memory_plan := MemoryPlan(device, dtype, budget))
    while memory_plan.budget.windows > 1:
        fewer = replace(memory_plan.budget, windows=memory_plan.budget.windows // 2)
        yield (memory_plan := replace(memory_plan, budget=fewer, change=f"windows {fewer.windows}"))
    yield from _smaller_plans(memory_plan)
    for fallback in fallbacks:
        first = MemoryPlan(fallback, torch.float32, Budget(), f"device {fallback}")
        yield first
        yield from _smaller_plans(first)


def _smaller_plans(memory_plan: MemoryPlan) -> Iterator[MemoryPlan]:
    """Yield the smaller plans on the same device, for one window at a time."""
    if memory_plan.device.type != "cpu":
        memory_plan = replace(
            memory_plan, budget=replace(memory_plan.budget, scores="host"), change="scores on host"
        )
        yield memory_plan
    for slab in SMALLER_SLAB_BYTES:
        change = f"slab {slab // 1024**2} MiB"
        yield replace(memory_plan, budget=replace(memory_plan.budget, slab=slab), change=change)


def first_fitting(
    plans: Iterator[MemoryPlan],
    card: ModelCard,
    plan: NetworkPlan,
    stored: int,
    limits: MemoryLimits,
) -> tuple[list[MemoryPlan], list[str]]:
    """Return the plans from the first that fits on, and the changes that lead to it.

    Parameters
    ----------
    plans : iterator of MemoryPlan
        Plans in the order of `fallback_plans`.
    card, plan, stored
        As in `estimate_network`.
    limits : MemoryLimits
        Memory that may be allocated.

    Raises
    ------
    ScanError
        OUT_OF_MEMORY, with the figures, if no plan fits.
    """
    candidates, changes = list(plans), []
    for n, memory_plan in enumerate(candidates):
        changes += [memory_plan.change] if memory_plan.change else []
        need = estimate_network(
            card, plan, memory_plan.device, memory_plan.dtype, memory_plan.budget, stored
        )
        if limits.holds(need):
            return candidates[n:], changes
    where, needed, left = "", need.host_peak, limits.host or 0
    if limits.device is not None and need.device_peak > limits.device:
        where, needed, left = f" on {memory_plan.device}", need.device_peak, limits.device
    detail = f"{card.name} needs {format_bytes(needed)} more{where}"
    raise ScanError(Reason.OUT_OF_MEMORY, f"{detail}, {format_bytes(left)} are left")


def room(device: torch.device, limit: int | None = None, reserved: int = 0) -> MemoryLimits:
    """Return the memory that may still be allocated.

    It depends on the machine's memory, never on that of other processes: the same machine must give
    the same bytes.

    Parameters
    ----------
    device : torch.device
        Device of the network.
    limit : int, optional
        Bytes that the whole process may use; None for the machine's memory.
    reserved : int
        Bytes of the device that stay free.
    """
    total_host = machine_memory() if limit is None else limit
    host = None if total_host is None else max(0, total_host - resident())
    if device.type != "cuda":
        return MemoryLimits(None if host is None else max(0, host - reserved))
    free = device_memory(device) - torch.cuda.memory_allocated(device) - reserved
    return MemoryLimits(host, max(0, free))


def resident() -> int:
    """Return the resident memory of this process in bytes; its peak if only that is known."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


def machine_memory() -> int | None:
    """Return the memory of the machine, or of a container or job, in bytes; None if unknown."""
    limits = [limit for limit, _ in memory_limits()]
    with suppress(ValueError, OSError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def network_bytes(
    spec: NetworkSpec,
    size: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    windows: int = 1,
    detached: bool = True,
) -> int:
    """Return the peak memory of a network's values in one forward pass.

    Parameters
    ----------
    spec : NetworkSpec
        Class and arguments.
    size : (x, y, z) or (x, y)
        Size of the network's input.
    dtype : torch.dtype
        Type in which the network calculates.
    windows : int
        Windows in a batch.
    detached : bool
        Whether the final layer is detached where possible.

    Returns
    -------
    int
        Bytes, including the scores, without input and weights. `VALUES_PER_VOXEL` per voxel for a
        network that cannot run on the meta device.
    """
    arguments = json.dumps(dict(spec.args), sort_keys=True)
    if dtype is torch.bfloat16:
        return _window_bytes(spec.name, arguments, size, detached, ends=True) * windows
    window_bytes = _window_bytes(spec.name, arguments, size, detached, ends=False)
    return window_bytes * windows * dtype.itemsize // FLOAT_BYTES


@lru_cache(maxsize=64)
def _window_bytes(
    name: str, arguments: str, size: tuple[int, ...], detached: bool, *, ends: bool
) -> int:
    """Return the bytes of one window in float32, or in bfloat16 with `MixedBfloat16`.

    `detached` is whether the final layer is detached where possible.
    """
    spec = NetworkSpec(name, json.loads(arguments))
    channels = int(spec.args.get("in_channels", 1))
    try:
        with torch.device("meta"):
            with meta_dispatch():
                network = build_network(spec)
            last = last_layer(spec, size) if detached else None
            if last is not None:
                replace_with_identity(network, last[0])
        if ends:
            with meta_dispatch():
                network = MixedBfloat16(network, channels, size)
        window = torch.empty((1, channels, *size), device="meta")
        with torch.inference_mode(), _LiveMemoryMode() as live:
            network(window)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return math.prod(size) * VALUES_PER_VOXEL * (FLOAT_BYTES // 2 if ends else FLOAT_BYTES)
    return int(live.peak)


class _LiveMemory(MetaShapeRules):
    """Counts the bytes of all live tensors; `peak` is their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, int] = {}

    def note(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self._watch(value.untyped_storage())
        self.peak = max(self.peak, self.live + _workspace(str(func), args, out))

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._seen:
            self._seen[key] = storage.nbytes()
            self.live += self._seen[key]
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._seen.pop(key)


class _LiveMemoryMode(_LiveMemory, TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Counts the memory of all operations of torch in the block."""


def _workspace(operation: str, args: tuple[Any, ...], out: Any) -> int:
    """Return the temporary memory of a convolution (measured with torch 2.13 on a CPU).

    oneDNN converts input and output to blocks of channels; small inputs are unfolded to columns.
    """
    if not operation.startswith("aten.conv"):
        return 0
    image, weight = args[0], args[1]
    if "transpose" in operation or (len(args) > 6 and args[6] is True):
        return 2 * int(out.nbytes)
    if math.prod(image.shape[:4]) <= MAX_UNFOLDED_VALUES:
        columns = math.prod(weight.shape[1:]) * math.prod(out.shape[2:])
        return int(columns * out.element_size())
    padding = out.nbytes * (-out.shape[1] % CHANNEL_BLOCK) // out.shape[1]
    return int(image.nbytes + padding)
