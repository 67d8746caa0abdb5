"""stdout and stderr as they are found: in any encoding, full, or closed."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from scanloom.cli.exits import Exit


@contextmanager
def steady_streams() -> Iterator[None]:
    """Say what the encoding has no letters for by escapes; end in one line if stdout is lost.

    A reader of a pipe that went away is no error to tell.
    """
    _prepare()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard()
        raise SystemExit(Exit.SOME_FAILED) from None
    except OSError as exc:
        if not stdout_lost():
            raise
        _discard()
        name = errno.errorcode.get(exc.errno or 0, type(exc).__name__)
        sys.stderr.write(f"scanloom: the output can't be written to stdout ({name}).\n")
        raise SystemExit(Exit.INPUT_OUTPUT) from None


def stdout_lost() -> bool:
    """Whether something was said that can't be written."""
    return isinstance(sys.stdout, _Watched | _Closed) and sys.stdout.lost


def _prepare() -> None:
    if sys.stdout is None:
        os.open(os.devnull, os.O_WRONLY)  # else the next file that is opened becomes stdout
        sys.stdout = _Closed()
    elif sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        encoding, lines = sys.stdout.encoding, sys.stdout.line_buffering
        sys.stdout = _Watched(
            sys.stdout.detach(), encoding, "backslashreplace", line_buffering=lines
        )
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    elif isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")


def _discard() -> None:
    """Let go what could not be written: Python would try again at its end."""
    if isinstance(sys.stdout, _Closed):
        sys.stdout = io.StringIO()
        return
    with suppress(OSError, ValueError):  # no file of the system
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Watched(io.TextIOWrapper):
    """A stdout that remembers whether it failed."""

    lost = False

    def write(self, text: str, /) -> int:
        with self._watching():
            return super().write(text)

    def flush(self) -> None:
        with self._watching():
            super().flush()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.lost = True
            raise


class _Closed(io.TextIOBase):
    """A stdout that is not there."""

    lost = False

    def write(self, text: str, /) -> int:
        self.lost = True
        raise OSError(errno.EBADF, "stdout is closed")
