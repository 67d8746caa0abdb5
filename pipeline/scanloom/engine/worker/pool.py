"""`Pool`: processes cases, on engines of this process or of Dask workers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from scanloom.core import Case
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
    """Pool of engines of this process, without Dask.

    Parameters
    ----------
    engines : sequence of WorkerSupervisor
        One per device.
    in_flight : int
        Concurrent cases in each.
    """

    def __init__(self, engines: Sequence[WorkerSupervisor], in_flight: int) -> None:
        self._engines, self._in_flight = tuple(engines), in_flight
        self._threads = ThreadPoolExecutor(self.window, "case")
        self._busy: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def window(self) -> int:
        """Number of cases that the engines take."""
        return len(self._engines) * self._in_flight

    def submit(self, case: Case) -> Future[CaseOutcome]:
        """Submit a case to the least busy engine."""
        return self._threads.submit(self._run, case)

    def stop(self, patience: float) -> None:
        """End the engines."""
        threads = [threading.Thread(target=e.stop, args=(patience,)) for e in self._engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._threads.shutdown(cancel_futures=True)

    def _run(self, case: Case) -> CaseOutcome:
        with self._lock:
            chosen = min(range(len(self._engines)), key=lambda n: self._busy[n])
            self._busy[chosen] += 1
        try:
            outcome = self._engines[chosen].run(case)
        finally:
            with self._lock:
                self._busy[chosen] -= 1
        if outcome.fault is not None:
            raise outcome.fault  # all engines share this machine and these models
        return outcome
