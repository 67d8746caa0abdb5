"""How long each step of a case took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Seconds:
    """Wall time and the processor time of the whole process, all threads, in seconds."""

    wall: float
    cpu: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)


@dataclass
class Clock:
    """Collects seconds by step; `on_step` is told when a step begins (progress).

    `notes` are what had to be done to get there, each once, by subject: the memory ladder's steps.
    """

    on_step: Callable[[str], None] | None = None
    steps: dict[str, Seconds] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def note(self, subject: str, text: str) -> None:
        """Keep what is to be known of the run beside its seconds."""
        known = self.notes.setdefault(subject, [])
        if text not in known:
            known.append(text)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to step `name`."""
        if self.on_step is not None:
            self.on_step(name)
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            spent = Seconds(time.perf_counter() - wall, time.process_time() - cpu)
            self.steps[name] = self.steps.get(name, Seconds(0, 0)) + spent


def duration(seconds: float) -> str:
    """Return seconds as a person says them."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
