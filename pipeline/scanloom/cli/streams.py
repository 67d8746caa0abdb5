"""Robust stdout and stderr: any encoding, a full disk, a closed stream."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from scanloom.cli.exit_codes import Exit


@contextmanager
def steady_streams() -> Iterator[None]:
    """Escape characters that the encoding lacks; exit with one line if stdout fails.

    A pipe closed by its reader is not reported as an error.
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
    """Return whether a write to stdout has failed."""
    return isinstance(sys.stdout, _Watched | _Closed) and sys.stdout.lost


def _prepare() -> None:
    if sys.stdout is None:
        os.open(os.devnull, os.O_WRONLY)  # otherwise the next opened file becomes stdout
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
    """Discard unwritten output: Python would try to write it again at exit."""
    if isinstance(sys.stdout, _Closed):
        sys.stdout = io.StringIO()
        return
    with suppress(OSError, ValueError):  # not backed by a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Watched(io.TextIOWrapper):
    """A stdout that records whether a write failed."""

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
    """A stdout that was closed before the program started."""

    lost = False

    def write(self, text: str, /) -> int:
        self.lost = True
        raise OSError(errno.EBADF, "stdout is closed")
