"""What `--debug` shows: where things happened, never in other libraries' words.

Exceptions, warnings and log lines of other libraries quote paths and headers, which name patients.
Of them the type and the place in the code are shown; only what scanloom itself says is quoted.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

OURS = "scanloom"
WITHHELD = "(text withheld)"


def told_traceback(error: BaseException) -> str:
    """Return the traceback of an error and of all that led to it.

    The text of a `ScanError` is shown, and which module is missing; else only the type.
    """
    parts = [_told(link) for link in _chain(error)]
    return "\nwhich led to\n\n".join(reversed(parts))


@contextmanager
def libraries_withheld() -> Iterator[None]:
    """Let our logger speak (stderr, DEBUG), and other libraries say no more than where they are.

    Logging is changed where records are made, since some libraries bring their own handlers.
    """
    logger, handler = logging.getLogger(OURS), logging.StreamHandler()
    handler.setFormatter(_Formatter())
    level, factory = logger.level, logging.getLogRecordFactory()

    def record(*values: object, **more: object) -> logging.LogRecord:
        made: logging.LogRecord = factory(*values, **more)
        if made.name.partition(".")[0] != OURS:
            made.msg = f"{made.name}, {made.filename} line {made.lineno}: {WITHHELD}"
            made.args, made.exc_info, made.exc_text, made.stack_info = (), None, None, None
        return made

    logging.setLogRecordFactory(record)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logging.setLogRecordFactory(factory)


class _Formatter(logging.Formatter):
    """Log lines whose tracebacks are told in our manner."""

    def formatException(  # noqa: N802 the name is logging's
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None]
        | tuple[None, None, None],
    ) -> str:
        return "" if ei[1] is None else told_traceback(ei[1])


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Give an error, then what it came from, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            waiting.extend(link.exceptions)
        waiting.append(link.__cause__ or (None if link.__suppress_context__ else link.__context__))


def _told(error: BaseException) -> str:
    from scanloom.core import ScanError

    text = WITHHELD
    if isinstance(error, ScanError):
        text = str(error)
    elif isinstance(error, ImportError) and error.name:
        text = error.name  # of a module
    lines = ["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__)]
    kind = type(error)
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return "".join(lines) + f"{where}{kind.__qualname__}: {text}\n"


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Stand in for `warnings.showwarning`: the place and the kind, not the text."""
    logging.getLogger(OURS).debug(
        "%s line %d: %s: %s", filename, lineno, category.__name__, WITHHELD
    )
