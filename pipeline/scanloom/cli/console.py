"""Output of commands: results on stdout, everything else on stderr, errors in one format."""

from __future__ import annotations

import codecs
import json
import logging
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from scanloom.cli.exit_codes import Exit, exit_of_reason, unexamined
from scanloom.cli.streams import stdout_lost
from scanloom.cli.tracebacks import Log, logged, told_traceback

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from scanloom.core import Reason

_LINE_ENDS = re.compile(r"([\n\t])")
_BEYOND_ASCII = re.compile(r"[^\n -~]")
WIDTH = 110
"""Columns of a table that is written to a file or a pipe."""


@dataclass(frozen=True)
class OutputMode:
    """Output options of a command."""

    json: bool = False
    debug: bool = False
    quiet: bool = False
    verbose: bool = False
    log: Path | None = None


def console(*, stderr: bool = False) -> Console:
    """Return a rich console, wide enough for tables if the stream is not a terminal."""
    from rich.console import Console
    from rich.segment import Segment

    class Clean(Console):
        """Escapes control characters in all text, including text inside renderables."""

        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(clean(text), **options)

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for piece in super().render(renderable, options):
                yield piece if piece.control else Segment(clean(piece.text), piece.style)

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH
    return Clean(file=stream, width=width, highlight=False, emoji=False, markup=False)


def clean(text: str) -> str:
    """Return text that is safe for a terminal; line breaks and tabs stay.

    File names and text from headers and models are foreign: see `scanloom.core.printable`.
    """
    from scanloom.core import printable

    if text.isprintable():
        return text
    return "".join(
        piece if piece in ("\n", "\t") else printable(piece) for piece in _LINE_ENDS.split(text)
    )


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a message on stdout or stderr."""
    typer.echo(clean(text), err=err, nl=nl)


def print_json(document: Mapping[str, Any]) -> None:
    """Print a JSON document on stdout: UTF-8, or ASCII if stdout has another encoding.

    Control characters and path bytes that are not UTF-8 are escaped.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    if codecs.lookup(getattr(sys.stdout, "encoding", None) or "utf-8").name != "utf-8":
        text = json.dumps(document, indent=2, allow_nan=False)
    typer.echo(_BEYOND_ASCII.sub(_escaped, text))


def _escaped(match: re.Match[str]) -> str:
    """Return a character for JSON, escaped if it is not printable."""
    character = match[0]
    return character if character.isprintable() else json.dumps(character)[1:-1]


def print_result(
    mode: OutputMode, document: Callable[[], Mapping[str, Any]], show: Callable[[], None]
) -> None:
    """Print a result as `mode` says: as a JSON document, as text, or not at all."""
    if mode.json:
        print_json(document())
    elif not mode.quiet:
        show()


def error_document(reason: Reason, detail: str) -> dict[str, Any]:
    """Return the JSON object of an error."""
    return {
        "code": reason.code,
        "outcome": reason.outcome,
        "detail": detail,
        "advice": reason.advice,
        "retry": reason.retry,
    }


def format_error(reason: Reason, detail: str, private: str = "") -> str:
    """Return the message of an error: detail, code, advice.

    `private` is what it is about: a path comes first, a list of several lines below.
    """
    message = f"{detail} ({reason.code}). {reason.advice}."
    first, *further = private.splitlines() or [""]
    if not further:
        return f"{first}: {message}" if first else message
    return "\n".join([message, *(f"  {line}" for line in (first, *further))])


def warn_of_damaged(out: Path, cases: Sequence[str]) -> None:
    """Report published cases that are unreadable, on stderr."""
    for case in cases:
        say(
            f"scanloom: case {case} is damaged: `scanloom verify {out}` lists its files. Remove "
            "its folder and run again.",
            err=True,
        )


def warn_of_unexamined(reasons: Mapping[str, int]) -> None:
    """Report files that this machine could not look at, on stderr.

    Parameters
    ----------
    reasons : mapping
        Counts of files by reason code.
    """
    from scanloom.core import Reason, counted

    for code, count in unexamined(reasons).items():
        say(
            f"scanloom: {counted(count, 'file')} could not be looked at ({code}), so cases may be "
            f"missing. {Reason[code].advice}.",
            err=True,
        )


def typed_command() -> str:
    """Return the command line of this process, quoted for a shell."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        prefix = [sys.executable, "-m", "scanloom"]
    elif (installed := shutil.which(program.name)) and Path(installed) == program:
        prefix = [program.name]
    else:
        prefix = [str(program)]
    return shlex.join([*prefix, *sys.argv[1:]])


def print_resume_command() -> None:
    """Print the command that goes on where an interrupted one ended, on stderr."""
    say(f"To resume:\n  {typed_command()}", err=True)


@contextmanager
def error_boundary(manner: OutputMode, *, resumable: bool = False) -> Iterator[None]:
    """Turn any error in the block into a message and an exit code.

    `resumable`: whether the same command continues one that was interrupted.

    Warnings and logs of other libraries may name a patient: `--debug` shows their location in the
    code, never their text.
    """
    from scanloom.core import Reason, ScanError, keep_memory_private, settle_in

    keep_memory_private()
    settle_in()
    try:
        with _libraries_heard(manner):
            yield
    except ScanError as error:
        _fail(manner, error, error.reason, error.detail, error.private)
        raise typer.Exit(exit_of_reason(error.reason)) from error
    except KeyboardInterrupt as error:
        say("Interrupted. Unfinished scans left no partial output.", err=True)
        if resumable:
            print_resume_command()
        raise typer.Exit(Exit.INTERRUPTED) from error
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise
    except Exception as error:  # foreign text must not reach the user
        if isinstance(error, OSError) and stdout_lost():  # `steady_streams` ends it
            raise
        from scanloom.io.system.disk_errors import disk_error

        if (write_error := disk_error(error)) is not None:
            _fail(manner, error, write_error.reason, write_error.detail, write_error.private)
            raise typer.Exit(exit_of_reason(write_error.reason)) from error
        _fail(manner, error, Reason.INTERNAL, f"unexpected {type(error).__name__}")
        raise typer.Exit(Exit.SOME_FAILED) from error


def _fail(
    manner: OutputMode, error: Exception, reason: Reason, detail: str, private: str = ""
) -> None:
    if manner.debug:
        say(told_traceback(error), err=True)
    if manner.json:
        print_json({"schema": 1, "error": error_document(reason, detail)})
    else:
        say(f"scanloom: {format_error(reason, detail, private)}", err=True)


def _libraries_heard(manner: OutputMode) -> AbstractContextManager[None]:
    """Return the context of a command: with its log if there is one, else without any."""
    if not (manner.debug or manner.verbose or manner.log):
        return _libraries_silent()
    level = logging.DEBUG if manner.debug else logging.INFO if manner.verbose else None
    return logged(Log(level, manner.log))


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
