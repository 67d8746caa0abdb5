"""Other processes that look at files and describe series, for large archives.

They are started like programs, not forked: this process may have threads, and need not guard its
main module. What goes to and fro is JSON and bytes; nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from scanloom.io.survey import Description, Look, describe, look_at

MOST = 16
"""More gain nothing: the process that collects is the limit."""

_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from scanloom.io.helpers import serve; serve()"
)
_HEAD = struct.Struct("<QQ")
_AHEAD = 2  # pieces of work for each process that wait or are done and not yet taken


class ToDescribe(NamedTuple):
    """A series, as `describe` takes it."""

    kind: str
    paths: Sequence[str]
    packed: Sequence[bytes]


class Helpers:
    """Some processes, for the time of a `with` block.

    Parameters
    ----------
    count : int
        How many; with fewer than 2 all is done in this process.
    """

    def __init__(self, count: int) -> None:
        self._count = min(count, MOST) if sys.executable else 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()

    def __enter__(self) -> Self:
        if self._count > 1:
            for _ in range(self._count):
                process = _started()
                self._processes.append(process)
                self._idle.put(process)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            if kind is not None:
                process.kill()
            if process.stdin:
                with suppress(OSError):
                    process.stdin.close()
        for process in self._processes:
            process.wait()
            if process.stdout:
                process.stdout.close()

    def look(self, chunks: Iterable[Sequence[str]]) -> Iterator[list[Look]]:
        """Give what `look_at` gives for each list of paths, in order."""
        return self._in_order(self._look, look_at, chunks)

    def describe(self, chunks: Iterable[Sequence[ToDescribe]]) -> Iterator[list[Description]]:
        """Give what `describe` gives for each series of each list, in order."""
        return self._in_order(self._describe, _describe_all, chunks)

    def _in_order(
        self, there: Callable[[Any], Any], here: Callable[[Any], Any], chunks: Iterable[Any]
    ) -> Iterator[Any]:
        if not self._processes:
            yield from map(here, chunks)
            return
        waiting: list[Future[Any]] = []
        with ThreadPoolExecutor(len(self._processes)) as pool:
            for chunk in chunks:
                waiting.append(pool.submit(there, chunk))
                if len(waiting) > _AHEAD * len(self._processes):
                    yield waiting.pop(0).result()
            for future in waiting:
                yield future.result()

    def _look(self, paths: Sequence[str]) -> list[Look]:
        answer = self._ask({"look": list(paths)}, b"")
        if answer is None:
            return look_at(paths)
        rows, packed = answer
        return [
            Look._make((*row[:-1], part))
            for row, part in zip(rows, _cut(rows, packed), strict=True)
        ]

    def _describe(self, series: Sequence[ToDescribe]) -> list[Description]:
        rows = [(s.kind, list(s.paths), list(map(len, s.packed))) for s in series]
        packed = b"".join(part for s in series for part in s.packed)
        answer = self._ask({"describe": rows}, packed)
        if answer is None:
            return _describe_all(series)
        return [
            Description(*row)._replace(shape=tuple(row[2]), spacing=tuple(row[3]))
            for row in answer[0]
        ]

    def _ask(self, request: dict[str, Any], packed: bytes) -> tuple[Any, bytes] | None:
        """Return what one of the processes answers; None if it died, and it is not used again."""
        process = self._idle.get()
        answer = None
        with suppress(OSError, ValueError):  # its pipe is closed
            if process.stdin and process.stdout:
                _send(process.stdin, request, packed)
                answer = _receive(process.stdout)
        if answer is None:
            process.kill()
            process.wait()
        self._idle.put(process)
        return answer


def serve() -> None:
    """Answer on stdout what is asked on stdin, until that is closed."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints goes elsewhere
    while (asked := _receive(sys.stdin.buffer)) is not None:
        request, packed = asked
        if "look" in request:
            looks = look_at(request["look"])
            rows = [(*look[:-1], len(look.packed)) for look in looks]
            _send(answers, rows, b"".join(look.packed for look in looks))
        else:
            _send(answers, _describe_all(_series(request["describe"], packed)), b"")


def _series(rows: Sequence[Any], packed: bytes) -> Iterator[ToDescribe]:
    start = 0
    for kind, paths, lengths in rows:
        parts = []
        for length in lengths:
            parts.append(packed[start : start + length])
            start += length
        yield ToDescribe(kind, paths, parts)


def _describe_all(series: Iterable[ToDescribe]) -> list[Description]:
    return [describe(*one) for one in series]


def _cut(rows: Sequence[Sequence[Any]], packed: bytes) -> Iterator[bytes]:
    start = 0
    for row in rows:
        yield packed[start : start + row[-1]]
        start += row[-1]


def _started() -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 this program itself
        [sys.executable, "-c", _START, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _send(stream: IO[bytes], message: Any, packed: bytes) -> None:
    text = json.dumps(message).encode("ascii")
    stream.write(_HEAD.pack(len(text), len(packed)))
    stream.write(text)
    stream.write(packed)
    stream.flush()


def _receive(stream: IO[bytes]) -> tuple[Any, bytes] | None:
    """Return a message and its bytes; None at the end of the stream."""
    head = stream.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    text_size, size = _HEAD.unpack(head)
    text, packed = stream.read(text_size), stream.read(size)
    if len(text) < text_size or len(packed) < size:
        return None
    return json.loads(text), packed
