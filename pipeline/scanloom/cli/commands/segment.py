"""`scanloom segment`: segment scans, or describe the results that it would write.

Progress on stderr is a line with a bar on a terminal, few plain lines otherwise.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from scanloom.cli.command import is_typed
from scanloom.cli.commands.models import fetch_missing
from scanloom.cli.console import (
    Exit,
    OutputMode,
    console,
    error_boundary,
    error_document,
    exit_of_scans,
    format_error,
    print_json,
    print_result,
    report_new_key,
    say,
)
from scanloom.cli.options import PathOptions, Reporting, StrictOption, takes_panels
from scanloom.options import SegmentOptions

if TYPE_CHECKING:
    from rich.console import Console

    from scanloom.core import CaseRecord, Reason, SeriesChoice
    from scanloom.core.timing import MarkStep, WindowCount
    from scanloom.engine.prepare import Prepared
    from scanloom.engine.segment import PlannedScan

    Records = Sequence[tuple[Path, CaseRecord]]
    """Each path with the record of a case."""


@dataclass(frozen=True)
class CallOptions:
    """Options of a call that no segmentation depends on."""

    panel: ClassVar[str] = "Output"

    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Show what would be done; write nothing.")
    ] = False
    strict: StrictOption = False


@dataclass(frozen=True)
class ProfileOptions:
    """Options for looking into networks."""

    panel: ClassVar[str] = "Expert"

    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace of torch.profiler, JSON."),
    ] = None


@takes_panels
def segment(
    scans: PathOptions,
    options: SegmentOptions,
    call: CallOptions,
    profile: ProfileOptions,
    general: Reporting,
) -> None:
    """Segment scans into folders in OUT/cases, or one file.

    Example: scanloom segment study/ -o results
    """
    with error_boundary(general.mode, resumable=True):
        paths = scans.all_paths
        if call.dry_run and is_typed("profile"):
            raise typer.BadParameter("give it without --dry-run", param_hint="'--profile'")
        options = _of_a_file(options)
        if not options.models:
            options = replace(options, models=(_default_model(paths, options, general.mode),))
        if call.dry_run:
            raise typer.Exit(show_dry_run(paths, options, general.mode, strict=call.strict))
        fetch_missing(options.models)
        started = time.monotonic()
        records = run(paths, options, quiet=general.quiet, trace=profile.profile)
        seconds = time.monotonic() - started
        if general.json:
            print_json(document(records))
        else:
            show(records, seconds, quiet=general.quiet)
        code = exit_of_scans([record.reason for _, record in records], strict=call.strict)
        raise typer.Exit(code)


def _of_a_file(options: SegmentOptions) -> SegmentOptions:
    """Return the options of a result that is one file: without defaults for output folders.

    Beside the file there is no place for what `also` and `names` ask for. On the command line they
    are refused; in a variable or a file of options they do not count.
    """
    from scanloom.engine.result_file import suffix_of

    if not suffix_of(options.out):
        return options
    if not is_typed("also"):
        options = replace(options, outputs=replace(options.outputs, also=()))
    return options if is_typed("names") else replace(options, names="id")


def _default_model(paths: Sequence[Path], options: SegmentOptions, mode: OutputMode) -> str:
    """Return the only model of the store that fits the scans, and say which it is."""
    from scanloom.engine.default_model import default_model
    from scanloom.io.session import read_session

    with read_session():
        name = default_model(
            paths, options.read.modality, selection=options.series, archives=options.archives
        )
    if not (mode.quiet or mode.json):
        say(f"Model: {name}, the only one for such scans. Name another with --model.", err=True)
    return name


def run(
    paths: Sequence[Path],
    options: SegmentOptions,
    *,
    quiet: bool = False,
    trace: Path | None = None,
) -> Records:
    """Segment scans, with progress on stderr unless `quiet`; errors as in `iter_segment`.

    `trace` is a file for a trace of torch's operations.
    """
    from scanloom.engine.machine.lean_imports import without_optional_imports
    from scanloom.engine.segment import iter_segment

    shown = nullcontext() if quiet else progress(paths)
    with (
        without_optional_imports(),
        report_new_key(options.key),
        shown as display,
        _profiled(trace) as mark,
    ):
        on_step, on_windows = (display.on_step, display.on_windows) if display else (None, None)
        return list(iter_segment(paths, options, on_step, on_windows, mark))


def _profiled(trace: Path | None) -> AbstractContextManager[MarkStep]:
    """Return a block whose trace is written, if a file is given."""
    if trace is None:
        return nullcontext(nullcontext)
    from scanloom.inference.engines.profiling import profiled

    return profiled(trace)


def document(records: Records) -> dict[str, Any]:
    """Return the document of `--json`: the cases of each path, in order."""
    return {"schema": 1, "cases": [_case(path, record) for path, record in records]}


def _case(path: Path, record: CaseRecord) -> dict[str, Any]:
    from scanloom.io.output.measurements import measurement_to_json

    reason = record.reason
    return {
        "path": str(path),
        "case": record.id or None,
        "series": choice_document(record.choice),
        "outcome": "used" if reason is None else reason.outcome,
        "reason": None if reason is None else error_document(reason, record.detail),
        "flags": [{"code": flag.code, "text": flag.text} for flag in record.flags],
        "recalled": record.reused,
        "remade": record.updated,
        "folder": None if record.folder is None else str(record.folder),
        "file": None if record.file is None else str(record.file),
        "seconds": round(record.seconds, 3),
        "measurements": [measurement_to_json(m) for m in record.measurements],
    }


def show(records: Records, seconds: float, *, quiet: bool = False) -> None:
    """Print tables and a summary on stdout, and errors on stderr."""
    from scanloom.core import printable
    from scanloom.engine.result_file import models_of
    from scanloom.io.output.layout import output_of

    shown = False
    for path, record in records:
        if record.reason is not None:
            show_failure(path, record.reason, record.detail, record.private, record.choice)
        elif not quiet:
            if shown:
                console().print()
            show_case(path, record)
            shown = True
    if quiet:
        return
    published = [record for _, record in records if not record.reason]
    for line in limitation_lines(m for record in published for m in models_of(record)):
        console().print(printable(line))
    if len(records) > 1 or not records or records[0][1].reason is None:
        begin = "\n" if shown else ""  # failures are on stderr
        console().print(f"{begin}{summary(records, seconds)}")
    folders = {output_of(record.folder) for record in published if record.folder is not None}
    if len(published) > 1 and len(folders) == 1:
        out = printable(str(folders.pop()))
        console().print(f"One page and one table of all: scanloom report -o {out}")


def summary(records: Records, seconds: float) -> str:
    """Return a line that counts the scans by outcome, with the time and the device."""
    from scanloom.core import counted, format_duration
    from scanloom.engine.result_file import models_of

    outcomes = Counter(
        record.reason.outcome if record.reason else "from before" if record.reused else "done"
        for _, record in records
    )
    named = ("done", "from before", "skipped", "ambiguous", "failed")
    always = ("done", "failed")  # shown even if there are none
    counts = ", ".join(f"{outcomes[n]} {n}" for n in named if outcomes[n] or n in always)
    scans = counted(len(records), "scan")
    new = [record for _, record in records if not record.reused]
    models = (model for record in new for model in models_of(record))
    devices = dict.fromkeys(
        f"{m['device']} ({m['precision']}, {m['engine']['name']})" for m in models
    )
    where = f" on {' and '.join(devices)}" if devices else ""
    return f"{scans}: {counts}; {format_duration(seconds)}{where}"


def shown_intensity(value: float | None, unit: str) -> str:
    """Return a mean or deviation for the table: whole HU, of other units three digits."""
    if value is None:
        return ""
    whole = unit == "HU" or 100 <= abs(value) < 1e6
    return f"{value:z.0f}" if whole else f"{value:.3g}"


def show_case(path: Path, record: CaseRecord) -> None:
    """Print the measurements of one case, and the paths of its results."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from scanloom.core import milliliters, printable
    from scanloom.io.output.single_file import document_of

    several = len({m.model for m in record.measurements}) > 1
    columns = [*(["model"] if several else []), "structure", "ml", "mean", "sd", "unit", "flags"]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in ("ml", "mean", "sd") else "left")
    for m in record.measurements:
        mean, sd = (shown_intensity(value, m.unit) for value in (m.mean, m.sd))
        # flags of the whole case are printed once, below the table
        flags = " ".join(f.code for f in m.flags if f not in record.flags)
        row = [m.label, milliliters(m.volume_ml), mean, sd, m.unit, flags]
        table.add_row(*([m.model] if several else []), *row)
    screen = console()
    screen.print(f"{printable(str(path))}: case {record.id}")
    for line in choice_lines(record.choice):
        screen.print(line)
    screen.print(table)
    for flag in record.flags:
        screen.print(f"! {flag.text} ({flag.code}).")
    if record.reused:
        screen.print("A result of this recipe already exists: nothing was done.")
    if record.updated:
        screen.print("The scan had changed: this result replaces the earlier one.")
    screen.print(f"Results: {record.file or record.folder}")
    if record.file is not None:
        screen.print(f"Structures and measurements: {document_of(record.file)}")
    if record.folder is not None and (picture := record.folder / "preview.png").exists():
        screen.print(f"Look at: {picture}")


def limitation_lines(models: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each model with limitations: the first one, and where the others are.

    `models` are entries of `case.json`, which may be repeated.
    """
    lines = {}
    for model in models:
        first, *further = model.get("limitations") or ("",)
        if first:
            name = model["name"]
            more = f" {len(further)} more: scanloom models show {name}" if further else ""
            lines[name] = f"! {name}: {first}{more}"
    return list(lines.values())


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


def show_dry_run(
    paths: Sequence[Path], options: SegmentOptions, mode: OutputMode, *, strict: bool = False
) -> Exit:
    """Print the plan for each scan, and return the exit code."""
    from scanloom.engine.machine.lean_imports import without_optional_imports
    from scanloom.engine.segment import plan_scans

    with without_optional_imports():
        planned = list(plan_scans(paths, options))
    plain = {"schema": 1, "planned": [_plain_scan(scan, options) for scan in planned]}
    print_result(mode, lambda: plain, lambda: _show(planned, options))
    failed = [(scan, scan.error) for scan in planned if scan.error is not None]
    for scan, error in failed if not mode.json else ():
        show_failure(scan.path, error.reason, error.detail, error.private, scan.choice)
    reasons = [scan.error.reason if scan.error else None for scan in planned]
    return exit_of_scans(reasons, strict=strict)


def _show(planned: Sequence[PlannedScan], options: SegmentOptions) -> None:
    from rich.table import Table

    from scanloom.core import counted, printable
    from scanloom.io.output.published import ResultState

    screen = console()
    fitting = [(scan, scan.prepared) for scan in planned if scan.prepared and not scan.error]
    for scan, prepared in fitting:
        table = Table.grid(padding=(0, 2))
        for name, text in _rows(prepared, scan.changes, options):
            table.add_row("", name, printable(text))
        screen.print(printable(str(scan.path)))
        for line in choice_lines(scan.choice):
            screen.print(line)
        screen.print(table)
    done = sum(prepared.state is ResultState.CURRENT for _, prepared in fitting)
    before = f", {done} from before" if done else ""
    scans = counted(len(planned), "scan")
    screen.print(f"{scans}: {len(fitting) - done} would be segmented{before}. Nothing was written.")


def _rows(prepared: Prepared, changes: str, options: SegmentOptions) -> Iterator[tuple[str, str]]:
    from scanloom.core import format_bytes

    if prepared.outline is not None:
        grid = prepared.outline[0]
        yield "grid", f"{_times(grid.shape)} at {_times(round(mm, 3) for mm in grid.spacing)} mm"
    yield "model", ", ".join(options.models)
    if changes:
        yield "changed", changes
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
    fitting = None if error else prepared
    grid = fitting.outline[0] if fitting and fitting.outline else None
    estimate = fitting.estimate if fitting else None
    return {
        "path": str(scan.path),
        "case": fitting.case.id or None if fitting else None,
        "series": choice_document(scan.choice),
        "modality": prepared.case.series.modality if prepared else None,
        "files": len(prepared.case.series.files) if prepared else None,
        "shape": list(grid.shape) if grid else None,
        "spacing": [round(float(mm), 6) for mm in grid.spacing] if grid else None,
        "models": list(options.models),
        "changes": scan.changes or None if not error else None,
        "memory": estimate.peak if estimate else None,
        "result": _result(fitting, options) if fitting else None,
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
PERIOD_S = 60.0
"""Seconds between two lines about progress, without a terminal."""


@contextmanager
def progress(paths: Sequence[Path]) -> Iterator[_PlainLines | _Bar]:
    """Yield a display that receives the steps of each path, and the windows that are done."""
    from scanloom.core import printable

    screen, numbers = console(stderr=True), {path: n for n, path in enumerate(paths, 1)}
    titles = {path: printable(path.name or str(path)) for path in paths}
    if len(titles) > 1:  # `[2/3] study`
        titles = {p: f"[{numbers[p]}/{len(titles)}] {title}" for p, title in titles.items()}
    if not screen.is_terminal:
        yield _PlainLines(titles)
        return
    with _Bar(titles, screen) as bar:
        yield bar


def _where(count: WindowCount) -> str:
    return f"{count.model} on {count.device}, {count.precision}"


def _remaining(seconds: float | None) -> str:
    from scanloom.core import format_duration

    return "" if seconds is None else f", {format_duration(seconds)} left"


class _PlainLines:
    """A line for some steps, each once, and one now and then for windows."""

    def __init__(self, titles: Mapping[Path, str]) -> None:
        from scanloom.core.timing import WindowPace

        self._titles = titles
        self._printed: set[str] = set()
        self._models: set[tuple[Path, str]] = set()
        self._next_at, self._pace = 0.0, WindowPace()

    def on_step(self, path: Path, step: str) -> None:
        line = f"{self._titles[path]}: {DOING.get(step, step)}"
        if step in PRINTED and line not in self._printed:  # network and restore alternate
            self._printed.add(line)
            say(line, err=True)

    def on_windows(self, path: Path, count: WindowCount) -> None:
        now, left = time.monotonic(), self._pace.left(count)
        is_new = (path, count.model) not in self._models
        if not is_new and now < self._next_at:
            return
        self._models.add((path, count.model))
        self._next_at = now + PERIOD_S
        say(f"{self._titles[path]}: {count.text}{_remaining(left)}, {_where(count)}", err=True)


class _Bar:
    """A line on a terminal: step, bar, windows, time left, model and device."""

    def __init__(self, titles: Mapping[Path, str], screen: Console) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        from scanloom.core.timing import WindowPace

        # no markup: [brackets] in a name are part of it
        step = TextColumn("{task.description}", markup=False)
        detail = TextColumn("{task.fields[detail]}", markup=False)
        columns = (SpinnerColumn(), step, BarColumn(bar_width=16), detail)
        self._progress = Progress(*columns, console=screen, transient=True)
        self._task = self._progress.add_task("starting", total=None, detail="")
        self._titles = titles
        self._pace = WindowPace()

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
        remaining = _remaining(self._pace.left(count))
        self._progress.update(
            self._task,
            completed=count.done,
            total=count.total,
            detail=f"{count.text}{remaining}; {_where(count)}",
        )
