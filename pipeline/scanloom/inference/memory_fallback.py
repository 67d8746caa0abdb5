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
from scanloom.core import Reason, ScanError
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
    others: Sequence[torch.device] = (),
) -> Iterator[MemoryPlan]:
    """Yield all memory plans, from the requested one to the smallest.

    `others` are the devices to try last; empty if the device was requested by name.
    """
    yield (rung := MemoryPlan(device, dtype, budget))
    while rung.budget.windows > 1:
        fewer = replace(rung.budget, windows=rung.budget.windows // 2)
        yield (rung := replace(rung, budget=fewer, change=f"windows {fewer.windows}"))
    yield from _less(rung)
    for fallback in others:
        first = MemoryPlan(fallback, torch.float32, Budget(), f"device {fallback}")
        yield first
        yield from _less(first)


def _less(rung: MemoryPlan) -> Iterator[MemoryPlan]:
    """Yield the smaller plans on the same device, for one window at a time."""
    if rung.device.type != "cpu":
        rung = replace(rung, budget=replace(rung.budget, scores="host"), change="scores on host")
        yield rung
    for slab in SMALLER_SLAB_BYTES:
        change = f"slab {slab // 1024**2} MiB"
        yield replace(rung, budget=replace(rung.budget, slab=slab), change=change)


def first_fitting(
    ways: Iterator[MemoryPlan], card: ModelCard, plan: NetworkPlan, stored: int, room: MemoryLimits
) -> tuple[list[MemoryPlan], list[str]]:
    """Return the plans from the first that fits on, and the changes that lead to it.

    Parameters
    ----------
    ways : iterator of Rung
        Plans in the order of `fallback_plans`.
    card, plan, stored
        As in `estimate_network`.
    room : Room
        Memory that may be allocated.

    Raises
    ------
    ScanError
        OUT_OF_MEMORY, with the figures, if no plan fits.
    """
    all_ways, changes = list(ways), []
    for n, rung in enumerate(all_ways):
        changes += [rung.change] if rung.change else []
        need = estimate_network(card, plan, rung.device, rung.dtype, rung.budget, stored)
        if room.holds(need):
            return all_ways[n:], changes
    least = estimate_network(
        card, plan, all_ways[-1].device, all_ways[-1].dtype, all_ways[-1].budget, stored
    )
    detail = f"{card.name} needs {gigabytes(least.host_peak)} more"
    raise ScanError(Reason.OUT_OF_MEMORY, f"{detail}, {gigabytes(room.host or 0)} are left")


def room(device: torch.device, limit: int | None = None) -> MemoryLimits:
    """Return the memory that may still be allocated.

    It depends on the machine's memory, never on that of other processes: the same machine must give
    the same bytes.

    Parameters
    ----------
    device : torch.device
        Device of the network.
    limit : int, optional
        Bytes that the whole process may use; None for the machine's memory.
    """
    total_host = machine_memory() if limit is None else limit
    host = None if total_host is None else max(0, total_host - resident())
    if device.type != "cuda":
        return MemoryLimits(host)
    total = int(torch.cuda.get_device_properties(device).total_memory)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    return MemoryLimits(host, max(0, int(total * fraction) - torch.cuda.memory_allocated(device)))


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


def gigabytes(count: int) -> str:
    """Return a number of bytes in GB, such as "7.3 GB"."""
    return f"{count / 1e9:.1f} GB"
