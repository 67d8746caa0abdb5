"""`WorkerSupervisor`: processes cases in a child process, and finds which case made it fail.

`ChildProcess` starts the child process, sends it cases, and observes how it ends.
"""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import struct
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from socket import SHUT_WR, SO_SNDTIMEO, SOL_SOCKET, socketpair
from typing import Any, Self

from scanloom.core import Case, CaseRecord, Reason, ScanError, blame
from scanloom.core.process import is_limited, limit_met
from scanloom.engine.retries import MAX_CHILD_STARTS, PROCESS_LOST, policy_of
from scanloom.engine.worker import messages
from scanloom.engine.worker.memory_admission import AdmissionGate
from scanloom.io.output.private import append_private
from scanloom.io.system.messages import Message, receive, send
from scanloom.own_python import own_environment, own_python

_START_TIMEOUT_S = 600.0
"""Time limit for imports and the loading of models, and then until a case begins."""
_POLL_INTERVAL_S = 0.25
"""Time between two checks of a case's deadline."""

_TRIM_THRESHOLD, _THRESHOLD_OF_DASK = "MALLOC_TRIM_THRESHOLD_", "65536"


class ChildDiedError(Exception):
    """The child ended before the case; `code` is its exit code, negative for a signal."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the child process ended with {code}")
        self.code = code


class CaseTimeoutError(Exception):
    """The case exceeded the time limit, and the child was killed."""


class _RunningCase:
    """A case in the child: its processing time and its end."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.done: messages.CaseReply | None = None
        self.has_begun = False
        self._since: float | None = None
        self._worked = 0.0

    @property
    def worked(self) -> float:
        """Processing time in seconds, without waiting."""
        since = self._since
        return self._worked + (time.monotonic() - since if since is not None else 0.0)

    def begin(self, step: str) -> None:
        # In this order: another thread may look at `worked` between two lines, to compare its limit
        worked, self._since = self.worked, None
        self._worked, self.has_begun = worked, True
        self._since = None if step == messages.QUEUED else time.monotonic()

    def finish(self, done: messages.CaseReply | None) -> None:
        self.done = done
        self.ended.set()


class ChildProcess:
    """A running child process, used by several threads until it ends.

    Parameters
    ----------
    setup : ChildSetup
        Settings of the child.
    log : Path or None
        File for its output, readable by its owner alone: native code may print anything. None
        discards the output.

    Attributes
    ----------
    ready : bool
        Whether its models are loaded; before that, no failure is caused by a case.
    late : bool
        Whether it took too long to load them.
    """

    def __init__(self, setup: messages.ChildSetup, log: Path | None = None) -> None:
        first = Message(
            replace(setup, make_predictors=messages.FunctionCall.of(setup.make_predictors))
        )
        self._socket, theirs = socketpair()
        with theirs, _open_log(log) as output:
            self._process = subprocess.Popen(  # noqa: S603  # this very program
                own_python("-m", "scanloom.engine.worker.child_main", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=child_environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal goes to the worker only
            )
        # A stopped child reads nothing: without a limit, a message beyond the buffer waits for ever
        seconds, microseconds = divmod(int(1e6 * _START_TIMEOUT_S), 1_000_000)
        limit = struct.pack("ll", seconds, microseconds)
        self._socket.setsockopt(SOL_SOCKET, SO_SNDTIMEO, limit)
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._waiting: dict[int, _RunningCase] = {}
        self._number = 0
        self._code: int | None = None
        self._fault: ScanError | None = None
        self.ready = self.late = False
        with suppress(OSError):  # the child died, which the listener thread finds
            first.send(self._socket)
        threading.Thread(target=self._listen, name="child process", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the child accepts cases."""
        return self._code is None and self._fault is None

    @property
    def fault(self) -> ScanError | None:
        """Why its models could not be loaded; None if they were, or still may be."""
        if self.ready or self.alive:
            return None
        return self._fault or _never_ready(self._code or 0)

    def ask(self, case: Case, limit: float) -> messages.CaseReply:
        """Process a case in the child, and wait for its end.

        `limit` is its processing time in s; waiting for models and the device does not count. A
        child that does not begin the case is killed.

        Raises
        ------
        ScanError
            If the child could not load the models.
        ChildDiedError
            If the child died meanwhile, for whatever cause.
        CaseTimeoutError
            If the case exceeded the limit. The child was killed, and its other cases get
            ChildDiedError.
        """
        waiting = _RunningCase()
        with self._lock:
            self._check_alive()
            self._number += 1
            number = self._number
            self._waiting[number] = waiting
        try:
            with self._sending:
                send(self._socket, messages.CaseRequest(number, case))
        except BlockingIOError:  # it reads nothing
            self._give_up()
        except OSError:
            pass  # the child is dying, which the listener thread finds
        ready, waited = self.ready, 0.0
        while not waiting.ended.wait(_POLL_INTERVAL_S):
            if waiting.worked > limit:
                self.kill()
                raise CaseTimeoutError
            # Not by the clock, which goes on while a job with both processes is suspended
            waited = waited + _POLL_INTERVAL_S if self.ready == ready else 0.0
            ready = self.ready
            if not waiting.has_begun and waited > _START_TIMEOUT_S:
                self._give_up()
        if waiting.done is None:
            self._check_alive()
            raise ChildDiedError(0)
        return waiting.done

    def _give_up(self) -> None:
        """Kill a child that hangs, such as a stopped one; no case is to blame."""
        if not self.ready:
            detail = f"the models were not loaded within {_START_TIMEOUT_S:.0f} s"
            self._fault, self.late = ScanError(Reason.ENVIRONMENT, detail), True
        self.kill()

    def _check_alive(self) -> None:
        if self._fault is not None:
            raise self._fault
        if self._code is not None:
            raise ChildDiedError(self._code)

    def kill(self) -> None:
        """Kill the child."""
        with suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self, patience: float = 5.0) -> None:
        """End the child when its cases are finished, or after `patience` seconds."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(SHUT_WR)  # the child reads the end of the stream
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill()

    def _listen(self) -> None:
        try:
            while True:
                self._take(receive(self._socket))
        except (EOFError, ConnectionError):
            pass
        except Exception:  # noqa: BLE001  # something else wrote into the socket, or no memory
            self.kill()
        code = self._process.wait()
        with self._sending, self._lock:  # nothing is sent to a number that another file may have
            self._socket.close()
            self._code = code
        self._wake_all()

    def _wake_all(self) -> None:
        """Wake all threads that wait for a case."""
        with self._lock:
            unfinished, self._waiting = self._waiting, {}
        for waiting in unfinished.values():
            waiting.finish(None)

    def _take(self, message: messages.Ready | messages.Step | messages.CaseReply) -> None:
        if isinstance(message, messages.Ready):
            self.ready, self._fault = message.fault is None, message.fault
            if message.fault is not None:
                self._wake_all()
            return
        if isinstance(message, messages.Step):
            waiting = self._waiting.get(message.number)
            if waiting is not None:
                waiting.begin(message.name)
            return
        with self._lock:
            waiting = self._waiting.pop(message.number, None)
        if waiting is not None:
            waiting.finish(message)


def child_environment() -> dict[str, str]:
    """Return the environment of a child, without the threshold that Dask's nannies set for malloc.

    With any threshold, glibc maps and clears new memory for each array above 128 KiB: a third of
    the processor time of small scans. One that the user chose is kept.
    """
    environment = own_environment()
    if environment.get(_TRIM_THRESHOLD) == _THRESHOLD_OF_DASK:
        del environment[_TRIM_THRESHOLD]
    return environment


def _never_ready(code: int) -> ScanError:
    """Return the error for a child that ended before its models were loaded."""
    if (limit := limit_met(code)) is not None:
        return limit
    if code == -signal.SIGKILL:
        detail = "the worker process was killed while loading models, probably for lack of memory"
        return ScanError(Reason.OUT_OF_MEMORY, detail)
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return ScanError(Reason.ENVIRONMENT, f"the worker process ended while starting ({how})")


def _open_log(log: Path | None) -> Any:
    if log is not None:
        with suppress(OSError):  # no case fails for lack of a log
            log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            return append_private(log)
    return Path(os.devnull).open("ab")


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
    device : tuple of (float, float)
        When it held the device, in seconds of CLOCK_MONOTONIC: once for each of its networks.
    supervisor : str
        Random name of its supervisor.
    """

    record: CaseRecord | None
    tries: tuple[Attempt, ...]
    device: tuple[messages.Span, ...] = ()
    supervisor: str = ""

    def after_a_death(self) -> Self:
        """Return the outcome of a case of which an earlier process died.

        A result that was found is taken to be of that process, which may have published it.
        """
        if self.record is None:
            return self
        return replace(self, record=replace(self.record, reused=False))


KILLED = f"died -{signal.SIGKILL.value}"
"""End of a try whose process was killed from outside, which need not be the case's fault."""


class WorkerSupervisor:
    """Keeps models loaded in a child process, for cases of several threads.

    A case that raises gives a record. When the child dies, or is killed because a case exceeded
    the time limit, every case in it is a suspect. Each is retried alone in a new child, and only
    a case that fails there is reported (CASE_TIMEOUT, CRASHED). A concurrent case is never blamed.

    `time_limit` is the longest time for a case in s, without waiting. The output of the child goes
    to the file `log`.
    """

    def __init__(
        self, setup: messages.ChildSetup, time_limit: float, log: Path | None = None
    ) -> None:
        self._name = secrets.token_hex(4)
        self._setup, self._limit, self._log = setup, time_limit, log
        self._gate = AdmissionGate(setup.in_flight)
        self._starting = threading.Lock()
        self._child: ChildProcess | None = None
        self._failed_starts = 0
        self._fault: ScanError | None = None
        self._stopped = threading.Event()

    def warm_up(self) -> None:
        """Start the child, so that models are loaded before the first case."""
        with suppress(ScanError):  # the first case reports it
            self._running()

    def run(self, case: Case) -> CaseOutcome:
        """Process a case until its outcome is certain, with retries by the policy of its reason.

        Several threads may call this.

        Raises
        ------
        ScanError
            If no case can be processed: models cannot be loaded, or the machine lacks a resource
            that all cases need.
        """
        tries: list[Attempt] = []
        for retries in itertools.count():
            record, device = self._try_until_sure(case, tries)
            pauses = policy_of(record.reason).pauses_s[retries:] if record else ()
            if not pauses:
                break
            if self._stopped.wait(pauses[0]):  # a later run retries it
                record = None
                break
        outcome = CaseOutcome(record, tuple(tries), device, self._name)
        return outcome.after_a_death() if len(tries) > 1 else outcome

    def _try_until_sure(
        self, case: Case, tries: list[Attempt]
    ) -> tuple[CaseRecord | None, tuple[messages.Span, ...]]:
        """Try a case among others, then alone if others may have caused its failure."""
        with self._gate.shared():
            record, device = self._try(case, tries, alone=False)
        if record is None and self._stopped.is_set():
            return None, device
        policy = policy_of(record.reason) if record else PROCESS_LOST
        if policy.alone_in_new_process and tries[-1].end != REFUSED:
            with self._gate.exclusive():
                self._replace_child()
                record, device = self._try(case, tries, alone=True)
                if tries[-1].end == KILLED and not self._stopped.is_set():
                    record, device = self._try(case, tries, alone=True)
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
        self, case: Case, tries: list[Attempt], *, alone: bool
    ) -> tuple[CaseRecord | None, tuple[messages.Span, ...]]:
        """Give the case to the child; return None as record if the child died first."""
        began = time.monotonic()
        done: messages.CaseReply | None = None
        try:
            done = self._ask(case)
            reason = done.record.reason
            end = "done" if reason is None else REFUSED if done.refused else reason.code
        except CaseTimeoutError:
            end = "late"
        except ChildDiedError as error:
            end = f"died {error.code}"
        tries.append(Attempt(end, alone, time.monotonic() - began))
        return (done.record, done.device) if done else (None, ())

    def _ask(self, case: Case) -> messages.CaseReply:
        """Give the case to a child; start another one if it died before its models were loaded."""
        while True:
            child = self._running()
            try:
                return child.ask(case, self._limit)
            except (ChildDiedError, ScanError):
                if child.ready or self._stopped.is_set():
                    raise

    def _running(self) -> ChildProcess:
        """Return the running child, or start one; raise ScanError if none can process a case."""
        with self._starting:
            if self._stopped.is_set():
                raise ChildDiedError(0)
            if self._child is not None and self._child.alive:
                return self._child
            if self._child is not None:
                self._check_end(self._child)
                self._child = None
            if self._fault is not None:
                raise self._fault
            try:
                self._child = ChildProcess(self._setup, self._log)
            except (OSError, RuntimeError) as error:
                raise blame(error) from error
            return self._child

    def _check_end(self, ended: ChildProcess) -> None:
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
    code = last.end.removeprefix("died ")
    how = f"signal {code[1:]}" if code[:1] == "-" else f"exit code {code}"
    reason, detail = Reason.CRASHED, f"the worker process ended with {how}"
    # Known causes first: a limit of the machine also ends a process by a signal, and only an end
    # that nothing explains is a crash of the code
    if last.end == "late":
        reason, detail = Reason.CASE_TIMEOUT, f"stopped after {last.seconds:.0f} s"
    elif (limit := limit_met(int(code))) is not None:
        reason, detail = limit.reason, limit.detail
    elif last.end == KILLED:
        detail = "the worker process of the case was killed twice, probably for lack of memory"
        reason = Reason.OUT_OF_MEMORY
    elif is_limited("AS"):  # native code may crash if it gets no memory
        reason, detail = Reason.ENVIRONMENT, f"{detail}, with limited address space (ulimit -v)"
    return CaseRecord(case.id, reason, detail, (), None)
