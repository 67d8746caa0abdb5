"""The ladder: what is done when memory does not suffice, step by step.

Fewer windows at once, scores in host memory, smaller slabs, the next device. The first rung that
fits by the estimate is taken before anything is allocated; the ones below it are for what the
estimate did not see.
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
from scanloom.inference.memory import Budget, MemoryEstimate, estimate_network

SMALLER_SLABS = (16 * 1024**2, 4 * 1024**2)
"""Bytes; below that a slab is one plane nearly always."""


@dataclass(frozen=True)
class Room:
    """How much may be taken.

    Parameters
    ----------
    host, device : int or None
        Bytes beside what is held already; None for no limit.
    """

    host: int | None = None
    device: int | None = None

    def holds(self, need: MemoryEstimate) -> bool:
        """Whether an estimate fits."""
        return not (
            (self.host is not None and need.host_peak > self.host)
            or (self.device is not None and need.device_peak > self.device)
        )


@dataclass(frozen=True)
class Rung:
    """A way of doing it, and what it was that changed from the rung above; "" for the first."""

    device: torch.device
    dtype: torch.dtype
    budget: Budget
    change: str = ""


def rungs(
    device: torch.device,
    dtype: torch.dtype,
    budget: Budget,
    others: Sequence[torch.device] = (),
) -> Iterator[Rung]:
    """Yield all ways of doing it, from the one that is wanted to the one that takes least.

    `others` are the devices to go to at last; none where the device was asked for by name.
    """
    yield (rung := Rung(device, dtype, budget))
    while rung.budget.windows > 1:
        fewer = replace(rung.budget, windows=rung.budget.windows // 2)
        yield (rung := replace(rung, budget=fewer, change=f"windows {fewer.windows}"))
    yield from _less(rung)
    for other in others:
        last = Rung(other, torch.float32, Budget(), f"device {other}")
        yield last
        yield from _less(last)


def _less(rung: Rung) -> Iterator[Rung]:
    """Yield what takes less on the same device, one window at a time."""
    if rung.device.type != "cpu":
        rung = replace(rung, budget=replace(rung.budget, scores="host"), change="scores on host")
        yield rung
    for slab in SMALLER_SLABS:
        change = f"slab {slab // 1024**2} MiB"
        yield replace(rung, budget=replace(rung.budget, slab=slab), change=change)


def fitting(
    ways: Iterator[Rung], card: ModelCard, plan: NetworkPlan, stored: int, room: Room
) -> tuple[list[Rung], list[str]]:
    """Return the first rung that fits and those below it, and what was changed to get there.

    Parameters
    ----------
    ways : iterator of Rung
        As `rungs` gives them.
    card, plan, stored
        As in `estimate_network`.
    room : Room
        What may be taken.

    Raises
    ------
    ScanError
        OUT_OF_MEMORY, with the figures, if not even the last one fits.
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


def room(device: torch.device, limit: int | None = None) -> Room:
    """Return what may still be taken.

    It depends on what the machine has, never on what others happen to use: the same machine must
    give the same bytes.

    Parameters
    ----------
    device : torch.device
        Where the network runs.
    limit : int, optional
        Bytes that the whole process may take; None for the machine's.
    """
    most = machine_memory() if limit is None else limit
    host = None if most is None else max(0, most - resident())
    if device.type != "cuda":
        return Room(host)
    total = int(torch.cuda.get_device_properties(device).total_memory)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    return Room(host, max(0, int(total * fraction) - torch.cuda.memory_allocated(device)))


def resident() -> int:
    """Return the bytes of memory that this process holds now (its peak where that isn't told)."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


def machine_memory() -> int | None:
    """Return the bytes that the machine, or the container, has; None where that isn't told."""
    found = []
    with suppress(ValueError, OSError, AttributeError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(ValueError, OSError):  # "max" is no number
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(found, default=None)


def gigabytes(count: int) -> str:
    """Return bytes as people say them: "7.3 GB"."""
    return f"{count / 1e9:.1f} GB"
