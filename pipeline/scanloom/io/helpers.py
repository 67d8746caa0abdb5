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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from threading import Thread
from types import TracebackType
from typing import IO, Any, NamedTuple, Self, TypeVar

from scanloom.io.survey import Description, Look, Surveyed, describe, survey

MOST = 16
"""More gain nothing: the process that collects is the limit."""

_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from scanloom.io.helpers import serve; serve()"
)
_HEAD = struct.Struct("<QQ")


Done = TypeVar("Done")


class ToDescribe(NamedTuple):
    """A series, as `describe` takes it."""

    kind: str
    paths: Sequence[str]
    packed: Sequence[bytes]


class Helpers:
    """Some processes, for the time of a `with` block, that work beside this one.

    Parameters
    ----------
    count : int
        How many work, this one among them; with fewer than 2 all is done here.
    """

    def __init__(self, count: int) -> None:
        self._count = min(count, MOST) - 1 if sys.executable else 0
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._processes = [_started() for _ in range(self._count)]
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
            _close(process.stdin)
        for process in self._processes:
            process.wait()
            _close(process.stdout)

    def survey(self, chunks: Sequence[Sequence[str]]) -> list[Surveyed]:
        """Return what `survey` gives for each list of paths."""
        return self._each(survey, _survey_there, chunks)

    def describe(self, chunks: Sequence[Sequence[ToDescribe]]) -> list[list[Description]]:
        """Return what `describe` gives for each series of each list."""
        return self._each(_describe_all, _describe_there, chunks)

    def _each(
        self,
        here: Callable[[Any], Done],
        there: Callable[[subprocess.Popen[bytes], Any], Done | None],
        tasks: Sequence[Any],
    ) -> list[Done]:
        """Do each task once, wherever somebody is idle."""
        done: dict[int, Done] = {}
        waiting = deque(range(len(tasks)))

        def feed(process: subprocess.Popen[bytes]) -> None:
            while True:
                try:
                    number = waiting.popleft()
                except IndexError:
                    return
                result = there(process, tasks[number])
                if result is None:  # it died: this process does it, and what else there is
                    waiting.append(number)
                    return
                done[number] = result

        feeders = [Thread(target=feed, args=(process,)) for process in self._processes]
        for feeder in feeders:
            feeder.start()
        try:
            _work_off(waiting, lambda number: done.__setitem__(number, here(tasks[number])))
        except BaseException:
            waiting.clear()
            raise
        finally:
            for feeder in feeders:
                feeder.join()
        _work_off(waiting, lambda number: done.__setitem__(number, here(tasks[number])))
        return [done[number] for number in range(len(tasks))]


def _work_off(waiting: deque[int], work: Callable[[int], None]) -> None:
    while True:
        try:
            number = waiting.popleft()
        except IndexError:
            return
        work(number)


def _survey_there(process: subprocess.Popen[bytes], paths: Sequence[str]) -> Surveyed | None:
    answer = _ask(process, {"survey": list(paths)}, b"")
    if answer is None:
        return None
    (heads, which, lengths, series), packed = answer
    parts = _cut(lengths, packed)
    looks = [Look._make((*heads[n], part)) for n, part in zip(which, parts, strict=True)]
    return Surveyed(looks, [(tuple(places), _description(row)) for places, row in series])


def _describe_there(
    process: subprocess.Popen[bytes], series: Sequence[ToDescribe]
) -> list[Description] | None:
    rows = [(s.kind, list(s.paths), list(map(len, s.packed))) for s in series]
    packed = b"".join(part for s in series for part in s.packed)
    answer = _ask(process, {"describe": rows}, packed)
    return None if answer is None else [_description(row) for row in answer[0]]


def _ask(
    process: subprocess.Popen[bytes], request: dict[str, Any], packed: bytes
) -> tuple[Any, bytes] | None:
    """Return what a process answers; None if it died."""
    with suppress(OSError, ValueError):  # its pipe is closed
        if process.stdin and process.stdout:
            _send(process.stdin, request, packed)
            return _receive(process.stdout)
    return None


def _close(stream: IO[bytes] | None) -> None:
    with suppress(OSError):  # the other end is gone
        if stream is not None:
            stream.close()


def serve() -> None:
    """Answer on stdout what is asked on stdin, until that is closed."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints goes elsewhere
    while (asked := _receive(sys.stdin.buffer)) is not None:
        request, packed = asked
        if "survey" in request:
            _send(answers, *_plain(survey(request["survey"])))
        else:
            _send(answers, _describe_all(_series(request["describe"], packed)), b"")


def _series(rows: Sequence[Any], packed: bytes) -> Iterator[ToDescribe]:
    parts = _cut([length for row in rows for length in row[2]], packed)
    for kind, paths, lengths in rows:
        yield ToDescribe(kind, paths, list(islice(parts, len(lengths))))


def _describe_all(series: Iterable[ToDescribe]) -> list[Description]:
    return [describe(*one) for one in series]


def _plain(done: Surveyed) -> tuple[Any, bytes]:
    """Return it as JSON and bytes; what files have in common is said once."""
    heads: dict[tuple[Any, ...], int] = {}
    which = [heads.setdefault(look[:-1], len(heads)) for look in done.looks]
    lengths = [len(look.packed) for look in done.looks]
    return (list(heads), which, lengths, done.series), b"".join(look.packed for look in done.looks)


def _description(row: Sequence[Any]) -> Description:
    return Description(*row)._replace(shape=tuple(row[2]), spacing=tuple(row[3]))


def _cut(lengths: Sequence[int], packed: bytes) -> Iterator[bytes]:
    start = 0
    for length in lengths:
        yield packed[start : start + length]
        start += length


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
