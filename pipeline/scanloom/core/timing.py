"""Time the steps of a case."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from scanloom.core.text import counted

MarkStep = Callable[[str], AbstractContextManager[object]]
"""Returns a block that appears in a trace under a name."""


@dataclass(frozen=True)
class CpuWall:
    """Wall time and the processor time of the whole process, all threads, in seconds."""

    wall: float
    cpu: float

    def __add__(self, other: CpuWall) -> CpuWall:
        return CpuWall(self.wall + other.wall, self.cpu + other.cpu)


@dataclass(frozen=True)
class WindowCount:
    """Progress of a network on its windows.

    Parameters
    ----------
    model : str
        Name of the model.
    done, total : int
        Windows of the scan, each counted once for each of the model's networks.
    device, precision : str
        Such as "cuda:0" and "float16".
    network, networks : int
        Number of the network, from 1 in the order in which they run, and of all of the case.
    """

    model: str
    done: int
    total: int
    device: str
    precision: str
    network: int = 1
    networks: int = 1

    @property
    def text(self) -> str:
        """The windows that are done, and of which network."""
        of = f", network {self.network} of {self.networks}" if self.networks > 1 else ""
        return f"{self.done} of {counted(self.total, 'window')}{of}"


class WindowPace:
    """Estimates the time that a network needs for the windows that are left."""

    def __init__(self) -> None:
        self._begin: tuple[str, int, float] | None = None

    def left(self, count: WindowCount) -> float | None:
        """Return the seconds left; None until a network has done windows twice."""
        now = time.monotonic()
        if not count.done:
            self._begin = None
            return None
        if self._begin is None or self._begin[0] != count.model or self._begin[1] >= count.done:
            self._begin = count.model, count.done, now  # the first windows take longer
        _, done, begin = self._begin
        if count.done == done:  # just begun
            return None
        return (now - begin) / (count.done - done) * (count.total - count.done)


@dataclass
class StepTimer:
    """Wall and processor time of each step.

    `on_step` is called with the name of each step as it begins, `on_windows` after each batch of
    windows (progress); each step runs inside `mark` of its name (traces). `notes` records, by
    subject and without repeats, measures such as out-of-memory fallbacks. `device_turn` is held
    while a model computes on the device, and not for what its host does before and after.
    `networks` is the number of networks of the case, if known.
    """

    on_step: Callable[[str], None] | None = None
    on_windows: Callable[[WindowCount], None] | None = None
    mark: MarkStep = nullcontext
    device_turn: Callable[[], AbstractContextManager[None]] = nullcontext
    steps: dict[str, CpuWall] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    networks: int = 0
    _begun: list[str] = field(default_factory=list)

    def note(self, subject: str, text: str) -> None:
        """Record a note under a subject, once."""
        notes = self.notes.setdefault(subject, [])
        if text not in notes:
            notes.append(text)

    def announce(self, name: str) -> None:
        """Report a step that is not timed."""
        if self.on_step is not None:
            self.on_step(name)

    def window_reporter(
        self, model: str, device: str, precision: str
    ) -> Callable[[int, int], None] | None:
        """Return a function of the windows done and of all that reports; None without listener."""
        listen = self.on_windows
        if listen is None:
            return None
        if model not in self._begun:
            self._begun.append(model)
        number = self._begun.index(model) + 1
        of = number, max(number, self.networks)
        return lambda done, total: listen(WindowCount(model, done, total, device, precision, *of))

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the time spent in the block to step `name`."""
        if self.on_step is not None:
            self.on_step(name)
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            with self.mark(name):
                yield
        finally:
            spent = CpuWall(time.perf_counter() - wall, time.process_time() - cpu)
            self.steps[name] = self.steps.get(name, CpuWall(0, 0)) + spent


def format_duration(seconds: float) -> str:
    """Return a duration as text in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
