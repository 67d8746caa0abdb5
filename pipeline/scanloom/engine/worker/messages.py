"""Messages between a worker and its child process, and `CaseFile`: the cases of a run in a file.

The first message to the child is a `ChildSetup`, then one `CaseRequest` per case; the child
answers with `Ready`, `Step` and `CaseReply`. They travel as `scanloom.io.system.messages`.

A `CaseFile` in `OUT/private/` holds one line of JSON per case. Dask tasks carry an offset in this
file, never the path of a scan: Dask's logs and pages therefore show nothing about a source.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from scanloom.core import Case, CaseRecord, ScanError
from scanloom.engine.prepare import OutputTarget
from scanloom.engine.workflow.schema import Execution
from scanloom.inference.graph import Predictor
from scanloom.io.system.atomic_write import fsync_path
from scanloom.io.system.messages import Message, from_json, register
from scanloom.own_python import safe_path

QUEUED = "waiting"
"""Pseudo-step of a case waiting for models or for the device; not counted against its limit."""

Span = tuple[float, float]
"""Start and end, in seconds of CLOCK_MONOTONIC."""


@dataclass(frozen=True)
class ChildSetup:
    """Settings of a child, which it receives before its first case.

    Parameters
    ----------
    output : OutputTarget
        Output folder for the results.
    make_predictors : callable
        Creates the models, in the child: a top-level function, or a `functools.partial` of one.
    in_flight : int
        Maximum number of concurrent cases.
    memory_limit : int or None
        Bytes of data that the process may have (RLIMIT_DATA), so that a case that takes more ends
        with an error instead of taking the machine's memory. By their estimates, concurrent cases
        take no more together, and a case that alone would take more is refused.
    progress : Path or None
        Folder for the progress of its cases.
    search_path : tuple of str
        Folders in which Python looks for modules, as in the process that makes this. Folders to
        which other users can write, here or on the child's machine, are left out.
    """

    output: OutputTarget
    make_predictors: Callable[[], Sequence[Predictor]]
    in_flight: int = 1
    memory_limit: int | None = None
    progress: Path | None = None
    search_path: tuple[str, ...] = field(default_factory=lambda: tuple(safe_path(sys.path)))


@dataclass(frozen=True)
class FunctionCall:
    """A call of a top-level function, as MODULE:FUNCTION, so that another process can make it."""

    target: str
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Callable[[], Any]) -> FunctionCall:
        """Return the call that a function, or a `functools.partial` of one, stands for.

        Raises
        ------
        TypeError
            If the function is not at the top level of a module.
        """
        if isinstance(function, FunctionCall):
            return function
        call = function if isinstance(function, partial) else partial(function)
        name = getattr(call.func, "__qualname__", "<unknown>")
        if not name.isidentifier():
            raise TypeError(f"{name} is not at the top level of a module")
        return cls(f"{call.func.__module__}:{name}", call.args, dict(call.keywords))

    def __call__(self) -> Any:
        """Import the function and call it."""
        module, name = self.target.split(":")
        return getattr(importlib.import_module(module), name)(*self.arguments, **self.keywords)


@dataclass(frozen=True)
class CaseRequest:
    """A case to be processed; the number identifies it in `Step` and `CaseReply`."""

    number: int
    case: Case


@dataclass(frozen=True)
class Ready:
    """The models are loaded; or cannot be, because of a `fault` that affects all cases."""

    fault: ScanError | None = None


@dataclass(frozen=True)
class Step:
    """A case begins a step."""

    number: int
    name: str


@dataclass(frozen=True)
class CaseReply:
    """A case has ended.

    Parameters
    ----------
    number : int
        That of its `CaseRequest`.
    record : CaseRecord
        Its result, or the reason for none.
    device : tuple of (float, float)
        When it held the device, in seconds of CLOCK_MONOTONIC: once for each of its networks.
    refused : bool
        Whether it exceeds the memory even when run alone; nothing of it was read.
    """

    number: int
    record: CaseRecord
    device: tuple[Span, ...]
    refused: bool = False


for _message_type in (ChildSetup, FunctionCall, CaseRequest, Ready, Step, CaseReply, OutputTarget):
    register(_message_type)
register(Execution, lambda execution: (execution.model_dump(),), Execution.model_validate)


class CaseFile:
    """Cases in a file that only its owner can read, in the order in which they are to run.

    It is an iterator that gives each case once: it ends where none follows, and goes on when more
    were added. In memory are the offsets of the cases that it gave and that were not removed.

    Parameters
    ----------
    path : Path
        It is emptied.
    expected : int or None
        Number of cases that a service expects, which its length is; None for that of the cases.
    at_least : int
        Number of cases that will come for sure, as its length at first.

    Raises
    ------
    OSError
        If it can't be written.
    """

    LONGEST_BYTES = 1 << 26
    """Beyond that, the file of a service is emptied as soon as no case is in work."""

    def __init__(self, path: Path, expected: int | None = None, at_least: int = 0) -> None:
        self.path, self._expected, self._count = path, expected, 0
        self._at_least = at_least
        self._offsets: dict[str, int] = {}
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        self._next = self._end = 0  # offsets of the case to be given, and behind the last one
        self._changed = threading.Condition()

    def append(self, case: Case) -> None:
        """Add a case; OSError if it can't be written."""
        line = Message(case).json + b"\n"
        with self._changed:
            with self.path.open("r+b") as file:
                is_long = self._expected is not None and self._end > self.LONGEST_BYTES
                if is_long and self._next == self._end and not self._offsets:
                    file.truncate(0)
                    self._next = self._end = 0
                file.seek(self._end)
                file.write(line)
            self._end += len(line)
            self._count += 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Return whether a case follows, now or within some seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next < self._end, seconds)

    def __iter__(self) -> Iterator[Case]:
        return self

    def __next__(self) -> Case:
        with self._changed:
            if self._next == self._end:
                raise StopIteration
            with self.path.open("rb") as file:
                file.seek(self._next)
                case: Case = from_json(file.readline())
                self._offsets[case.id] = self._next
                self._next = file.tell()
            return case

    @property
    def end(self) -> int:
        """The offset behind the last case."""
        return self._end

    def cases(self, start: int = 0) -> Iterator[Case]:
        """Yield all cases from an offset on, whether they were given or not."""
        with self.path.open("rb") as file:
            file.seek(start)
            yield from map(from_json, file)

    def sync(self) -> None:
        """Sync the file to the disk; OSError if that fails."""
        fsync_path(self.path)

    def offset(self, case_id: str) -> int:
        """Return the offset of a case that was given."""
        return self._offsets[case_id]

    def remove(self, case_id: str) -> None:
        """Forget a case that has ended."""
        del self._offsets[case_id]

    def __len__(self) -> int:
        return max(self._count, self._at_least) if self._expected is None else self._expected

    @staticmethod
    def read(path: Path, offset: int) -> Case:
        """Return the case at an offset of a file.

        Raises
        ------
        OSError
            If the file can't be read.
        ValueError
            If the offset is not that of a case.
        """
        with path.open("rb") as file:
            file.seek(offset)
            case: Case = from_json(file.readline())
            return case
