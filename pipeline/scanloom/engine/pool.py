"""Where cases are worked on: engines of this process, or those of Dask's workers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from scanloom.core import Case
from scanloom.engine.engine import Engine, Outcome


class LostError(Exception):
    """The worker is gone: killed, preempted, cut off. Nobody is to blame, the case may go on."""


class UnfitError(LostError):
    """The worker could never have done the work: that counts for nothing, and the case goes on."""


class Pool(Protocol):
    """Takes cases and gives outcomes."""

    @property
    def window(self) -> int:
        """How many cases are worth handing over at once; 0 while nobody is there to take one."""

    def submit(self, case: Case) -> Future[Outcome]:
        """Have a case worked on.

        The future may raise `LostError`, or a `ScanError` where no case can be worked on: nothing
        else.
        """

    def stop(self, patience: float) -> None:
        """End all work; what is not done after `patience` seconds is cut off."""


class LocalPool:
    """Engines of this process, without Dask: the serial way, through the same functions.

    Parameters
    ----------
    engines : sequence of Engine
        One a device.
    in_flight : int
        Cases at once in each.
    """

    def __init__(self, engines: Sequence[Engine], in_flight: int) -> None:
        self._engines, self._in_flight = tuple(engines), in_flight
        self._threads = ThreadPoolExecutor(self.window, "case")
        self._busy: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def window(self) -> int:
        """As many as the engines take."""
        return len(self._engines) * self._in_flight

    def submit(self, case: Case) -> Future[Outcome]:
        """Have a case worked on by the engine that has least to do."""
        return self._threads.submit(self._run, case)

    def stop(self, patience: float) -> None:
        """End the engines."""
        enders = [threading.Thread(target=e.stop, args=(patience,)) for e in self._engines]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
        self._threads.shutdown(cancel_futures=True)

    def _run(self, case: Case) -> Outcome:
        with self._lock:
            chosen = min(range(len(self._engines)), key=lambda n: self._busy[n])
            self._busy[chosen] += 1
        try:
            outcome = self._engines[chosen].run(case)
        finally:
            with self._lock:
                self._busy[chosen] -= 1
        if outcome.fault is not None:
            raise outcome.fault  # the other engines are on this machine, with these models
        return outcome


OnOutcome = Callable[[Case, Outcome], None]
