"""`scanloom run`: run a workflow over an archive."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from scanloom.cli.command import is_typed
from scanloom.cli.commands.fetch import SourceOptions, fetch_wanted
from scanloom.cli.commands.fetch import show as show_fetched
from scanloom.cli.commands.models import fetch_missing
from scanloom.cli.commands.plan import compared_rows
from scanloom.cli.commands.segment import PERIOD_S
from scanloom.cli.commands.status import in_words, indexing_line, status_table, totals_table
from scanloom.cli.console import (
    Exit,
    console,
    error_boundary,
    exit_of_nothing,
    exit_of_run,
    format_error,
    print_result,
    print_resume_command,
    report_new_key,
    say,
    warn_of_damaged,
    warn_of_unexamined,
)
from scanloom.cli.options import (
    Reporting,
    RunOutputOptions,
    StrictOption,
    WorkflowOptions,
    takes_panels,
)
from scanloom.cli.workflows import explain_nothing_selected, explain_unstated, find_workflow
from scanloom.engine.clusters.kinds import cluster_names

if TYPE_CHECKING:
    from scanloom.engine.monitor import Status, StatusWriter
    from scanloom.engine.run import RunResult
    from scanloom.engine.stop_request import StopRequest

IN_ORDER, AT_ONCE = 9.0, 2.0
"""Seconds until the process exits after the first and the second Ctrl-C."""
_GIVE_UP_S = 1.0
"""Those of them in which it kills its children and releases its lock."""


@dataclass(frozen=True)
class ExecutionOptions:
    """Place of a run's execution, and its reports."""

    panel: ClassVar[str] = "Device"

    cluster: Annotated[
        str,
        typer.Option(
            metavar="WHICH",
            help=f"local, none (no Dask), {', '.join(cluster_names())}, an address or its file.",
        ),
    ] = "local"
    metrics: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write metrics to FILE for Prometheus (textfile)."),
    ] = None
    price_per_hour: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="AMOUNT", help="Price of an hour of a worker with its device."
        ),
    ] = None


@dataclass(frozen=True)
class ResultOptions(RunOutputOptions):
    """Results of a run, and their folder."""

    bids: Annotated[
        bool, typer.Option("--bids", help="Also OUT/bids, a BIDS derivative of label maps.")
    ] = False
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Take over the lock of a dead run on another host."),
    ] = False
    strict: StrictOption = False


@takes_panels
def run(
    scans: WorkflowOptions,
    source: SourceOptions,
    output: ResultOptions,
    execution: ExecutionOptions,
    general: Reporting,
) -> None:
    """Segment every scan that a workflow selects, in an archive or fetched from a PACS.

    Run the same command again to resume. Ctrl-C stops after the current writes; a second Ctrl-C
    stops immediately.

    Example: scanloom run ct_tissue archive/ -o results
    """
    with error_boundary(general.mode, resumable=True):
        from scanloom.engine.run import RunOptions
        from scanloom.engine.run import run as run_workflow
        from scanloom.engine.workflow.selection import Scope

        # A source in a file of options does not count beside paths that were typed
        named = bool(scans.paths or scans.input)
        fetched = source.source is not None and (is_typed("source") or not named)
        paths = [] if fetched else scans.all_paths
        selected = find_workflow(scans.workflow, paths)
        fetch_missing(selected.models)
        lacks = False
        if fetched:
            paths, lacks = _fetched(source, scans, output, general)
        elif any(is_typed(each.name) for each in fields(SourceOptions)):
            raise typer.BadParameter("missing: name a source of SITE", param_hint="'--from'")
        options = RunOptions(
            out=output.out,
            key=output.key,
            cluster=execution.cluster,
            scope=Scope(output.replace, output.retry_failed, scans.shard),
            take_over=output.take_over,
            metrics=execution.metrics,
            price=execution.price_per_hour,
            bids=output.bids,
            archives=scans.archives,
        )
        with report_new_key(output.key), _interruptible() as stop:
            shown = None if general.json or general.quiet else _shown
            result = run_workflow(selected, paths, options, stop=stop, display=shown)
        print_result(general.mode, lambda: document(result), lambda: _print_end(result, output.out))
        warn_of_damaged(output.out, result.damaged)
        if (error := result.metrics_error) is not None:
            say(f"scanloom: {format_error(error.reason, error.detail)}", err=True)
        files = result.totals["files"]
        failed = files.get("failed", {})
        warn_of_unexamined(failed)
        nothing = scans.shard is None and not result.selected and result.files["found"] > 0
        if nothing:
            reasons = {code: count for each in files.values() for code, count in each.items()}
            explain_nothing_selected(reasons, result.unstated, scans.workflow, selected)
        elif result.unstated and not general.quiet:
            explain_unstated(result.unstated, scans.workflow, selected)
        if stop.is_set():
            print_resume_command()
            # Whatever the results are: those that are missing were not tried
            raise typer.Exit(Exit.INTERRUPTED)
    code = exit_of_nothing(failed) if nothing else exit_of_run(result, strict=output.strict)
    raise typer.Exit(Exit.SOME_FAILED if lacks and code is Exit.OK else code)


def _fetched(
    source: SourceOptions, scans: WorkflowOptions, output: ResultOptions, general: Reporting
) -> tuple[list[Path], bool]:
    """Return the whole series that were fetched, and whether others are missing."""
    from scanloom.core import Reason, ScanError

    if scans.paths or scans.input or scans.shard:
        raise typer.BadParameter("give it without PATH and --shard", param_hint="'--from'")
    quiet = general.json or general.quiet
    done = fetch_wanted(source, output.out, output.key, quiet=quiet)
    if not quiet:
        show_fetched(done)
    if not done.series:
        detail = "nothing that was asked for is whole, so there is nothing to run"
        raise ScanError(Reason.NOT_FETCHED, detail)
    return done.series, bool(done.failed)


def document(result: RunResult) -> dict[str, Any]:
    """Return the document of a run for `--json`."""
    return {
        "schema": 1,
        "run": result.run,
        "complete": result.complete,
        "files": result.files,
        "status": asdict(result.status),
        "totals": result.totals,
        "plan": result.compared,
        "damaged": list(result.damaged),
    }


@contextmanager
def _interruptible() -> Iterator[StopRequest]:
    """Yield a request that the first Ctrl-C sets; the second raises KeyboardInterrupt.

    SIGTERM and SIGHUP (unless ignored, as by nohup(1)) do the same. After a grace period the
    process exits in any case; the next run resumes.
    """
    from scanloom.engine.stop_request import StopRequest

    stop = StopRequest()
    ends: list[threading.Timer] = []
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def handle(number: int, frame: object) -> None:
        second = stop.is_set()
        ends.append(_end_within(AT_ONCE if second else IN_ORDER, stop))
        if second:
            raise KeyboardInterrupt
        stop.set()
        if number == signal.SIGHUP:
            # The terminal is closed: what is written to it would fail
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for terminal in terminals:
                os.dup2(nowhere, terminal)
            os.close(nowhere)
        console(stderr=True).print(
            "Stopping after the current writes. Press Ctrl-C again to stop immediately."
        )

    # All three end a run in order: a batch system sends SIGTERM, a closed terminal SIGHUP
    handled = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        handled.remove(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield stop
    finally:
        for end in ends:
            end.cancel()
            end.join()  # one that has begun ends this process
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_within(seconds: float, stop: StopRequest) -> threading.Timer:
    """Exit this process, and with it its children, after a delay unless cancelled."""

    def end() -> None:
        stop.give_up(_GIVE_UP_S)
        with suppress(OSError):
            print_resume_command()
        os._exit(Exit.INTERRUPTED)

    timer = threading.Timer(seconds - _GIVE_UP_S, end)
    timer.daemon = True
    timer.start()
    return timer


def _shown(status_writer: StatusWriter) -> AbstractContextManager[Any]:
    """Show the status: a live table on a terminal, else a line a minute if something changed."""
    from rich.live import Live

    screen = console(stderr=True)
    if not screen.is_terminal:
        return _plain_lines(status_writer, screen.print)
    return Live(
        get_renderable=lambda: status_table(status_writer.now()),
        console=screen,
        refresh_per_second=2,
        transient=True,
    )


@contextmanager
def _plain_lines(status_writer: StatusWriter, print_line: Callable[[str], None]) -> Iterator[None]:
    over = threading.Event()

    def keep_printing() -> None:
        before = ""
        # the first line soon: it says that there is work, and how much
        pause = 5.0
        while not over.wait(pause):
            line = status_line(status_writer.now())
            pause = PERIOD_S if line else pause
            if line and line != before:
                print_line(line)
                before = line

    printer = threading.Thread(target=keep_printing, daemon=True)
    printer.start()
    try:
        yield
    finally:
        over.set()
        printer.join()


def status_line(now: Status) -> str:
    """Return the progress of a run in a line, of the cases that it works on; "" before them."""
    from scanloom.core import counted, format_duration

    if indexing := indexing_line(now):
        return f"{now.state}: {indexing}"
    if not now.work:
        return ""
    phrases = [f"{now.state}: {now.worked} of {counted(now.work, 'case')}"]
    # the cases that were refused by their headers are no work: the report lists them
    without_result = now.worked - now.done - now.recalled
    if without_result:
        phrases.append(f"{without_result} without result")
    if now.left_s is not None:
        phrases.append(f"{format_duration(now.left_s)} left")
    named = list(now.progress.items())[:MOST_NAMED]
    phrases += [f"{case[:8]}…{in_words(progress)}" for case, progress in named]
    if unnamed := len(now.in_flight) - len(named):
        phrases.append(f"{unnamed}{' more' if named else ''} in progress")
    return "; ".join(phrases)


MOST_NAMED = 3
"""Cases of a line about a run."""


def _print_end(result: RunResult, out: Path) -> None:
    screen = console()
    screen.print(status_table(result.status))
    files = ", ".join(f"{count} {name}" for name, count in result.files.items())
    screen.print(f"files: {files}")
    screen.print(totals_table(result.totals))
    for name, text in compared_rows(result.compared) if result.compared else ():
        screen.print(f"{name}: {text}")
    screen.print(f"Report: {out / 'report' / 'index.html'}")
