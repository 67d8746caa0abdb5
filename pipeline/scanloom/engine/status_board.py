"""`Board`: keeps the status of a run, and writes it each second for `status` and Prometheus."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scanloom.core import OUTCOMES, CaseRecord, Reason, ScanError
from scanloom.engine.metrics import metrics_text
from scanloom.engine.nvml import nvml_handles
from scanloom.engine.status import STATUS, Status
from scanloom.io.living import process_start, this_host

_RATE_WINDOW_S = 300.0
"""Sliding window for the rate behind the time estimate."""


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
            while self._moments and now - self._moments[0] > _RATE_WINDOW_S:
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
                devices=_gpu_state(),
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
        span = now - max(self._began, now - _RATE_WINDOW_S)
        return len(self._moments) / span if span > 0 else None

    def _keep_writing(self) -> None:
        self._write()  # from now on it has its place, also on a disk that is full
        while not self._over.wait(self._period):
            self._write()

    def _write(self, put: Callable[[Path, str], None] | None = None) -> None:
        """Replace the file; not brought to the disk each second: it is a view, not a record."""
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


def _gpu_state() -> list[dict[str, Any]]:
    """Return what each NVIDIA device says of itself, none without a driver."""
    states: list[dict[str, Any]] = []
    with nvml_handles() as handles:
        states += [_device(number, handle) for number, handle in enumerate(handles or ())]
    return states


def _device(number: int, handle: Any) -> dict[str, Any]:
    import pynvml

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
