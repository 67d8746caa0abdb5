"""`scanloom plan`: predict a run from headers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scanloom.cli.console import (
    DebugOption,
    JsonOption,
    OutputMode,
    console,
    error_boundary,
    print_json,
)
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

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scanloom.engine.planning.model import Plan


def plan(
    workflow: WorkflowArgument,
    paths: SourcesArgument,
    out: Annotated[Path, typer.Option(metavar="OUT", help="Output folder of the run.")],
    archives: ArchivesOption = False,
    shard: ShardOption = None,
    key: RunKeyOption = None,
    replace: ReplaceOption = False,
    retry_failed: RetryOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Predict a run: cases, exclusions and their reasons, time, memory and disk space.

    Only headers are read. If this machine has not run the models before, a few cases are segmented
    to measure the time; their results are discarded.
    """
    with error_boundary(OutputMode(as_json, debug)):
        from scanloom.engine.planning.plan import make_plan, save_plan
        from scanloom.engine.workflow.scope import Scope

        scope = Scope(replace, retry_failed, parse_shard(shard))
        with report_new_key(key):
            selected_workflow = find_workflow(workflow)
            planned_run = make_plan(selected_workflow, paths, out, key, scope, archives=archives)
        save_plan(planned_run, out)
        if as_json:
            print_json({"schema": 1, "plan": document(planned_run)})
        else:
            console().print(table(planned_run))


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
