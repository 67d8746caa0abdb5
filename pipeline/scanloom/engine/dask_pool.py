"""Dask's workers as a pool: each a thin supervisor with an engine child.

A task carries ids alone and never raises, so that no scheduler, log or error page ever shows where
a scan lies: the worker reads the case from the run's book in `OUT/private/`. Nothing is pinned to
a worker, nothing is kept in Dask: what is on the disk is the only truth.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import Client, WorkerPlugin, get_worker
from distributed.client import Future as DaskFuture

from scanloom.core import Case, Reason, ScanError
from scanloom.engine.book import CaseBook
from scanloom.engine.child import Setup
from scanloom.engine.engine import Engine, Outcome
from scanloom.engine.handshake import Answer, Question, answer, find_fault
from scanloom.engine.pool import LostError

LOOKING = 0.5
"""Seconds for which the count of workers is taken as known."""
GONE = "its scheduler is gone"


@dataclass(frozen=True)
class EngineSetup:
    """What a worker makes its engine of."""

    child: Setup
    time_limit: float
    book: Path
    logs: Path


class EnginePlugin(WorkerPlugin):  # type: ignore[misc]
    """Gives a worker its engine before it takes a task, also after it was started anew."""

    name = "scanloom-engine"
    idempotent = False

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup

    def setup(self, worker: Any) -> None:
        """Start the engine."""
        made = self._setup
        name = f"engine-{os.getpid()}-{time.time_ns():x}.log"
        engine = Engine(made.child, made.time_limit, made.logs / name)
        engine.warm_up()
        worker.scanloom_engine = engine

    def teardown(self, worker: Any) -> None:
        """End the engine at once: what it works on is done again elsewhere."""
        worker.scanloom_engine.stop()


class Doorkeeper(WorkerPlugin):  # type: ignore[misc]
    """Keeps out a worker that comes later and can't do the work: it does not start."""

    name = "scanloom-doorkeeper"

    def __init__(self, question: Question, expected: Answer) -> None:
        self._question, self._expected = question, expected

    def setup(self, worker: Any) -> None:
        """Check the worker."""
        fault = find_fault({"": answer(self._question)}, self._expected)
        if fault is not None:
            raise RuntimeError(fault)


def run_case(book: str, offset: int) -> bytes:
    """Work on the case at `offset` of the run's book; on a worker.

    Returns
    -------
    bytes
        The pickled `Outcome`, or the name of an error that says nothing of the case: Dask shows the
        type of a result, not what is in it. Never an exception, of which Dask shows all.
    """
    try:
        case = CaseBook.read(Path(book), offset)
        told: Outcome | str = get_worker().scanloom_engine.run(case)
    except Exception as exc:  # noqa: BLE001  # a book out of sight, a worker that is leaving
        told = type(exc).__name__
    return pickle.dumps(told)


class DaskPool:
    """The workers of a cluster.

    Parameters
    ----------
    client : distributed.Client
        Connected; its workers have an engine (`EnginePlugin`).
    book : CaseBook
        Where the cases stand.
    in_flight : int
        Cases at once in a worker.
    patience : float
        Seconds without any worker after which the cluster is given up.
    """

    def __init__(
        self, client: Client, book: CaseBook, in_flight: int, patience: float = 600.0
    ) -> None:
        self._client, self._book, self._in_flight = client, book, in_flight
        self._patience = patience
        self._stopped = threading.Event()
        self._given: dict[Future[Outcome], DaskFuture] = {}
        self._workers, self._looked, self._seen = 0, -LOOKING, time.monotonic()
        self._faulty: set[str] = set()
        self._proven = False

    @property
    def window(self) -> int:
        """As many as the workers that are there now take, one at least.

        Raises
        ------
        ScanError
            CLUSTER if the scheduler is gone, or no worker was there for long.
        """
        now = time.monotonic()
        if now - self._looked > LOOKING:
            self._workers, self._looked = self._count(), now
        if self._workers:
            self._seen = now
        elif now - self._seen > self._patience:
            raise ScanError(Reason.CLUSTER, f"no worker was there for {self._patience:.0f} s")
        return max(1, self._workers) * self._in_flight

    def submit(self, case: Case) -> Future[Outcome]:
        """Have a case worked on by whichever worker is free.

        Raises
        ------
        ScanError
            CLUSTER if the scheduler is gone.
        """
        self._check_scheduler()  # else what it took with it would be lost again and again
        ours: Future[Outcome] = Future()
        offset = self._book.offset(case.id)
        theirs = self._client.submit(
            run_case, str(self._book.path), offset, pure=False, key=_key(case.id)
        )
        self._given[ours] = theirs
        theirs.add_done_callback(lambda done: self._hand_on(done, ours))
        return ours

    def stop(self, patience: float) -> None:
        """Have the engines end, after `patience` seconds at the latest."""
        self._stopped.set()
        if self._client.status == "running":
            with suppress(OSError, TimeoutError, ValueError):  # no worker is left
                self._client.run(_stop_engine, patience, on_error="ignore")
        until = time.monotonic() + 2.0
        while any(not f.done() for f in self._given) and time.monotonic() < until:
            time.sleep(0.05)
        for ours in list(self._given):
            ours.cancel()

    def _count(self) -> int:
        self._check_scheduler()
        try:
            return len(self._client.nthreads())
        except (OSError, TimeoutError, ValueError, RuntimeError) as exc:
            raise ScanError(Reason.CLUSTER, GONE) from exc

    def _check_scheduler(self) -> None:
        if self._client.status != "running":
            raise ScanError(Reason.CLUSTER, GONE)

    def _unfit(self, told: Outcome) -> Exception:
        """Return what an engine's fault means: its worker's own, or that no worker can do it."""
        self._faulty.add(told.engine)
        shared = not self._proven and len(self._faulty) >= max(1, self._workers)
        return told.fault if shared and told.fault else LostError("its worker is unfit")

    def _hand_on(self, theirs: DaskFuture, ours: Future[Outcome]) -> None:
        self._given.pop(ours, None)
        try:
            if theirs.status != "finished":
                ours.set_exception(LostError(theirs.status))
                return
            told = pickle.loads(theirs.result())  # noqa: S301  # our own worker's
            if isinstance(told, Outcome) and told.fault is None:
                self._proven = True
                ours.set_result(told)
            elif isinstance(told, Outcome):
                ours.set_exception(self._unfit(told))
            else:
                ours.set_exception(LostError(told))
        except Exception as exc:  # noqa: BLE001  # the cluster is gone in one of many ways
            if not ours.done():
                ours.set_exception(LostError(type(exc).__name__))
        finally:
            theirs.release()


def _key(case_id: str) -> str:
    return f"case-{case_id}-{time.time_ns():x}"


async def _stop_engine(patience: float, dask_worker: Any) -> None:
    """End a worker's engine; beside its event loop, by which results go out meanwhile."""
    await asyncio.to_thread(dask_worker.scanloom_engine.stop, patience)
