"""Dask's workers as a pool: each a thin supervisor with an engine child.

A task carries ids alone and never raises, so that no scheduler, log or error page ever shows where
a scan lies: the worker reads the case from the run's book in `OUT/private/`. Nothing is kept in
Dask: what is on the disk is the only truth. A case is for any of the workers that have said that
they have an engine; one that can't do the work, or hangs while it starts, is given none.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from distributed import Client
from distributed.client import Future as DaskFuture

from scanloom.core import Case, Reason, ScanError
from scanloom.engine.book import CaseBook
from scanloom.engine.dask_worker import (
    EnginePlugin,
    EngineSetup,
    Unfit,
    dismiss,
    run_case,
    stop_engine,
)
from scanloom.engine.engine import Outcome
from scanloom.engine.pool import LostError, UnfitError

LOOKING = 0.5
"""Seconds for which the count of workers is taken as known."""
LISTENING = 30.0
"""Seconds that a scheduler has until it hands on what workers say."""
ENDING = 10.0
"""Seconds that workers have to end their engines, beside the patience with what they work on."""
GONE = "its scheduler is gone"
OF_PLACE = frozenset(
    (
        Reason.UNREADABLE,
        Reason.OUTPUT_UNWRITABLE,
        Reason.SCRATCH_FULL,
        Reason.ENVIRONMENT,
        Reason.DEVICE_UNAVAILABLE,
    )
)
"""What a case ends with that may go well on another machine."""
OF_DEVICE = frozenset((Reason.DEVICE_UNAVAILABLE,))
"""What may go well on another worker of the same machine."""
MOST_FAILED = 3
"""Cases that a worker fails and another does: then it is sent away."""


@dataclass(frozen=True)
class Terms:
    """When a run gives its workers up, and whom it tells.

    Parameters
    ----------
    patience : float
        Seconds without any worker.
    unfit_patience : float
        Seconds in which workers come and none of them can do the work.
    same_machine : bool
        Whether what keeps one worker out keeps out all.
    check_models : callable
        Raises ScanError (MODEL_CHANGED) if the models are not what they were, for this process.
    on_unfit : callable
        Is told why a worker was sent away.
    """

    patience: float = 600.0
    unfit_patience: float = 600.0
    same_machine: bool = False
    check_models: Callable[[], None] = lambda: None
    on_unfit: Callable[[str], None] = lambda fault: None


class DaskPool:
    """The workers of a cluster, and an engine in each that can do the work.

    Parameters
    ----------
    client : distributed.Client
        Connected.
    book : CaseBook
        Where the cases stand.
    setup : EngineSetup
        For the workers that are there and those that come.
    terms : Terms
        When they are given up.

    Raises
    ------
    ScanError
        CLUSTER if the scheduler is gone.
    """

    def __init__(
        self, client: Client, book: CaseBook, setup: EngineSetup, terms: Terms | None = None
    ) -> None:
        self._client, self._book, self._setup = client, book, setup
        self._terms = terms or Terms()
        self._stopped = threading.Event()
        self._given: dict[Future[Outcome], tuple[DaskFuture, frozenset[str]]] = {}
        self._fit: set[str] = set()
        self._unfit: dict[str, Unfit] = {}
        self._doubt: list[Unfit] = []
        self._first: dict[str, tuple[str, Outcome]] = {}
        self._outdone: Counter[str] = Counter()
        self._workers: frozenset[str] = frozenset()
        self._looked, self._seen = -LOOKING, time.monotonic()
        self._refused: float | None = None
        self._listen()
        try:
            client.register_plugin(EnginePlugin(setup))
        except (ImportError, AttributeError) as exc:  # of a worker that has just answered
            detail = f"a worker's scanloom is another one of this version ({type(exc).__name__})"
            raise ScanError(Reason.CLUSTER, detail) from exc
        except Exception:  # noqa: BLE001, S110  # a worker that just left: others were asked
            pass

    @property
    def window(self) -> int:
        """As many as the workers that can do the work take.

        Raises
        ------
        ScanError
            CLUSTER if the scheduler is gone, or no worker was there for long; MODEL_CHANGED if
            the models are not what they were; START if no engine starts on this machine.
        """
        now = time.monotonic()
        if now - self._looked > LOOKING:
            self._workers, self._looked = self._present(), now
            self._judge()
            self._take_back()
        if self._workers:
            self._seen, self._refused = now, None
        self._check_patience(now)
        return len(self._workers) * self._setup.child.in_flight

    def submit(self, case: Case) -> Future[Outcome]:
        """Have a case worked on by whichever worker is free; there must be a window.

        Raises
        ------
        ScanError
            CLUSTER if the scheduler is gone.
        """
        self._check_scheduler()  # else what it took with it would be lost again and again
        ours: Future[Outcome] = Future()
        self._give(case, ours)
        return ours

    def _give(self, case: Case, ours: Future[Outcome]) -> None:
        """Give a case to the workers; not to one that failed it if there are others."""
        where = (self._setup.run, str(self._book.path), self._book.offset(case.id))
        able = self._workers & self._fit or self._workers
        if case.id in self._first:
            able = able - {self._first[case.id][0]} or able
        theirs = self._client.submit(
            run_case, *where, pure=False, key=_key(case.id), workers=list(able)
        )
        self._given[ours] = (theirs, able)
        theirs.add_done_callback(lambda done: self._hand_on(done, case, ours))

    def stop(self, patience: float) -> None:
        """Have the engines end, after `patience` seconds at the latest."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._client.status == "running":
            ender = threading.Thread(target=self._end, args=(patience,), daemon=True)
            ender.start()
            ender.join(patience + ENDING)  # a worker may hang
        until = time.monotonic() + 2.0
        while any(not f.done() for f in self._given) and time.monotonic() < until:
            time.sleep(0.05)
        for ours in list(self._given):
            ours.cancel()

    def _end(self, patience: float) -> None:
        """End the engines, and have workers that come later start none."""
        run = self._setup.run
        with suppress(Exception):  # no worker is left, or the scheduler is gone
            left = list(self._present())
            if left:
                self._client.run(stop_engine, run, patience, workers=left, on_error="ignore")
            self._client.unregister_worker_plugin(run)

    def _listen(self) -> None:
        """Hear what workers say of themselves, before the first is asked."""
        heard = threading.Event()

        def hear(event: tuple[float, Mapping[str, Any]]) -> None:
            told = event[1]
            if "address" not in told:
                heard.set()
            elif "fault" in told:
                reason = Reason[told["reason"]]
                self._keep_out(Unfit(str(told["address"]), reason, str(told["fault"])))
            else:
                self._fit.add(str(told["address"]))

        run, until = self._setup.run, time.monotonic() + LISTENING
        try:
            self._client.subscribe_topic(run, hear)
            while not heard.wait(0.05):
                self._client.log_event(run, {})
                if time.monotonic() > until:
                    raise ScanError(Reason.CLUSTER, "its scheduler hands on no events")
        except (OSError, TimeoutError) as exc:
            raise ScanError(Reason.CLUSTER, GONE) from exc

    def _keep_out(self, unfit: Unfit) -> None:
        """Take note of a worker that can't do the work; it leaves by itself."""
        self._fit.discard(unfit.address)
        if unfit.address not in self._unfit:
            self._terms.on_unfit(unfit.fault)
            self._doubt.append(unfit)
        self._unfit[unfit.address] = unfit
        if self._refused is None:
            self._refused = time.monotonic()

    def _judge(self) -> None:
        """End the run where it is not the worker that is at fault."""
        while self._doubt:
            unfit = self._doubt.pop()
            if unfit.reason is Reason.MODEL_CHANGED:
                self._terms.check_models()
            if self._terms.same_machine:
                raise ScanError(unfit.reason, unfit.fault)

    def _check_patience(self, now: float) -> None:
        terms = self._terms
        if self._refused is not None and now - self._refused > terms.unfit_patience:
            fault = list(self._unfit.values())[-1].fault
            detail = f"for {terms.unfit_patience:.0f} s no worker could do the work: {fault}"
            raise ScanError(Reason.CLUSTER, detail)
        if now - self._seen > terms.patience:
            detail = f"no worker that can do the work was there for {terms.patience:.0f} s"
            raise ScanError(Reason.CLUSTER, detail)

    def _take_back(self) -> None:
        """Take cases from Dask whose workers are all gone: it would wait for them for ever."""
        for ours, (theirs, where) in list(self._given.items()):
            if where & self._workers or theirs.status != "pending":
                continue
            self._given.pop(ours, None)
            theirs.cancel()
            lost = UnfitError if where <= self._unfit.keys() else LostError
            with suppress(InvalidStateError):  # its end came just now
                ours.set_exception(lost("its workers are gone"))

    def _present(self) -> frozenset[str]:
        """Return the workers that are there and can do the work."""
        self._check_scheduler()
        try:
            return frozenset(self._fit & set(self._client.nthreads()))
        except (OSError, TimeoutError, ValueError, RuntimeError) as exc:
            raise ScanError(Reason.CLUSTER, GONE) from exc

    def _check_scheduler(self) -> None:
        if self._client.status != "running":
            raise ScanError(Reason.CLUSTER, GONE)

    def _hand_on(self, theirs: DaskFuture, case: Case, ours: Future[Outcome]) -> None:
        self._given.pop(ours, None)
        try:
            if theirs.status != "finished":
                ours.set_exception(LostError(theirs.status))
                return
            told = pickle.loads(theirs.result())  # noqa: S301  # our own worker's
            if isinstance(told, Unfit):
                self._keep_out(told)
                ours.set_exception(UnfitError(told.fault))
                return
            worker, outcome = told
            if not self._asks_another(case, worker, outcome, ours):
                ours.set_result(self._settle(case, worker, outcome))
        except InvalidStateError:  # taken back just now
            pass
        except Exception as exc:  # noqa: BLE001  # the cluster is gone in one of many ways
            if not ours.done():
                ours.set_exception(LostError(type(exc).__name__))
        finally:
            theirs.release()

    def _asks_another(
        self, case: Case, worker: str, outcome: Outcome, ours: Future[Outcome]
    ) -> bool:
        """Give a case once to another worker where the first one may be at fault."""
        doubtful = OF_DEVICE if self._terms.same_machine else OF_PLACE
        if outcome.record is None or outcome.record.reason not in doubtful:
            return False
        others = (self._workers & self._fit) - {worker}
        if case.id in self._first or not others or self._stopped.is_set() or ours.done():
            return False
        self._first[case.id] = (worker, outcome)
        self._give(case, ours)
        return True

    def _settle(self, case: Case, worker: str, outcome: Outcome) -> Outcome:
        """Return what counts: the second worker's word, with the tries of both."""
        if outcome.record is None or case.id not in self._first:
            return outcome
        failed_on, first = self._first.pop(case.id)
        if outcome.record.reason is None and worker != failed_on:
            self._outdone[failed_on] += 1
            known = not self._terms.same_machine and failed_on in self._fit
            if self._outdone[failed_on] >= MOST_FAILED and known:
                self._dismiss(failed_on, first)
        return replace(outcome, tries=first.tries + outcome.tries)

    def _dismiss(self, worker: str, last: Outcome) -> None:
        """Send a worker away that fails what others do; beside this thread, since it may hang."""
        reason = last.record.reason if last.record and last.record.reason else Reason.CLUSTER
        fault = f"a worker failed {MOST_FAILED} cases that others did ({reason.code})"
        self._keep_out(Unfit(worker, Reason.CLUSTER, fault))

        def tell() -> None:
            run = self._setup.run
            with suppress(Exception):  # it is gone, or hangs: it is given nothing more anyway
                said = (run, Reason.CLUSTER, fault)
                self._client.run(dismiss, *said, workers=[worker], on_error="ignore")

        threading.Thread(target=tell, daemon=True).start()


def _key(case_id: str) -> str:
    return f"case-{case_id}-{time.time_ns():x}"
