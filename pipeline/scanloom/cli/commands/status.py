"""`scanloom status`: show the status of the latest run; needs neither lock nor key."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from scanloom.cli.commands.segment import DOING
from scanloom.cli.console import Exit, console, error_boundary, print_result, say
from scanloom.cli.options import Reporting, ResultsOptions, takes_panels

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scanloom.engine.listen.outbox import OutboxState
    from scanloom.engine.monitor import Status


@takes_panels
def status(results: ResultsOptions, general: Reporting) -> None:
    """Show the status of the latest run in an output folder, of `listen`, and of its outbox.

    Exit with 1 if the run failed or died, or if a result could not be sent.
    """
    with error_boundary(general.mode):
        from scanloom.core import Reason, ScanError, counted
        from scanloom.engine.listen.outbox import open_outbox
        from scanloom.engine.monitor import Status
        from scanloom.engine.run_files import run_folders
        from scanloom.io.output.layout import no_results, published_cases
        from scanloom.io.system.scratch_folders import DIED
        from scanloom.review.verdicts.verdict import STATES

        out = results.path
        if not out.is_dir():
            raise no_results(out)
        held = open_outbox(out)
        outbox = None if held is None else held.state()
        now: Status | None = None
        damaged = list[str]()
        # The newest first: a run that has just begun has no status yet
        for folder in reversed(run_folders(out)):
            try:
                now = Status.observe(folder)
                break
            except FileNotFoundError:
                continue  # it has not written a status yet
            except (OSError, ValueError):
                damaged.append(folder.name)
        if now is None and damaged:
            raise ScanError(Reason.OUTPUT_UNWRITABLE, _damage(damaged[0]))
        for name in damaged:
            say(f"scanloom: {_damage(name)}.", err=True)
        # `segment` writes results, but no status
        cases = len(published_cases(out)) if now is None else 0
        reviewed, listens = _reviewed(out), _listen_status(out)
        if now is None and not cases and not reviewed and outbox is None and listens is None:
            raise no_results(out, "runs")

        def document() -> dict[str, Any]:
            run = {"status": None, "cases": cases} if now is None else {"status": asdict(now)}
            known = {"reviewed": reviewed, "listen": listens, "outbox": _outbox_document(outbox)}
            return {"schema": 1, **run, **known}

        def show() -> None:
            if now is not None:
                console().print(status_table(now))
            elif cases:
                results = f"{counted(cases, 'result')} of `scanloom segment`, and no run."
                console().print(f"{results} To look at the results: scanloom report {out}")
            if reviewed:
                counts = (f"{n:,} {STATES[state]}" for state, n in reviewed.items())
                console().print(f"Reviewed: {', '.join(counts)}.")
            if listens:
                console().print(_listen_sentence(**listens))
            _print_outbox(outbox)

        print_result(general.mode, document, show)
        failed = bool(outbox and outbox.failed) or (now and now.state in ("failed", DIED))
        raise typer.Exit(Exit.SOME_FAILED if failed else Exit.OK)


def _listen_status(out: Path) -> dict[str, Any] | None:
    """Return what `listen` has last written of its processes; None if there is nothing."""
    from scanloom.core import ScanError
    from scanloom.io.output.json_file import read_json
    from scanloom.io.output.layout import LISTEN_STATUS

    with suppress(OSError, ValueError, TypeError, KeyError, ScanError):
        document = read_json(out / LISTEN_STATUS)
        written, due = float(document["written"]), float(document["due"])
        known = {"written": written, "due": due, "has_ended": bool(document["has_ended"])}
        return {**known, "parts": dict(document["parts"])}
    return None


def _listen_sentence(
    written: float, due: float, parts: Mapping[str, str], *, has_ended: bool
) -> str:
    """Return what is known of the processes of `listen`, with the time since it was written."""
    now = time.time()
    age = format_clock(max(0.0, now - written))
    if has_ended:
        return f"Listen: ended {age} ago."
    if now - due > LISTEN_SILENT_S:
        return f"Listen: nothing was heard for {age}: it was killed, or hangs."
    troubles = [f"the {role}: {state}" for role, state in parts.items() if state]
    return f"Listen: {'; '.join(troubles) or ('all processes run' if parts else 'starts')}."


LISTEN_SILENT_S = 300.0
"""So long after its time, what `listen` writes is missing."""


def _outbox_document(outbox: OutboxState | None) -> dict[str, Any] | None:
    """Return what an outbox holds, for JSON; None if there is none."""
    from scanloom.cli.commands.send import described_plainly

    if outbox is None:
        return None
    return {
        "counts": outbox.counts,
        "open": described_plainly(outbox.open),
        "failed": described_plainly(outbox.failed),
        "troubles": {name: asdict(trouble) for name, trouble in outbox.troubles.items()},
    }


def _print_outbox(outbox: OutboxState | None) -> None:
    """Print what was sent, what waits, and what was given up."""
    from scanloom.cli.commands.send import described

    if outbox is None:
        return
    for target, counts in outbox.counts.items():
        listed = (f"{counts[state]:,} {text}" for state, text in _SENT.items() if state in counts)
        console().print(f"Outbox, {target}: {', '.join(listed)}.")
    now = time.time()
    for target, trouble in outbox.troubles.items():
        again = format_clock(max(0.0, trouble.due - now))
        sentence = f"{target}: {trouble.reason}; attempt {trouble.tries + 1} in {again}"
        console().print(sentence)
    for lines in (outbox.failed, outbox.open):
        for line in lines[:MOST_LINES]:
            console().print(described(line))
        if len(lines) > MOST_LINES:
            console().print(f"... and {len(lines) - MOST_LINES:,} more: --json lists all")


_SENT = {
    "waiting": "waiting",
    "sent": "sent, to be confirmed",
    "asked": "sent, asked for commitment",
    "committed": "committed",
    "found": "there",
    "acknowledged": "acknowledged",
    "failed": "given up",
    "replaced": "replaced by newer results before they were there",
}
"""Words for the states of objects."""
MOST_LINES = 20
"""Objects of a kind that are printed."""


def _reviewed(out: Path) -> dict[str, int]:
    """Return the number of reviewed cases by their verdict; none if the log is damaged."""
    from scanloom.core import ScanError
    from scanloom.review.verdicts.tables import review_states

    try:
        return dict(Counter(review_states(out).values()).most_common())
    except ScanError as error:
        say(f"scanloom: {error.detail}; the verdicts were not counted.", err=True)
        return {}


def _damage(run: str) -> str:
    """Return the message for a run with a damaged status."""
    return f"runs/{run}/status.json is damaged: delete it; `scanloom report` shows the results"


def status_table(status: Status) -> RenderableType:
    """Return the status of a run as a table."""
    from rich.table import Table

    from scanloom.core import Reason, counted, format_bytes
    from scanloom.io.system.scratch_folders import DIED, FINAL_STATES

    table = Table.grid(padding=(0, 2))
    cause = f" ({status.reason})" if status.reason else ""
    table.add_row("run", f"{status.run}: {status.state}{cause}")
    if now_indexing := indexing_line(status):
        table.add_row("progress", now_indexing)
    if status.early:
        is_over = status.state in (*FINAL_STATES, DIED)
        later = "the next run takes their results" if is_over else "recorded with the whole index"
        table.add_row("early", f"{counted(status.early, 'case')} ended; {later}")
    if status.work:
        table.add_row("progress", f"{status.worked} of {counted(status.work, 'case')} to run")
    of_all = f" of {status.cases}" if status.cases else ""  # unknown before the index is complete
    table.add_row(
        "cases",
        f"{status.ended}{of_all}: {status.done} done, {status.skipped} skipped, "
        f"{status.ambiguous} ambiguous, {status.failed} failed, {status.before} from before",
    )
    if status.remade:
        table.add_row("replaced", f"{status.remade}, because their scans had changed")
    for problem, count in status.sent_away.items():
        table.add_row("rejected", f"{counted(count, 'worker')}: {problem}")
    if status.per_hour:
        remaining = f", {format_clock(status.left_s)} left" if status.left_s else ""
        table.add_row("rate", f"{counted(round(status.per_hour), 'case')} an hour{remaining}")
    table.add_row("time", format_clock(status.elapsed_s))
    if status.state == "died":
        heard = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.moment))
        table.add_row("last heartbeat", f"{heard}; resume with the same command")
    when = "in progress" if status.state == "running" else "not finished"
    for case, seconds in sorted(status.in_flight.items(), key=lambda item: -item[1]):
        table.add_row(when, f"{case}  {format_clock(seconds)}{in_words(status.progress.get(case))}")
    for device in status.devices:
        used, total = format_bytes(device["memory_used"]), format_bytes(device["memory_total"])
        figures = {**device, "memory": f"{used} of {total}"}
        units = {"busy_percent": " % busy", "memory": "", "celsius": " °C", "watts": " W"}
        known = {name: unit for name, unit in units.items() if figures[name] is not None}
        figure = ", ".join(f"{figures[name]}{unit}" for name, unit in known.items())
        table.add_row(f"GPU {device['device']}", figure)
    for reason, count in status.reasons.items():
        advice = Reason[reason].advice if reason in Reason.__members__ else ""
        table.add_row(reason, f"{count}  {advice}".rstrip())
    return table


def indexing_line(status: Status) -> str:
    """Return the progress of a run whose index is not complete; "" if it is."""
    from scanloom.core import counted

    if status.state != "indexing" or not status.indexed:
        return ""
    return f"{counted(status.indexed, 'file')} so far; {counted(status.begun, 'case')} begun"


def in_words(progress: Mapping[str, Any] | None) -> str:
    """Return the progress of a case as a phrase after its name; empty if unknown."""
    from scanloom.core import format_duration
    from scanloom.core.timing import WindowCount

    if progress is None:
        return ""
    if progress.get("step") not in ("network", "restore") or "total" not in progress:
        step = DOING.get(progress.get("step", ""), "")
        return f", {step}" if step else ""
    names = ("model", "done", "total", "network", "networks")
    count = WindowCount(**{name: progress[name] for name in names}, device="", precision="")
    left = progress["left_s"]
    remaining = f", {format_duration(left)} left of it" if left is not None else ""
    return f", {count.model}: {count.text}{remaining}"


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
        table.add_row("device", f"{busy:.1%} busy, {counted(workers, 'worker')}")
    if totals["joules_a_scan"] is not None:
        table.add_row("energy", f"{totals['joules_a_scan']:.0f} J a scan, of the whole machine")
    if totals["cost"]:
        cost = totals["cost"]
        table.add_row("cost", f"{cost['amount']:.2f} for {cost['worker_hours']:.2f} worker hours")
    for slow in totals["slowest"]:
        table.add_row("slowest", f"{slow['case']}  {slow['seconds']:.1f} s")
    return table


def format_clock(seconds: float | None) -> str:
    """Return a duration as h:mm:ss."""
    whole = int(seconds or 0)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
