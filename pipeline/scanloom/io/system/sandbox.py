"""Functions run in a child process, with a deadline and a memory limit.

Decoders are C code, and files come from anywhere: a damaged file can crash a decoder, hang it or
exhaust the memory. In a child process, this costs one scan and nothing else. Every job has a
process of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import select
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

from scanloom.core import Reason, ScanError, blame
from scanloom.core.process import limit_met
from scanloom.io.system import shared_memory
from scanloom.io.system.messages import receive, send
from scanloom.own_python import own_environment, own_python, safe_path

Result = TypeVar("Result")

AVAILABLE = sys.platform == "linux" and hasattr(os, "memfd_create") and bool(sys.executable)
"""Whether child processes are used; if not, functions run in this process, without limits."""

_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from scanloom.io.system.sandbox_server import main; main(int(sys.argv[1]))"
)
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_FORK_TIMEOUT_S = 300  # the server may have to import a module before it forks
_END_TIMEOUT_S = 60  # a worker may wait for a disk when it is killed
_PATIENCE = 10
"""A job may wait so many times its limits of processor time, for a core or a disk."""
_LOOK_S = 0.5
"""Longest time between two looks at the time that a job has taken."""


@dataclass(frozen=True)
class SandboxLimits:
    """Resources that a job may use.

    Parameters
    ----------
    memory_bytes : int
        Bytes of private memory, in addition to the shared arrays that it receives and returns.
    silence_s : float
        Seconds of processor time between two progress messages: a busy machine convicts no file.
    total_s : float
        Seconds of processor time in total.
    """

    memory_bytes: int
    silence_s: float
    total_s: float


def run_sandboxed(
    target: Callable[..., Result],
    *arguments: Any,
    limits: SandboxLimits,
    modules: tuple[str, ...] = (),
) -> Result:
    """Return `target(*arguments)`, run in a child process.

    Parameters
    ----------
    target : function
        At the top level of an importable module. It allocates arrays with `shared_empty`, so that
        they are returned without a copy, and calls `report_progress` regularly.
    *arguments
        As of `Message`; the result likewise. Types that the module of `target` registers may be
        among them. Arrays of `shared_empty` are not copied: the caller sees the
        values that the child process writes into them.
    limits : SandboxLimits
    modules : tuple of str
        Modules that `target` imports and that take long to import: the server imports them once
        for all jobs.

    Raises
    ------
    ScanError
        The error raised by `target`; DAMAGED if it crashed, DECODE_TIMEOUT if it computed for too
        long, TOO_LARGE if it exceeded its memory limit, OUT_OF_MEMORY if the system killed it,
        ENVIRONMENT if the machine is too busy or lacks a resource, INTERNAL for any other
        exception.
    """
    if not AVAILABLE:
        return target(*arguments)
    job = {
        "target": f"{target.__module__}:{target.__qualname__}",
        "arguments": list(arguments),
        "memory": limits.memory_bytes,
    }
    try:
        connection, worker = _SERVER.fork((target.__module__, *modules))
    except OSError as exc:
        raise blame(exc) from exc
    reply: dict[str, Any] = {}
    status: int | None = None
    try:
        with connection:
            reply = _run_job(connection, worker, job, limits)
    except ValueError as exc:
        raise ScanError(Reason.DAMAGED, "the decoder sent an invalid reply") from exc
    except (EOFError, ConnectionError):
        pass  # the worker died: its exit status shows how
    except TimeoutError as exc:  # within a message
        raise _busy() from exc
    except OSError as exc:
        raise blame(exc) from exc
    finally:
        status = _SERVER.end(worker)
    if "result" in reply:
        return reply["result"]  # type: ignore[no-any-return]  # that of the function
    raise _error(reply, status)


def start_sandbox() -> None:
    """Start the server process in the background, for jobs that will follow soon."""
    if AVAILABLE:
        _SERVER.warm_up()


def shared_empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return a new array that another process can fill or read without a copy.

    Raises
    ------
    MemoryError
        If there is not enough memory.
    """
    return shared_memory.shared_empty(shape, dtype) if AVAILABLE else np.zeros(shape, dtype)


def report_progress() -> None:
    """Report progress; in a child process, `SandboxLimits.silence_s` begins again."""
    _report_progress()


def set_progress_reporter(report: Callable[[], None]) -> None:
    """Set the function that `report_progress` calls in a child process."""
    global _report_progress
    _report_progress = report


def _no_report() -> None:
    pass


_report_progress: Callable[[], None] = _no_report


def _run_job(
    connection: socket.socket, worker: int, job: dict[str, Any], limits: SandboxLimits
) -> dict[str, Any]:
    """Send a job to a worker and return its reply; ScanError if it exceeds its time limits."""
    connection.settimeout(_PATIENCE * limits.silence_s)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    # Seconds of waiting and of processor time. The clock would go on while a job is suspended
    look_s = min(_LOOK_S, limits.silence_s)
    start = heard = now = 0.0, 0.0
    send(connection, job)
    while True:
        has_message = poll.poll(1000 * look_s)
        now = now[0] + (0.0 if has_message else look_s), _processor_time(worker, now[1])
        if has_message:
            reply = receive(connection)
            if not isinstance(reply, dict):
                raise ValueError("invalid reply")
            if "alive" not in reply:
                return reply
            heard = now
        for since, limit_s in ((heard, limits.silence_s), (start, limits.total_s)):
            if now[1] - since[1] > limit_s:
                detail = f"the decoder computed for {now[1] - since[1]:.0f} s without an end"
                raise ScanError(Reason.DECODE_TIMEOUT, detail)
            if now[0] - since[0] > _PATIENCE * limit_s:
                raise _busy()


def _processor_time(process: int, otherwise: float) -> float:
    """Return the processor time of a process in s, or `otherwise` if it has ended."""
    try:
        return time.clock_gettime(~process << 3 | 2)  # as clock_getcpuclockid(3) numbers the clock
    except OSError:
        return otherwise


def _busy() -> ScanError:
    """Return the error for a process that the machine kept from its work."""
    detail = "a process that reads files waited too long for a core or a disk: the machine is busy"
    return ScanError(Reason.ENVIRONMENT, detail)


def _error(reply: dict[str, Any], status: int | None) -> ScanError:
    """Return the error for a reply without a result, or for the exit status of a dead worker.

    It is None if the worker died with its server: not of the job, but of something from outside.
    """
    error = reply.get("error")
    if isinstance(error, ScanError):
        return error
    if "memory" in reply:
        return ScanError(Reason.TOO_LARGE, "decoding takes more memory than the image size allows")
    if "fault" in reply:
        return ScanError(Reason.INTERNAL, str(reply["fault"]))
    end = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if (limit := limit_met(end)) is not None:
        return limit
    if end == -signal.SIGKILL:
        return ScanError(Reason.OUT_OF_MEMORY, "the system killed the decoder process")
    return ScanError(Reason.DAMAGED, "the decoder crashed")


class _Server:
    """Server process that forks workers; started on first use, and again if it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def warm_up(self) -> None:
        with self._lock:
            self._connected()

    def fork(self, modules: tuple[str, ...]) -> tuple[socket.socket, int]:
        """Return a socket to a new worker, and its process ID."""
        ours, theirs = socket.socketpair()
        worker = 0
        try:
            with theirs:
                reply = self._request({"fork": list(modules)}, [theirs.fileno()])
            worker = reply.get("pid", 0)
            if "late" in reply:
                raise _busy()
            if "errno" in reply:
                raise blame(OSError(reply["errno"], ""))
            if not worker:
                raise ScanError(Reason.OUT_OF_MEMORY, "no decoder process could be started")
        finally:
            if not worker:
                ours.close()
        return ours, worker

    def end(self, worker: int) -> int | None:
        """Kill a worker if it is still running; return its wait status, as of waitpid(2).

        None if its server has ended, and it with it.
        """
        status: int | None = self._request({"end": worker}, []).get("status")
        return status

    def _request(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        failed: dict[str, Any] = {}
        with self._lock:
            for _ in range(2):  # the server may have been killed since the last request
                control = self._connected()
                control.settimeout(_FORK_TIMEOUT_S if "fork" in request else _END_TIMEOUT_S)
                try:
                    socket.send_fds(control, [json.dumps(request).encode("ascii")], descriptors)
                    reply = control.recv(1 << 12)
                    if reply:
                        return dict(json.loads(reply))
                    failed = {}
                except TimeoutError:
                    failed = {"late": True}
                except OSError:
                    failed = {}
                self._stop()
                if "end" in request:
                    break  # its workers died with it
        return failed

    def _connected(self) -> socket.socket:
        """Return the control socket of the server, which is started if necessary."""
        if self._control is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control = ours  # first: closed by `_stop` if no process can be started
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - this very Python
                    own_python(
                        "-s", "-c", _START, f"{theirs.fileno()}", json.dumps(safe_path(sys.path))
                    ),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # decoders print text from headers
                    env={**own_environment(), **dict.fromkeys(_ONE_THREAD, "1")},
                )
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
        """Drop the server after a fork: it belongs to the parent, which must see it end."""
        if self._control is not None:
            self._control.close()
        _OF_PARENT.append(self._process)
        self._lock = threading.Lock()
        self._process = self._control = None


_OF_PARENT: list[subprocess.Popen[bytes] | None] = []  # referenced, so that none is waited for
_SERVER = _Server()
if AVAILABLE:
    atexit.register(_SERVER.stop)
    os.register_at_fork(after_in_child=_SERVER.forget)
