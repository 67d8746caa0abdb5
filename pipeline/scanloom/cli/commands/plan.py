"""`scanloom plan`: predict a run from headers."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from scanloom.cli.console import console, error_boundary, print_result
from scanloom.cli.exit_codes import Exit
from scanloom.cli.new_key import report_new_key
from scanloom.cli.options.general import Reporting
from scanloom.cli.options.panels import takes_panels
from scanloom.cli.options.scans import RunOutputOptions, WorkflowOptions
from scanloom.cli.workflows import explain_nothing_selected, explain_unstated, find_workflow

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scanloom.engine.planning.model import Plan


@takes_panels
def plan(scans: WorkflowOptions, output: RunOutputOptions, general: Reporting) -> None:
    """Predict a run: cases, exclusions and their reasons, time, memory and disk space.

    Only headers are read. If this machine has not run the models before, a few cases are segmented
    to measure the time; their results are discarded.

    For example: scanloom plan ct_tissue archive/ -o results
    """
    with error_boundary(general.mode):
        from scanloom.engine.planning.plan import make_plan, save_plan
        from scanloom.engine.workflow.scope import Scope
        from scanloom.engine.workflow.selection import NO_MODALITY

        paths, out, key = scans.given, output.out, output.key
        scope = Scope(output.replace, output.retry_failed, scans.shard)
        with report_new_key(key):
            workflow = find_workflow(scans.workflow, paths)
            planned = make_plan(workflow, paths, out, key, scope, archives=scans.archives)
        save_plan(planned, out)
        plain = {"schema": 1, "plan": document(planned)}
        print_result(general.mode, lambda: plain, lambda: console().print(table(planned)))
        nothing = scans.shard is None and not planned.cases and not planned.before
        nothing = nothing and planned.files["found"] > 0
        unstated = sum(detail == NO_MODALITY for _, _, detail in planned.left)
        if nothing:
            explain_nothing_selected(planned.left_out, unstated, scans.workflow)
        elif unstated and not general.quiet:
            explain_unstated(unstated, scans.workflow)
    raise typer.Exit(Exit.UNUSABLE if nothing else Exit.OK)


def document(planned: Plan) -> dict[str, Any]:
    """Return the document of a plan for `--json`."""
    return {**asdict(planned), "todo": len(planned.todo)}


def table(planned: Plan) -> RenderableType:
    """Return a plan as a table."""
    from rich.table import Table

    from scanloom.core import counted, format_bytes, format_duration

    totals, todo = planned.totals, planned.todo
    rows = Table.grid(padding=(0, 2))
    rows.add_row("workflow", planned.workflow)
    rows.add_row("files", ", ".join(f"{count} {name}" for name, count in planned.files.items()))
    rows.add_row("cases", f"{len(todo)} to do, {planned.before} from before")
    rows.add_row(
        "device", f"{planned.device}, {planned.precision}; {counted(planned.workers, 'worker')}"
    )
    if totals.seconds is not None and todo:
        per_case = totals.seconds / len(todo)
        rows.add_row(
            "time", f"{format_duration(totals.seconds)} in all, {format_duration(per_case)} a case"
        )
    if totals.written is not None:
        rows.add_row("results", format_bytes(totals.written))
    rows.add_row("memory", f"{format_bytes(totals.host)} a worker")
    if totals.device:
        rows.add_row("", f"{format_bytes(totals.device)} on the device")
    for note in planned.notes:
        rows.add_row("", note)
    excluded = {**planned.left_out}
    for case in planned.cases:
        if case.reason:
            excluded[case.reason] = excluded.get(case.reason, 0) + 1
    for n, (reason, count) in enumerate(sorted(excluded.items(), key=lambda item: -item[1])):
        rows.add_row("" if n else "excluded", f"{count} {reason}")
    return rows


def compared_rows(compared: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows that compare a run with its plan."""
    from scanloom.core import format_bytes, format_duration

    happened, planned = compared["happened"], compared["planned"]
    rows_by_key = {
        "seconds": ("time", format_duration),
        "written": ("results", format_bytes),
        "host": ("memory", format_bytes),
    }
    return [
        (name, f"{format_value(happened[key])}, {format_value(planned[key])} planned")
        for key, (name, format_value) in rows_by_key.items()
        if planned[key]
    ]
