"""`scanloom segment`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from scanloom.cli.console import (
    OutputMode,
    console,
    error_boundary,
    error_document,
    exit_of_records,
    print_json,
    report_new_key,
    say,
)
from scanloom.cli.options.common import PathOptions, Reporting, StrictOption
from scanloom.cli.options.panels import takes_panels
from scanloom.cli.segment_output import (
    Silence,
    choice_document,
    choice_lines,
    progress,
    show_dry_run,
    show_failure,
)
from scanloom.cli.tables import limitation_lines
from scanloom.options import SegmentOptions

if TYPE_CHECKING:
    from scanloom.core import CaseRecord
    from scanloom.core.timing import MarkStep

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
    """Segment scans; each result is a folder in OUT/cases.

    Example: scanloom segment study/ -o results
    """
    with error_boundary(general.mode, resumable=True):
        paths = scans.given
        if not options.models:
            options = replace(options, models=(_default_model(paths, options, general.mode),))
        if call.dry_run:
            raise typer.Exit(show_dry_run(paths, options, general.mode))
        started = time.monotonic()
        records = run(paths, options, quiet=general.quiet, trace=profile.profile)
        seconds = time.monotonic() - started
        if general.json:
            print_json(document(records))
        else:
            show(records, seconds, quiet=general.quiet)
        code = exit_of_records([record for _, record in records], strict=call.strict)
        raise typer.Exit(code)


def _default_model(paths: Sequence[Path], options: SegmentOptions, mode: OutputMode) -> str:
    """Return the only model of the store that fits the scans, and say which it is."""
    from scanloom.engine.default_model import default_model
    from scanloom.io.session import read_session

    with read_session():
        name = default_model(paths, options.read.modality, archives=options.archives)
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
    """Segment scans, with progress on stderr unless `quiet`; errors as in `segment_paths`.

    Parameters
    ----------
    paths, options
        As of `segment_paths`.
    quiet : bool
    trace : Path or None
        File for a trace of torch's operations.
    """
    from scanloom.engine.machine.lean_imports import without_optional_imports
    from scanloom.engine.segment import iter_segment

    shown = nullcontext(Silence()) if quiet else progress(paths)
    with (
        without_optional_imports(),
        report_new_key(options.key),
        shown as observer,
        _profiled(trace) as mark,
    ):
        return list(iter_segment(paths, options, observer.on_step, observer.on_windows, mark))


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
        "seconds": round(record.seconds, 3),
        "measurements": [measurement_to_json(m) for m in record.measurements],
    }


def show(records: Records, seconds: float, *, quiet: bool = False) -> None:
    """Print tables and a summary on stdout, and errors on stderr."""
    for path, record in records:
        if record.reason is not None:
            show_failure(path, record.reason, record.detail, record.private, record.choice)
        elif not quiet:
            show_case(path, record)
    if not quiet:
        show_limitations(records)
    only_failure = len(records) == 1 and records[0][1].reason is not None
    if not quiet and not only_failure:
        console().print(f"\n{summary(records, seconds)}", soft_wrap=True)


def show_limitations(records: Records) -> None:
    """Print a line for each model with known errors."""
    from scanloom.core import printable
    from scanloom.io.output.layout import read_case

    folders = [record.folder for _, record in records if record.folder and not record.reason]
    for line in limitation_lines(m for folder in folders for m in read_case(folder)["models"]):
        console().print(printable(line), soft_wrap=True)


def summary(records: Records, seconds: float) -> str:
    """Return a line that counts the scans by outcome, with the time and the device."""
    from scanloom.core import counted, format_duration

    outcomes = Counter(
        record.reason.outcome if record.reason else "from before" if record.reused else "done"
        for _, record in records
    )
    named = ("done", "from before", "skipped", "ambiguous", "failed")
    always = ("done", "failed")
    counts = ", ".join(f"{outcomes[n]} {n}" for n in named if outcomes[n] or n in always)
    scans = counted(len(records), "scan")
    devices = dict.fromkeys(d for _, record in records for d in _devices_of(record))
    where = f" on {' and '.join(devices)}" if devices else ""
    return f"{scans}: {counts}; {format_duration(seconds)}{where}"


def _devices_of(record: CaseRecord) -> list[str]:
    """Return device, precision and engine of each model of a case that was segmented now."""
    from scanloom.io.output.file_names import CASE
    from scanloom.io.output.json_file import read_json

    if record.folder is None or record.reused:
        return []
    models = read_json(record.folder / CASE)["models"]
    return [f"{m['device']} ({m['precision']}, {m['engine']['name']})" for m in models]


def show_case(path: Path, record: CaseRecord) -> None:
    """Print the measurements of one case, and the paths of its results."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from scanloom.core import printable

    several = len({m.model for m in record.measurements}) > 1
    columns = [*(["model"] if several else []), "structure", "ml", "mean", "sd", "unit", "flags"]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in ("ml", "mean", "sd") else "left")
    for m in record.measurements:
        mean = "" if m.mean is None else f"{m.mean:.0f}"
        sd = "" if m.sd is None else f"{m.sd:.0f}"
        # flags of the whole case are printed once, below the table
        flags = " ".join(f.code for f in m.flags if f not in record.flags)
        row = [m.label, f"{m.volume_ml:.1f}", mean, sd, m.unit, flags]
        table.add_row(*([m.model] if several else []), *row)
    screen = console()
    screen.print(f"\n{printable(str(path))}: case {record.id}")
    for line in choice_lines(record.choice):
        screen.print(line, soft_wrap=True)
    screen.print(table)
    for flag in record.flags:
        screen.print(f"! {flag.text} ({flag.code}).", soft_wrap=True)
    if record.reused:
        screen.print("A result of this recipe already exists: nothing was done.")
    if record.updated:
        screen.print("The scan had changed: this result replaces the earlier one.")
    screen.print(f"Results: {record.folder}", soft_wrap=True)
    if record.folder is not None and (picture := record.folder / "preview.png").exists():
        screen.print(f"Look at: {picture}", soft_wrap=True)
