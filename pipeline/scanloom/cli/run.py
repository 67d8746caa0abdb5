"""`scanloom run`: a workflow over an archive."""

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

from scanloom.cli.asked import (
    ArchivesOption,
    ReplaceOption,
    RetryOption,
    ShardOption,
    find_workflow,
    parse_shard,
    telling_new_key,
)
from scanloom.cli.console import (
    DebugOption,
    JsonOption,
    Manner,
    console,
    print_json,
    speaking,
    warn_of_damaged,
)
from scanloom.cli.exits import Exit
from scanloom.cli.plan import compared_rows

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scanloom.engine.run import RunResult
    from scanloom.engine.status import Board, Status

IN_ORDER, AT_ONCE = 9.0, 2.0
"""Seconds that a run has to end after the first and the second Ctrl-C."""


def run(
    workflow: Annotated[
        str, typer.Argument(metavar="WORKFLOW", help="A YAML or JSON file, or one that ships.")
    ],
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Folders, files, archives, patterns.")
    ],
    out: Annotated[Path, typer.Option(metavar="OUT", help="The output folder.")],
    cluster: Annotated[
        str,
        typer.Option(
            metavar="WHICH",
            help="local, none (no Dask), slurm, ssh:HOSTS, kubernetes, an address or its file.",
        ),
    ] = "local",
    archives: ArchivesOption = False,
    shard: ShardOption = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The key of the ids; SCANLOOM_KEY.")
    ] = None,
    replace: ReplaceOption = False,
    retry_failed: RetryOption = False,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Take the lock of a run on another host that is dead."),
    ] = False,
    bids: Annotated[
        bool, typer.Option("--bids", help="Also OUT/bids, a BIDS derivative of label maps.")
    ] = False,
    metrics: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep FILE up to date for Prometheus (textfile)."),
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
    """Segment all of an archive that a workflow selects; started again, it goes on.

    Ctrl-C ends it in good order; once more ends it at once.
    """
    with speaking(Manner(as_json, debug)):
        from scanloom.engine.run import RunOptions
        from scanloom.engine.run import run as run_workflow
        from scanloom.engine.scope import Scope

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
        wanted = find_workflow(workflow)
        with telling_new_key(key), _interruptible() as stop:
            shown = _silent if as_json else _shown
            result = run_workflow(wanted, paths, options, stop=stop, on_board=shown)
        if as_json:
            print_json(document(result))
        else:
            _print_end(result, out)
        warn_of_damaged(out, result.damaged)
    raise typer.Exit(_exit(result, stop))


def document(result: RunResult) -> dict[str, Any]:
    """Return what `--json` says of a run."""
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
    """Return the status of a run as a person reads it."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    why = f" ({status.reason})" if status.reason else ""
    table.add_row("run", f"{status.run}: {status.state}{why}")
    table.add_row(
        "cases",
        f"{status.over} of {status.cases}: {status.done} done, {status.skipped} skipped, "
        f"{status.ambiguous} ambiguous, {status.failed} failed, {status.before} from before",
    )
    if status.remade:
        table.add_row("made anew", f"{status.remade}: their scans had changed")
    for why, count in status.sent_away.items():
        table.add_row("sent away", f"{count} worker{'s' if count > 1 else ''}: {why}")
    if status.per_hour:
        left = f", {_clock(status.left_s)} left" if status.left_s else ""
        table.add_row("rate", f"{status.per_hour:.0f} scans an hour{left}")
    table.add_row("time", _clock(status.elapsed_s))
    if status.state == "died":
        heard = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.moment))
        table.add_row("last heard", f"{heard}: start it again with the same words")
    for case, seconds in sorted(status.in_flight.items(), key=lambda item: -item[1]):
        table.add_row("", f"{case}  {seconds:.0f} s")
    for device in status.devices:
        memory = f"{device['memory_used'] / 2**30:.1f} of {device['memory_total'] / 2**30:.0f} GiB"
        told = [f"{device['busy_percent']} % busy", memory, f"{device['celsius']} °C"]
        table.add_row(f"GPU {device['device']}", ", ".join([*told, f"{device['watts']} W"]))
    for reason, count in status.reasons.items():
        table.add_row(reason, str(count))
    return table


def totals_table(totals: dict[str, Any]) -> RenderableType:
    """Return the totals of a run as a person reads them."""
    from rich.table import Table

    from scanloom.core import OUTCOMES

    table = Table.grid(padding=(0, 2))
    for outcome in OUTCOMES:
        for reason, count in totals["files"].get(outcome, {}).items():
            table.add_row(outcome, f"{count} files: {reason}")
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
    for one in totals["slowest"]:
        table.add_row("slowest", f"{one['case']}  {one['seconds']:.1f} s")
    return table


def _clock(seconds: float | None) -> str:
    whole = int(seconds or 0)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Let the first Ctrl-C ask for the end; the second one is the usual one.

    So do SIGTERM and the end of the terminal, SIGHUP, unless nohup(1) had that ignored. Whatever
    the run is at, it ends in time: what it leaves undone, the next one does.
    """
    stop = threading.Event()
    ends: list[threading.Timer] = []
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def asked(number: int, frame: object) -> None:
        again = stop.is_set()
        ends.append(_end_within(AT_ONCE if again else IN_ORDER))
        if again:
            raise KeyboardInterrupt
        stop.set()
        if number == signal.SIGHUP:
            _silence(terminals)
        console(stderr=True).print("Ending: what is being written is finished. Ctrl-C: at once.")

    wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        wanted.remove(signal.SIGHUP)
    before = {number: signal.signal(number, asked) for number in wanted}
    try:
        yield stop
    finally:
        for end in ends:
            end.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _silence(terminals: Sequence[int]) -> None:
    """Let what is written to terminals that are gone go nowhere: it would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in terminals:
        os.dup2(nowhere, number)
    os.close(nowhere)


def _end_within(seconds: float) -> threading.Timer:
    """End this process then, if it is not told otherwise; its children go with it."""
    timer = threading.Timer(seconds, os._exit, (Exit.INTERRUPTED,))
    timer.daemon = True
    timer.start()
    return timer


@contextmanager
def _silent(board: Board) -> Iterator[None]:
    yield


def _shown(board: Board) -> AbstractContextManager[None]:
    """Show the board: living on a terminal, a plain line now and then elsewhere."""
    screen = console(stderr=True)
    return _living(board, screen) if screen.is_terminal else _plain_lines(board, screen.print)


@contextmanager
def _living(board: Board, screen: Any) -> Iterator[None]:
    from rich.live import Live

    with Live(
        get_renderable=lambda: status_table(board.now()),
        console=screen,
        refresh_per_second=2,
        transient=True,
    ):
        yield


@contextmanager
def _plain_lines(board: Board, say: Callable[[str], None], period: float = 10.0) -> Iterator[None]:
    over = threading.Event()

    def keep_saying() -> None:
        while not over.wait(period):
            now = board.now()
            rate = f", {now.per_hour:.0f} an hour" if now.per_hour else ""
            say(f"{now.state}: {now.over} of {now.cases} cases, {now.failed} failed{rate}")

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
    for name, words in compared_rows(result.compared) if result.compared else ():
        screen.print(f"{name}: {words}")
    screen.print(f"Look at {out / 'report' / 'index.html'}")


def _exit(result: RunResult, stop: threading.Event) -> Exit:
    if stop.is_set():
        return Exit.INTERRUPTED
    return Exit.SOME_FAILED if result.any_failed else Exit.OK
