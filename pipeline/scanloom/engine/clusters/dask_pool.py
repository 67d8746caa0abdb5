"""`DaskPool`: a pool of Dask workers, each of which supervises a child process.

A task carries only ids and never raises, so that no scheduler, log or error page shows the path of
a scan: the worker reads the case from the `CaseFile` in `OUT/private/`. No state is kept in Dask;
the files in OUT are authoritative. Cases go only to workers that reported a running supervisor: a
worker that cannot do the work, or hangs while it starts, gets none.

Before its first task, a plugin gives each worker a supervisor or the reason why it gets none. Dask
ignores exceptions of a plugin, and such a worker would still take tasks. Therefore each task is
refused by a worker without a supervisor, which leaves the cluster.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributed import Client, WorkerPlugin, get_worker
from distributed.client import Future as DaskFuture

from scanloom.core import Case, Reason, ScanError
from scanloom.engine.clusters.contact import Handshake, answer, describe_mismatch
from scanloom.engine.retries import MAX_OUTDONE_CASES, policy_of
from scanloom.engine.worker.messages import CaseFile, ChildSetup
from scanloom.engine.worker.pool import WorkerLostError, WorkerUnfitError
from scanloom.engine.worker.supervisor import CaseOutcome, WorkerSupervisor

_LEAVE_DELAY_S = 1.0
"""Time until a dismissed worker leaves: Dask may still be starting it."""
_HOLD_S = 5.0
"""Time for which it holds a task meanwhile, so that it does not attract all others."""


@dataclass(frozen=True)
class SupervisorSetup:
    """Settings of the supervisors of workers.

    Parameters
    ----------
    run : str
        Name of the run, unique in a cluster that other runs may share.
    child : ChildSetup
        Settings of the child process.
    time_limit : float
        Longest time for a case in seconds, without waiting.
    logs : Path
        Folder for the output of the supervisors.
    handshake : Handshake
        Question to each worker, and the answer of one that can do the work.
    """

    run: str
    child: ChildSetup
    time_limit: float
    logs: Path
    handshake: Handshake


@dataclass(frozen=True)
class UnfitWorker:
    """Result of a task on a worker that cannot process any case."""

    address: str
    reason: Reason
    fault: str


class SupervisorPlugin(WorkerPlugin):  # type: ignore[misc]  # Dask's is untyped
    """Starts the supervisor of a worker before its first task, also after a restart."""

    idempotent = False

    def __init__(self, setup: SupervisorSetup) -> None:
        self._setup = setup
        self.name = setup.run

    def setup(self, worker: Any) -> None:
        """Start the supervisor, or dismiss the worker."""
        setup, expected = self._setup, self._setup.handshake.expected
        reply = answer(setup.handshake.question)
        fault = describe_mismatch({worker.address: reply}, expected)
        if fault is not None:
            changed = reply.models != expected.models
            reason = Reason.MODEL_CHANGED if changed else Reason.CLUSTER
            dismiss_worker(setup.run, reason, fault, worker)
            return
        name = f"engine-{os.getpid()}-{time.time_ns():x}.log"
        supervisor = WorkerSupervisor(setup.child, setup.time_limit, setup.logs / name)
        supervisor.warm_up()
        _supervisors(worker)[setup.run] = supervisor
        worker.log_event(setup.run, {"address": worker.address})

    def teardown(self, worker: Any) -> None:
        """End the supervisor at once; its cases are retried elsewhere."""
        supervisor = _supervisors(worker).pop(self._setup.run, None)
        if isinstance(supervisor, WorkerSupervisor):
            supervisor.stop()


def work_on_case(run: str, case_file: str, offset: int) -> bytes:
    """Process the case at an offset of the run's `CaseFile`; the task of a worker.

    Returns
    -------
    bytes
        The worker's address and `CaseOutcome`, or `UnfitWorker`, pickled: Dask's logs and pages
        show the type of a result, not its content; of an exception all, so none is raised.
    """
    worker = get_worker()
    supervisor = _supervisors(worker).get(run)
    if supervisor is None:
        supervisor = UnfitWorker(
            worker.address, Reason.CLUSTER, "a worker has no engine for this run"
        )
    if isinstance(supervisor, UnfitWorker):
        time.sleep(_HOLD_S)
        dismiss_worker(run, supervisor.reason, supervisor.fault, worker)
        return pickle.dumps(supervisor)
    try:
        outcome = supervisor.run(CaseFile.read(Path(case_file), offset))
    except ScanError as error:
        return pickle.dumps(dismiss_worker(run, error.reason, error.detail, worker))
    except Exception as exc:  # noqa: BLE001  # the file is out of reach
        fault = f"a worker can no longer read the run's cases ({type(exc).__name__})"
        return pickle.dumps(dismiss_worker(run, Reason.CLUSTER, fault, worker))
    now = _supervisors(worker).get(run)
    if outcome.record is None and isinstance(now, UnfitWorker):
        return pickle.dumps(now)  # aborted when the worker was dismissed
    return pickle.dumps((worker.address, outcome))


async def stop_supervisor(run: str, patience: float, dask_worker: Any) -> None:
    """End a worker's supervisor in a thread, so that its event loop can still send results."""
    supervisor = _supervisors(dask_worker).get(run)
    if isinstance(supervisor, WorkerSupervisor):
        await asyncio.to_thread(supervisor.stop, patience)


def dismiss_worker(run: str, reason: Reason, fault: str, dask_worker: Any) -> UnfitWorker:
    """Stop the supervisor of a worker, and make the worker and its nanny leave the cluster.

    The run calls it on a worker that failed cases: Dask fills in `dask_worker`.
    """
    supervisor, loop = _supervisors(dask_worker).get(run), dask_worker.loop
    unfit = UnfitWorker(dask_worker.address, reason, fault)
    _supervisors(dask_worker)[run] = unfit
    if isinstance(supervisor, WorkerSupervisor):
        supervisor.stop()
    reply = {"address": unfit.address, "reason": reason.code, "fault": fault}
    loop.add_callback(dask_worker.log_event, run, reply)
    leave, why = dask_worker.close_gracefully, f"scanloom-{reason.code}"
    loop.add_callback(loop.call_later, _LEAVE_DELAY_S, leave, reason=why)
    return unfit


def _supervisors(worker: Any) -> dict[str, WorkerSupervisor | UnfitWorker]:
    """Return the supervisor of each run in a worker, or the reason for its absence."""
    if not hasattr(worker, "scanloom"):
        worker.scanloom = {}
    supervisors: dict[str, WorkerSupervisor | UnfitWorker] = worker.scanloom
    return supervisors


_COUNT_INTERVAL_S = 0.5
"""Time between two counts of the workers."""
_EVENTS_TIMEOUT_S = 30.0
"""Time limit for a scheduler to forward the first event."""
_END_TIMEOUT_S = 10.0
"""Time limit for workers to end their supervisors, in addition to the patience with their cases."""
_SENDING_S = 2.0
"""Time for results of cases that have ended to arrive."""
_RESULT_TIMEOUT_S = 30.0
"""Time limit for one result. If its worker was lost before it was sent, Dask waits until the case
was worked on again, forever if none of its workers is left, and meanwhile takes no other result."""
_UNFIT_PATIENCE_S = 600.0
"""Time in which workers may join without one of them that can do the work."""
_SCHEDULER_LOST = "the connection to the scheduler was lost"


@dataclass(frozen=True)
class PoolLimits:
    """Conditions under which a run gives up its workers.

    Parameters
    ----------
    patience : float
        Seconds without any worker.
    same_machine : bool
        Whether all workers are on one machine, so that a fault of one affects all.
    check_models : callable
        Raises ScanError (MODEL_CHANGED) if this process sees changed models.
    on_unfit : callable
        Called with the cause when a worker is dismissed.
    """

    patience: float = 600.0
    same_machine: bool = False
    check_models: Callable[[], None] = lambda: None
    on_unfit: Callable[[str], None] = lambda fault: None


class DaskPool:
    """Pool of the workers of a cluster, with a supervisor in each that can do the work.

    `setup` is for current and future workers.

    Raises
    ------
    ScanError
        CLUSTER if the connection to the scheduler was lost.
    """

    def __init__(
        self,
        client: Client,
        case_file: CaseFile,
        setup: SupervisorSetup,
        limits: PoolLimits = PoolLimits(),
    ) -> None:
        self._client, self._case_file, self._setup = client, case_file, setup
        self._limits = limits
        self._stopped = threading.Event()
        self._pending: dict[Future[CaseOutcome], tuple[DaskFuture, frozenset[str]]] = {}
        self._fit: set[str] = set()
        self._unfit: dict[str, UnfitWorker] = {}
        self._doubts: list[UnfitWorker] = []
        self._first_outcomes: dict[str, tuple[str, CaseOutcome]] = {}
        self._outdone: Counter[str] = Counter()
        self._workers: frozenset[str] = frozenset()
        self._counted_at, self._seen_at = -_COUNT_INTERVAL_S, time.monotonic()
        self._refused_since: float | None = None
        self._listen()
        try:
            client.register_plugin(SupervisorPlugin(setup))
        except (ImportError, AttributeError) as exc:  # on a worker that passed the handshake
            detail = f"a worker has a different scanloom of the same version ({type(exc).__name__})"
            raise ScanError(Reason.CLUSTER, detail) from exc
        except Exception:  # noqa: BLE001, S110  # a worker that just left; the others have the plugin
            pass

    @property
    def window(self) -> int:
        """Number of cases that the workers with a supervisor take.

        Raises
        ------
        ScanError
            CLUSTER if the connection to the scheduler was lost, or there was no worker for too
            long; MODEL_CHANGED if the models have changed; the reason of a child process if none
            starts on this machine.
        """
        now = time.monotonic()
        if now - self._counted_at > _COUNT_INTERVAL_S:
            self._workers, self._counted_at = self._present(), now
            self._check_doubts()
            self._take_back()
        if self._workers:
            self._seen_at, self._refused_since = now, None
        self._check_patience(now)
        return len(self._workers) * self._setup.child.in_flight

    def submit(self, case: Case) -> Future[CaseOutcome]:
        """Submit a case to any free worker; `window` must not be 0.

        Raises
        ------
        ScanError
            CLUSTER if the connection to the scheduler was lost.
        """
        self._check_scheduler()  # else the case would be lost repeatedly
        future: Future[CaseOutcome] = Future()
        self._submit_to_workers(case, future)
        return future

    def _submit_to_workers(self, case: Case, future: Future[CaseOutcome]) -> None:
        """Give a case to the workers, preferably not to one on which it failed."""
        candidates = self._workers & self._fit or self._workers
        if case.id in self._first_outcomes:
            candidates = candidates - {self._first_outcomes[case.id][0]} or candidates
        key = f"case-{case.id}-{time.time_ns():x}"
        dask_future = self._client.submit(
            work_on_case,
            self._setup.run,
            str(self._case_file.path),
            self._case_file.offset(case.id),
            pure=False,
            key=key,
            workers=list(candidates),
        )
        self._pending[future] = (dask_future, candidates)
        dask_future.add_done_callback(lambda done: self._on_done(done, case, future))

    def stop(self, patience: float) -> None:
        """End the supervisors, after `patience` seconds at the latest."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._client.status == "running":
            thread = threading.Thread(target=self._end, args=(patience,), daemon=True)
            thread.start()
            thread.join(patience + _END_TIMEOUT_S)  # a worker may hang
        for future in wait(list(self._pending), timeout=_SENDING_S).not_done:
            future.cancel()

    def _end(self, patience: float) -> None:
        """End the supervisors, and keep workers that join later from starting one."""
        run = self._setup.run
        with suppress(Exception):  # no worker is left, or the scheduler was lost
            workers = list(self._present())
            if workers:
                self._client.run(stop_supervisor, run, patience, workers=workers, on_error="ignore")
            self._client.unregister_worker_plugin(run)

    def _listen(self) -> None:
        """Subscribe to the workers' events, before the plugin is sent to any."""
        connected = threading.Event()

        def on_event(event: tuple[float, Mapping[str, Any]]) -> None:
            reply = event[1]
            if "address" not in reply:
                connected.set()
            elif "fault" in reply:
                reason = Reason[reply["reason"]]
                self._exclude(UnfitWorker(str(reply["address"]), reason, str(reply["fault"])))
            else:
                self._fit.add(str(reply["address"]))

        run, deadline = self._setup.run, time.monotonic() + _EVENTS_TIMEOUT_S
        try:
            self._client.subscribe_topic(run, on_event)
            while not connected.wait(0.05):
                self._client.log_event(run, {})
                if time.monotonic() > deadline:
                    raise ScanError(Reason.CLUSTER, "the scheduler forwards no events")
        except (OSError, TimeoutError) as exc:
            raise ScanError(Reason.CLUSTER, _SCHEDULER_LOST) from exc

    def _exclude(self, unfit: UnfitWorker) -> None:
        """Record a worker that cannot do the work; it leaves by itself."""
        self._fit.discard(unfit.address)
        if unfit.address not in self._unfit:
            self._limits.on_unfit(unfit.fault)
            self._doubts.append(unfit)
        self._unfit[unfit.address] = unfit
        if self._refused_since is None:
            self._refused_since = time.monotonic()

    def _check_doubts(self) -> None:
        """End the run if the fault is not one of the worker alone."""
        while self._doubts:
            unfit = self._doubts.pop()
            if unfit.reason is Reason.MODEL_CHANGED:
                self._limits.check_models()
            if self._limits.same_machine:
                raise ScanError(unfit.reason, unfit.fault)

    def _check_patience(self, now: float) -> None:
        if self._refused_since is not None and now - self._refused_since > _UNFIT_PATIENCE_S:
            fault = list(self._unfit.values())[-1].fault
            detail = f"for {_UNFIT_PATIENCE_S:.0f} s no worker could do the work: {fault}"
            raise ScanError(Reason.CLUSTER, detail)
        patience = self._limits.patience
        if now - self._seen_at > patience:
            detail = f"there was no worker that can do the work for {patience:.0f} s"
            raise ScanError(Reason.CLUSTER, detail)

    def _take_back(self) -> None:
        """Take back cases whose workers were all lost: Dask would wait for them forever."""
        for future, (dask_future, workers) in list(self._pending.items()):
            if workers & self._workers or dask_future.status != "pending":
                continue
            self._pending.pop(future, None)
            error_type = WorkerUnfitError if workers <= self._unfit.keys() else WorkerLostError
            with suppress(InvalidStateError):  # it ended just now
                future.set_exception(error_type("the workers of the case were lost"))
            dask_future.cancel()  # last: of a cancelled one, `_on_done` would say that it was lost

    def _present(self) -> frozenset[str]:
        """Return the connected workers that can do the work."""
        self._check_scheduler()
        try:
            return frozenset(self._fit & set(self._client.nthreads()))
        except (OSError, TimeoutError, ValueError, RuntimeError) as exc:
            raise ScanError(Reason.CLUSTER, _SCHEDULER_LOST) from exc

    def _check_scheduler(self) -> None:
        if self._client.status != "running":
            raise ScanError(Reason.CLUSTER, _SCHEDULER_LOST)

    def _on_done(self, dask_future: DaskFuture, case: Case, future: Future[CaseOutcome]) -> None:
        self._pending.pop(future, None)
        try:
            if dask_future.status != "finished":
                future.set_exception(WorkerLostError(dask_future.status))
                return
            packed = dask_future.result(_RESULT_TIMEOUT_S)
            reply = pickle.loads(packed)  # noqa: S301  # from our own worker
            if isinstance(reply, UnfitWorker):
                self._exclude(reply)
                future.set_exception(WorkerUnfitError(reply.fault))
                return
            worker, outcome = reply
            if not self._retries_elsewhere(case, worker, outcome, future):
                future.set_result(self._final_outcome(case, worker, outcome))
        except InvalidStateError:  # taken back meanwhile
            pass
        except Exception as exc:  # noqa: BLE001  # the connection can fail in many ways
            if not future.done():
                future.set_exception(WorkerLostError(type(exc).__name__))
        finally:
            dask_future.release()

    def _retries_elsewhere(
        self, case: Case, worker: str, outcome: CaseOutcome, future: Future[CaseOutcome]
    ) -> bool:
        """Retry a case once on another worker if the first one may be at fault."""
        policy = policy_of(outcome.record.reason if outcome.record else None)
        if not policy.on_other_worker(same_machine=self._limits.same_machine):
            return False
        # Once is enough: a case that fails on two workers is at fault itself
        other_workers = (self._workers & self._fit) - {worker}
        if (
            case.id in self._first_outcomes
            or not other_workers
            or self._stopped.is_set()
            or future.done()
        ):
            return False
        self._first_outcomes[case.id] = (worker, outcome)
        self._submit_to_workers(case, future)
        return True

    def _final_outcome(self, case: Case, worker: str, outcome: CaseOutcome) -> CaseOutcome:
        """Return the final outcome: that of the second worker, with the tries of both."""
        if outcome.record is None or case.id not in self._first_outcomes:
            return outcome
        failed_on, first = self._first_outcomes.pop(case.id)
        if outcome.record.reason is None and worker != failed_on:
            self._outdone[failed_on] += 1
            known = not self._limits.same_machine and failed_on in self._fit
            if self._outdone[failed_on] >= MAX_OUTDONE_CASES and known:
                self._dismiss(failed_on, first)
        return replace(outcome, tries=first.tries + outcome.tries)

    def _dismiss(self, worker: str, last: CaseOutcome) -> None:
        """Dismiss a worker that fails cases others do; in a thread, since the worker may hang."""
        reason = last.record.reason if last.record and last.record.reason else Reason.CLUSTER
        failures = f"{MAX_OUTDONE_CASES} cases that succeeded elsewhere ({reason.code})"
        fault = f"a worker failed {failures}"
        self._exclude(UnfitWorker(worker, Reason.CLUSTER, fault))

        def send() -> None:
            run, reason = self._setup.run, Reason.CLUSTER
            with suppress(Exception):  # lost or hanging: it gets no further case anyway
                self._client.run(
                    dismiss_worker, run, reason, fault, workers=[worker], on_error="ignore"
                )

        threading.Thread(target=send, daemon=True).start()
