"""The status and the totals of a run as tables."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scanloom.engine.monitor.status import Status


def status_table(status: Status) -> RenderableType:
    """Return the status of a run as a table."""
    from rich.table import Table

    from scanloom.core import Reason, counted, format_bytes

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
        table.add_row("rejected", f"{counted(count, 'worker')}: {problem}")
    if status.per_hour:
        remaining = f", {format_clock(status.left_s)} left" if status.left_s else ""
        table.add_row("rate", f"{counted(round(status.per_hour), 'scan')} an hour{remaining}")
    table.add_row("time", format_clock(status.elapsed_s))
    if status.state == "died":
        heard = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.moment))
        table.add_row("last heartbeat", f"{heard}; resume with the same command")
    when = "in progress" if status.state == "running" else "not finished"
    for case, seconds in sorted(status.in_flight.items(), key=lambda item: -item[1]):
        table.add_row(when, f"{case}  {seconds:.0f} s")
    for device in status.devices:
        used, total = format_bytes(device["memory_used"]), format_bytes(device["memory_total"])
        readings = [
            f"{device['busy_percent']} % busy",
            f"{used} of {total}",
            f"{device['celsius']} °C",
        ]
        table.add_row(f"GPU {device['device']}", ", ".join([*readings, f"{device['watts']} W"]))
    for reason, count in status.reasons.items():
        advice = Reason[reason].advice if reason in Reason.__members__ else ""
        table.add_row(reason, f"{count}  {advice}".rstrip())
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
