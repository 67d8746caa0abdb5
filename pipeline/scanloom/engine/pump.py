"""Keeps a pool busy: never more cases handed over than its window, whatever the archive's size."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from scanloom.core import Case, CaseRecord, Reason
from scanloom.engine.engine import Outcome
from scanloom.engine.pool import LostError, Pool, UnfitError

MOST_LOSSES = 10
"""How often a case may lose its worker before it is given up for this run."""

OnOutcome = Callable[[Case, Outcome], None]


def pump(
    cases: Iterable[Case],
    pool: Pool,
    on_outcome: OnOutcome,
    *,
    on_start: Callable[[Case], None] | None = None,
    stop: threading.Event | None = None,
    drain: float = 6.0,
) -> bool:
    """Hand cases to a pool until all have an outcome.

    Parameters
    ----------
    cases : iterable of Case
        Taken one by one, as there is room.
    pool : Pool
        Where they are worked on.
    on_outcome, on_start : callable
        Called in this thread. If `on_outcome` raises, nothing more is started, the pool is
        stopped, and the error goes on.
    stop : threading.Event or None
        When it is set, nothing more is started, and what is in flight has `drain` seconds.
    drain : float
        See `stop`.

    Returns
    -------
    bool
        Whether all cases were worked on.

    Raises
    ------
    ScanError
        Of the pool, if no case can be worked on; or what `on_outcome` raised.
    """
    stop = stop or threading.Event()
    ended: queue.SimpleQueue[tuple[Case, Future[Outcome]]] = queue.SimpleQueue()
    losses: Counter[str] = Counter()
    again: list[Case] = []
    flying = 0
    waiting = iter(cases)
    exhausted = False

    def hand_over(case: Case) -> None:
        if on_start is not None:
            on_start(case)
        future = pool.submit(case)
        future.add_done_callback(lambda done: ended.put((case, done)))

    try:
        while True:
            while flying < pool.window and not stop.is_set():
                case = again.pop() if again else next(waiting, None)
                if case is None:
                    exhausted = True
                    break
                hand_over(case)
                flying += 1
            if stop.is_set() or (flying == 0 and exhausted and not again):
                break
            try:
                case, future = ended.get(timeout=0.2)
            except queue.Empty:
                continue
            flying -= 1
            outcome = _outcome(future)
            if outcome is None:
                losses[case.id] += not isinstance(future.exception(), UnfitError)
                if losses[case.id] < MOST_LOSSES:
                    again.append(case)
                    continue
                outcome = _given_up(case)
            on_outcome(case, outcome)
        if flying:
            _drain(pool, ended, flying, drain, on_outcome)
            return False
    except BaseException:
        pool.stop(0.0)
        raise
    return exhausted and not again


def _drain(
    pool: Pool,
    ended: queue.SimpleQueue[tuple[Case, Future[Outcome]]],
    flying: int,
    patience: float,
    on_outcome: OnOutcome,
) -> None:
    """Take in what still ends by itself; the rest is cut off, and is no outcome."""
    pool.stop(patience)
    for _ in range(flying):
        try:
            case, future = ended.get(timeout=1.0)
        except queue.Empty:
            return
        if future.cancelled() or future.exception() is not None:
            continue
        outcome = future.result()
        if outcome.record is not None:
            on_outcome(case, outcome)


def _outcome(future: Future[Outcome]) -> Outcome | None:
    """Return what became of a case; None where its worker was lost, or left in the midst of it.

    Raises
    ------
    ScanError
        If no case can be worked on.
    """
    try:
        outcome = future.result()
    except LostError:
        return None
    return outcome if outcome.record is not None else None


def _given_up(case: Case) -> Outcome:
    detail = f"its worker was lost {MOST_LOSSES} times"
    return Outcome(CaseRecord(case.id, Reason.WORKER_LOST, detail, (), None), ())
