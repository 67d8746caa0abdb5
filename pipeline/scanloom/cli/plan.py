"""`scanloom plan`: what a run would do, from headers alone."""

from __future__ import annotations

from dataclasses import asdict
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
from scanloom.cli.console import DebugOption, JsonOption, Manner, console, print_json, speaking

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scanloom.engine.plan_model import Plan


def plan(
    workflow: Annotated[
        str, typer.Argument(metavar="WORKFLOW", help="A YAML or JSON file, or one that ships.")
    ],
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Folders, files, archives, patterns.")
    ],
    out: Annotated[Path, typer.Option(metavar="OUT", help="The output folder of the run.")],
    archives: ArchivesOption = False,
    shard: ShardOption = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The key of the ids; SCANLOOM_KEY.")
    ] = None,
    replace: ReplaceOption = False,
    retry_failed: RetryOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Say what `run` would do: which cases, which not and why, how long, how much memory and disk.

    Scans are judged by their headers. Where this machine has not run these models yet, a few cases
    are worked on to see how long they take; their results are thrown away.
    """
    with speaking(Manner(as_json, debug)):
        from scanloom.engine.plan import keep_plan, make_plan
        from scanloom.engine.scope import Scope

        scope = Scope(replace, retry_failed, parse_shard(shard))
        with telling_new_key(key):
            wanted = find_workflow(workflow)
            made = make_plan(wanted, paths, out, key, scope, archives=archives)
        keep_plan(made, out)
        if as_json:
            print_json({"schema": 1, "plan": document(made)})
        else:
            console().print(table(made))


def document(made: Plan) -> dict[str, Any]:
    """Return what `--json` says of a plan."""
    return {**asdict(made), "todo": len(made.todo)}


def table(made: Plan) -> RenderableType:
    """Return a plan as a person reads it."""
    from rich.table import Table

    from scanloom.core import duration

    totals, todo = made.totals, made.todo
    rows = Table.grid(padding=(0, 2))
    rows.add_row("workflow", made.workflow)
    rows.add_row("files", ", ".join(f"{count} {name}" for name, count in made.files.items()))
    rows.add_row("cases", f"{len(todo)} to do, {made.before} from before")
    rows.add_row("device", f"{made.device}, {made.precision}; {made.workers} workers")
    if totals.seconds is not None and todo:
        each = totals.seconds / len(todo)
        rows.add_row("time", f"{duration(totals.seconds)} in all, {duration(each)} a case")
    if totals.written is not None:
        rows.add_row("results", _bytes(totals.written))
    rows.add_row("memory", f"{_bytes(totals.host)} a worker")
    if totals.device:
        rows.add_row("", f"{_bytes(totals.device)} on the device")
    for note in made.notes:
        rows.add_row("", note)
    left = {**made.left_out}
    for one in made.cases:
        if one.reason:
            left[one.reason] = left.get(one.reason, 0) + 1
    for n, (reason, count) in enumerate(sorted(left.items(), key=lambda item: -item[1])):
        rows.add_row("" if n else "left out", f"{count} {reason}")
    return rows


def compared_rows(compared: dict[str, Any]) -> list[tuple[str, str]]:
    """Return how a run went beside its plan, in words."""
    from scanloom.core import duration

    happened, planned = compared["happened"], compared["planned"]
    words = {
        "seconds": ("time", duration),
        "written": ("results", _bytes),
        "host": ("memory", _bytes),
    }
    return [
        (name, f"{tell(happened[part])}, {tell(planned[part])} planned")
        for part, (name, tell) in words.items()
        if planned[part]
    ]


def _bytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"
