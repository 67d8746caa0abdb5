"""Out-of-memory fallback: a sequence of memory plans, each smaller than the previous one.

The plans use fewer windows at once, scores in host memory, smaller slabs, then the next device. The
first plan that fits by the estimate is chosen before anything is allocated; the plans after it are
used if the estimate was too low.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from scanloom.cards.card import ModelCard
from scanloom.core import Reason, ScanError, format_bytes
from scanloom.inference.geometry import NetworkPlan
from scanloom.inference.memory_estimate import Budget, MemoryEstimate, estimate_network

SMALLER_SLAB_BYTES = (16 * 1024**2, 4 * 1024**2)
"""Bytes of the smaller slabs; an even smaller slab would nearly always be a single plane."""


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
    least = estimate_network(
        card, plan, candidates[-1].device, candidates[-1].dtype, candidates[-1].budget, stored
    )
    detail = f"{card.name} needs {format_bytes(least.host_peak)} more"
    raise ScanError(Reason.OUT_OF_MEMORY, f"{detail}, {format_bytes(limits.host or 0)} are left")


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
    total = int(torch.cuda.get_device_properties(device).total_memory)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    allocated = torch.cuda.memory_allocated(device)
    return MemoryLimits(host, max(0, int(total * fraction) - allocated - reserved))


def resident() -> int:
    """Return the resident memory of this process in bytes; its peak if only that is known."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


def machine_memory() -> int | None:
    """Return the memory of the machine or the container in bytes; None if unknown."""
    limits = []
    with suppress(ValueError, OSError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(ValueError, OSError):  # "max" is not a number
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(limits, default=None)
