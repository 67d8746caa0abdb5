"""`scanloom`: the commands and nothing else. Heavy imports happen when a command runs."""

from __future__ import annotations

import atexit
import gc
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
import typer.core

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
from scanloom.cli.console import clean
from scanloom.cli.streams import steady_streams
from scanloom.own_python import safe_path


class _Commands(typer.core.TyperGroup):
    """The commands; mistakes in what they are given are shown as all foreign text is."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        with _shown_clean():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        with _shown_clean():
            return super().invoke(ctx)


@contextmanager
def _shown_clean() -> Iterator[None]:
    """Clean the text of a mistake in the command line, which quotes names of files."""
    try:
        yield
    except Exception as error:
        if isinstance(getattr(error, "message", None), str):  # click's, wherever typer has it from
            error.message = clean(error.message)  # type: ignore[attr-defined]
        raise


app = typer.Typer(
    name="scanloom",
    cls=_Commands,
    help="Segment medical scans, and write results that lie exactly on them.\n\n"
    "Research software: not a medical device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _flowing(text: str | None) -> str:
    """Return a docstring whose paragraphs are as wide as the terminal, not as the source."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


for _command in (
    segment.segment,
    index.index,
    plan.plan,
    run.run,
    status.status,
    report.report,
    verify.verify,
    doctor.doctor,
    demo.demo,
    where.where,
    join.join,
):
    app.command(_command.__name__, help=_flowing(_command.__doc__))(_command)
app.add_typer(models.app, name="models")


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
    if arguments is None:  # a program of its own
        sys.path[:] = safe_path(sys.path)
    atexit.register(gc.freeze)  # else Python looks through all of torch before it ends: 1.5 s
    with steady_streams():
        app(None if arguments is None else list(arguments), prog_name="scanloom")
