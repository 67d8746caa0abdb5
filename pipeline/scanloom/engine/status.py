"""What a run is doing now: a small file, written whole each second, that anybody may read."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from scanloom.core import OUTCOMES, CaseRecord, Reason, ScanError
from scanloom.core.reasons import current_code
from scanloom.io.json_file import read_json
from scanloom.io.living import DIED, process_start, state_seen, this_host

STATUS = "status.json"
RECENT_SECONDS = 300.0
"""Over how long the rate is taken that time left is reckoned by."""


@dataclass(frozen=True)
class Status:
    """A run as it stands.

    Parameters
    ----------
    run : str
        Its id.
    state : str
        "indexing", "running", "collecting", "done", "stopped" or "failed"; "died" where it ended
        without a last word, as `seen` finds.
    cases : int
        All that were planned.
    before : int
        Those that were done by earlier runs.
    done, skipped, ambiguous, failed : int
        What this run has finished; series that failed by their headers count as failed, those of
        which one of several volumes has to be chosen as ambiguous.
    remade : int
        How many of `done` replaced a result because their scan had changed since.
    reasons : dict
        How many of each reason.
    in_flight : dict
        Case id to the seconds since it was handed over.
    elapsed_s, left_s : float or None
        Since the start, and until the end by the rate of the last minutes.
    per_hour : float or None
        Cases an hour, by that rate.
    devices : list of dict
        Busy share, memory, temperature and power of each GPU.
    moment : float
        When this was written (seconds since 1970).
    sent_away : dict
        Workers that could not do the work: how many, by why.
    reason : str
        The code of why the run failed as a whole; empty where it did not.
    host, process, start : str, int, str
        Who wrote this: to know whether it still runs.
    """

    run: str
    state: str
    cases: int = 0
    before: int = 0
    done: int = 0
    skipped: int = 0
    ambiguous: int = 0
    failed: int = 0
    remade: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    in_flight: dict[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0
    left_s: float | None = None
    per_hour: float | None = None
    devices: list[dict[str, Any]] = field(default_factory=list)
    moment: float = 0.0
    sent_away: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    host: str = ""
    process: int = 0
    start: str = ""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return what the run of a folder last said of itself.

        Raises
        ------
        OSError, ValueError
            If it said nothing, or something else.
        ScanError
            NEWER_VERSION if a newer scanloom wrote it.
        """
        document = read_json(folder / STATUS)
        known = {f.name: document[f.name] for f in fields(cls) if f.name in document}
        try:
            reasons = {current_code(code): n for code, n in known.get("reasons", {}).items()}
            reason = current_code(known.get("reason", ""))
            return cls(**{**known, "reasons": reasons, "reason": reason})
        except (TypeError, AttributeError) as exc:
            raise ValueError("status.json has another form") from exc

    @property
    def over(self) -> int:
        """How many cases have ended, those of earlier runs too."""
        return self.before + self.done + self.skipped + self.ambiguous + self.failed

    def seen(self) -> Self:
        """Return it as it is now, when the run may have died since."""
        if state_seen(asdict(self)) != DIED:
            return self
        return replace(self, state=DIED, left_s=None, per_hour=None, devices=[])


class Board:
    """Keeps the status of a run, and writes it each second.

    Parameters
    ----------
    run : str
        The run's id.
    folder : Path
        `OUT/runs/<run id>`, which is there.
    period : float
        Seconds between two writings.
    metrics : Path or None
        Where the same is written for Prometheus.
    """

    def __init__(
        self, run: str, folder: Path, period: float = 1.0, metrics: Path | None = None
    ) -> None:
        self._run, self._folder, self._period = run, folder, period
        self._metrics = metrics
        self._process = os.getpid()
        self._start = process_start(self._process)
        self._began = time.monotonic()
        self._state, self._cases, self._before, self._reason = "indexing", 0, 0, ""
        self._ends: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._sent_away: Counter[str] = Counter()
        self._flying: dict[str, float] = {}
        self._moments: deque[float] = deque()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._writer = threading.Thread(target=self._keep_writing, name="status", daemon=True)
        self._writer.start()

    def plan(self, cases: int, before: int) -> None:
        """Say how many cases there are, and how many were done before."""
        with self._lock:
            self._state, self._cases, self._before = "running", cases, before

    def state(self, state: str) -> None:
        """Say what the run is at."""
        with self._lock:
            self._state = state

    def start(self, case_id: str) -> None:
        """Say that a case was handed over."""
        with self._lock:
            self._flying[case_id] = time.monotonic()

    def finish(self, record: CaseRecord) -> None:
        """Say that a case has ended."""
        with self._lock:
            self._flying.pop(record.id, None)
            self._moments.append(time.monotonic())
            if record.reason is None:
                self._ends["done"] += 1
                self._ends["remade"] += record.remade
            else:
                self._ends[record.reason.outcome] += 1
                self._reasons[record.reason.code] += 1

    def send_away(self, why: str) -> None:
        """Say that a worker could not do the work."""
        with self._lock:
            self._sent_away[why] += 1

    def now(self) -> Status:
        """Return the status of this moment."""
        now = time.monotonic()
        with self._lock:
            while self._moments and now - self._moments[0] > RECENT_SECONDS:
                self._moments.popleft()
            over = sum(self._ends[end] for end in ("done", *OUTCOMES))
            rate = self._rate(now)
            left = self._cases - self._before - over
            return Status(
                run=self._run,
                state=self._state,
                cases=self._cases,
                before=self._before,
                done=self._ends["done"],
                skipped=self._ends["skipped"],
                ambiguous=self._ends["ambiguous"],
                failed=self._ends["failed"],
                remade=self._ends["remade"],
                reasons=dict(sorted(self._reasons.items())),
                in_flight={name: round(now - t, 1) for name, t in self._flying.items()},
                elapsed_s=round(now - self._began, 1),
                left_s=round(left / rate, 1) if rate else None,
                per_hour=round(3600 * rate, 1) if rate else None,
                devices=gpu_state(),
                moment=round(time.time(), 1),
                sent_away=dict(self._sent_away),
                reason=self._reason,
                host=this_host(),
                process=self._process,
                start=self._start,
            )

    def close(self, state: str | None = None, reason: str = "") -> None:
        """Write the last word: how the run ended unless that was said, and why it failed."""
        with self._lock:
            self._state, self._reason = state or self._state, reason
        self._over.set()
        self._writer.join()
        self._write(_replace_or_fill)

    def _rate(self, now: float) -> float | None:
        """Return cases a second over the last minutes, None where too little is known."""
        if len(self._moments) < 2:
            return None
        span = now - max(self._began, now - RECENT_SECONDS)
        return len(self._moments) / span if span > 0 else None

    def _keep_writing(self) -> None:
        self._write()  # from now on it has its place, also on a disk that is full
        while not self._over.wait(self._period):
            self._write()

    def _write(self, put: Callable[[Path, str], None] | None = None) -> None:
        """Replace the file; not brought to the disk each second: it is a view, not a record."""
        from scanloom.engine.metrics import metrics_text

        now = self.now()
        with suppress(OSError):  # a full disk is told where results are written
            (put or _replace)(self._folder / STATUS, json.dumps(asdict(now)))
        if self._metrics is not None:
            with suppress(OSError):  # a run does not end for want of metrics
                _replace(self._metrics, metrics_text(now))


@contextmanager
def closing(board: Board) -> Iterator[None]:
    """Let a board say the last word, whatever ends its run."""
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, ScanError) else Reason.INTERNAL.code
        board.close("failed", code if isinstance(error, Exception) else "")
        raise
    board.close()


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    try:
        draft.unlink(missing_ok=True)
        with draft.open("x", encoding="utf-8") as file:  # a link there would lead elsewhere
            file.write(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _replace_or_fill(path: Path, text: str) -> None:
    """Replace a file, or else write into it: on a full disk there may be room in it alone."""
    try:
        _replace(path, text)
    except OSError:
        with path.open("r+", encoding="utf-8") as file:
            file.write(text)
            file.truncate()


def gpu_state() -> list[dict[str, Any]]:
    """Return what each NVIDIA device says of itself, none without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_device(n) for n in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _device(number: int) -> dict[str, Any]:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    state = {"device": number, "memory_used": memory.used, "memory_total": memory.total}
    asked: Mapping[str, Any] = {
        "busy_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "celsius": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "watts": lambda: round(pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3, 1),
    }
    for name, ask in asked.items():
        try:
            state[name] = ask()
        except pynvml.NVMLError:
            state[name] = None
    return state
