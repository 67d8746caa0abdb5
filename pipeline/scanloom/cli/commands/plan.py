"""`scanloom plan`: predict a run from headers; a few cases are segmented to measure their cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from scanloom.cli.commands.models import fetch_missing
from scanloom.cli.console import Exit, console, error_boundary, print_result, report_new_key
from scanloom.cli.options import Reporting, RunOutputOptions, WorkflowOptions, takes_panels
from scanloom.cli.workflows import explain_nothing_selected, explain_unstated, find_workflow

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scanloom.engine.planning import RunPlan


@takes_panels
def plan(scans: WorkflowOptions, output: RunOutputOptions, general: Reporting) -> None:
    """Predict a run: cases, exclusions and their reasons, time, memory and disk space.

    Cases and memory follow from headers. Times are ranges, from cases that this machine has run
    before; if these say too little of the archive, a few cases are segmented (half a minute on top
    of loading the models) and their results discarded.

    Example: scanloom plan ct_tissue archive/ -o results
    """
    with error_boundary(general.mode):
        from scanloom.engine.planning import make_plan, save_plan
        from scanloom.engine.workflow.selection import NO_MODALITY, Scope

        paths, out, key = scans.all_paths, output.out, output.key
        scope = Scope(output.replace, output.retry_failed, scans.shard)
        with report_new_key(key):
            workflow = find_workflow(scans.workflow, paths)
            fetch_missing(workflow.models)
            planned = make_plan(workflow, paths, out, key, scope, archives=scans.archives)
        save_plan(planned, out)
        plain = {"schema": 1, "plan": {**asdict(planned), "todo": len(planned.todo)}}
        print_result(general.mode, lambda: plain, lambda: _show(planned))
        nothing = scans.shard is None and not planned.cases and not planned.before
        nothing = nothing and planned.files["found"] > 0
        unstated = sum(detail == NO_MODALITY for _, _, detail in planned.left)
        if nothing:
            explain_nothing_selected(planned.left_out, unstated, scans.workflow, workflow)
        elif unstated and not general.quiet:
            explain_unstated(unstated, scans.workflow, workflow)
    raise typer.Exit(Exit.UNUSABLE if nothing else Exit.OK)


def _show(planned: RunPlan) -> None:
    screen = console()
    screen.print(table(planned))
    for line in excluded_lines(planned):
        screen.print(line, soft_wrap=True)


def table(planned: RunPlan) -> RenderableType:
    """Return the cases, times, memory and notes of a plan as a table."""
    from rich.table import Table

    from scanloom.core import counted, format_bytes
    from scanloom.engine.planning import format_range

    totals, todo = planned.totals, len(planned.todo)
    rows = Table.grid(padding=(0, 2))
    rows.add_row("workflow", planned.workflow)
    rows.add_row("files", ", ".join(f"{count} {name}" for name, count in planned.files.items()))
    counts = f"{todo} to do, {planned.before} from before"
    rows.add_row("cases", f"{counts}, {planned.selected} in the archive")
    rows.add_row(
        "device", f"{planned.device}, {planned.precision}; {counted(planned.workers, 'worker')}"
    )
    if todo and totals.seconds is None:
        rows.add_row("this run", f"time unknown: {totals.unknown}")
    elif todo and totals.seconds is not None:
        each = format_range([end / todo for end in totals.seconds])
        duration = f"{format_range(totals.seconds)} on this machine"
        rows.add_row("this run", f"{duration}: {counted(todo, 'case')}, {each} a case")
        basis = f"from {counted(totals.tried, 'case')} that this machine has processed"
        share = "all" if totals.known_share == 1 else f"{100 * totals.known_share:.0f} %"
        rows.add_row("", f"{basis}; {share} of the voxels are in scans of no more than their size")
    if todo and totals.archive_seconds is not None and planned.selected > todo:
        duration = f"{format_range(totals.archive_seconds)} on this machine, if none were done yet"
        rows.add_row("whole archive", f"{duration}: {counted(planned.selected, 'case')}")
    if totals.written is not None:
        low, high = (format_bytes(end) for end in totals.written)
        rows.add_row("results", low if low == high else f"{low} to {high}")
    if todo:
        rows.add_row("memory", f"{format_bytes(totals.host)} a worker")
    if totals.device:
        rows.add_row("", f"{format_bytes(totals.device)} on the device")
    for note in planned.notes:
        rows.add_row("", note)
    return rows


def excluded_lines(planned: RunPlan) -> list[str]:
    """Return a count of each reason for which cases are not processed, with its advice."""
    from scanloom.core import Reason, counted

    refused = [(case.reason, case.detail) for case in planned.cases if case.reason]
    listed = [*((reason, detail) for _, reason, detail in planned.left), *refused]
    if not listed:
        return []
    series, cases = counted(len(planned.left), "series", "series"), counted(len(refused), "case")
    both = " and ".join([*([series] if planned.left else []), *([cases] if refused else [])])
    lines = ["", f"Not processed: {both}"]
    for code, count in Counter(reason for reason, _ in listed).most_common():
        lines.append(f"{count:7} {code}: {Reason[code].advice}.")
        if code == Reason.NOT_SELECTED.code:  # its details are the workflow's own conditions
            details = Counter(detail for reason, detail in listed if reason == code)
            lines += [f"        {n} {detail}" for detail, n in details.most_common()]
    return lines


def compared_rows(compared: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows that compare a run with its plan."""
    from scanloom.core import format_bytes, format_duration

    happened, planned = compared["happened"], compared["planned"]
    rows_by_key = {
        "seconds": ("time", format_duration),
        "written": ("results", format_bytes),
        "host": ("memory", format_bytes),
    }
    rows = []
    for key, (name, format_value) in rows_by_key.items():
        if planned[key]:
            low, high = (format_value(end) for end in planned[key])
            expected = f"up to {high}" if not planned[key][0] else f"{low} to {high}"
            rows.append((name, f"{format_value(happened[key])}, {expected} planned"))
    return rows
