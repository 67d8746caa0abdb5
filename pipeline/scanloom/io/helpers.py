"""Other processes that look at files and describe series, for large archives.

They are started like programs, not forked: this process may have threads, and need not guard its
main module. Questions and answers travel as `scanloom.io.messages`.
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
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from scanloom.core import keep_memory_private
from scanloom.io.dicom.elements import Packed
from scanloom.io.messages import Message, receive, send
from scanloom.io.survey import Description, Look, Surveyed, describe, survey
from scanloom.own_python import own_environment, own_python, safe_path

MOST = 16
"""More gain nothing: the process that collects is the limit."""

BUFFER_BYTES = 1 << 20
"""Bytes that may wait to be read while their sender goes on; the system may allow fewer."""

_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from scanloom.io.helpers import serve; serve(int(sys.argv[1]))"
)

Done = TypeVar("Done")


class ToDescribe(NamedTuple):
    """A series, as `describe` takes it."""

    kind: str
    paths: Sequence[str]
    packed: Sequence[Packed]


class Helpers:
    """Some processes, for the time of a `with` block, that work beside this one.

    Each is given its next task before it ends the one before; this process looks after them
    between two tasks of its own. No threads: they would slow down what is done here.

    Parameters
    ----------
    count : int
        How many work once they are started, this one among them; with fewer than 2, and before,
        all is done here.
    """

    def __init__(self, count: int) -> None:
        self._count = min(count, MOST) - 1 if sys.executable else 0
        self._helpers: list[_Helper] = []

    def __enter__(self) -> Self:
        return self

    def start(self) -> None:
        """Start them, unless they are there: it takes a fifth of a second, in which one goes on."""
        if not self._helpers:
            self._helpers = [_Helper() for _ in range(self._count)]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for helper in self._helpers:
            helper.stop()

    def survey(self, chunks: Sequence[Sequence[tuple[str, int]]]) -> list[Surveyed]:
        """Return what `survey` gives for each list of files."""
        return self._each(survey, _survey_question, _survey_answer, chunks)

    def describe(self, chunks: Sequence[Sequence[ToDescribe]]) -> list[list[Description]]:
        """Return what `describe` gives for each series of each list."""
        return self._each(_describe_all, _describe_question, _describe_answer, chunks)

    def _each(
        self,
        here: Callable[[Any], Done],
        question: Callable[[Any], Message],
        answer: Callable[[Any], Done],
        tasks: Sequence[Any],
    ) -> list[Done]:
        """Do each task once, wherever somebody is idle."""
        done: dict[int, Done] = {}
        waiting = deque(range(len(tasks)))
        while len(done) < len(tasks):
            for helper in self._helpers:
                while waiting and helper.ask(waiting[0], lambda: question(tasks[waiting[0]])):
                    waiting.popleft()
            if waiting:
                number = waiting.popleft()
                done[number] = here(tasks[number])
            for helper in self._answering(wait=not waiting):
                number, content = helper.answer()
                if content is None:  # it died: others do what it was asked
                    waiting.extend(helper.given_up())
                else:
                    done[number] = answer(content)
        return [done[number] for number in range(len(tasks))]

    def _answering(self, *, wait: bool) -> list[_Helper]:
        """Return those that have something to say, if need be once they have."""
        asked = [helper for helper in self._helpers if helper.asked]
        if not asked:
            return []
        with DefaultSelector() as selector:
            for helper in asked:
                selector.register(helper.connection, EVENT_READ, helper)
            return [key.data for key, _ in selector.select(None if wait else 0)]


class _Helper:
    """One process, and the numbers of what it was asked and has not answered yet."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        for end in (self.connection, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 this program itself
                own_python("-c", _START, str(theirs.fileno()), json.dumps(safe_path(sys.path))),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # libraries may print what headers say
                stderr=subprocess.DEVNULL,
                env={**own_environment(), "OPENBLAS_NUM_THREADS": "1"},  # others would be idle
                pass_fds=[theirs.fileno()],
            )
        # Linux doubles the number for its own needs
        self._room = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
        self.asked: deque[int] = deque()
        self._alive = True

    def ask(self, number: int, question: Callable[[], Message]) -> bool:
        """Ask something, unless there is enough to do; return whether it will be answered.

        A question asked ahead must fit into the socket's buffer. If both processes waited until
        the other one reads, they would wait for ever.
        """
        if not self._alive or len(self.asked) > 1:
            return False
        message = question()
        if self.asked and len(message) > self._room:
            return False
        self.asked.append(number)
        with suppress(OSError):  # it is gone: so says what it answers
            message.send(self.connection)
        return True

    def answer(self) -> tuple[int, Any]:
        """Return the number of what was asked first, and the answer; None if it died."""
        content = None
        with suppress(OSError, EOFError, ValueError):
            content = receive(self.connection)
        return self.asked[0] if content is None else self.asked.popleft(), content

    def given_up(self) -> Sequence[int]:
        """Return what it will not answer."""
        self._alive, given_up = False, list(self.asked)
        self.asked.clear()
        return given_up

    def stop(self) -> None:
        """End it: it has nothing to keep."""
        self._process.kill()
        self._process.wait()
        self.connection.close()


def _survey_question(files: Sequence[tuple[str, int]]) -> Message:
    return Message(["survey", [path for path, _ in files], [size for _, size in files]])


def _survey_answer(content: Any) -> Surveyed:
    rows, which, packed, lengths, series = content
    heads = [(head, common) for *head, common in rows]
    looks = []
    for n, own in zip(which, _cut(lengths, packed), strict=True):
        head, common = heads[n]
        looks.append(Look._make((*head, None if common is None else Packed(common, own))))
    return Surveyed(looks, [(tuple(places), _description(row)) for places, row in series])


def _describe_question(series: Sequence[ToDescribe]) -> Message:
    rows = [[s.kind, list(s.paths), len(s.packed)] for s in series]
    parts = [part for s in series for packed in s.packed for part in packed]
    return Message(["describe", rows, b"".join(parts), list(map(len, parts))])


def _describe_answer(content: Any) -> list[Description]:
    return [_description(row) for row in content]


def serve(descriptor: int) -> None:
    """Answer what is asked through a socket, until its other end is closed."""
    keep_memory_private()
    with socket.socket(fileno=descriptor) as connection, suppress(EOFError, OSError):
        while True:
            task, *content = receive(connection)
            if task == "survey":
                send(connection, _plain(survey(list(zip(*content, strict=True)))))
            else:
                send(connection, list(map(list, _describe_all(_series(*content)))))


def _series(rows: Sequence[Any], packed: bytes, lengths: Sequence[int]) -> Iterator[ToDescribe]:
    parts = _cut(lengths, packed)
    for kind, paths, count in rows:
        yield ToDescribe(kind, paths, [Packed(next(parts), next(parts)) for _ in range(count)])


def _describe_all(series: Iterable[ToDescribe]) -> list[Description]:
    return [describe(*one) for one in series]


def _plain(done: Surveyed) -> list[Any]:
    """Return the content of an answer; what files have in common is said once."""
    heads: dict[tuple[Any, ...], int] = {}
    which, own = [], []
    for look in done.looks:
        common = look.packed.common if look.packed else None
        which.append(heads.setdefault((*look[:-1], common), len(heads)))
        own.append(look.packed.own if look.packed else b"")
    series = [[list(numbers), list(description)] for numbers, description in done.series]
    return [list(map(list, heads)), which, b"".join(own), list(map(len, own)), series]


def _description(row: Sequence[Any]) -> Description:
    return Description(*row)


def _cut(lengths: Sequence[int], packed: bytes) -> Iterator[bytes]:
    start = 0
    for length in lengths:
        yield packed[start : start + length]
        start += length
