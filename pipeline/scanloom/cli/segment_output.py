"""Output of `segment`: the series that it takes at a path, its dry run, and its progress.

Progress on stderr is a line with a bar on a terminal, few plain lines otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from scanloom.cli.console import (
    Exit,
    OutputMode,
    console,
    error_document,
    exit_of_reason,
    format_error,
    print_result,
    say,
)

if TYPE_CHECKING:
    from rich.console import Console

    from scanloom.core import Reason, SeriesChoice
    from scanloom.core.timing import WindowCount
    from scanloom.engine.prepare import Prepared
    from scanloom.engine.segment import PlannedScan
    from scanloom.options import SegmentOptions


def choice_lines(choice: SeriesChoice | None) -> list[str]:
    """Return a line that names the series, and a line for each remark on the choice."""
    if choice is None:
        return []
    return [str(choice), *(f"! {remark}." for remark in (*choice.notes, *choice.unused))]


def choice_document(choice: SeriesChoice | None) -> dict[str, Any] | None:
    """Return the JSON object of a choice, without text of headers and paths."""
    if choice is None:
        return None
    remarks = [*choice.notes, *choice.unused]
    return {"number": choice.number, "of": choice.of, "remarks": remarks}


def show_failure(
    path: Path, reason: Reason, detail: str, private: str, choice: SeriesChoice | None
) -> None:
    """Print on stderr why a scan gave no result, and which of several series it is."""
    from scanloom.core import printable

    message = format_error(reason, detail, private)
    names_it = private and "\n" not in private
    say(message if names_it else f"{printable(str(path))}: {message}", err=True)
    if choice is not None and (choice.of > 1 or choice.unused):
        for line in choice_lines(choice):
            say(f"  {line}", err=True)


def show_dry_run(paths: Sequence[Path], options: SegmentOptions, mode: OutputMode) -> Exit:
    """Print what would be done with each scan, and return the exit code."""
    from scanloom.engine.machine.lean_imports import without_optional_imports
    from scanloom.engine.segment import plan_scans

    with without_optional_imports():
        planned = list(plan_scans(paths, options))
    plain = {"schema": 1, "planned": [_plain_scan(scan, options) for scan in planned]}
    print_result(mode, lambda: plain, lambda: _show(planned, options))
    errors = [scan.error for scan in planned if scan.error is not None]
    if not mode.json:
        for scan in planned:
            if scan.error is not None:
                error = scan.error
                show_failure(scan.path, error.reason, error.detail, error.private, scan.choice)
    if not errors:
        return Exit.OK
    return exit_of_reason(errors[0].reason) if len(planned) == 1 else Exit.SOME_FAILED


def _show(planned: Sequence[PlannedScan], options: SegmentOptions) -> None:
    from rich.table import Table

    from scanloom.core import counted, printable
    from scanloom.io.output.published import ResultState

    screen = console()
    for scan in planned:
        if scan.error is not None:
            continue
        table = Table.grid(padding=(0, 2))
        for name, text in _rows(scan, options):
            table.add_row("", name, printable(text))
        screen.print(printable(str(scan.path)))
        for line in choice_lines(scan.choice):
            screen.print(line, soft_wrap=True)
        screen.print(table)
    fitting = [scan for scan in planned if scan.error is None]
    done = sum(
        scan.prepared is not None and scan.prepared.state is ResultState.CURRENT for scan in fitting
    )
    before = f", {done} from before" if done else ""
    scans = counted(len(planned), "scan")
    screen.print(f"{scans}: {len(fitting) - done} would be segmented{before}. Nothing was written.")


def _rows(scan: PlannedScan, options: SegmentOptions) -> Iterator[tuple[str, str]]:
    from scanloom.core import format_bytes

    prepared = scan.prepared
    if prepared is None:
        return
    if prepared.outline is not None:
        grid = prepared.outline[0]
        yield "grid", f"{_times(grid.shape)} at {_times(round(mm, 3) for mm in grid.spacing)} mm"
    yield "model", ", ".join(options.models)
    if scan.changes:
        yield "changed", scan.changes
    if prepared.estimate is not None:
        yield "memory", f"{format_bytes(prepared.estimate.peak)}, estimated for a CPU"
    yield "result", _result(prepared, options)


def _result(prepared: Prepared, options: SegmentOptions) -> str:
    from scanloom.io.output.published import ResultState

    if prepared.folder is None or prepared.state is None:
        return str(options.out / "cases")
    existing = {
        ResultState.CURRENT: " (exists already: nothing would be done)",
        ResultState.CHANGED: " (would be replaced: the scan has changed)",
        ResultState.REPLACEABLE: " (would be replaced)",
    }
    return f"{prepared.folder}{existing.get(prepared.state, '')}"


def _times(numbers: Any) -> str:
    return " x ".join(f"{number:g}" for number in numbers)


def _plain_scan(scan: PlannedScan, options: SegmentOptions) -> dict[str, Any]:
    """Return the JSON object of a planned scan."""
    prepared, error = scan.prepared, scan.error
    grid = prepared.outline[0] if prepared and prepared.outline and not error else None
    estimate = prepared.estimate if prepared and not error else None
    return {
        "path": str(scan.path),
        "case": prepared.case.id or None if prepared and not error else None,
        "series": choice_document(scan.choice),
        "modality": prepared.case.series.modality if prepared else None,
        "files": len(prepared.case.series.files) if prepared else None,
        "shape": list(grid.shape) if grid else None,
        "spacing": [round(float(mm), 6) for mm in grid.spacing] if grid else None,
        "models": list(options.models),
        "changes": scan.changes or None if not error else None,
        "memory": estimate.peak if estimate else None,
        "result": _result(prepared, options) if prepared and not error else None,
        "reason": error_document(error.reason, error.detail) if error else None,
    }


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
