"""A run's part in a Dask worker: an engine for who can do the work, the way out for who can't.

A plugin gives each worker, before its first task, an engine or a word why it gets none. What a
plugin raises is swallowed by Dask, and the worker takes tasks all the same: so the work itself is
refused where there is no engine, and the worker leaves the cluster.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import WorkerPlugin, get_worker

from scanloom.core import Reason
from scanloom.engine.book import CaseBook
from scanloom.engine.engine import Engine
from scanloom.engine.handshake import Answer, Question, answer, find_fault
from scanloom.engine.worker_messages import Setup

LEAVING = 1.0
"""Seconds after which a worker that is kept out leaves: Dask may still be starting it."""
HOLDING = 5.0
"""Seconds for which it holds what it is given meanwhile, lest it attract all the rest."""


@dataclass(frozen=True)
class EngineSetup:
    """What a worker makes its engine of.

    Parameters
    ----------
    run : str
        The run's own name in the cluster, which it may share with others.
    child : Setup
        For the engine.
    time_limit : float
        Seconds that a case may work.
    logs : Path
        Folder of the engine's words.
    question, expected : Question, Answer
        What a worker must see, and what it must say.
    """

    run: str
    child: Setup
    time_limit: float
    logs: Path
    question: Question
    expected: Answer


@dataclass(frozen=True)
class Unfit:
    """What a worker gives for a case that it can't work on, nor on any other."""

    address: str
    reason: Reason
    fault: str


class EnginePlugin(WorkerPlugin):  # type: ignore[misc]
    """Gives a worker its engine before it takes a task, also after it was started anew."""

    idempotent = False

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self.name = setup.run

    def setup(self, worker: Any) -> None:
        """Start the engine, or send the worker away."""
        made = self._setup
        told = answer(made.question)
        fault = find_fault({worker.address: told}, made.expected)
        if fault is not None:
            changed = told.models != made.expected.models
            send_away(worker, made.run, Reason.MODEL_CHANGED if changed else Reason.CLUSTER, fault)
            return
        name = f"engine-{os.getpid()}-{time.time_ns():x}.log"
        engine = Engine(made.child, made.time_limit, made.logs / name)
        engine.warm_up()
        _places(worker)[made.run] = engine
        worker.log_event(made.run, {"address": worker.address})

    def teardown(self, worker: Any) -> None:
        """End the engine at once: what it works on is done again elsewhere."""
        engine = _places(worker).pop(self._setup.run, None)
        if isinstance(engine, Engine):
            engine.stop()


def run_case(run: str, book: str, offset: int) -> bytes:
    """Work on the case at `offset` of the run's book; on a worker.

    Returns
    -------
    bytes
        The pickled `Outcome`, with the worker's address, or `Unfit`: Dask shows the type of a
        result, not what is in it. Never an exception, of which Dask shows all.
    """
    worker = get_worker()
    engine = _places(worker).get(run)
    if engine is None:
        engine = Unfit(worker.address, Reason.CLUSTER, "a worker has no engine for this run")
    if isinstance(engine, Unfit):
        time.sleep(HOLDING)
        send_away(worker, run, engine.reason, engine.fault)
        return pickle.dumps(engine)
    try:
        outcome = engine.run(CaseBook.read(Path(book), offset))
    except Exception as exc:  # noqa: BLE001  # a book out of sight
        fault = f"a worker can't read the run's cases any more ({type(exc).__name__})"
        return pickle.dumps(send_away(worker, run, Reason.CLUSTER, fault))
    record, now = outcome.record, _places(worker).get(run)
    if record is None and isinstance(now, Unfit):
        return pickle.dumps(now)  # cut off when it was sent away
    if outcome.fault is not None:
        return pickle.dumps(send_away(worker, run, outcome.fault.reason, outcome.fault.detail))
    return pickle.dumps((worker.address, outcome))


async def stop_engine(run: str, patience: float, dask_worker: Any) -> None:
    """End a worker's engine; beside its event loop, by which results go out meanwhile."""
    engine = _places(dask_worker).get(run)
    if isinstance(engine, Engine):
        await asyncio.to_thread(engine.stop, patience)


def send_away(worker: Any, run: str, reason: Reason, fault: str) -> Unfit:
    """Take a worker its engine, and have it leave the cluster, with its nanny."""
    engine = _places(worker).get(run)
    unfit = Unfit(worker.address, reason, fault)
    _places(worker)[run] = unfit
    if isinstance(engine, Engine):
        engine.stop()
    told = {"address": worker.address, "reason": reason.code, "fault": fault}
    worker.loop.add_callback(worker.log_event, run, told)
    worker.loop.add_callback(
        worker.loop.call_later, LEAVING, worker.close_gracefully, reason=f"scanloom-{reason.code}"
    )
    return unfit


def dismiss(run: str, reason: Reason, fault: str, dask_worker: Any) -> None:
    """Send a worker away because of what it did; run on it."""
    send_away(dask_worker, run, reason, fault)


def _places(worker: Any) -> dict[str, Engine | Unfit]:
    """Return what a worker has for each run."""
    if not hasattr(worker, "scanloom"):
        worker.scanloom = {}
    found: dict[str, Engine | Unfit] = worker.scanloom
    return found
