"""The engine child: the one process of a worker in which models and native code live.

What aborts, hangs or takes all the memory takes this process with it and nothing else: the worker
that started it (`scanloom.engine.process`) sees its end, finds who was at fault, starts another.

It is started as ``python -m scanloom.engine.child FD``, where FD is one end of a socket pair. The
first thing that comes through is a `Setup`, then one `Order` a case; back go `Ready`, `Step` and
`Done`.
Both ends are this program on this machine, started by one user: nothing else is unpickled.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from scanloom.core import Case, CaseRecord, Clock, ScanError, blame, keep_memory_private, settle_in
from scanloom.engine.case_types import Labeller
from scanloom.engine.lean import lean_imports
from scanloom.engine.models import import_heavy
from scanloom.engine.room import Room
from scanloom.engine.work import Place, failed_record, work_on
from scanloom.own_python import safe_path

WAITING = "waiting"
"""The step of a case that waits for models or before the device's door: its time is not its own."""

Labellers = Callable[[], Sequence[Labeller]]


@dataclass(frozen=True)
class Setup:
    """What a child must know before its first case.

    Parameters
    ----------
    place : Place
        Where results go.
    labellers : callable
        Makes the models, in the child. A top-level function or a `functools.partial` of one.
    in_flight : int
        How many cases may be there at once.
    memory_limit : int or None
        Bytes of data that the process may have (RLIMIT_DATA), so that a case that takes more ends
        with an error instead of taking the machine's memory. By their estimates, cases in flight
        take no more together, and one that alone would take more is refused.
    neighbours : int
        How many such processes share the machine's memory where there is no limit.
    search_path : tuple of str
        Where Python looks for modules, as in the process that makes this; what others can write,
        here or where the child is, is left out.
    """

    place: Place
    labellers: Labellers
    in_flight: int = 1
    memory_limit: int | None = None
    neighbours: int = 1
    search_path: tuple[str, ...] = field(default_factory=lambda: tuple(safe_path(sys.path)))


@dataclass(frozen=True)
class Order:
    """A case to be worked on; `number` tells its messages from others'."""

    number: int
    case: Case


@dataclass(frozen=True)
class Ready:
    """The models are loaded; or can't be, for a reason that all cases share."""

    fault: ScanError | None = None


@dataclass(frozen=True)
class Step:
    """A case begins a step."""

    number: int
    name: str


@dataclass(frozen=True)
class Done:
    """A case has ended; `device` is when it held the device (seconds of CLOCK_MONOTONIC).

    `refused`: it can't fit into memory, whoever else is there; nothing was read of it.
    """

    number: int
    record: CaseRecord
    device: tuple[float, float] | None
    refused: bool = False


class Child:
    """Works on orders until the socket is closed."""

    def __init__(self, setup: Setup, connection: Connection[Any, Any]) -> None:
        self._setup, self._connection = setup, connection
        self._sending, self._door = threading.Lock(), threading.Lock()
        self._models: Future[tuple[Sequence[Labeller], Room]] = Future()

    def serve(self) -> None:
        """Take orders; they wait until the models are there, so that no case pays for them."""
        with ThreadPoolExecutor(self._setup.in_flight + 1) as pool:
            pool.submit(self._make_models)
            while True:
                try:
                    order: Order = self._connection.recv()
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
        with self._sending, suppress(OSError):  # the other end is gone: so are we, soon
            self._connection.send(message)


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
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    sys.path[:] = safe_path([*connection.recv(), *sys.path])  # what it unpickles may need it
    setup: Setup = connection.recv()
    limit_memory(setup.memory_limit)
    settle_in()
    Child(setup, connection).serve()


if __name__ == "__main__":
    # The module's classes must be the ones that the other side pickles
    from scanloom.engine import child

    child.main()
