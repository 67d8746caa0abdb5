"""`Engine`: works on cases in a child process, and says whose fault it is when one ends badly."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scanloom.core import Case, CaseRecord, Reason, ScanError, blame
from scanloom.core.limits import is_limited, limit_met
from scanloom.engine.child import Done, Setup
from scanloom.engine.gate import Gate
from scanloom.engine.process import (
    CaseLateError,
    ChildDiedError,
    EngineProcess,
    NoEngineError,
)

OnStep = Callable[[str], None]

PAUSES = (1.0, 4.0, 15.0)
"""Seconds before another try where the disk or the network may have been at fault."""
REFUSED = "refused"
"""How a try ends for a case that would not fit into memory alone: no other try is made."""
_TRANSIENT = (Reason.UNREADABLE, Reason.OUTPUT_UNWRITABLE)
MOST_STARTS = 3
"""Children in a row that never became ready, after which no other is started."""
_CROWDED = (Reason.OUT_OF_MEMORY, Reason.DEVICE_UNAVAILABLE, Reason.ENVIRONMENT)
"""What the neighbours may be to blame for: such a case is tried once more, alone and afresh."""


@dataclass(frozen=True)
class Try:
    """One start of a case: how it ended, and whether anything else was in the child meanwhile."""

    end: str
    alone: bool
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Parameters
    ----------
    record : CaseRecord or None
        Its result or the reason why there is none; None where it was cut off by `Engine.stop`,
        which says nothing of the case.
    tries : tuple of Try
        Each start, the last one last.
    device : (float, float) or None
        When it held the device, seconds of CLOCK_MONOTONIC; None where it did not get there.
    engine : str
        Which engine worked on it: a word made up when the engine was made.
    fault : ScanError or None
        Why this engine can work on no case at all: models that can't be loaded, a machine that
        lacks what all cases need. Then there is no record: it says nothing of the case.
    """

    record: CaseRecord | None
    tries: tuple[Try, ...]
    device: tuple[float, float] | None = None
    engine: str = ""
    fault: ScanError | None = None


KILLED = f"died -{signal.SIGKILL.value}"
"""How a try ends whose process was killed from outside: that alone is not the case's fault."""


class Engine:
    """Models kept warm in a child process, for cases of several threads.

    A case that raises is a record. When the child dies or is killed for a case that takes too
    long, every case that was in it is a suspect: each is tried again alone in a fresh child, and
    only one that fails there is convicted (CASE_TIMEOUT, CRASHED). So a neighbour is never blamed.

    Parameters
    ----------
    setup : Setup
        For the child.
    time_limit : float
        Seconds that a case may work.
    log : Path or None
        Where the child's words go.
    environment : mapping
        Variables of the child.
    """

    def __init__(
        self,
        setup: Setup,
        time_limit: float,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = secrets.token_hex(4)
        self._setup, self._limit = setup, time_limit
        self._log, self._environment = log, environment
        self._gate = Gate(setup.in_flight)
        self._starting = threading.Lock()
        self._child: EngineProcess | None = None
        self._vain = 0
        self._fault: ScanError | None = None
        self._stopped = threading.Event()

    def warm_up(self) -> None:
        """Start the child, so that models are loaded before the first case comes."""
        with suppress(NoEngineError):  # the first case tells
            self._running()

    def run(self, case: Case, on_step: OnStep | None = None) -> Outcome:
        """Work on a case until its end is sure; called by several threads at once.

        Parameters
        ----------
        case : Case
            Which.
        on_step : callable or None
            Is told each step that it begins.

        Returns
        -------
        Outcome
            Never an exception.
        """
        tries: list[Try] = []
        try:
            return self._work_on(case, tries, on_step)
        except NoEngineError as unfit:
            return Outcome(None, tuple(tries), None, self._name, unfit.fault)

    def _work_on(self, case: Case, tries: list[Try], on_step: OnStep | None) -> Outcome:
        device = None
        for pause in (*PAUSES, None):
            with self._gate.among_others():
                record, device = self._try(case, tries, on_step, alone=False)
            refused = tries[-1].end == REFUSED
            crowded = record is not None and record.reason in _CROWDED and not refused
            if (record is None and not self._stopped.is_set()) or crowded:
                with self._gate.alone():
                    self._replace_child()
                    record, device = self._try(case, tries, on_step, alone=True)
                    if tries[-1].end == KILLED and not self._stopped.is_set():
                        record, device = self._try(case, tries, on_step, alone=True)
            if record is None and not self._stopped.is_set():
                record = _verdict(case, tries[-1])
            if record is None or record.reason not in _TRANSIENT or pause is None:
                break
            if self._stopped.wait(pause):
                return Outcome(None, tuple(tries), device, self._name)  # another run tries again
        return Outcome(record, tuple(tries), device, self._name)

    def stop(self, patience: float = 0.0) -> None:
        """End the child; cases in flight that are not done after `patience` seconds are cut."""
        with self._starting:
            self._stopped.set()
            if self._child is not None:
                self._child.close(patience)

    def _try(
        self, case: Case, tries: list[Try], on_step: OnStep | None, *, alone: bool
    ) -> tuple[CaseRecord | None, tuple[float, float] | None]:
        """Give the case to the child; no record where the child did not live to give one."""
        began = time.monotonic()
        done: Done | None = None
        try:
            done = self._ask(case, on_step)
            reason = done.record.reason
            end = "done" if reason is None else REFUSED if done.refused else reason.code
        except CaseLateError:
            end = "late"
        except ChildDiedError as error:
            end = f"died {error.code}"
        tries.append(Try(end, alone, time.monotonic() - began))
        return (done.record, done.device) if done else (None, None)

    def _ask(self, case: Case, on_step: OnStep | None) -> Done:
        """Give the case to a child that is ready: one that never is has not begun it."""
        while True:
            child = self._running()
            try:
                return child.ask(case, self._limit, on_step)
            except (ChildDiedError, NoEngineError):
                if child.ready or self._stopped.is_set():
                    raise

    def _running(self) -> EngineProcess:
        """Return the child; a new one where there is none that lives.

        Raises
        ------
        NoEngineError
            If it is known that no child can work on anything.
        """
        with self._starting:
            if self._stopped.is_set():
                raise ChildDiedError(0)
            if self._child is not None and self._child.alive:
                return self._child
            if self._child is not None:
                self._judge(self._child)
                self._child = None
            if self._fault is not None:
                raise NoEngineError(self._fault)
            try:
                self._child = EngineProcess(self._setup, self._log, self._environment)
            except (OSError, RuntimeError) as error:
                raise NoEngineError(blame(error)) from error
            return self._child

    def _judge(self, ended: EngineProcess) -> None:
        """Learn from a child that ended whether another would do any better."""
        ended.close(1.0)
        if ended.fault is None:
            self._vain = 0
            return
        self._vain += 1
        final = not ended.fault.reason.retry or ended.fault.reason is Reason.MODEL_CHANGED
        if self._vain == MOST_STARTS or ended.late or final:
            self._fault = ended.fault

    def _replace_child(self) -> None:
        with self._starting:
            if self._child is not None:
                self._child.close()
                self._child = None


def _verdict(case: Case, last: Try) -> CaseRecord:
    """Return the record of a case that failed alone."""
    if last.end == "late":
        return CaseRecord(
            case.id, Reason.CASE_TIMEOUT, f"stopped after {last.seconds:.0f} s", (), None
        )
    code = last.end.removeprefix("died ")
    limit = limit_met(int(code))
    if limit is not None:
        return CaseRecord(case.id, limit.reason, limit.detail, (), None)
    if last.end == KILLED:
        detail = "its process was killed twice while it was alone: by the system, for memory?"
        return CaseRecord(case.id, Reason.OUT_OF_MEMORY, detail, (), None)
    how = f"signal {code[1:]}" if code[:1] == "-" else f"exit code {code}"
    if is_limited("AS"):  # native code has no other way to say that it got no memory
        detail = f"its process ended with {how}, under a limit of address space (ulimit -v)"
        return CaseRecord(case.id, Reason.ENVIRONMENT, detail, (), None)
    return CaseRecord(case.id, Reason.CRASHED, f"its process ended with {how}", (), None)
