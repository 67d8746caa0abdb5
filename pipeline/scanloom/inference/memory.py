"""How much memory the network's part of a case takes, known before anything is allocated.

The figures follow the code step by step: what a step holds at once, from the shapes of scan,
network grid and window. What the network itself needs comes from a run on the meta device, which
knows shapes and allocates nothing. Interpreter and libraries are not counted here.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scanloom.cards.card import Argmax, IntensityStep, ModelCard, NetworkSpec, ScaleRange
from scanloom.core import Grid
from scanloom.inference.device import VALUES_PER_VOXEL
from scanloom.inference.ends import Ends
from scanloom.inference.geometry import NetworkPlan, Shape, plan_grid
from scanloom.inference.head import PROBE, last_layer, leave_out
from scanloom.inference.networks import build_network
from scanloom.inference.resample import SLAB_BYTES
from scanloom.inference.restore import CPU_SLAB, GPU_SLAB, label_type
from scanloom.inference.shapes import Shortcuts
from scanloom.inference.windows import HEAD_SLABS, window_size

FLOAT = 4
"""Bytes of a float32, in which scores are summed and scans resampled."""
UNFOLDED = 20_480
"""Inputs of so many values a plane (batch, channels, x and y) are unfolded into columns on a CPU:
torch gives larger ones to oneDNN."""
BLOCK = 16
"""oneDNN's blocks of channels: fewer are filled up."""
CLASS_SLABS = 8
"""Slabs of one class that interpolation and the running maximum hold at once."""
PARTS = 64 * 1024**2
"""Of a slab whose connected parts are sought."""
ALLOCATOR = 1.1
"""What allocators hold beyond what was asked for: rounding and blocks kept for the next use."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that are held at once, by step, on the host and on a device of its own memory.

    Parameters
    ----------
    host : mapping of str to int
        By step; without interpreter, libraries and what was held before.
    device : mapping of str to int
        By step; empty where the device is the host.
    """

    host: Mapping[str, int]
    device: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(n < 0 for n in (*self.host.values(), *self.device.values())):
            raise ValueError("memory is not negative")

    @property
    def host_peak(self) -> int:
        """The most that any step holds on the host."""
        return max(self.host.values(), default=0)

    @property
    def device_peak(self) -> int:
        """The most that any step holds on the device."""
        return max(self.device.values(), default=0)


@dataclass(frozen=True)
class Budget:
    """How much is done at once: the ladder goes down its values.

    Parameters
    ----------
    windows : int
        Through the network at once.
    scores : "device" or "host"
        Where the scores of the planes that windows still touch are summed.
    slab : int
        Bytes of the slabs in which a scan is resampled and scores are handed on.
    """

    windows: int = 1
    scores: str = "device"
    slab: int = SLAB_BYTES

    def __post_init__(self) -> None:
        if self.windows < 1 or self.slab < 1 or self.scores not in ("device", "host"):
            raise ValueError(f"no such budget: {self}")


@dataclass(frozen=True)
class _Sizes:
    """Sizes of the arrays that several steps hold, in bytes but for the scan."""

    scan: int  # voxels
    image: int  # network-grid copy, float32
    padded: int  # its enlarged copy, 0 where the window fits
    open: int  # sums of scores and weights of the planes that windows touch
    plane: int  # scores of one plane
    block: int  # scores that are handed on together
    made: int  # of which a head makes so many at once
    window: int  # values of the windows that go in together
    maps: int  # label maps, all layers


def estimate_network(
    card: ModelCard,
    plan: NetworkPlan,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    budget: Budget | None = None,
    stored: int = 2,
) -> MemoryEstimate:
    """Estimate what labelling takes beside the scan itself, the weights and the libraries.

    Parameters
    ----------
    card : ModelCard
        The model; its weights are not read.
    plan : NetworkPlan
        Scan grid and network grid.
    device : torch.device
        Where it would run; it need not be there.
    dtype : torch.dtype
        In which the network would calculate.
    budget : Budget, optional
        How much would be done at once.
    stored : int
        Bytes of a voxel of the scan.

    Returns
    -------
    MemoryEstimate
        For the steps "resample", "network", "restore" and "clean".
    """
    budget = budget or Budget()
    sizes = _sizes(card, plan, dtype, budget)
    forward = network_bytes(card.network, _window(card, plan), dtype, budget.windows)
    image = sizes.image + sizes.padded
    # planes between two blocks; what is activated at a time; bounds of the classes by blocks
    handed = 4 * sizes.plane + 2 * budget.slab + sizes.open // 16 + sizes.made
    if budget.scores == "host":
        handed += sizes.block
    slab = CPU_SLAB if device.type == "cpu" else GPU_SLAB
    steps = {
        "resample": max(_resampling(card, plan, budget), sizes.image * _copies(card.after)),
        "network": image + sizes.open + forward + handed + sizes.window,
        "restore": image + sizes.open + handed + CLASS_SLABS * slab,
    }
    clean = _cleaning(card, sizes.maps // _maps(card))
    if card.restore == "labels":
        steps["restore"] += sizes.image * 4  # labels as float64 while neighbours are taken
    if device.type == "cpu":
        host = {step: round(n * ALLOCATOR) + sizes.maps for step, n in steps.items()}
        return MemoryEstimate({**host, "clean": sizes.maps + clean})
    return _apart(steps, sizes, (clean, stored), budget)


def estimate_placed(
    card: ModelCard, grid: Grid, stored: int, where: tuple[str, str], windows: int
) -> MemoryEstimate:
    """Estimate as `estimate_network` does, for those who don't know torch.

    Parameters
    ----------
    card, grid, stored
        The model, the scan's grid, and the bytes of a stored voxel.
    where : (device, precision)
        Such as ("cuda:0", "float16").
    windows : int
        How many go through the network at once.
    """
    device, precision = where
    plan, dtype = plan_grid(grid, card.grid), getattr(torch, precision)
    return estimate_network(card, plan, torch.device(device), dtype, Budget(windows), stored)


def _apart(
    steps: Mapping[str, int], sizes: _Sizes, more: tuple[int, int], budget: Budget
) -> MemoryEstimate:
    """Return the estimate for a device with a memory of its own."""
    on_host = sizes.open if budget.scores == "host" else 0
    clean, stored = more
    moved = stored * sizes.scan
    host = {
        "resample": moved,
        "network": sizes.maps + on_host,
        "restore": sizes.maps + on_host,
        "clean": sizes.maps + clean,
    }
    device = {step: round(n * ALLOCATOR) for step, n in steps.items()}
    device["resample"] += moved
    for step in ("network", "restore"):
        device[step] -= on_host
    return MemoryEstimate(host, device)


def network_bytes(
    spec: NetworkSpec, size: Shape, dtype: torch.dtype = torch.float32, windows: int = 1
) -> int:
    """Return the most that a network's values take at once, in one forward pass.

    Parameters
    ----------
    spec : NetworkSpec
        Class and arguments.
    size : (x, y, z)
        Of a window.
    dtype : torch.dtype
        In which it calculates.
    windows : int
        How many at once.

    Returns
    -------
    int
        Bytes, the scores included, input and weights not. For a network that can't run without
        numbers: `VALUES_PER_VOXEL` for each voxel.
    """
    arguments = json.dumps(dict(spec.args), sort_keys=True)
    if dtype is torch.bfloat16:
        return _one_window(spec.name, arguments, size, ends=True) * windows
    one = _one_window(spec.name, arguments, size, ends=False)
    return one * windows * dtype.itemsize // FLOAT


@lru_cache(maxsize=64)
def _one_window(name: str, arguments: str, size: Shape, *, ends: bool) -> int:
    """Return the bytes of one window in float32, or in bfloat16 with `Ends`."""
    spec, channels = NetworkSpec(name, json.loads(arguments)), _channels(arguments)
    try:
        with torch.device("meta"):
            network = build_network(spec)
            last = last_layer(spec, size)
            if last is not None:
                leave_out(network, last[0])
            network = Ends(network, channels, size) if ends else network
        window = torch.empty((1, channels, *size), device="meta")
        with torch.inference_mode(), _Live() as live:
            network(window)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return math.prod(size) * VALUES_PER_VOXEL * (FLOAT // 2 if ends else FLOAT)
    return int(live.peak)


def _channels(arguments: str) -> int:
    """Return how many channels a network takes."""
    return int(json.loads(arguments).get("in_channels", 1))


class _Count(Shortcuts):
    """Counts the bytes of all tensors that are alive; `peak` is the most there were."""

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
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self._seen.pop(key)


class _Live(_Count, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A `_Count` of all that torch does in the block."""


def _workspace(operation: str, args: tuple[Any, ...], out: Any) -> int:
    """Return what a convolution holds beside its input and output (measured on torch 2.13, CPU).

    oneDNN turns input and output to blocks of channels; small inputs are unfolded to columns.
    """
    if not operation.startswith("aten.conv"):
        return 0
    image, weight = args[0], args[1]
    if "transpose" in operation or (len(args) > 6 and args[6] is True):
        return 2 * int(out.nbytes)
    if math.prod(image.shape[:4]) <= UNFOLDED:
        columns = math.prod(weight.shape[1:]) * math.prod(out.shape[2:])
        return int(columns * out.element_size())
    filled = out.nbytes * (-out.shape[1] % BLOCK) // out.shape[1]
    return int(image.nbytes + filled)


def _sizes(card: ModelCard, plan: NetworkPlan, dtype: torch.dtype, budget: Budget) -> _Sizes:
    axis, size = plan.network_axis(plan.lead), _window(card, plan)
    padded = [max(n, roi) for n, roi in zip(plan.network.shape, size, strict=True)]
    voxels, window = math.prod(plan.network.shape), math.prod(size)
    beside = math.prod(n for x, n in enumerate(padded) if x != axis)
    plane = FLOAT * beside * card.n_outputs
    last = last_layer(card.network, card.window.size or PROBE)
    summed = FLOAT * beside * (last[1] if last else card.n_outputs)
    made = min(max(HEAD_SLABS * budget.slab, plane), size[axis] * plane)
    values = window * budget.windows
    return _Sizes(
        scan=math.prod(plan.source.shape),
        image=FLOAT * voxels,
        padded=FLOAT * math.prod(padded) if math.prod(padded) > voxels else 0,
        open=size[axis] * (summed + FLOAT * beside),
        plane=plane,
        block=min(max(budget.slab, summed), size[axis] * summed),
        made=made if last else 0,
        window=FLOAT * window + values * (FLOAT + dtype.itemsize),
        maps=math.prod(plan.source.shape) * _maps(card) * _label_bytes(card),
    )


def _resampling(card: ModelCard, plan: NetworkPlan, budget: Budget) -> int:
    """Return what the resampling holds: the result, and slabs of source and network planes."""
    voxels, source = math.prod(plan.network.shape), math.prod(plan.source.shape)
    result = FLOAT * voxels
    plane = FLOAT * source // plan.source.shape[plan.lead]
    ratio = plan.source.shape[plan.lead] / plan.network.shape[plan.network_axis(plan.lead)]
    planes = 1 if any(plan.lean) else max(1, budget.slab // (2 * plane))
    slab = min(planes, plan.network.shape[plan.network_axis(plan.lead)]) * plane
    changed = FLOAT * source * _copies(card.before) if card.before else 0
    return result + round(slab * (3 + ratio)) + 2 * plane + changed


def _copies(steps: tuple[IntensityStep, ...]) -> int:
    """Return how many float32 copies of an image the intensity steps hold at once."""
    most = 1
    for n, step in enumerate(steps):
        plain = isinstance(step, ScaleRange)  # the others make one more, and masks
        most = max(most, (2 if plain else 4) + (n > 0) + getattr(step, "nonzero", False))
    return most


def _cleaning(card: ModelCard, one_map: int) -> int:
    """Return what the card's cleaning holds beside the label maps."""
    numbers = {s.number for s in card.structures}
    holes = isinstance(card.decision, Argmax) and len(numbers) < max(numbers)
    return one_map * (bool(card.cleaning) + holes) + (PARTS if card.cleaning else 0)


def _window(card: ModelCard, plan: NetworkPlan) -> Shape:
    return window_size(card.window, plan.network.shape)


def _maps(card: ModelCard) -> int:
    return 1 if isinstance(card.decision, Argmax) else card.n_outputs


def _label_bytes(card: ModelCard) -> int:
    return np.dtype(label_type(card.decision, card.n_outputs)).itemsize
