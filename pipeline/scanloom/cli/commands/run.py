"""`scanloom run`: run a workflow over an archive."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scanloom.cli.commands.plan import compared_rows
from scanloom.cli.console import (
    DebugOption,
    JsonOption,
    OutputMode,
    console,
    error_boundary,
    print_json,
    warn_of_damaged,
)
from scanloom.cli.exit_codes import Exit
from scanloom.cli.shared_options import (
    ArchivesOption,
    ReplaceOption,
    RetryOption,
    RunKeyOption,
    ShardOption,
    SourcesArgument,
    WorkflowArgument,
    find_workflow,
    parse_shard,
    report_new_key,
)
from scanloom.engine.clusters.kinds import cluster_names

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scanloom.engine.monitor.board import StatusWriter
    from scanloom.engine.monitor.status import Status
    from scanloom.engine.run import RunResult

IN_ORDER, AT_ONCE = 9.0, 2.0
"""Seconds until the process exits after the first and the second Ctrl-C."""


def run(
    workflow: WorkflowArgument,
    paths: SourcesArgument,
    out: Annotated[Path, typer.Option(metavar="OUT", help="Output folder.")],
    cluster: Annotated[
        str,
        typer.Option(
            metavar="WHICH",
            help=f"local, none (no Dask), {', '.join(cluster_names())}, an address or its file.",
        ),
    ] = "local",
    archives: ArchivesOption = False,
    shard: ShardOption = None,
    key: RunKeyOption = None,
    replace: ReplaceOption = False,
    retry_failed: RetryOption = False,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Take over the lock of a dead run on another host."),
    ] = False,
    bids: Annotated[
        bool, typer.Option("--bids", help="Also OUT/bids, a BIDS derivative of label maps.")
    ] = False,
    metrics: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write metrics to FILE for Prometheus (textfile)."),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="AMOUNT", help="Price of an hour of a worker with its device."
        ),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Segment every scan in an archive that a workflow selects.

    Run the same command again to resume. Ctrl-C stops after the current writes; a second Ctrl-C
    stops immediately.
    """
    with error_boundary(OutputMode(as_json, debug)):
        from scanloom.engine.run import RunOptions
        from scanloom.engine.run import run as run_workflow
        from scanloom.engine.workflow.scope import Scope

        options = RunOptions(
            out=out,
            key=key,
            cluster=cluster,
            scope=Scope(replace, retry_failed, parse_shard(shard)),
            take_over=take_over,
            metrics=metrics,
            price=price_per_hour,
            bids=bids,
            archives=archives,
        )
        selected = find_workflow(workflow)
        with report_new_key(key), _interruptible() as stop:
            shown = _silent if as_json else _shown
            result = run_workflow(selected, paths, options, stop=stop, on_board=shown)
        if as_json:
            print_json(document(result))
        else:
            _print_end(result, out)
        warn_of_damaged(out, result.damaged)
    raise typer.Exit(_exit(result, stop))


def document(result: RunResult) -> dict[str, Any]:
    """Return the document of a run for `--json`."""
    from dataclasses import asdict

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


def status_table(status: Status) -> RenderableType:
    """Return the status of a run as a table."""
    from rich.table import Table

    from scanloom.core import format_bytes

    table = Table.grid(padding=(0, 2))
    cause = f" ({status.reason})" if status.reason else ""
    table.add_row("run", f"{status.run}: {status.state}{cause}")
    table.add_row(
        "cases",
        f"{status.ended} of {status.cases}: {status.done} done, {status.skipped} skipped, "
        f"{status.ambiguous} ambiguous, {status.failed} failed, {status.before} from before",
    )
    if status.remade:
        table.add_row("replaced", f"{status.remade}, because their scans had changed")
    for problem, count in status.sent_away.items():
        table.add_row("rejected", f"{count} worker{'s' if count > 1 else ''}: {problem}")
    if status.per_hour:
        remaining = f", {_clock(status.left_s)} left" if status.left_s else ""
        table.add_row("rate", f"{status.per_hour:.0f} scans an hour{remaining}")
    table.add_row("time", _clock(status.elapsed_s))
    if status.state == "died":
        heard = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.moment))
        table.add_row("last heartbeat", f"{heard}; resume with the same command")
    for case, seconds in sorted(status.in_flight.items(), key=lambda item: -item[1]):
        table.add_row("", f"{case}  {seconds:.0f} s")
    for device in status.devices:
        used, total = format_bytes(device["memory_used"]), format_bytes(device["memory_total"])
        readings = [
            f"{device['busy_percent']} % busy",
            f"{used} of {total}",
            f"{device['celsius']} °C",
        ]
        table.add_row(f"GPU {device['device']}", ", ".join([*readings, f"{device['watts']} W"]))
    for reason, count in status.reasons.items():
        table.add_row(reason, str(count))
    return table


def totals_table(totals: dict[str, Any]) -> RenderableType:
    """Return the totals of a run as a table."""
    from rich.table import Table

    from scanloom.core import OUTCOMES, counted

    table = Table.grid(padding=(0, 2))
    for outcome in OUTCOMES:
        for reason, count in totals["files"].get(outcome, {}).items():
            table.add_row(outcome, f"{counted(count, 'file')}: {reason}")
    if totals["steps"]:
        steps = (f"{name} {step['wall_s']:.1f}" for name, step in totals["steps"].items())
        table.add_row("seconds", ", ".join(steps))
    if totals["device"]:
        busy, workers = totals["device"]["busy_share"], totals["device"]["workers"]
        table.add_row("device", f"{busy:.1%} busy, {workers} worker{'s' if workers > 1 else ''}")
    if totals["joules_a_scan"] is not None:
        table.add_row("energy", f"{totals['joules_a_scan']:.0f} J a scan, of the whole machine")
    if totals["cost"]:
        cost = totals["cost"]
        table.add_row("cost", f"{cost['amount']:.2f} for {cost['worker_hours']:.2f} worker hours")
    for slow in totals["slowest"]:
        table.add_row("slowest", f"{slow['case']}  {slow['seconds']:.1f} s")
    return table


def _clock(seconds: float | None) -> str:
    whole = int(seconds or 0)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets; the second raises KeyboardInterrupt.

    SIGTERM and SIGHUP (unless ignored, as by nohup(1)) do the same. After a grace period the
    process exits in any case; the next run resumes.
    """
    stop = threading.Event()
    ends: list[threading.Timer] = []
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def handle(number: int, frame: object) -> None:
        second = stop.is_set()
        ends.append(_end_within(AT_ONCE if second else IN_ORDER))
        if second:
            raise KeyboardInterrupt
        stop.set()
        if number == signal.SIGHUP:
            _silence(terminals)
        console(stderr=True).print(
            "Stopping after the current writes. Press Ctrl-C again to stop immediately."
        )

    handled = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        handled.remove(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield stop
    finally:
        for end in ends:
            end.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _silence(terminals: Sequence[int]) -> None:
    """Redirect the streams of a closed terminal to /dev/null, since writing would fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in terminals:
        os.dup2(nowhere, number)
    os.close(nowhere)


def _end_within(seconds: float) -> threading.Timer:
    """Exit this process, and with it its children, after a delay unless cancelled."""
    timer = threading.Timer(seconds, os._exit, (Exit.INTERRUPTED,))
    timer.daemon = True
    timer.start()
    return timer


@contextmanager
def _silent(board: StatusWriter) -> Iterator[None]:
    yield


def _shown(board: StatusWriter) -> AbstractContextManager[None]:
    """Show the status: a live table on a terminal, a line every few seconds otherwise."""
    screen = console(stderr=True)
    return _living(board, screen) if screen.is_terminal else _plain_lines(board, screen.print)


@contextmanager
def _living(board: StatusWriter, screen: Any) -> Iterator[None]:
    from rich.live import Live

    with Live(
        get_renderable=lambda: status_table(board.now()),
        console=screen,
        refresh_per_second=2,
        transient=True,
    ):
        yield


@contextmanager
def _plain_lines(
    board: StatusWriter, print_line: Callable[[str], None], period: float = 10.0
) -> Iterator[None]:
    over = threading.Event()

    def keep_saying() -> None:
        while not over.wait(period):
            now = board.now()
            rate = f", {now.per_hour:.0f} an hour" if now.per_hour else ""
            print_line(f"{now.state}: {now.ended} of {now.cases} cases, {now.failed} failed{rate}")

    speaker = threading.Thread(target=keep_saying, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        speaker.join()


def _print_end(result: RunResult, out: Path) -> None:
    screen = console()
    screen.print(status_table(result.status))
    files = ", ".join(f"{count} {name}" for name, count in result.files.items())
    screen.print(f"files: {files}")
    screen.print(totals_table(result.totals))
    for name, text in compared_rows(result.compared) if result.compared else ():
        screen.print(f"{name}: {text}")
    screen.print(f"Report: {out / 'report' / 'index.html'}")


def _exit(result: RunResult, stop: threading.Event) -> Exit:
    if stop.is_set():
        return Exit.INTERRUPTED
    return Exit.SOME_FAILED if result.any_failed else Exit.OK
