"""`WorkerSupervisor`: processes cases in a child process, and finds which case made it fail."""

from __future__ import annotations

import itertools
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scanloom.core import Case, CaseRecord, Reason, ScanError, blame
from scanloom.core.process import is_limited, limit_met
from scanloom.engine.retries import MAX_CHILD_STARTS, PROCESS_LOST, policy_of
from scanloom.engine.worker.child_process import (
    CaseTimeoutError,
    ChildDiedError,
    WorkerProcess,
    WorkerUnusableError,
)
from scanloom.engine.worker.gate import AdmissionGate
from scanloom.engine.worker.messages import CaseReply, WorkerSetup

OnStep = Callable[[str], None]
Span = tuple[float, float]

REFUSED = "refused"
"""End of a try of a case that exceeds the memory even when run alone; it is not retried."""


@dataclass(frozen=True)
class Attempt:
    """One start of a case: how it ended, and whether it was alone in the child."""

    end: str
    alone: bool
    seconds: float


@dataclass(frozen=True)
class CaseOutcome:
    """Outcome of a case.

    Parameters
    ----------
    record : CaseRecord or None
        Its result, or the reason for its failure; None if `WorkerSupervisor.stop` aborted it.
    tries : tuple of Attempt
        All starts in order.
    device : (float, float) or None
        When it held the device, in seconds of CLOCK_MONOTONIC; None if it never did.
    engine : str
        Random name of the engine.
    fault : ScanError or None
        Why this engine cannot process any case: models that cannot be loaded, or a machine that
        lacks a resource all cases need. Then `record` is None.
    """

    record: CaseRecord | None
    tries: tuple[Attempt, ...]
    device: tuple[float, float] | None = None
    engine: str = ""
    fault: ScanError | None = None


KILLED = f"died -{signal.SIGKILL.value}"
"""End of a try whose process was killed from outside, which need not be the case's fault."""


class WorkerSupervisor:
    """Keeps models loaded in a child process, for cases of several threads.

    A case that raises gives a record. When the child dies, or is killed because a case exceeded
    the time limit, every case in it is a suspect. Each is retried alone in a new child, and only
    a case that fails there is reported (CASE_TIMEOUT, CRASHED). A concurrent case is never blamed.

    Parameters
    ----------
    setup : WorkerSetup
        Settings of the child.
    time_limit : float
        Longest time for a case in seconds, without waiting.
    log : Path or None
        File for the output of the child.
    environment : mapping
        Additional environment variables of the child.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        time_limit: float,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = secrets.token_hex(4)
        self._setup, self._limit = setup, time_limit
        self._log, self._environment = log, environment
        self._gate = AdmissionGate(setup.in_flight)
        self._starting = threading.Lock()
        self._child: WorkerProcess | None = None
        self._failed_starts = 0
        self._fault: ScanError | None = None
        self._stopped = threading.Event()

    def warm_up(self) -> None:
        """Start the child, so that models are loaded before the first case."""
        with suppress(WorkerUnusableError):  # the first case reports it
            self._running()

    def run(self, case: Case, on_step: OnStep | None = None) -> CaseOutcome:
        """Process a case until its outcome is certain; several threads may call this.

        Parameters
        ----------
        case : Case
            The case.
        on_step : callable or None
            Called with the name of each step that begins.

        Returns
        -------
        Outcome
            Never raises.
        """
        tries: list[Attempt] = []
        try:
            return self._work_on(case, tries, on_step)
        except WorkerUnusableError as error:
            return CaseOutcome(None, tuple(tries), None, self._name, error.fault)

    def _work_on(self, case: Case, tries: list[Attempt], on_step: OnStep | None) -> CaseOutcome:
        """Process a case, and retry it in this worker by the policy of its reason."""
        for retries in itertools.count():
            record, device = self._try_until_sure(case, tries, on_step)
            pauses = policy_of(record.reason).pauses_s[retries:] if record else ()
            if not pauses:
                break
            if self._stopped.wait(pauses[0]):  # a later run retries it
                return CaseOutcome(None, tuple(tries), device, self._name)
        return CaseOutcome(record, tuple(tries), device, self._name)

    def _try_until_sure(
        self, case: Case, tries: list[Attempt], on_step: OnStep | None
    ) -> tuple[CaseRecord | None, Span | None]:
        """Try a case among others, then alone if others may have caused its failure."""
        with self._gate.shared():
            record, device = self._try(case, tries, on_step, alone=False)
        if record is None and self._stopped.is_set():
            return None, device
        policy = policy_of(record.reason) if record else PROCESS_LOST
        if policy.alone_in_new_process and tries[-1].end != REFUSED:
            with self._gate.exclusive():
                self._replace_child()
                record, device = self._try(case, tries, on_step, alone=True)
                if tries[-1].end == KILLED and not self._stopped.is_set():
                    record, device = self._try(case, tries, on_step, alone=True)
        if record is None and not self._stopped.is_set():
            record = _record_of_death(case, tries[-1])
        return record, device

    def stop(self, patience: float = 0.0) -> None:
        """End the child; cases still running after `patience` seconds are aborted."""
        with self._starting:
            self._stopped.set()
            if self._child is not None:
                self._child.close(patience)

    def _try(
        self, case: Case, tries: list[Attempt], on_step: OnStep | None, *, alone: bool
    ) -> tuple[CaseRecord | None, Span | None]:
        """Give the case to the child; return None as record if the child died first."""
        began = time.monotonic()
        done: CaseReply | None = None
        try:
            done = self._ask(case, on_step)
            reason = done.record.reason
            end = "done" if reason is None else REFUSED if done.refused else reason.code
        except CaseTimeoutError:
            end = "late"
        except ChildDiedError as error:
            end = f"died {error.code}"
        tries.append(Attempt(end, alone, time.monotonic() - began))
        return (done.record, done.device) if done else (None, None)

    def _ask(self, case: Case, on_step: OnStep | None) -> CaseReply:
        """Give the case to a child; start another one if it died before its models were loaded."""
        while True:
            child = self._running()
            try:
                return child.ask(case, self._limit, on_step)
            except (ChildDiedError, WorkerUnusableError):
                if child.ready or self._stopped.is_set():
                    raise

    def _running(self) -> WorkerProcess:
        """Return the running child, or start one.

        Raises
        ------
        NoEngineError
            If no child can process any case.
        """
        with self._starting:
            if self._stopped.is_set():
                raise ChildDiedError(0)
            if self._child is not None and self._child.alive:
                return self._child
            if self._child is not None:
                self._check_end(self._child)
                self._child = None
            if self._fault is not None:
                raise WorkerUnusableError(self._fault)
            try:
                self._child = WorkerProcess(self._setup, self._log, self._environment)
            except (OSError, RuntimeError) as error:
                raise WorkerUnusableError(blame(error)) from error
            return self._child

    def _check_end(self, ended: WorkerProcess) -> None:
        """Find from a child that ended whether starting another one makes sense."""
        ended.close(1.0)
        if ended.fault is None:
            self._failed_starts = 0
            return
        self._failed_starts += 1
        final = ended.late or not policy_of(ended.fault.reason).new_child
        if final or self._failed_starts == MAX_CHILD_STARTS:
            self._fault = ended.fault

    def _replace_child(self) -> None:
        with self._starting:
            if self._child is not None:
                self._child.close()
                self._child = None


def _record_of_death(case: Case, last: Attempt) -> CaseRecord:
    """Return the record of a case whose process failed while it was alone."""
    if last.end == "late":
        return CaseRecord(
            case.id, Reason.CASE_TIMEOUT, f"stopped after {last.seconds:.0f} s", (), None
        )
    code = last.end.removeprefix("died ")
    limit = limit_met(int(code))
    if limit is not None:
        return CaseRecord(case.id, limit.reason, limit.detail, (), None)
    if last.end == KILLED:
        detail = "the worker process of the case was killed twice, probably for lack of memory"
        return CaseRecord(case.id, Reason.OUT_OF_MEMORY, detail, (), None)
    how = f"signal {code[1:]}" if code[:1] == "-" else f"exit code {code}"
    if is_limited("AS"):  # native code may crash if it gets no memory
        detail = f"the worker process ended with {how}, with limited address space (ulimit -v)"
        return CaseRecord(case.id, Reason.ENVIRONMENT, detail, (), None)
    return CaseRecord(case.id, Reason.CRASHED, f"the worker process ended with {how}", (), None)
