"""The child process: the one process of a worker in which models and native code live.

Code that aborts, hangs or takes all the memory takes this process with it and nothing else. The
worker that started it (`scanloom.engine.worker.supervisor`) sees its end, finds which case
caused it, and starts another.

It is started as ``python -m scanloom.engine.worker.child_main FD``, where FD is one end of a socket
pair; for the messages see `scanloom.engine.worker.messages`.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

from scanloom.core import StepTimer, blame, keep_memory_private, settle_in
from scanloom.engine.case.models import import_heavy
from scanloom.engine.case_progress import CaseProgress
from scanloom.engine.machine.lean_imports import leave_out_unused_modules, without_optional_imports
from scanloom.engine.prepare import failed_record, placement_of, prepare
from scanloom.engine.steps import run_case
from scanloom.engine.worker.memory_admission import AdmissionGate, memory_gate
from scanloom.engine.worker.messages import (
    QUEUED,
    CaseReply,
    CaseRequest,
    ChildSetup,
    Ready,
    Span,
    Step,
)
from scanloom.inference.graph import Predictor
from scanloom.io.system.messages import Message, receive
from scanloom.own_python import safe_path

_SWITCH_INTERVAL_S = 0.0005
"""Longest time for which a thread keeps the interpreter while another one asks for it. A thread
that has waited for the GPU asks; threads that read and write other cases kept it for 5 ms, which is
Python's default, at each of its waits."""


class ChildLoop:
    """Processes cases until the socket is closed."""

    def __init__(self, setup: ChildSetup, connection: socket.socket) -> None:
        self._setup, self._connection = setup, connection
        self._send_lock, self._device_lock = threading.Lock(), threading.Lock()
        self._models: Future[tuple[Sequence[Predictor], AdmissionGate]] = Future()

    def serve(self) -> None:
        """Receive cases; they wait for the models, which does not count against their limit."""
        with ThreadPoolExecutor(self._setup.in_flight + 1) as pool:
            pool.submit(self._make_models)
            while True:
                try:
                    request: CaseRequest = receive(self._connection)
                except (EOFError, OSError):
                    return
                try:
                    pool.submit(self._work, request)
                except RuntimeError as error:  # no thread can be started
                    self._fail(request, error)

    def _make_models(self) -> None:
        try:
            with without_optional_imports():
                models = self._setup.make_predictors()  # first: this may fail
                import_heavy()
            setup = self._setup
            gate = memory_gate(models, setup.memory_limit, setup.in_flight)
            self._send(Ready())  # first: from now on a case may end this process
            self._models.set_result((models, gate))
        except BaseException as exc:  # noqa: BLE001  # no case is to blame
            traceback.print_exc()  # into the log, which is private
            self._models.set_exception(exc)
            self._send(Ready(blame(exc)))

    def _work(self, request: CaseRequest) -> None:
        try:
            self._run(request)
        except BaseException as exc:  # noqa: BLE001  # else the worker would wait for an answer
            traceback.print_exc()  # into the log, which is private
            self._fail(request, exc)

    def _fail(self, request: CaseRequest, error: BaseException) -> None:
        record = failed_record(request.case.id, error)
        self._send(CaseReply(request.number, record, ()))

    def _run(self, request: CaseRequest) -> None:
        spans: list[Span] = []

        @contextmanager
        def device_turn() -> Iterator[None]:
            self._send(Step(request.number, QUEUED))
            with self._device_lock:
                start = time.monotonic()
                try:
                    yield
                finally:
                    spans.append((start, time.monotonic()))

        progress = CaseProgress(self._setup.progress, request.case.id)

        def on_step(step: str) -> None:
            self._send(Step(request.number, step))
            progress.on_step(step)

        clock = StepTimer(on_step, progress.on_windows, device_turn=device_turn)
        if self._models.exception() is not None:
            return  # the worker received the fault in `Ready`
        models, gate = self._models.result()
        setup, target = self._setup, self._setup.output
        with clock.step("find"):
            prepared = prepare(
                request.case,
                [model.card for model in models],
                target,
                memory_limit=setup.memory_limit,
                placement=placement_of(models),
            )
        record, refused = prepared.ended(), prepared.is_too_large
        if record is None:
            self._send(Step(request.number, QUEUED))
            estimate = prepared.estimate
            with gate.shared(0.0 if estimate is None else estimate.peak - estimate.base):
                record = run_case(prepared, lambda: models, target, clock)
        progress.close()
        self._send(CaseReply(request.number, record, tuple(spans), refused=refused))

    def _send(self, message: Ready | Step | CaseReply) -> None:
        packed = Message(message)
        with self._send_lock, suppress(OSError):  # the worker has ended; this process ends soon
            packed.send(self._connection)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even during native code."""
    if sys.platform != "linux":
        return
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # it died before prctl


def is_abandoned(connection: socket.socket) -> bool:
    """Return whether the other process has closed its end, by itself or by its death.

    A worker that dies while this process starts, before `die_with_parent`, is found by this alone;
    what it sent before can still be received.
    """
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP is always reported
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def limit_memory(limit: int | None) -> None:
    """Limit the data of this process to `limit` bytes."""
    if limit is None or sys.platform != "linux":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main() -> None:
    """Run the child: receive the setup, then process cases."""
    leave_out_unused_modules()
    die_with_parent()
    keep_memory_private()
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):  # the worker decides when it ends
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    if is_abandoned(connection):
        return
    setup: ChildSetup = receive(connection)
    sys.path[:] = safe_path([*setup.search_path, *sys.path])  # for the modules of the models
    limit_memory(setup.memory_limit)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    settle_in()
    ChildLoop(setup, connection).serve()


if __name__ == "__main__":
    main()
