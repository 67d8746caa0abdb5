"""The engine child: the one process of a worker in which models and native code live.

Code that aborts, hangs or takes all the memory takes this process with it and nothing else. The
worker that started it (`scanloom.engine.process`) sees its end, finds which case caused it, and
starts another.

It is started as ``python -m scanloom.engine.child FD``, where FD is one end of a socket pair; for
the messages see `scanloom.engine.worker_messages`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

from scanloom.core import Clock, ScanError, blame, keep_memory_private, settle_in
from scanloom.engine.lean import lean_imports
from scanloom.engine.models import import_heavy
from scanloom.engine.room import Room
from scanloom.engine.steps import Labeller
from scanloom.engine.work import failed_record, work_on
from scanloom.engine.worker_messages import WAITING, Done, Order, Ready, Setup, Step
from scanloom.io.messages import Message, receive
from scanloom.own_python import safe_path


class Child:
    """Works on orders until the socket is closed."""

    def __init__(self, setup: Setup, connection: socket.socket) -> None:
        self._setup, self._connection = setup, connection
        self._sending, self._door = threading.Lock(), threading.Lock()
        self._models: Future[tuple[Sequence[Labeller], Room]] = Future()

    def serve(self) -> None:
        """Take orders; they wait until the models are there, so that no case pays for them."""
        with ThreadPoolExecutor(self._setup.in_flight + 1) as pool:
            pool.submit(self._make_models)
            while True:
                try:
                    order: Order = receive(self._connection)
                except (EOFError, OSError):
                    return
                self._begin(pool, order)

    def _begin(self, pool: ThreadPoolExecutor, order: Order) -> None:
        """Start on a case; one for which there is no thread is given back."""
        try:
            pool.submit(self._work, order)
        except RuntimeError as error:
            self._tell(Done(order.number, failed_record(order.case.id, error), None))

    def _make_models(self) -> None:
        try:
            with lean_imports():
                models = self._setup.labellers()  # first: it is what may fail
                import_heavy()
            made = self._setup
            room = Room(models, made.memory_limit, made.in_flight, made.neighbours)
            self._tell(Ready())  # first: what ends this process from now on may be a case
            self._models.set_result((models, room))
        except BaseException as exc:  # noqa: BLE001  # whatever it is, no case is to blame
            traceback.print_exc()  # into the log, which is private
            self._models.set_exception(exc)
            self._tell(Ready(blame(exc)))

    def _work(self, order: Order) -> None:
        held: list[float] = []

        @contextmanager
        def door() -> Iterator[None]:
            self._tell(Step(order.number, WAITING))
            with self._door:
                held.append(time.monotonic())
                try:
                    yield
                finally:
                    held.append(time.monotonic())

        clock = Clock(lambda step: self._tell(Step(order.number, step)))
        if self._models.exception() is not None:
            return  # the other end was told
        models, room = self._models.result()
        try:
            need = self._need(order, room)
        except ScanError as error:
            refusal = failed_record(order.case.id, error)
            self._tell(Done(order.number, refusal, None, refused=True))
            return
        with room.hold(need):
            record = work_on(order.case, lambda: models, self._setup.place, clock, door)
        device = (held[0], held[1]) if len(held) == 2 else None
        self._tell(Done(order.number, record, device))

    def _need(self, order: Order, room: Room) -> float:
        """Return the bytes that a case will take; then it waits for them."""
        self._tell(Step(order.number, "find"))
        need = room.need(order.case)
        self._tell(Step(order.number, WAITING))
        return need

    def _tell(self, message: Ready | Step | Done) -> None:
        packed = Message(message)
        with self._sending, suppress(OSError):  # the worker is gone: so is this process, soon
            packed.send(self._connection)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even in the midst of native code."""
    if sys.platform != "linux":
        return
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # it died before we asked


def limit_memory(limit: int | None) -> None:
    """Let this process have at most `limit` bytes of data."""
    if limit is None or sys.platform != "linux":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main() -> None:
    """Run the child."""
    die_with_parent()
    keep_memory_private()
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):  # the worker decides when it ends
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    setup: Setup = receive(connection)
    sys.path[:] = safe_path([*setup.search_path, *sys.path])  # for the modules of the models
    limit_memory(setup.memory_limit)
    settle_in()
    Child(setup, connection).serve()


if __name__ == "__main__":
    main()
