"""The other side of `scanloom.io.sandbox`: a helper that forks a worker for every job.

The helper has one thread, loads modules and never touches a scan, so that each worker begins as a
clean copy of it, within a millisecond or two.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, Never

from scanloom.core import Reason, blame, keep_memory_private
from scanloom.io import sandbox
from scanloom.io.messages import receive, send

_PR_SET_PDEATHSIG = 1  # prctl(2)
_REQUEST = 1 << 16  # bytes


def main(descriptor: int) -> None:
    """Answer requests until the other end of the socket is closed.

    Requests and answers are JSON: {"fork": [modules]}, with the worker's socket, gives {"pid"};
    {"end": pid} ends that worker and gives {"status"}, as waitpid(2) tells it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to answer
    keep_memory_private()
    control = socket.socket(fileno=descriptor)
    while True:
        text, descriptors, _, _ = socket.recv_fds(control, _REQUEST, 1)
        if not text:
            return  # and the kernel ends all workers
        request = json.loads(text)
        if "fork" in request:
            answer = {"pid": _fork(control, descriptors[0], request["fork"])}
        else:
            answer = {"status": _end(request["end"])}
        control.send(json.dumps(answer).encode("ascii"))


def _fork(control: socket.socket, descriptor: int, modules: list[str]) -> int:
    """Return the number of a new worker, 0 if there is no room for one."""
    for name in modules:
        importlib.import_module(name)
    try:
        helper, worker = os.getpid(), os.fork()
    except OSError:
        worker = 0
    else:
        if worker == 0:
            control.close()
            _work(descriptor, helper)
    os.close(descriptor)
    return worker


def _end(worker: int) -> int:
    """Kill a worker, if it still lives, and return how it ended."""
    os.kill(worker, signal.SIGKILL)
    return os.waitpid(worker, 0)[1]


def _work(descriptor: int, helper: int) -> Never:
    """Do the one job that comes through the socket."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == helper:  # else it died before that
            connection = socket.socket(fileno=descriptor)
            lock = threading.Lock()

            def say(message: dict[str, Any]) -> None:
                with lock:
                    send(connection, message)

            sandbox.report_progress_by(lambda: say({"alive": True}))
            answer = _answer(receive(connection))
            try:
                say(answer)
            except TypeError:
                say({"fault": "a result that can't be sent"})
    finally:
        os._exit(0)


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    granted = False
    try:
        target = _named(job["target"])
        granted = _limit_memory(job["memory"])
        return {"result": target(*job["arguments"])}
    except Exception as exc:  # noqa: BLE001 - told by type and place: its words may name a patient
        fault = blame(exc)
        if isinstance(exc, MemoryError) and granted:
            return {"memory": True}
        if fault.reason is not Reason.INTERNAL:
            return {"error": fault.reason, "detail": fault.detail}
        place = traceback.extract_tb(exc.__traceback__)[-1]
        return {"fault": f"{type(exc).__name__} in {Path(place.filename).name} {place.lineno}"}


def _named(target: str) -> Callable[..., Any]:
    module, name = target.split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _limit_memory(more: int) -> bool:
    """Let this process have `more` bytes of its own than now; shared memory does not count.

    Return whether it can have them: the system's own limits may be tighter.
    """
    words = Path("/proc/self/statm").read_text().split()
    whole, data = (int(words[n]) * resource.getpagesize() + more for n in (0, 5))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or data < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (data, hard))
    endless = resource.RLIM_INFINITY
    return (hard == endless or data <= hard) and (space == endless or whole <= space)
