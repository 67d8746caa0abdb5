"""Code of a run in a Dask worker: starts an engine, or dismisses a worker that cannot do the work.

Before its first task, a plugin gives each worker an engine or the reason why it gets none. Dask
ignores exceptions of a plugin, and such a worker would still take tasks. Therefore each task is
refused by a worker without an engine, which leaves the cluster.
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
from scanloom.engine.clusters.handshake import Answer, Question, answer, describe_mismatch
from scanloom.engine.worker.case_file import CaseFile
from scanloom.engine.worker.messages import WorkerSetup
from scanloom.engine.worker.supervisor import WorkerSupervisor

_LEAVE_DELAY_S = 1.0
"""Time until a dismissed worker leaves: Dask may still be starting it."""
_HOLD_S = 5.0
"""Time for which it holds a task meanwhile, so that it does not attract all others."""


@dataclass(frozen=True)
class EngineSetup:
    """Settings of the engines of workers.

    Parameters
    ----------
    run : str
        Name of the run, unique in a cluster that other runs may share.
    child : WorkerSetup
        Settings of the engine child.
    time_limit : float
        Longest time for a case in seconds, without waiting.
    logs : Path
        Folder for the output of the engines.
    question, expected : Question, Answer
        Question to each worker, and the answer of one that can do the work.
    """

    run: str
    child: WorkerSetup
    time_limit: float
    logs: Path
    question: Question
    expected: Answer


@dataclass(frozen=True)
class UnfitWorker:
    """Result of a task on a worker that cannot process any case."""

    address: str
    reason: Reason
    fault: str


class EnginePlugin(WorkerPlugin):  # type: ignore[misc]
    """Starts the engine of a worker before its first task, also after a restart."""

    idempotent = False

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self.name = setup.run

    def setup(self, worker: Any) -> None:
        """Start the engine, or dismiss the worker."""
        setup = self._setup
        reply = answer(setup.question)
        fault = describe_mismatch({worker.address: reply}, setup.expected)
        if fault is not None:
            changed = reply.models != setup.expected.models
            dismiss_worker(
                worker, setup.run, Reason.MODEL_CHANGED if changed else Reason.CLUSTER, fault
            )
            return
        name = f"engine-{os.getpid()}-{time.time_ns():x}.log"
        engine = WorkerSupervisor(setup.child, setup.time_limit, setup.logs / name)
        engine.warm_up()
        _engines(worker)[setup.run] = engine
        worker.log_event(setup.run, {"address": worker.address})

    def teardown(self, worker: Any) -> None:
        """End the engine at once; its cases are retried elsewhere."""
        engine = _engines(worker).pop(self._setup.run, None)
        if isinstance(engine, WorkerSupervisor):
            engine.stop()


def run_case(run: str, book: str, offset: int) -> bytes:
    """Process the case at an offset of the run's `CaseFile`; the task of a worker.

    Returns
    -------
    bytes
        The worker's address and `Outcome`, or `UnfitWorker`, pickled: Dask's logs and pages show
        the type of a result, not its content. They show all of an exception, so none is raised.
    """
    worker = get_worker()
    engine = _engines(worker).get(run)
    if engine is None:
        engine = UnfitWorker(worker.address, Reason.CLUSTER, "a worker has no engine for this run")
    if isinstance(engine, UnfitWorker):
        time.sleep(_HOLD_S)
        dismiss_worker(worker, run, engine.reason, engine.fault)
        return pickle.dumps(engine)
    try:
        outcome = engine.run(CaseFile.read(Path(book), offset))
    except Exception as exc:  # noqa: BLE001  # the file is out of reach
        fault = f"a worker can no longer read the run's cases ({type(exc).__name__})"
        return pickle.dumps(dismiss_worker(worker, run, Reason.CLUSTER, fault))
    record, now = outcome.record, _engines(worker).get(run)
    if record is None and isinstance(now, UnfitWorker):
        return pickle.dumps(now)  # aborted when the worker was dismissed
    if outcome.fault is not None:
        return pickle.dumps(dismiss_worker(worker, run, outcome.fault.reason, outcome.fault.detail))
    return pickle.dumps((worker.address, outcome))


async def stop_engine(run: str, patience: float, dask_worker: Any) -> None:
    """End a worker's engine in a thread, so that its event loop can still send results."""
    engine = _engines(dask_worker).get(run)
    if isinstance(engine, WorkerSupervisor):
        await asyncio.to_thread(engine.stop, patience)


def dismiss_worker(worker: Any, run: str, reason: Reason, fault: str) -> UnfitWorker:
    """Stop the engine of a worker, and make the worker and its nanny leave the cluster."""
    engine = _engines(worker).get(run)
    unfit = UnfitWorker(worker.address, reason, fault)
    _engines(worker)[run] = unfit
    if isinstance(engine, WorkerSupervisor):
        engine.stop()
    reply = {"address": worker.address, "reason": reason.code, "fault": fault}
    worker.loop.add_callback(worker.log_event, run, reply)
    worker.loop.add_callback(
        worker.loop.call_later,
        _LEAVE_DELAY_S,
        worker.close_gracefully,
        reason=f"scanloom-{reason.code}",
    )
    return unfit


def dismiss_this_worker(run: str, reason: Reason, fault: str, dask_worker: Any) -> None:
    """Dismiss this worker; the run calls it on a worker that failed cases."""
    dismiss_worker(dask_worker, run, reason, fault)


def _engines(worker: Any) -> dict[str, WorkerSupervisor | UnfitWorker]:
    """Return the engine of each run in a worker, or the reason for its absence."""
    if not hasattr(worker, "scanloom"):
        worker.scanloom = {}
    engines: dict[str, WorkerSupervisor | UnfitWorker] = worker.scanloom
    return engines
