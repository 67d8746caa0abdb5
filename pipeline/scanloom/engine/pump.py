"""Keeps a pool busy: never more cases handed over than its window, whatever the archive's size."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from scanloom.core import CaseRecord, Reason
from scanloom.engine.engine import Outcome
from scanloom.engine.pool import LostError, Pool, Task

MOST_LOSSES = 10
"""How often a case may lose its worker before it is given up for this run."""

OnOutcome = Callable[[Task, Outcome], None]


def pump(
    tasks: Iterable[Task],
    pool: Pool,
    on_outcome: OnOutcome,
    *,
    on_start: Callable[[Task], None] | None = None,
    stop: threading.Event | None = None,
    drain: float = 6.0,
) -> bool:
    """Hand tasks to a pool until all have an outcome.

    Parameters
    ----------
    tasks : iterable of Task
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
        Whether all tasks were worked on.
    """
    stop = stop or threading.Event()
    ended: queue.SimpleQueue[tuple[Task, Future[Outcome]]] = queue.SimpleQueue()
    losses: Counter[str] = Counter()
    again: list[Task] = []
    flying = 0
    waiting = iter(tasks)
    exhausted = False

    def hand_over(task: Task) -> None:
        if on_start is not None:
            on_start(task)
        future = pool.submit(task)
        future.add_done_callback(lambda done: ended.put((task, done)))

    try:
        while True:
            while flying < pool.window and not stop.is_set():
                task = again.pop() if again else next(waiting, None)
                if task is None:
                    exhausted = True
                    break
                hand_over(task)
                flying += 1
            if flying == 0 or stop.is_set():
                break
            try:
                task, future = ended.get(timeout=0.2)
            except queue.Empty:
                continue
            flying -= 1
            outcome = _outcome(future)
            if outcome is None:
                losses[task.case.id] += 1
                if losses[task.case.id] < MOST_LOSSES:
                    again.append(task)
                    continue
                outcome = _given_up(task)
            on_outcome(task, outcome)
        if flying:
            _drain(pool, ended, flying, drain, on_outcome)
            return False
    except BaseException:
        pool.stop(0.0)
        raise
    return exhausted and not again


def _drain(
    pool: Pool,
    ended: queue.SimpleQueue[tuple[Task, Future[Outcome]]],
    flying: int,
    patience: float,
    on_outcome: OnOutcome,
) -> None:
    """Take in what still ends by itself; the rest is cut off, and is no outcome."""
    pool.stop(patience)
    for _ in range(flying):
        try:
            task, future = ended.get(timeout=1.0)
        except queue.Empty:
            return
        if future.cancelled() or future.exception() is not None:
            continue
        outcome = future.result()
        if outcome.record is not None:
            on_outcome(task, outcome)


def _outcome(future: Future[Outcome]) -> Outcome | None:
    """Return what became of a case; None where its worker was lost, or left in the midst of it."""
    try:
        outcome = future.result()
    except LostError:
        return None
    return outcome if outcome.record is not None else None


def _given_up(task: Task) -> Outcome:
    detail = f"its worker was lost {MOST_LOSSES} times"
    return Outcome(CaseRecord(task.case.id, Reason.LOST, detail, (), None), ())
