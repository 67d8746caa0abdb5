"""Submit cases to a pool, never more than its window, whatever the size of the archive."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from scanloom.core import Case, CaseRecord, Reason
from scanloom.engine.retries import MAX_WORKER_LOSSES
from scanloom.engine.worker.pool import Pool, WorkerLostError, WorkerUnfitError
from scanloom.engine.worker.supervisor import CaseOutcome

OnOutcome = Callable[[Case, CaseOutcome], None]


def dispatch_cases(
    cases: Iterable[Case],
    pool: Pool,
    on_outcome: OnOutcome,
    *,
    on_start: Callable[[Case], None] | None = None,
    stop: threading.Event | None = None,
    drain: float = 6.0,
) -> bool:
    """Submit cases to a pool until all have an outcome.

    Parameters
    ----------
    cases : iterable of Case
        Taken one by one, as the pool has room.
    pool : Pool
        Processes the cases.
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
    ended: queue.SimpleQueue[tuple[Case, Future[CaseOutcome]]] = queue.SimpleQueue()
    losses: Counter[str] = Counter()
    lost_cases: list[Case] = []
    in_flight = 0
    waiting = iter(cases)
    exhausted = False

    def hand_over(case: Case) -> None:
        if on_start is not None:
            on_start(case)
        future = pool.submit(case)
        future.add_done_callback(lambda done: ended.put((case, done)))

    try:
        while True:
            while in_flight < pool.window and not stop.is_set():
                case = lost_cases.pop() if lost_cases else next(waiting, None)
                if case is None:
                    exhausted = True
                    break
                hand_over(case)
                in_flight += 1
            if stop.is_set() or (in_flight == 0 and exhausted and not lost_cases):
                break
            try:
                case, future = ended.get(timeout=0.2)
            except queue.Empty:
                continue
            in_flight -= 1
            outcome = _outcome(future)
            if outcome is None:
                losses[case.id] += not isinstance(future.exception(), WorkerUnfitError)
                if losses[case.id] < MAX_WORKER_LOSSES:
                    lost_cases.append(case)
                    continue
                outcome = _given_up(case)
            on_outcome(case, outcome)
        if in_flight:
            _drain(pool, ended, in_flight, drain, on_outcome)
            return False
    except BaseException:
        pool.stop(0.0)
        raise
    return exhausted and not lost_cases


def _drain(
    pool: Pool,
    ended: queue.SimpleQueue[tuple[Case, Future[CaseOutcome]]],
    in_flight: int,
    patience: float,
    on_outcome: OnOutcome,
) -> None:
    """Collect the cases that end within `patience` seconds; the others are aborted."""
    pool.stop(patience)
    for _ in range(in_flight):
        try:
            case, future = ended.get(timeout=1.0)
        except queue.Empty:
            return
        if future.cancelled() or future.exception() is not None:
            continue
        outcome = future.result()
        if outcome.record is not None:
            on_outcome(case, outcome)


def _outcome(future: Future[CaseOutcome]) -> CaseOutcome | None:
    """Return the outcome of a case; None if its worker was lost, or left during it.

    Raises
    ------
    ScanError
        If no case can be processed.
    """
    try:
        outcome = future.result()
    except WorkerLostError:
        return None
    return outcome if outcome.record is not None else None


def _given_up(case: Case) -> CaseOutcome:
    detail = f"the worker of the case was lost {MAX_WORKER_LOSSES} times"
    return CaseOutcome(CaseRecord(case.id, Reason.WORKER_LOST, detail, (), None), ())
