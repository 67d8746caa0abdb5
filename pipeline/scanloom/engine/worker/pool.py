"""`Pool`: processes cases, by a supervisor in this process or by those of Dask workers.

Cases are submitted to it, never more than its window, whatever the size of the archive.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

from scanloom.core import Case, CaseRecord, Reason
from scanloom.engine.retries import MAX_WORKER_LOSSES
from scanloom.engine.worker.supervisor import CaseOutcome, WorkerSupervisor


class WorkerLostError(Exception):
    """The worker was killed, preempted or disconnected; the case may be retried."""


class WorkerUnfitError(WorkerLostError):
    """The worker could not process any case; this does not count as a loss of the case."""


class Pool(Protocol):
    """Takes cases and returns their outcomes."""

    @property
    def window(self) -> int:
        """Number of cases to submit concurrently; 0 without workers."""

    def submit(self, case: Case) -> Future[CaseOutcome]:
        """Submit a case.

        The future may raise `WorkerLostError`, or `ScanError` if no case can be processed, but no
        other exception.
        """

    def stop(self, patience: float) -> None:
        """End all work; cases still running after `patience` seconds are aborted."""


class LocalPool:
    """Pool of one supervisor, without Dask; `window` is the number of its cases."""

    def __init__(self, supervisor: WorkerSupervisor, window: int) -> None:
        self.window, self._supervisor = window, supervisor
        self._threads = ThreadPoolExecutor(window, "case")

    def submit(self, case: Case) -> Future[CaseOutcome]:
        """Submit a case."""
        return self._threads.submit(self._supervisor.run, case)

    def stop(self, patience: float) -> None:
        """End the supervisor's child process."""
        self._supervisor.stop(patience)
        self._threads.shutdown(cancel_futures=True)


_POLL_INTERVAL_S = 0.2
"""Time between two checks whether the run is to stop."""


def dispatch_cases(
    cases: Iterable[Case | None],
    pool: Pool,
    on_outcome: Callable[[Case, CaseOutcome], None],
    *,
    on_start: Callable[[Case], None] | None = None,
    stop: threading.Event | None = None,
    drain: float = 6.0,
) -> bool:
    """Submit cases to a pool until all have an outcome.

    Parameters
    ----------
    cases, pool
        Cases are taken one by one, as the pool has room. None stands for no case yet: more is
        asked for a moment later.
    on_outcome, on_start : callable
        Called in this thread. If `on_outcome` raises, no further case is started, the pool is
        stopped, and the error propagates.
    stop : threading.Event or None
        When it is set, no further case is started.
    drain : float
        Seconds that cases in flight may still take after `stop` was set.

    Returns
    -------
    bool
        True if all cases were processed.

    Raises
    ------
    ScanError
        Of the pool, if no case can be processed; or raised by `on_outcome`.
    """
    stop = stop or threading.Event()
    queued = _Queue(cases, pool, on_start)
    try:
        while True:
            queued.submit(stop)
            if stop.is_set() or queued.empty:
                break
            for case, outcome in queued.outcomes():
                on_outcome(case, outcome)
        if queued.in_flight:
            queued.drain(drain, on_outcome)
            return False
    except BaseException:
        pool.stop(0.0)
        raise
    return queued.empty


_END = object()
"""Stands for the end of the cases."""


class _Queue:
    """Cases of a pool: those that wait, those in flight, and those that lost their worker."""

    def __init__(
        self, cases: Iterable[Case | None], pool: Pool, on_start: Callable[[Case], None] | None
    ) -> None:
        self._waiting, self._exhausted = iter(cases), False
        self._pool, self._on_start = pool, on_start
        self._lost: list[Case] = []
        self._losses: Counter[str] = Counter()
        self._ended = queue.SimpleQueue[tuple[Case, Future[CaseOutcome]]]()
        self.in_flight = 0

    @property
    def empty(self) -> bool:
        """Whether all cases have an outcome."""
        return self.in_flight == 0 and self._exhausted and not self._lost

    def submit(self, stop: threading.Event) -> None:
        """Submit cases while the pool has room; first those that lost their worker."""
        while self.in_flight < self._pool.window and not stop.is_set():
            # A case that lost its worker goes first: the end of a run must not wait for it
            case = self._lost.pop() if self._lost else next(self._waiting, _END)
            if not isinstance(case, Case):
                self._exhausted = case is _END
                return
            if self._on_start is not None:
                self._on_start(case)
            future = self._pool.submit(case)
            future.add_done_callback(partial(self._note_end, case))
            self.in_flight += 1

    def _note_end(self, case: Case, future: Future[CaseOutcome]) -> None:
        self._ended.put((case, future))

    def outcomes(self) -> Iterator[tuple[Case, CaseOutcome]]:
        """Yield the next case with its outcome, unless none ends soon or it is submitted again.

        Raises
        ------
        ScanError
            If no case can be processed.
        """
        try:
            case, future = self._ended.get(timeout=_POLL_INTERVAL_S)
        except queue.Empty:
            return
        self.in_flight -= 1
        is_loss = True
        try:
            outcome = future.result()
            if outcome.record is not None:
                yield case, outcome.after_a_death() if self._losses[case.id] else outcome
                return
        except WorkerLostError as error:
            is_loss = not isinstance(error, WorkerUnfitError)
        self._losses[case.id] += is_loss
        if self._losses[case.id] < MAX_WORKER_LOSSES:
            self._lost.append(case)
        else:
            detail = f"the worker of the case was lost {MAX_WORKER_LOSSES} times"
            record = CaseRecord(case.id, Reason.WORKER_LOST, detail, (), None)
            yield case, CaseOutcome(record, ())

    def drain(self, patience: float, on_outcome: Callable[[Case, CaseOutcome], None]) -> None:
        """Collect the cases that end within `patience` seconds; the others are aborted."""
        self._pool.stop(patience)
        for _ in range(self.in_flight):
            try:
                case, future = self._ended.get(timeout=1.0)
            except queue.Empty:
                return
            if future.cancelled() or future.exception() is not None:
                continue
            outcome = future.result()
            if outcome.record is not None:
                on_outcome(case, outcome)
