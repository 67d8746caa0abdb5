"""`WorkerProcess`: starts an engine child, sends it cases, and observes how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from socket import SHUT_WR, socketpair
from typing import Any

from scanloom.core import Case, Reason, ScanError
from scanloom.core.process import limit_met
from scanloom.engine.worker.messages import (
    QUEUED,
    CaseReply,
    CaseRequest,
    FunctionCall,
    Ready,
    Step,
    WorkerSetup,
)
from scanloom.io.output.private import append_private
from scanloom.io.system.messages import Message, receive, send
from scanloom.own_python import own_environment, own_python

OnStep = Callable[[str], None]
_START_TIMEOUT_S = 600.0
"""Time limit for imports and the loading of models."""
_POLL_INTERVAL_S = 0.25
"""Time between two checks of a case's deadline."""


class ChildDiedError(Exception):
    """The child ended before the case; `code` is its exit code, negative for a signal."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the engine child ended with {code}")
        self.code = code


class WorkerUnusableError(Exception):
    """No case can be processed, because of `fault`."""

    def __init__(self, fault: ScanError) -> None:
        super().__init__(fault.code)
        self.fault = fault


class CaseTimeoutError(Exception):
    """The case exceeded the time limit, and the child was killed."""


class _RunningCase:
    """A case in the child: its processing time and its end."""

    def __init__(self, on_step: OnStep | None) -> None:
        self.ended = threading.Event()
        self.done: CaseReply | None = None
        self._on_step = on_step
        self._since: float | None = None
        self._worked = 0.0

    @property
    def worked(self) -> float:
        """Processing time in seconds, without waiting."""
        since = self._since
        return self._worked + (time.monotonic() - since if since is not None else 0.0)

    def begin(self, step: str) -> None:
        self._worked = self.worked
        self._since = None if step == QUEUED else time.monotonic()
        if self._on_step is not None:
            self._on_step(step)

    def finish(self, done: CaseReply | None) -> None:
        self.done = done
        self.ended.set()


class WorkerProcess:
    """A running child process, used by several threads until it ends.

    Parameters
    ----------
    setup : WorkerSetup
        Settings of the child.
    log : Path or None
        File for its output, readable by its owner alone: native code may print anything. None
        discards the output.
    environment : mapping
        Environment variables in addition to those of this process.

    Attributes
    ----------
    late : bool
        Whether the child took too long to load its models.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        first = Message(replace(setup, make_predictors=FunctionCall.of(setup.make_predictors)))
        self._socket, theirs = socketpair()
        with theirs, _open_log(log) as output:
            self._process = subprocess.Popen(  # noqa: S603  # this very program
                own_python("-m", "scanloom.engine.worker.child_main", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**own_environment(), **(environment or {})},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal goes to the worker only
            )
        self._lock = threading.Lock()
        self._waiting: dict[int, _RunningCase] = {}
        self._number, self._ready, self._began = 0, False, time.monotonic()
        self._code: int | None = None
        self._fault: ScanError | None = None
        self.late = False
        with suppress(OSError):  # the child died, which the listener thread finds
            first.send(self._socket)
        threading.Thread(target=self._listen, name="engine child", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the child accepts cases."""
        return self._code is None and self._fault is None

    @property
    def ready(self) -> bool:
        """Whether its models are loaded; before that, no failure is caused by a case."""
        return self._ready

    @property
    def fault(self) -> ScanError | None:
        """Why its models could not be loaded; None if they were, or still may be."""
        if self._ready or self.alive:
            return None
        return self._fault or _never_ready(self._code or 0)

    def ask(self, case: Case, limit: float, on_step: OnStep | None = None) -> CaseReply:
        """Process a case in the child, and wait for its end.

        Parameters
        ----------
        case : Case
            The case.
        limit : float
            Processing time in seconds; waiting for models and the device does not count.
        on_step : callable or None
            Called with the name of each step that begins.

        Raises
        ------
        NoEngineError
            If the child could not load the models.
        ChildDiedError
            If the child died meanwhile, for whatever cause.
        CaseLateError
            If the case exceeded the limit. The child was killed, and its other cases get
            ChildDiedError.
        """
        waiting = _RunningCase(on_step)
        with self._lock:
            self._check_alive()
            self._number += 1
            number = self._number
            self._waiting[number] = waiting
            with suppress(OSError):  # the child is dying, which the listener thread finds
                send(self._socket, CaseRequest(number, case))
        while not waiting.ended.wait(_POLL_INTERVAL_S):
            if waiting.worked > limit:
                self.kill()
                raise CaseTimeoutError
            if not self._ready and time.monotonic() - self._began > _START_TIMEOUT_S:
                detail = f"the models were not loaded within {_START_TIMEOUT_S:.0f} s"
                self._fault, self.late = ScanError(Reason.ENVIRONMENT, detail), True
                self.kill()
        if waiting.done is None:
            self._check_alive()
            raise ChildDiedError(0)
        return waiting.done

    def _check_alive(self) -> None:
        if self._fault is not None:
            raise WorkerUnusableError(self._fault)
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
        except (EOFError, OSError):
            pass
        except ValueError:  # something else wrote into the socket
            self.kill()
        code = self._process.wait()
        with self._lock:
            self._socket.close()
            self._code = code
        self._wake_all()

    def _wake_all(self) -> None:
        """Wake all threads that wait for a case."""
        with self._lock:
            unfinished, self._waiting = self._waiting, {}
        for waiting in unfinished.values():
            waiting.finish(None)

    def _take(self, message: Ready | Step | CaseReply) -> None:
        if isinstance(message, Ready):
            self._ready, self._fault = message.fault is None, message.fault
            if message.fault is not None:
                self._wake_all()
            return
        if isinstance(message, Step):
            waiting = self._waiting.get(message.number)
            if waiting is not None:
                waiting.begin(message.name)
            return
        with self._lock:
            waiting = self._waiting.pop(message.number, None)
        if waiting is not None:
            waiting.finish(message)


def _never_ready(code: int) -> ScanError:
    """Return the error for a child that ended before its models were loaded."""
    limit = limit_met(code)
    if limit is not None:
        return limit
    if code == -signal.SIGKILL:
        detail = "the worker process was killed while loading models, probably for lack of memory"
        return ScanError(Reason.OUT_OF_MEMORY, detail)
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return ScanError(Reason.ENVIRONMENT, f"the worker process ended while starting ({how})")


def _open_log(log: Path | None) -> Any:
    if log is None:
        return Path(os.devnull).open("ab")
    try:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return append_private(log)
    except OSError:  # no case fails for lack of a log
        return Path(os.devnull).open("ab")
