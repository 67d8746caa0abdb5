"""Other processes that look at files and describe series, for large archives.

They are started like programs, not forked: this process may have threads, and need not guard its
main module. What goes to and fro is JSON and bytes; nothing is unpickled.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector
from types import TracebackType
from typing import IO, Any, NamedTuple, Self, TypeVar

from scanloom.core import keep_memory_private
from scanloom.io.dicom.elements import Packed
from scanloom.io.survey import Description, Look, Surveyed, describe, survey
from scanloom.own_python import own_environment, own_python, safe_path

MOST = 16
"""More gain nothing: the process that collects is the limit."""

PIPE = 1 << 20
"""Bytes that may wait to be read while their sender goes on."""

_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from scanloom.io.helpers import serve; serve()"
)
_HEAD = struct.Struct("<QQ")
_SMALL_PIPE = 1 << 13


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
        question: Callable[[Any], bytes],
        answer: Callable[[Any, bytes], Done],
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
                number, told = helper.answer()
                if told is None:  # it died: others do what it was asked
                    waiting.extend(helper.given_up())
                else:
                    done[number] = answer(*told)
        return [done[number] for number in range(len(tasks))]

    def _answering(self, *, wait: bool) -> list[_Helper]:
        """Return those that have something to say, if need be once they have."""
        asked = [helper for helper in self._helpers if helper.asked]
        if not asked:
            return []
        with DefaultSelector() as selector:
            for helper in asked:
                selector.register(helper.answers, EVENT_READ, helper)
            return [key.data for key, _ in selector.select(None if wait else 0)]


class _Helper:
    """One process, and the numbers of what it was asked and has not answered yet."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 this program itself
            own_python("-c", _START, json.dumps(safe_path(sys.path))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **own_environment(),
                "OPENBLAS_NUM_THREADS": "1",
            },  # it would start others for nothing
            bufsize=0,  # what was read ahead would be seen by nobody who waits
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise ValueError("a process without pipes")
        self._questions, self.answers = self._process.stdin, self._process.stdout
        self._room = _widened(self._questions)
        _widened(self.answers)
        self.asked: deque[int] = deque()
        self._alive = True

    def ask(self, number: int, question: Callable[[], bytes]) -> bool:
        """Ask something, unless there is enough to do; return whether it will be answered.

        What is asked ahead must fit into the pipe: who waits for it to be read, while an answer
        waits for being read, would wait for ever.
        """
        if not self._alive or len(self.asked) > 1:
            return False
        message = question()
        if self.asked and len(message) > self._room:
            return False
        self.asked.append(number)
        with suppress(OSError):  # it is gone: so says what it answers
            _write(self._questions, message)
        return True

    def answer(self) -> tuple[int, tuple[Any, bytes] | None]:
        """Return the number of what was asked first, and the answer; None if it died."""
        told = None
        with suppress(OSError, ValueError):
            told = _receive(self.answers)
        return self.asked.popleft() if told else self.asked[0], told

    def given_up(self) -> Sequence[int]:
        """Return what it will not answer."""
        self._alive, given_up = False, list(self.asked)
        self.asked.clear()
        return given_up

    def stop(self) -> None:
        """End it: it has nothing to keep."""
        self._process.kill()
        self._process.wait()
        for stream in (self._questions, self.answers):
            with suppress(OSError):
                stream.close()


def _widened(pipe: IO[bytes]) -> int:
    """Let a pipe hold much where that is possible; return how many bytes it holds at least."""
    try:
        return fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE)
    except (OSError, AttributeError):  # Linux alone has it
        return _SMALL_PIPE


def _survey_question(files: Sequence[tuple[str, int]]) -> bytes:
    return _message({"survey": files})


def _survey_answer(told: Any, packed: bytes) -> Surveyed:
    rows, which, lengths, series = told
    heads = [(head, None if c is None else c.encode("latin-1")) for *head, c in rows]
    looks = []
    for n, own in zip(which, _cut(lengths, packed), strict=True):
        head, common = heads[n]
        looks.append(Look._make((*head, None if common is None else Packed(common, own))))
    return Surveyed(looks, [(tuple(places), _description(row)) for places, row in series])


def _describe_question(series: Sequence[ToDescribe]) -> bytes:
    rows = [(s.kind, list(s.paths), [list(map(len, p)) for p in s.packed]) for s in series]
    parts = (part for s in series for packed in s.packed for part in packed)
    return _message({"describe": rows}, b"".join(parts))


def _describe_answer(told: Any, packed: bytes) -> list[Description]:
    return [_description(row) for row in told]


def serve() -> None:
    """Answer on stdout what is asked on stdin, until that is closed."""
    keep_memory_private()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints goes elsewhere
    while (asked := _receive(sys.stdin.buffer)) is not None:
        request, packed = asked
        if "survey" in request:
            answer = _message(*_plain(survey(request["survey"])))
        else:
            answer = _message(_describe_all(_series(request["describe"], packed)))
        _write(answers, answer)
        answers.flush()


def _series(rows: Sequence[Any], packed: bytes) -> Iterator[ToDescribe]:
    parts = _cut([length for row in rows for both in row[2] for length in both], packed)
    for kind, paths, lengths in rows:
        yield ToDescribe(kind, paths, [Packed(next(parts), next(parts)) for _ in lengths])


def _describe_all(series: Iterable[ToDescribe]) -> list[Description]:
    return [describe(*one) for one in series]


def _plain(done: Surveyed) -> tuple[Any, bytes]:
    """Return it as JSON and bytes; what files have in common is said once."""
    heads: dict[tuple[Any, ...], int] = {}
    which, own = [], []
    for look in done.looks:
        common = look.packed.common if look.packed else None
        which.append(heads.setdefault((*look[:-1], common), len(heads)))
        own.append(look.packed.own if look.packed else b"")
    rows = [(*head, None if c is None else c.decode("latin-1")) for *head, c in heads]
    return (rows, which, list(map(len, own)), done.series), b"".join(own)


def _description(row: Sequence[Any]) -> Description:
    return Description(*row)._replace(shape=tuple(row[2]), spacing=tuple(row[3]))


def _cut(lengths: Sequence[int], packed: bytes) -> Iterator[bytes]:
    start = 0
    for length in lengths:
        yield packed[start : start + length]
        start += length


def _message(told: Any, packed: bytes = b"") -> bytes:
    text = json.dumps(told).encode("ascii")
    return b"".join((_HEAD.pack(len(text), len(packed)), text, packed))


def _write(stream: IO[bytes], message: bytes) -> None:
    left = memoryview(message)
    while left:
        left = left[stream.write(left) :]


def _receive(stream: IO[bytes]) -> tuple[Any, bytes] | None:
    """Return a message and its bytes; None at the end of the stream."""
    head = _read(stream, _HEAD.size)
    if len(head) < _HEAD.size:
        return None
    text_size, size = _HEAD.unpack(head)
    text, packed = _read(stream, text_size), _read(stream, size)
    if len(text) < text_size or len(packed) < size:
        return None
    return json.loads(text), packed


def _read(stream: IO[bytes], size: int) -> bytes:
    """Return so many bytes, fewer where the stream ends."""
    parts = []
    while size > 0 and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
