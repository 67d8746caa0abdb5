"""How commands speak: results on stdout, everything else on stderr, errors in one manner."""

from __future__ import annotations

import codecs
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scanloom.cli.exits import Exit, exit_of_reason
from scanloom.cli.streams import stdout_lost
from scanloom.cli.tracebacks import libraries_withheld, told_traceback

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.text import Text

    from scanloom.core import Reason

_PARTS = re.compile(r"([\n\t])")
_BEYOND_ASCII = re.compile(r"[^\n -~]")
WIDTH = 110
"""Columns of a table that goes to a file or a pipe, where nobody says how wide it may be."""

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else.")
]
DebugOption = Annotated[
    bool, typer.Option("--debug", help="Show tracebacks, without what other libraries say.")
]


@dataclass(frozen=True)
class Manner:
    """How a command was asked to speak."""

    json: bool = False
    debug: bool = False


def console(*, stderr: bool = False) -> Console:
    """Return a console; wide enough for a table where it is no terminal."""
    from rich.console import Console
    from rich.segment import Segment

    class Clean(Console):
        """Shows foreign text by its letters alone, in strings and in whatever is made of them."""

        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(clean(text), **how)

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for part in super().render(renderable, options):
                yield part if part.control else Segment(clean(part.text), part.style)

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH
    return Clean(file=stream, width=width, highlight=False, emoji=False, markup=False)


def clean(text: str) -> str:
    """Return text as it may reach a terminal; line breaks and tabs stay.

    Names of files and words of headers and models come from anywhere: see `printable`.
    """
    from scanloom.core import printable

    if text.isprintable():
        return text
    return "".join(part if part in ("\n", "\t") else printable(part) for part in _PARTS.split(text))


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a message: on stdout, or on stderr."""
    typer.echo(clean(text), err=err, nl=nl)


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document on stdout: UTF-8, or ASCII where that has another encoding.

    Bytes of a path that are no UTF-8 stand as escapes, and so does what would steer a terminal.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    if codecs.lookup(getattr(sys.stdout, "encoding", None) or "utf-8").name != "utf-8":
        text = json.dumps(document, indent=2, allow_nan=False)
    typer.echo(_BEYOND_ASCII.sub(_escaped, text))


def _escaped(found: re.Match[str]) -> str:
    """Return a character as it may stand in JSON: by its escape where it has no shape."""
    character = found[0]
    return character if character.isprintable() else json.dumps(character)[1:-1]


def told(reason: Reason, detail: str) -> dict[str, Any]:
    """Return what `--json` says of a reason."""
    return {
        "code": reason.code,
        "outcome": reason.outcome,
        "detail": detail,
        "advice": reason.advice,
        "retry": reason.retry,
    }


def message(reason: Reason, detail: str) -> str:
    """Return what a person reads: what happened, the code, what to do."""
    return f"{detail} ({reason.code}). {reason.advice}."


def warn_of_damaged(out: Path, cases: Sequence[str]) -> None:
    """Name published cases that can't be read, on stderr."""
    for case in cases:
        say(
            f"scanloom: case {case} is damaged: `scanloom verify {out}` names its files. Take "
            "its folder away and run again.",
            err=True,
        )


@contextmanager
def speaking(manner: Manner) -> Iterator[None]:
    """Turn whatever goes wrong in the block into one message and an exit code.

    Other libraries' warnings and logs may name a patient: with `--debug` it is shown where they
    spoke, never what they said.
    """
    from scanloom.core import Reason, ScanError, keep_memory_private, settle_in

    keep_memory_private()
    settle_in()
    try:
        with libraries_withheld() if manner.debug else _libraries_silent():
            yield
    except ScanError as error:
        _fail(manner, error, error.reason, error.detail)
        raise typer.Exit(exit_of_reason(error.reason)) from error
    except KeyboardInterrupt as error:
        say("Interrupted: what was not finished left nothing behind.", err=True)
        raise typer.Exit(Exit.INTERRUPTED) from error
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise
    except Exception as error:  # the last border: foreign text goes no further
        if isinstance(error, OSError) and stdout_lost():  # `steady_streams` ends it
            raise
        from scanloom.io.disk_errors import disk_error

        if (of_a_file := disk_error(error)) is not None:
            _fail(manner, error, of_a_file.reason, of_a_file.detail)
            raise typer.Exit(exit_of_reason(of_a_file.reason)) from error
        _fail(manner, error, Reason.INTERNAL, f"something unforeseen, {type(error).__name__}")
        raise typer.Exit(Exit.SOME_FAILED) from error


def _fail(manner: Manner, error: Exception, reason: Reason, detail: str) -> None:
    if manner.debug:
        say(told_traceback(error), err=True)
    if manner.json:
        print_json({"schema": 1, "error": told(reason, detail)})
    else:
        say(f"scanloom: {message(reason, detail)}", err=True)


@contextmanager
def _libraries_silent() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
