"""Tracebacks and logs for `--debug`, `--verbose` and `--log`, without text from other libraries.

Exceptions, warnings and log lines of other libraries quote paths and headers, which name patients.
Only their type and location in the code are shown; scanloom's own text is shown in full.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO

import typer

OURS = "scanloom"
WITHHELD = "(text withheld)"


def told_traceback(error: BaseException) -> str:
    """Return the traceback of an error and of its causes.

    The text of a `ScanError` and the name of a missing module are shown; otherwise only the type.
    """
    sections = [_formatted(link) for link in _chain(error)]
    return "\nwhich led to\n\n".join(reversed(sections))


@dataclass(frozen=True)
class Log:
    """Destination of log messages.

    Parameters
    ----------
    level : int or None
        Lowest level of messages on stderr; None for none. With DEBUG, other libraries are heard.
    file : Path or None
        A file to which messages are appended with their time: of INFO, or `level` if that is lower.
    """

    level: int | None
    file: Path | None = None

    def handlers(self) -> list[logging.Handler]:
        """Return the handlers of scanloom's messages.

        Raises
        ------
        BadParameter
            If the file can't be written.
        """
        handlers: list[logging.Handler] = []
        if self.level is not None:
            handlers.append(logging.StreamHandler())
            handlers[0].setFormatter(_Formatter())
            handlers[0].setLevel(self.level)
        if self.file is not None:
            try:
                handlers.append(logging.FileHandler(self.file, encoding="utf-8"))
            except OSError as exc:
                problem = f"{self.file} can't be written ({type(exc).__name__})"
                raise typer.BadParameter(problem, param_hint="'--log'") from exc
            handlers[-1].setLevel(min(logging.INFO, self.level or logging.INFO))
            handlers[-1].setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s"))
        return handlers


@contextmanager
def logged(log: Log) -> Iterator[None]:
    """Log scanloom's messages, and only the location of other libraries'.

    The record factory is replaced, since some libraries install their own handlers.
    """
    logger, handlers = logging.getLogger(OURS), log.handlers()
    level, factory = logger.level, logging.getLogRecordFactory()
    silence = None if log.level == logging.DEBUG else logging.NullHandler()

    def make_record(*values: object, **keywords: object) -> logging.LogRecord:
        record: logging.LogRecord = factory(*values, **keywords)
        if record.name.partition(".")[0] != OURS:
            record.msg = f"{record.name}, {record.filename} line {record.lineno}: {WITHHELD}"
            record.args, record.exc_info = (), None
            record.exc_text = record.stack_info = None
        return record

    logging.setLogRecordFactory(make_record)
    if silence is not None:  # otherwise logging prints the warnings of other libraries
        logging.root.addHandler(silence)
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    finally:
        if silence is not None:
            logging.root.removeHandler(silence)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)
        logging.setLogRecordFactory(factory)


class _Formatter(logging.Formatter):
    """Formats tracebacks without text from other libraries."""

    def formatException(  # noqa: N802 the name is logging's
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None]
        | tuple[None, None, None],
    ) -> str:
        return "" if ei[1] is None else told_traceback(ei[1])


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, each once."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            pending.extend(link.exceptions)
        pending.append(link.__cause__ or (None if link.__suppress_context__ else link.__context__))


def _formatted(error: BaseException) -> str:
    from scanloom.core import ScanError

    text = WITHHELD
    if isinstance(error, ScanError):
        text = str(error)
    elif isinstance(error, ImportError) and error.name:
        text = error.name  # of a module
    lines = ["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__)]
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return "".join(lines) + f"{module}{kind.__qualname__}: {text}\n"


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Replace `warnings.showwarning`: log location and category, not the text."""
    logging.getLogger(OURS).debug(
        "%s line %d: %s: %s", filename, lineno, category.__name__, WITHHELD
    )
