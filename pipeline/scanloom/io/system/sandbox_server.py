"""Server of `scanloom.io.system.sandbox`: forks a worker process for every job.

The server has one thread, imports modules and never touches a scan. Each worker therefore starts as
a clean copy of it, within one or two milliseconds.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import socket
import threading
import traceback
from pathlib import Path
from typing import Any, Never

from scanloom.core import Reason, blame, keep_memory_private
from scanloom.io.system import sandbox
from scanloom.io.system.messages import receive, send

_PR_SET_PDEATHSIG = 1  # prctl(2)
_MAX_REQUEST_BYTES = 1 << 16


def main(descriptor: int) -> None:
    """Serve requests until the other end of the socket is closed.

    Requests and replies are JSON. {"fork": [modules]}, sent with the worker's socket, is answered
    by {"pid"} or {"errno"}; {"end": pid} kills that worker and is answered by {"status"}, as of
    waitpid(2), or by None for a worker of an earlier server.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    keep_memory_private()
    control = socket.socket(fileno=descriptor)
    while True:
        text, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 1)
        if not text:
            return  # the kernel then kills all workers
        request = json.loads(text)
        if "fork" in request:
            reply = _fork(control, descriptors[0], request["fork"])
        else:
            reply = {"status": _end(request["end"])}
        control.send(json.dumps(reply).encode("ascii"))


def _fork(control: socket.socket, descriptor: int, modules: list[str]) -> dict[str, Any]:
    """Return the process ID of a new worker, or the number of the error that kept it away."""
    for name in modules:
        importlib.import_module(name)
    try:
        server, worker = os.getpid(), os.fork()
    except OSError as exc:
        return {"errno": exc.errno or 0}
    else:
        if worker == 0:
            control.close()
            _work(descriptor, server)
        return {"pid": worker}
    finally:
        os.close(descriptor)


def _end(worker: int) -> int | None:
    """Kill a worker if it is still running; return its wait status, None if it is not ours."""
    try:
        ended, status = os.waitpid(worker, os.WNOHANG)
    except ChildProcessError:
        return None
    if ended:
        return status
    os.kill(worker, signal.SIGKILL)
    return os.waitpid(worker, 0)[1]


def _work(descriptor: int, server: int) -> Never:
    """Run the single job received from the socket."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == server:  # else the server died before prctl
            connection = socket.socket(fileno=descriptor)
            lock = threading.Lock()

            def send_locked(message: dict[str, Any]) -> None:
                with lock:
                    send(connection, message)

            sandbox.set_progress_reporter(lambda: send_locked({"alive": True}))
            reply = _run(connection)
            try:
                send_locked(reply)
            except TypeError:
                send_locked({"fault": "the result of a job can't be sent"})
            except (OSError, MemoryError) as exc:
                send_locked({"error": blame(exc)})
    finally:
        os._exit(0)


def _run(connection: socket.socket) -> dict[str, Any]:
    granted = False
    try:
        job = receive(connection)
        module, name = job["target"].split(":")
        target = getattr(importlib.import_module(module), name)
        granted = _limit_memory(job["memory"])
        return {"result": target(*job["arguments"])}
    except Exception as exc:  # noqa: BLE001 - its text is not sent: it may name a patient
        fault = blame(exc)
        if isinstance(exc, MemoryError) and granted:
            return {"memory": True}
        if fault.reason is not Reason.INTERNAL:
            return {"error": fault}
        frame = traceback.extract_tb(exc.__traceback__)[-1]
        return {"fault": f"{type(exc).__name__} in {Path(frame.filename).name} {frame.lineno}"}


def _limit_memory(more: int) -> bool:
    """Limit this process to `more` bytes of private memory above its present use.

    Shared memory does not count. Return whether the system's own limits allow that much.
    """
    pages = Path("/proc/self/statm").read_text().split()
    address_space, data = (int(pages[n]) * resource.getpagesize() + more for n in (0, 5))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    space_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or data < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (data, hard))
    unlimited = resource.RLIM_INFINITY
    return (hard == unlimited or data <= hard) and (
        space_limit == unlimited or address_space <= space_limit
    )
