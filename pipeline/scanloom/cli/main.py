"""The `scanloom` program: registers the commands. Heavy imports happen when a command runs."""

from __future__ import annotations

import atexit
import gc
import inspect
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from scanloom.cli.command import HELP, Command, Group
from scanloom.cli.commands import (
    dataset,
    demo,
    doctor,
    evaluate,
    export,
    fetch,
    index,
    join,
    listen,
    models,
    plan,
    report,
    review,
    run,
    segment,
    send,
    status,
    train,
    verify,
    where,
)
from scanloom.cli.console import steady_streams
from scanloom.engine.machine.lean_imports import leave_out_unused_modules
from scanloom.own_python import let_idle_threads_sleep, safe_path
from scanloom.version import __version__

app = typer.Typer(
    name="scanloom",
    cls=Group,
    context_settings=HELP,
    help="Segment medical scans, and write results that lie exactly on them.\n\n"
    "Research software: not a medical device.",
    epilog="Every option has a variable (SCANLOOM_DEVICE) and may stand in a file (--config).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


_HELP_WIDTH = 97
"""Characters of a line of help in a terminal of 100 columns."""


def _paragraphs(text: str | None) -> list[str]:
    """Return the paragraphs of a docstring, a line each, to be wrapped to the terminal.

    An example is on the line of the sentence before it if both fit, so that help fits a screen.
    """
    paragraphs = [" ".join(p.split()) for p in inspect.cleandoc(text or "").split("\n\n")]
    one_line = " ".join(paragraphs)
    has_example = paragraphs[-1].startswith("Example:")
    return [one_line] if has_example and len(one_line) <= _HELP_WIDTH else paragraphs


# Help lists them so: make results, look at them, then the machine, then the private part
for _command in (
    segment.segment,
    index.index,
    plan.plan,
    run.run,
    status.status,
    report.report,
    review.review,
    dataset.dataset,
    evaluate.evaluate,
    verify.verify,
    export.export,
    fetch.fetch,
    listen.listen,
    send.send,
    train.train,
    doctor.doctor,
    demo.demo,
    where.where,
    join.join,
):
    app.command(
        _command.__name__,
        cls=Command,
        help="\n\n".join(_paragraphs(_command.__doc__)),
        short_help=inspect.cleandoc(_command.__doc__ or "").partition("\n")[0],
    )(_command)
app.add_typer(models.app, name="models")


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"scanloom {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            metavar="",
            callback=_show_version,
            is_eager=True,
            help="Show the version.",
        ),
    ] = False,
) -> None:
    """Define the program's own options."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits by SystemExit with a code of `scanloom.cli.console`.

    Parameters
    ----------
    arguments : sequence of str, optional
        Command-line arguments without the program's name; by default those of the process.
    """
    if arguments is None:  # a program of its own
        sys.path[:] = safe_path(sys.path)
        leave_out_unused_modules()
        let_idle_threads_sleep()
    atexit.register(gc.freeze)  # saves 1.5 s of garbage collection of torch's objects at exit
    with steady_streams():
        app(None if arguments is None else list(arguments), prog_name="scanloom")
