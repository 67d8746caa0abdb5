"""Estimates the memory and the work of the network's part of a case before anything is allocated.

The estimate follows the code step by step, from the shapes of scan, network grid and window. The
memory of the network itself is measured on the meta device. Interpreter and libraries are not
included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from scanloom.cards.card import Argmax, ModelCard
from scanloom.cards.intensity import Clip, IntensityStep, Normalize, ScaleRange, Truncate
from scanloom.core import Grid
from scanloom.inference.geometry import NetworkPlan, grid_for_parts, plan_grid
from scanloom.inference.network.layers import input_size, last_layer
from scanloom.inference.network.memory import network_bytes
from scanloom.inference.resampling.crop import largest_box
from scanloom.inference.resampling.resample import SLAB_BYTES
from scanloom.inference.restore.restorers import AREA_SLAB_BYTES, CPU_SLAB_BYTES, GPU_SLAB_BYTES
from scanloom.inference.restore.uncertainty import uncertainty_bytes as restorer_bytes
from scanloom.inference.sliding_window import HEAD_SLABS
from scanloom.inference.windows import window_layout

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

    def __post_init__(self) -> None:
        if any(n < 0 for n in (*self.host.values(), *self.device.values())):
            raise ValueError("memory must not be negative")

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
    scores: str = "device"
    slab: int = SLAB_BYTES

    def __post_init__(self) -> None:
        if self.windows < 1 or self.slab < 1 or self.scores not in ("device", "host"):
            raise ValueError(f"invalid budget: {self}")


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
    budget: Budget | None = None,
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
    budget : Budget, optional
        Amounts of data that are processed at once.
    stored : int
        Bytes per voxel of the scan.

    Returns
    -------
    MemoryEstimate
        For the steps "resample", "network", "restore" and "clean".
    """
    budget = budget or Budget()
    sizes = _sizes(card, plan, dtype, budget)
    largest = largest_box(plan, card.grid.crop)
    size = largest if card.window.size is None else input_size(card.window)
    forward = network_bytes(card.network, size, dtype, budget.windows, card.window.sums)
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
    if plan.mode == "area":  # scores of all planes, joined once, and slabs on the source grid
        scores = FLOAT_BYTES * card.n_outputs * math.prod(plan.network.shape)
        steps["network"] += scores
        steps["restore"] += 2 * scores + 3 * AREA_SLAB_BYTES
    clean = _cleaning(card, sizes.maps // card.n_maps)
    if card.restore == "labels":
        one = sizes.image // card.n_inputs
        steps["restore"] += one * 4  # labels as float64 during nearest neighbour
    if device.type == "cpu":
        host = {step: round(n * ALLOCATOR_FACTOR) + sizes.maps for step, n in steps.items()}
        return MemoryEstimate({**host, "clean": sizes.maps + clean})
    return _on_own_memory(steps, sizes, (clean, stored), budget)


def estimate_placed(
    card: ModelCard, grid: Grid, stored: int, where: tuple[str, str], windows: int
) -> MemoryEstimate:
    """Estimate as `estimate_network` does, for callers that do not import torch.

    Parameters
    ----------
    card, grid, stored
        The model, the scan's grid, and the bytes per stored voxel.
    where : (device, precision)
        Such as ("cuda:0", "float16").
    windows : int
        Windows in a batch.
    """
    stage = []
    if card.stage is not None:
        stage.append(estimate_placed(card.stage.card, grid, stored, where, windows))
    if card.parts:
        own, held = _resampled_for_parts(card, grid)
        inner = grid_for_parts(grid, card)
        parts = [estimate_placed(part, inner, FLOAT_BYTES, where, windows) for part in card.parts]
        return _largest([*stage, own, *(_with_held(part, held) for part in parts)])
    device, precision = where
    plan, dtype = plan_grid(grid, card.grid), getattr(torch, precision)
    network = estimate_network(card, plan, torch.device(device), dtype, Budget(windows), stored)
    return _largest([*stage, network])


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


def _with_held(estimate: MemoryEstimate, held: int) -> MemoryEstimate:
    """Return an estimate while further arrays are held on the host."""
    return replace(estimate, host={step: n + held for step, n in estimate.host.items()})


def _largest(estimates: Sequence[MemoryEstimate]) -> MemoryEstimate:
    """Return the largest memory by step of networks that run one after another."""
    host, device = dict[str, int](), dict[str, int]()
    for estimate in estimates:
        for known, found in ((host, estimate.host), (device, estimate.device)):
            known.update({step: max(n, known.get(step, 0)) for step, n in found.items()})
    return MemoryEstimate(host, device)


def _on_own_memory(
    steps: Mapping[str, int], sizes: _Sizes, scan: tuple[int, int], budget: Budget
) -> MemoryEstimate:
    """Return the estimate for a device with its own memory.

    `scan` are the bytes of the cleaning, and per stored voxel.
    """
    on_host = sizes.open if budget.scores == "host" else 0
    clean, stored = scan
    copied = stored * sizes.scan
    host = {
        "resample": copied,
        "network": sizes.maps + on_host,
        "restore": sizes.maps + on_host,
        "clean": sizes.maps + clean,
    }
    device = {step: round(n * ALLOCATOR_FACTOR) for step, n in steps.items()}
    device["resample"] += copied
    for step in ("network", "restore"):
        device[step] -= on_host
    return MemoryEstimate(host, device)


def network_image_bytes(card: ModelCard, plan: NetworkPlan) -> int:
    """Return the bytes of a scan on the network grid, all channels."""
    return FLOAT_BYTES * len(card.channels) * math.prod(plan.network.shape)


def shared_image_bytes(card: ModelCard, grid: Grid) -> int:
    """Return the bytes of a scan on the network grid, for callers that do not import torch."""
    return network_image_bytes(card, plan_grid(grid, card.grid))


def uncertainty_bytes(card: ModelCard, plan: NetworkPlan, members: int) -> int:
    """Return the bytes of maps of uncertainty, and of the scores of `members` networks for them."""
    axis = plan.network_axis(plan.lead)
    sizes = [n for x, n in enumerate(plan.network.shape) if x != axis]
    plane = FLOAT_BYTES * card.n_outputs * math.prod(sizes)
    planes = (plane, plan.network.shape[axis])
    maps, work = restorer_bytes(math.prod(plan.source.shape), planes, members)
    block = min(HEAD_SLABS * max(SLAB_BYTES, plane), math.prod(planes))
    kept = members * block if members > 1 else 0
    return maps + work + kept


def uncertainty_bytes_of(card: ModelCard, grid: Grid, members: int) -> int:
    """Return the bytes as `uncertainty_bytes`, for callers that do not import torch."""
    inner = grid_for_parts(grid, card) if card.parts else grid
    return sum(
        uncertainty_bytes(each, plan_grid(inner, each.grid), 1 + len(each.folds))
        for each in card.parts
    ) or uncertainty_bytes(card, plan_grid(grid, card.grid), members)


def _sizes(card: ModelCard, plan: NetworkPlan, dtype: torch.dtype, budget: Budget) -> _Sizes:
    axis, window = plan.network_axis(plan.lead), card.window
    layout = window_layout(window, largest_box(plan, card.grid.crop), axis, budget.windows)
    channels, folds = card.n_inputs, 1 + len(card.folds)
    sum_bytes = FLOAT_BYTES if window.sums == "float32" else 2
    voxels, padded = math.prod(plan.network.shape), math.prod(layout.padded)
    plane_voxels = padded // layout.padded[axis]
    last = last_layer(card.network, input_size(window)) if window.sums == "float32" else None
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
        image=network_image_bytes(card, plan),
        padded=FLOAT_BYTES * channels * padded if padded > voxels else 0,
        open=folds * layout.planes * (summed + sum_bytes * plane_voxels),
        own=folds * layout.planes * summed if own else 0,
        plane=plane,
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
    one = sizes.image // channels
    before = sizes.image - one  # the channels that are resampled already
    steps = max(_resampling(card, plan, budget), one * _copies(card.after)) + before
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


def _cleaning(card: ModelCard, map_bytes: int) -> int:
    """Return the bytes of the card's cleaning, without the label maps themselves."""
    numbers = {s.number for s in card.structures}
    gaps = isinstance(card.decision, Argmax) and len(numbers) < max(numbers)
    return map_bytes * (bool(card.cleaning) + gaps) + (COMPONENT_SLAB_BYTES if card.cleaning else 0)


def window_values(card: ModelCard, grid: Grid) -> int:
    """Return the number of voxels that networks process for a scan.

    Windows of air are included; a window counts once for each network and each flip. A crop to the
    structures of another model, which is not known beforehand, is not taken into account.
    """
    if card.stage is not None:
        return window_values(card.stage.card, grid) + window_values(replace(card, stage=None), grid)
    if card.parts:
        inner = grid_for_parts(grid, card)
        return sum(window_values(part, inner) for part in card.parts)
    plan = plan_grid(grid, card.grid)
    shape = largest_box(plan, card.grid.crop)
    layout = window_layout(card.window, shape, plan.network_axis(plan.lead))
    passes = (1 + len(card.folds)) * (1 << len(card.window.mirror))
    return layout.count * math.prod(layout.size) * passes
