"""Messages between a worker and its engine child, and `CaseFile`: the cases of a run in a file.

The first message to the child is a `WorkerSetup`, then one `CaseRequest` per case; the child
answers with `Ready`, `Step` and `CaseReply`. They travel as `scanloom.io.system.messages`.

A `CaseFile` in `OUT/private/` holds one line of JSON per case. Dask tasks carry an offset in this
file, never the path of a scan: Dask's logs and pages therefore show nothing about a source.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from scanloom.core import Case, CaseRecord, ScanError
from scanloom.engine.prepare import OutputTarget
from scanloom.engine.workflow.schema import Execution
from scanloom.inference.graph import Predictor
from scanloom.io.system.messages import Message, from_json, register
from scanloom.own_python import safe_path

QUEUED = "waiting"
"""Pseudo-step of a case waiting for models or for the device; not counted against its limit."""

Span = tuple[float, float]
"""Start and end, in seconds of CLOCK_MONOTONIC."""
PredictorFactory = Callable[[], Sequence[Predictor]]


@dataclass(frozen=True)
class WorkerSetup:
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
    neighbours : int
        Number of such processes that share the machine's memory without a limit.
    progress : Path or None
        Folder for the progress of its cases.
    search_path : tuple of str
        Folders in which Python looks for modules, as in the process that makes this. Folders to
        which other users can write, here or on the child's machine, are left out.
    """

    output: OutputTarget
    make_predictors: PredictorFactory
    in_flight: int = 1
    memory_limit: int | None = None
    neighbours: int = 1
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


for _message_type in (WorkerSetup, FunctionCall, CaseRequest, Ready, Step, CaseReply, OutputTarget):
    register(_message_type)
register(Execution, lambda execution: (execution.model_dump(),), Execution.model_validate)


class CaseFile:
    """Cases of a run by id; only their offsets in the file stay in memory."""

    def __init__(self, path: Path, offsets: dict[str, int]) -> None:
        self.path, self._offsets = path, offsets

    @classmethod
    def write(cls, path: Path, cases: Iterable[Case]) -> Self:
        """Write a new file that only its owner can read.

        Raises
        ------
        OSError
            If it can't be written.
        """
        offsets = {}
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for case in cases:
                offsets[case.id] = file.tell()
                file.write(Message(case).json + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return cls(path, offsets)

    def offset(self, case_id: str) -> int:
        """Return the offset of a case in the file."""
        return self._offsets[case_id]

    def __len__(self) -> int:
        return len(self._offsets)

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


class GrowingCaseFile(CaseFile):
    """Cases that come one by one, in a file that only its owner can read.

    Parameters
    ----------
    path : Path
        It is emptied.
    expected : int
        Number of cases that are expected, which its length is.

    Raises
    ------
    OSError
        If it can't be written.
    """

    LONGEST_BYTES = 1 << 26
    """Beyond that, the file is emptied as soon as no case is in work."""

    def __init__(self, path: Path, expected: int) -> None:
        super().__init__(path, {})
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        self._expected = expected

    def add(self, case: Case) -> None:
        """Append a case; OSError if it can't be written."""
        with self.path.open("ab") as file:
            offset = file.tell()
            if offset > self.LONGEST_BYTES and not self._offsets:
                file.truncate(0)
                offset = 0
            file.write(Message(case).json + b"\n")
        self._offsets[case.id] = offset

    def remove(self, case_id: str) -> None:
        """Forget a case that has ended."""
        del self._offsets[case_id]

    def __len__(self) -> int:
        return self._expected
