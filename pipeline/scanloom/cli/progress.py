"""Progress on stderr: a line with a bar on a terminal, few plain lines otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from scanloom.cli.console import console, say

if TYPE_CHECKING:
    from rich.console import Console

    from scanloom.core.timing import WindowCount

DOING = {
    "find": "looking for scans",
    "load": "reading",
    "models": "loading the model",
    "resample": "resampling",
    "network": "running the network",
    "restore": "restoring labels to the scan's grid",
    "clean": "cleaning",
    "relate": "combining the models",
    "measure": "measuring",
    "write": "writing",
    "readback": "reading back and comparing",
}
PRINTED = ("find", "load", "network", "write", "readback")
"""Steps that have a line of their own without a terminal."""
PERIOD_S = 30.0
"""Seconds between two lines about windows, without a terminal."""


class Observer(Protocol):
    """Receives the steps of each path, and the windows that a network has processed."""

    def on_step(self, path: Path, step: str) -> None:
        """Report the begin of a step."""

    def on_windows(self, path: Path, count: WindowCount) -> None:
        """Report windows that are done."""


@contextmanager
def progress(paths: Sequence[Path]) -> Iterator[Observer]:
    """Yield an observer that shows the progress of several paths."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _PlainLines(_Titles(paths))
        return
    with _Bar(_Titles(paths), screen) as bar:
        yield bar


class Silence:
    """Shows nothing."""

    def on_step(self, path: Path, step: str) -> None:
        """Report nothing."""

    def on_windows(self, path: Path, count: WindowCount) -> None:
        """Report nothing."""


class _Titles:
    """Position and name of each path: `[2/3] study`."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._numbers = {path: n for n, path in enumerate(paths, 1)}

    def __getitem__(self, path: Path) -> str:
        from scanloom.core import printable

        count = len(self._numbers)
        position = f"[{self._numbers[path]}/{count}] " if count > 1 else ""
        return position + printable(path.name or str(path))


def _where(count: WindowCount) -> str:
    return f"{count.model} on {count.device}, {count.precision}"


class _PlainLines:
    """A line for some steps, each once, and one now and then for windows."""

    def __init__(self, titles: _Titles) -> None:
        self._titles = titles
        self._printed: set[str] = set()
        self._models: set[tuple[Path, str]] = set()
        self._next_at = 0.0

    def on_step(self, path: Path, step: str) -> None:
        line = f"{self._titles[path]}: {DOING.get(step, step)}"
        if step in PRINTED and line not in self._printed:  # network and restore alternate
            self._printed.add(line)
            say(line, err=True)

    def on_windows(self, path: Path, count: WindowCount) -> None:
        from scanloom.core import counted

        now = time.monotonic()
        is_new = (path, count.model) not in self._models
        if not is_new and now < self._next_at:
            return
        self._models.add((path, count.model))
        self._next_at = now + PERIOD_S
        windows = f"{count.done} of {counted(count.total, 'window')}"
        say(f"{self._titles[path]}: {windows}, {_where(count)}", err=True)


class _Bar:
    """A line on a terminal: step, bar, windows, time left, model and device."""

    def __init__(self, titles: _Titles, screen: Console) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        # no markup: [brackets] in a name are part of it
        step = TextColumn("{task.description}", markup=False)
        detail = TextColumn("{task.fields[detail]}", markup=False)
        columns = (SpinnerColumn(), step, BarColumn(bar_width=16), detail)
        self._progress = Progress(*columns, console=screen, transient=True)
        self._task = self._progress.add_task("starting", total=None, detail="")
        self._titles = titles
        self._begin: tuple[Path, str, float] | None = None

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def on_step(self, path: Path, step: str) -> None:
        text = f"{self._titles[path]}: {DOING.get(step, step)}"
        if step in ("network", "restore"):  # they alternate: the bar stays
            self._progress.update(self._task, description=text)
        else:
            self._progress.reset(self._task, total=None, description=text, detail="")

    def on_windows(self, path: Path, count: WindowCount) -> None:
        from scanloom.core import format_duration

        now = time.monotonic()
        if self._begin is None or self._begin[:2] != (path, count.model):
            self._begin = (path, count.model, now)  # after the first window, which takes longer
        pace = (now - self._begin[2]) / (count.done - 1) if count.done > 1 else 0.0
        remaining = f", {format_duration(pace * (count.total - count.done))} left" if pace else ""
        self._progress.update(
            self._task,
            completed=count.done,
            total=count.total,
            detail=f"{count.done}/{count.total} windows{remaining}; {_where(count)}",
        )
