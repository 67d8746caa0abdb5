"""Worker processes that inspect files and describe series, for large archives.

They are started as programs, not forked: this process may have threads, and its main module needs
no guard. Requests and replies travel as `scanloom.io.system.messages`.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector
from typing import Any, NamedTuple, TypeVar

from scanloom.core import keep_memory_private
from scanloom.io.dicom.header.elements import EncodedElements
from scanloom.io.index.inspection import (
    ChunkInfo,
    FileInfo,
    SeriesInfo,
    describe_files,
    inspect_chunk,
)
from scanloom.io.system.messages import Message, receive, send
from scanloom.own_python import own_environment, own_python, safe_path

MAX_WORKERS = 16
"""Maximal number of processes; with more, collecting the results is the bottleneck."""

BUFFER_BYTES = 1 << 20
"""Send buffer: a sender waits only if more bytes are unread. The system may allow fewer."""

_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from scanloom.io.index.workers import serve; serve(int(sys.argv[1]))"
)

Result = TypeVar("Result")


class DescribeTask(NamedTuple):
    """A series to describe: the arguments of `describe_files`."""

    kind: str
    paths: Sequence[str]
    packed: Sequence[EncodedElements]


class HeaderWorkers:
    """Worker processes, until they are closed; this process works too.

    Each worker gets its next task before it finishes the previous one. This process serves the
    workers between two tasks of its own: threads for that would slow down its tasks.

    Parameters
    ----------
    count : int
        Number of processes once the workers are started, including this one. With fewer than 2,
        and before the start, this process does all the work.
    """

    def __init__(self, count: int) -> None:
        self._count = min(count, MAX_WORKERS) - 1 if sys.executable else 0
        self._workers: list[_Worker] = []

    def start(self) -> None:
        """Start the workers unless they are running; they need 0.2 s, in the background."""
        if not self._workers:
            self._workers = [_Worker() for _ in range(self._count)]

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.stop()

    def survey(self, chunks: Sequence[Sequence[tuple[str, int]]]) -> list[ChunkInfo]:
        """Return the result of `inspect_chunk` for each list of files."""
        return self._map(inspect_chunk, _survey_request, _survey_result, chunks)

    def describe(self, chunks: Sequence[Sequence[DescribeTask]]) -> list[list[SeriesInfo]]:
        """Return the results of `describe_files` for each list of series."""
        return self._map(_describe_all, _describe_request, _describe_result, chunks)

    def _map(
        self,
        run_here: Callable[[Any], Result],
        to_request: Callable[[Any], Message],
        from_reply: Callable[[Any], Result],
        tasks: Sequence[Any],
    ) -> list[Result]:
        """Run each task once, in a worker or in this process; return the results in order."""
        results: dict[int, Result] = {}
        waiting = deque(range(len(tasks)))
        while len(results) < len(tasks):
            for worker in self._workers:
                while waiting and worker.submit(waiting[0], lambda: to_request(tasks[waiting[0]])):
                    waiting.popleft()
            if waiting:
                number = waiting.popleft()
                results[number] = run_here(tasks[number])
            for worker in self._ready(wait=not waiting):
                number, reply = worker.reply()
                if reply is None:  # it died: other processes repeat its tasks
                    waiting.extend(worker.abandon())
                else:
                    results[number] = from_reply(reply)
        return [results[number] for number in range(len(tasks))]

    def _ready(self, *, wait: bool) -> list[_Worker]:
        """Return the workers with a reply to read; wait for the first one if requested."""
        busy = [worker for worker in self._workers if worker.pending]
        if not busy:
            return []
        with DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.connection, EVENT_READ, worker)
            return [key.data for key, _ in selector.select(None if wait else 0)]


class _Worker:
    """One process, and the numbers of the tasks that it has not finished yet."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        for end in (self.connection, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this very Python
                own_python("-c", _START, str(theirs.fileno()), json.dumps(safe_path(sys.path))),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # libraries may print text from headers
                stderr=subprocess.DEVNULL,
                env={**own_environment(), "OPENBLAS_NUM_THREADS": "1"},  # more would be idle
                pass_fds=[theirs.fileno()],
            )
        # Linux doubles the number for its own needs
        self._buffer_bytes = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
        self.pending: deque[int] = deque()
        self._alive = True

    def submit(self, number: int, to_request: Callable[[], Message]) -> bool:
        """Send a task unless the worker has two already; return whether a reply will follow.

        A request sent ahead must fit into the socket's buffer. If both processes waited until
        the other one reads, they would wait for ever.
        """
        if not self._alive or len(self.pending) > 1:
            return False
        request = to_request()
        if self.pending and len(request) > self._buffer_bytes:
            return False
        self.pending.append(number)
        with suppress(OSError):  # it died: `reply` will report it
            request.send(self.connection)
        return True

    def reply(self) -> tuple[int, Any]:
        """Return the number of the oldest task, and its reply; None if the worker died."""
        content = None
        with suppress(OSError, EOFError, ValueError):
            content = receive(self.connection)
        return self.pending[0] if content is None else self.pending.popleft(), content

    def abandon(self) -> Sequence[int]:
        """Give up a worker that died; return the numbers of its unfinished tasks."""
        self._alive, abandoned = False, list(self.pending)
        self.pending.clear()
        return abandoned

    def stop(self) -> None:
        """Kill the process: it has no state to save."""
        self._process.kill()
        self._process.wait()
        self.connection.close()


def _survey_request(files: Sequence[tuple[str, int]]) -> Message:
    return Message(["survey", [path for path, _ in files], [size for _, size in files]])


def _survey_result(reply: Any) -> ChunkInfo:
    rows, row_of_file, packed, lengths, series = reply
    shared = [(fields, common) for *fields, common in rows]
    infos = []
    for n, own in zip(row_of_file, _split(lengths, packed), strict=True):
        fields, common = shared[n]
        infos.append(
            FileInfo._make((*fields, None if common is None else EncodedElements(common, own)))
        )
    return ChunkInfo(infos, [(tuple(members), SeriesInfo(*row)) for members, row in series])


def _describe_request(series: Sequence[DescribeTask]) -> Message:
    rows = [[s.kind, list(s.paths), len(s.packed)] for s in series]
    values = [value for s in series for packed in s.packed for value in packed]
    return Message(["describe", rows, b"".join(values), list(map(len, values))])


def _describe_result(reply: Any) -> list[SeriesInfo]:
    return [SeriesInfo(*row) for row in reply]


def serve(descriptor: int) -> None:
    """Serve the requests of a socket until its other end is closed."""
    keep_memory_private()
    with socket.socket(fileno=descriptor) as connection, suppress(EOFError, OSError):
        while True:
            task, *content = receive(connection)
            if task == "survey":
                send(connection, _survey_reply(inspect_chunk(list(zip(*content, strict=True)))))
            else:
                send(connection, list(map(list, _describe_all(_series(*content)))))


def _series(rows: Sequence[Any], packed: bytes, lengths: Sequence[int]) -> Iterator[DescribeTask]:
    values = _split(lengths, packed)
    for kind, paths, count in rows:
        yield DescribeTask(
            kind, paths, [EncodedElements(next(values), next(values)) for _ in range(count)]
        )


def _describe_all(series: Iterable[DescribeTask]) -> list[SeriesInfo]:
    return [describe_files(*task) for task in series]


def _survey_reply(result: ChunkInfo) -> list[Any]:
    """Return the content of a reply; values that files have in common are sent once."""
    rows: dict[tuple[Any, ...], int] = {}
    row_of_file, own = [], []
    for info in result.infos:
        common = info.packed.common if info.packed else None
        row_of_file.append(rows.setdefault((*info[:-1], common), len(rows)))
        own.append(info.packed.own if info.packed else b"")
    series = [[list(members), list(description)] for members, description in result.series]
    return [list(map(list, rows)), row_of_file, b"".join(own), list(map(len, own)), series]


def _split(lengths: Sequence[int], packed: bytes) -> Iterator[bytes]:
    start = 0
    for length in lengths:
        yield packed[start : start + length]
        start += length
