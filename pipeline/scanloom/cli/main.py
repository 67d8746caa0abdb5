"""`scanloom`: the commands and nothing else. Heavy imports happen when a command runs."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Sequence
from typing import Annotated

import typer

from scanloom.cli import (
    demo,
    doctor,
    index,
    join,
    models,
    plan,
    report,
    run,
    segment,
    status,
    verify,
    where,
)
from scanloom.cli.streams import steady_streams

app = typer.Typer(
    name="scanloom",
    help="Segment medical scans, and write results that lie exactly on them.\n\n"
    "Research software: not a medical device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("segment")(segment.segment)
app.command("index")(index.index)
app.command("plan")(plan.plan)
app.command("run")(run.run)
app.command("status")(status.status)
app.command("report")(report.report)
app.command("verify")(verify.verify)
app.add_typer(models.app, name="models")
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)
app.command("where")(where.where)
app.command("join")(join.join)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"scanloom {version('scanloom')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options of scanloom itself."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends by SystemExit with a code of `scanloom.cli.exits`.

    Parameters
    ----------
    arguments : sequence of str, optional
        What stands behind the program's name; by default what it was started with.
    """
    atexit.register(gc.freeze)  # else Python looks through all of torch before it ends: 1.5 s
    with steady_streams():
        app(None if arguments is None else list(arguments), prog_name="scanloom")
