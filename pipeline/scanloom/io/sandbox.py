"""Functions run in a child process, with a deadline and a limit of memory.

Decoders are C code, and files come from anywhere: a damaged one can crash, hang or swallow all
memory. Then a child is lost, and one scan, nothing else. Every job has a process of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from scanloom.core import Reason, ScanError
from scanloom.core.limits import limit_met
from scanloom.own_python import own_environment, own_python, safe_path

Result = TypeVar("Result")

AVAILABLE = sys.platform == "linux" and hasattr(os, "memfd_create") and bool(sys.executable)
"""Elsewhere everything runs in this process, without limits."""

_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from scanloom.io.sandbox_helper import main; main(int(sys.argv[1]))"
)
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_PATIENCE = 60  # s until the helper must have forked: it may have to load a module before


@dataclass(frozen=True)
class Limits:
    """What a job may take.

    Parameters
    ----------
    memory : int
        Bytes of private memory, beside the shared arrays that it gets and gives.
    silence : float
        Seconds without a word of progress.
    seconds : float
        Seconds in all.
    """

    memory: int
    silence: float
    seconds: float


def run_limited(
    target: Callable[..., Result],
    *arguments: Any,
    limits: Limits,
    modules: tuple[str, ...] = (),
) -> Result:
    """Return what `target(*arguments)` returns, run in a child process.

    Parameters
    ----------
    target : function
        At the top level of a module that can be imported. In it `shared_empty` makes arrays that
        come back without being copied, and `progress` says that it goes on.
    *arguments
        None, bool, int, float, str, bytes, Path, Reason, Flag, arrays, lists, tuples and dicts of
        these; so is the result. Arrays of `shared_empty` are not copied: what the child writes
        into them is seen here.
    limits : Limits
        What it may take.
    modules : tuple of str
        What `target` imports inside, if that takes long: it is loaded once for all jobs.

    Raises
    ------
    ScanError
        What `target` raised; DAMAGED if it crashed, DECODE_TIMEOUT if it took too long, TOO_LARGE
        if it wanted more memory, OUT_OF_MEMORY if the system ended it, INTERNAL for any other
        exception.
    """
    if not AVAILABLE:
        return target(*arguments)
    job = {
        "target": f"{target.__module__}:{target.__qualname__}",
        "arguments": list(arguments),
        "memory": limits.memory,
    }
    connection, worker = _HELPER.fork((target.__module__, *modules))
    answer: dict[str, Any] = {}
    status = 0
    try:
        with connection:
            answer = _ask(connection, job, limits)
    except TimeoutError as exc:
        raise ScanError(Reason.DECODE_TIMEOUT, "its deadline passed, and it was given up") from exc
    except ValueError as exc:
        raise ScanError(Reason.DAMAGED, "its decoder gave no proper answer") from exc
    except (EOFError, OSError):
        pass  # it died: its status says how
    finally:
        status = _HELPER.end(worker)
    if "result" in answer:
        return answer["result"]  # type: ignore[no-any-return]
    raise _error(answer, status)


def warm_up() -> None:
    """Start the helper beside other work, for a job that is about to come."""
    if AVAILABLE:
        _HELPER.warm_up()


def shared_empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return a new array that another process can fill or read without a copy.

    Raises
    ------
    MemoryError
        If the system has no room for it.
    """
    if not AVAILABLE:
        return np.zeros(shape, dtype)
    from scanloom.io.shared import shared_empty as make

    return make(shape, dtype)


def progress() -> None:
    """Say that the work goes on; in a child, the time of silence begins anew."""
    _say_progress()


def report_progress_by(say: Callable[[], None]) -> None:
    """Set what `progress` does: for the child process."""
    global _say_progress
    _say_progress = say


def _nothing() -> None:
    pass


_say_progress: Callable[[], None] = _nothing


def _ask(connection: socket.socket, job: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Return the answer to a job; TimeoutError if it does not come in time."""
    from scanloom.io.shared import receive, send

    end = time.monotonic() + limits.seconds
    connection.settimeout(limits.silence)
    send(connection, job)
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(min(limits.silence, left))
        answer = receive(connection)
        if not isinstance(answer, dict):
            raise ValueError("not an answer")  # noqa: TRY004 - as of any other nonsense
        if "alive" not in answer:
            return answer


def _error(answer: dict[str, Any], status: int) -> ScanError:
    """Return what an answer without a result, or none, stands for."""
    if isinstance(answer.get("error"), Reason):
        return ScanError(answer["error"], str(answer.get("detail", "")))
    if "memory" in answer:
        return ScanError(Reason.TOO_LARGE, "decoding it takes more memory than its size allows")
    if "fault" in answer:
        return ScanError(Reason.INTERNAL, str(answer["fault"]))
    limit = limit_met(-os.WTERMSIG(status)) if os.WIFSIGNALED(status) else None
    if limit is not None:
        return limit
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return ScanError(Reason.OUT_OF_MEMORY, "the system ended the process that decoded it")
    return ScanError(Reason.DAMAGED, "its decoder crashed")


class _Helper:
    """The process that forks workers; started when it is first needed, and anew if it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def warm_up(self) -> None:
        with self._lock:
            self._started()

    def fork(self, modules: tuple[str, ...]) -> tuple[socket.socket, int]:
        """Return the socket to a new worker, and the worker's number."""
        ours, theirs = socket.socketpair()
        with theirs:
            worker = self._request({"fork": list(modules)}, [theirs.fileno()]).get("pid", 0)
        if not worker:
            ours.close()
            raise ScanError(Reason.OUT_OF_MEMORY, "no process could be started for its pixels")
        return ours, worker

    def end(self, worker: int) -> int:
        """Kill a worker, if it still lives; return its status as waitpid(2) tells it."""
        return int(self._request({"end": worker}, []).get("status", 0))

    def _request(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        with self._lock:
            for _ in range(2):  # the helper may have been killed since
                control = self._started()
                try:
                    socket.send_fds(control, [json.dumps(request).encode("ascii")], descriptors)
                    answer = control.recv(1 << 12)
                    if answer:
                        return dict(json.loads(answer))
                except OSError:
                    pass
                self._stop()
                if "end" in request:
                    break  # its workers went with it
            return {}

    def _started(self) -> socket.socket:
        if self._control is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(_PATIENCE)
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - this very Python
                    own_python(
                        "-s", "-c", _START, f"{theirs.fileno()}", json.dumps(safe_path(sys.path))
                    ),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # decoders print what headers say
                    env={**own_environment(), **dict.fromkeys(_ONE_THREAD, "1")},
                )
            self._control = ours
        return self._control

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """After a fork: the helper is that of the other process, and its end must be seen."""
        if self._control is not None:
            self._control.close()
        _LOST.append(self._process)
        self._lock = threading.Lock()
        self._process = self._control = None


_LOST: list[subprocess.Popen[bytes] | None] = []  # of other processes: never waited for
_HELPER = _Helper()
if AVAILABLE:
    atexit.register(_HELPER.stop)
    os.register_at_fork(after_in_child=_HELPER.forget)
