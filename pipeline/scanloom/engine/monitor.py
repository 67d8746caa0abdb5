"""Status of a run: progress in a small file that is replaced each second.

`scanloom status` reads it, and Prometheus by the node exporter's textfile collector.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from scanloom.core import OUTCOMES, CaseRecord, Reason, ScanError
from scanloom.engine.case_progress import FOLDER, read_progress
from scanloom.engine.machine.devices import nvml_handles
from scanloom.io.output.json_file import read_json
from scanloom.io.system.atomic_write import check_replaceable
from scanloom.io.system.disk_errors import output_error
from scanloom.io.system.scratch_folders import (
    DIED,
    FINAL_STATES,
    host_id,
    observed_state,
    process_start_ticks,
)

STATUS_FILE = "status.json"
_NEXT_WRITE_S = 3.0
"""Time in which a run that is alive writes its status again."""


@dataclass(frozen=True)
class Status:
    """Progress of a run.

    Parameters
    ----------
    run : str
        Id of the run.
    state : str
        "indexing", "running", "collecting", "done", "stopped" or "failed"; "died" if the process
        ended without writing a final state, see `seen`.
    cases : int
        Number of planned cases.
    before : int
        Cases that were done by earlier runs.
    recalled : int
        Number of `before` of which a worker had to compare the scan, such as copied ones.
    work, worked : int
        Cases that this run has to work on, and those of them that have ended. The others were done
        before, or refused by their headers. 0 while the archive is indexed.
    indexed : int
        Number of files in the index so far.
    early : int
        Cases that have ended while the archive is indexed, until the whole index is compared; 0
        afterwards.
    done, skipped, ambiguous, failed : int
        Cases that this run finished, and those that ended so in earlier runs and were not tried
        again. Series with invalid headers count as failed, series with several volumes to choose
        from as ambiguous.
    remade : int
        Number of `done` that replaced a result because its scan had changed.
    reasons : dict
        Number of cases by reason code.
    in_flight : dict
        Seconds since a case was submitted, by case id.
    progress : dict
        Step, network and windows of the cases in flight for longest, by case id.
    elapsed_s, left_s : float or None
        Seconds since the start, and until the end by the rate of the last minutes.
    per_hour : float or None
        Cases per hour, by that rate.
    devices : list of dict
        Load, memory, temperature and power of each GPU.
    moment : float
        Time of writing, in seconds since 1970.
    sent_away : dict
        Number of dismissed workers, by cause.
    reason : str
        Code of the reason for which the run as a whole failed; empty if it did not.
    host, process, start : str, int, str
        The process that wrote this, to check whether it still runs.
    """

    run: str
    state: str
    cases: int = 0
    before: int = 0
    recalled: int = 0
    work: int = 0
    worked: int = 0
    indexed: int = 0
    early: int = 0
    done: int = 0
    skipped: int = 0
    ambiguous: int = 0
    failed: int = 0
    remade: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    in_flight: dict[str, float] = field(default_factory=dict)
    progress: dict[str, dict[str, Any]] = field(default_factory=dict)
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
        """Read the last status of the run of a folder.

        Raises
        ------
        OSError, ValueError
            If the status is missing or not valid.
        ScanError
            OLDER_VERSION or NEWER_VERSION if another version wrote it.
        """
        document = read_json(folder / STATUS_FILE)
        known = {f.name: document[f.name] for f in fields(cls) if f.name in document}
        try:
            return cls(**known)
        except (TypeError, AttributeError) as exc:
            raise ValueError("status.json has invalid fields") from exc

    @property
    def begun(self) -> int:
        """Number of cases on which this run has begun to work."""
        return self.early + self.worked + len(self.in_flight)

    @property
    def ended(self) -> int:
        """Number of cases that have ended, including those of earlier runs."""
        return self.before + self.done + self.skipped + self.ambiguous + self.failed

    @classmethod
    def observe(cls, folder: Path) -> Self:
        """Return the current status of the run of a folder; errors as in `read`.

        It is read again before a run of another host counts as dead: that host's clock may be slow.
        """
        status = cls.read(folder)
        observed, until = status.as_observed(), time.monotonic() + _NEXT_WRITE_S
        while observed.state == DIED and status.host != host_id() and time.monotonic() < until:
            time.sleep(0.2)
            again = cls.read(folder)
            if again.moment != status.moment:
                return again
        return observed

    def as_observed(self) -> Self:
        """Return the current status: the run may have died since it was written."""
        if observed_state(asdict(self)) != DIED:
            return self
        return replace(self, state=DIED, left_s=None, per_hour=None, devices=[])


_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
"""The characters that the text format escapes in label values."""


def format_metrics(status: Status) -> str:
    """Return the metrics of a run, without case ids, so that their number is small."""
    ends = {labels_of(outcome=name): getattr(status, name) for name in ("done", *OUTCOMES)}
    reasons = {labels_of(reason=code): count for code, count in status.reasons.items()}

    def of_devices(key: str, scale: float = 1.0) -> dict[str, float]:
        known = [d for d in status.devices if d.get(key) is not None]
        return {labels_of(device=str(d["device"])): d[key] * scale for d in known}

    samples: list[Sample] = [
        ("run_info", "The run.", {labels_of(run=status.run, state=status.state): 1}),
        ("cases_planned", "Cases of the run.", {"": status.cases}),
        ("cases_before", "Cases done by earlier runs.", {"": status.before}),
        ("cases_finished_total", "Cases that this run finished.", ends),
        ("cases_without_result_total", "Cases that gave no result, by reason.", reasons),
        ("cases_in_flight", "Cases that are worked on.", {"": len(status.in_flight)}),
        ("cases_per_hour", "Rate of the last minutes.", {"": status.per_hour}),
        ("left_seconds", "Time left by that rate.", {"": status.left_s}),
        ("elapsed_seconds", "Time since the start.", {"": status.elapsed_s}),
        ("gpu_busy_ratio", "Busy share.", of_devices("busy_percent", 0.01)),
        ("gpu_memory_used_bytes", "Memory in use.", of_devices("memory_used")),
        ("gpu_memory_bytes", "Memory there is.", of_devices("memory_total")),
        ("gpu_temperature_celsius", "Temperature.", of_devices("celsius")),
        ("gpu_power_watts", "Power.", of_devices("watts")),
        ("written_timestamp_seconds", "When this was written.", {"": status.moment}),
    ]
    return format_samples(samples)


Sample = tuple[str, str, Mapping[str, float | None]]
"""A metric: its name, a sentence, and its values by labels, of which unknown ones are left out."""


def format_samples(samples: Sequence[Sample]) -> str:
    """Return metrics in the text format of Prometheus."""
    lines = []
    for name, text, values in samples:
        known = {labels: value for labels, value in values.items() if value is not None}
        if known:
            kind = "counter" if name.endswith("_total") else "gauge"  # as Prometheus names them
            lines += [f"# HELP scanloom_{name} {text}", f"# TYPE scanloom_{name} {kind}"]
            lines += [f"scanloom_{name}{labels} {value!r}" for labels, value in known.items()]
    return "\n".join(lines) + "\n"


def labels_of(**labels: str) -> str:
    """Return the labels of a sample in braces, their values escaped."""
    pairs = (f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


_MOST_SHOWN = 16
"""Cases in flight whose progress is read each second: a cluster may have hundreds."""
_RATE_WINDOW_S = 300.0
"""Sliding window for the rate behind the time estimate."""


class StatusWriter:
    """Keeps the status of a run, and writes it periodically.

    Parameters
    ----------
    run : str
        Id of the run.
    folder : Path
        `OUT/runs/<run id>`, which exists.
    period : float
        Seconds between two writes.
    metrics : Path or None
        File for the same data in Prometheus' format.
    """

    def __init__(
        self, run: str, folder: Path, period: float = 1.0, metrics: Path | None = None
    ) -> None:
        self._folder, self._period, self._metrics = folder, period, metrics
        self.metrics_error: ScanError | None = None
        """Why the metrics could not be written the last time; None if they were."""
        process = os.getpid()
        start = process_start_ticks(process)
        self._status = Status(run, "indexing", host=host_id(), process=process, start=start)
        self._began = time.monotonic()
        self._submitted: dict[str, float] = {}
        self._moments: deque[float] = deque()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._writer = threading.Thread(target=self._keep_writing, name="status", daemon=True)
        self._writer.start()

    def plan(self, cases: int, before: int, work: int) -> None:
        """Add planned cases: all of them, those done by earlier runs, and those to run."""
        with self._lock:
            status = self._status
            self._status = replace(
                status,
                state="running",
                early=0,
                cases=status.cases + cases,
                before=status.before + before,
                work=status.work + work,
            )

    def state(self, state: str) -> None:
        """Set the state of the run."""
        with self._lock:
            self._status = replace(self._status, state=state)

    def add_indexed(self, files: int) -> None:
        """Record that more files are in the index."""
        with self._lock:
            self._status = replace(self._status, indexed=self._status.indexed + files)

    def start(self, case_id: str) -> None:
        """Record that a case was submitted."""
        with self._lock:
            self._submitted[case_id] = time.monotonic()

    def finish(self, record: CaseRecord) -> None:
        """Record that a case has ended; the rate is that of cases that were submitted."""
        with self._lock:
            is_work = self._submitted.pop(record.id, None) is not None
            if is_work:
                self._moments.append(time.monotonic())
            status, reason = self._status, record.reason
            ended = "before" if record.reused else "done"
            outcome = ended if reason is None else reason.outcome
            reasons = Counter(status.reasons) + Counter([reason.code] if reason else ())
            self._status = replace(
                status,
                **{outcome: getattr(status, outcome) + 1},
                worked=status.worked + is_work,
                recalled=status.recalled + record.reused,
                remade=status.remade + (reason is None and record.updated),
                reasons=dict(sorted(reasons.items())),
            )

    def set_aside(self, case_id: str) -> None:
        """Record that a case ended whose outcome waits for the index."""
        with self._lock:
            del self._submitted[case_id]
            self._moments.append(time.monotonic())
            self._status = replace(self._status, early=self._status.early + 1)

    def confirm(self) -> None:
        """Record that a case of this run ended before its index was complete."""
        with self._lock:
            self._status = replace(self._status, worked=self._status.worked + 1)

    def send_away(self, why: str) -> None:
        """Record that a worker was dismissed."""
        with self._lock:
            sent_away = dict(Counter(self._status.sent_away) + Counter([why]))
            self._status = replace(self._status, sent_away=sent_away)

    def now(self) -> Status:
        """Return the current status."""
        now = time.monotonic()
        with self._lock:
            while self._moments and now - self._moments[0] > _RATE_WINDOW_S:
                self._moments.popleft()
            status, rate = self._status, self._rate(now)
            in_flight = {name: round(now - t, 1) for name, t in self._submitted.items()}
        remaining = status.cases - status.ended
        longest = sorted(in_flight, key=lambda name: -in_flight[name])[:_MOST_SHOWN]
        known = {name: read_progress(self._folder / FOLDER, name) for name in longest}
        return replace(
            status,
            in_flight=in_flight,
            progress={name: dict(read) for name, read in known.items() if read},
            elapsed_s=round(now - self._began, 1),
            left_s=round(remaining / rate, 1) if rate and status.cases else None,
            per_hour=round(3600 * rate, 1) if rate else None,
            devices=_gpu_state(),
            moment=round(time.time(), 1),
        )

    def close(self, state: str | None = None, reason: str = "") -> None:
        """Write the final status: how the run ended, and the code of the reason if it failed.

        A state of None is the current one. What the first call says counts.
        """
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            final = state or self._status.state
            self._status = replace(self._status, state=final, reason=reason)
        # Joined first: the last periodic write must not come after the final one
        self._writer.join()
        self._write(_replace_or_fill)

    def _rate(self, now: float) -> float | None:
        """Return cases per second over the last minutes; None before two have ended."""
        if len(self._moments) < 2:
            return None
        # A run that began within the window has not had all of it
        span = now - max(self._began, now - _RATE_WINDOW_S)
        return len(self._moments) / span if span > 0 else None

    def _keep_writing(self) -> None:
        self._write()  # from now on the file exists, even if the disk fills up
        while not self._closed.wait(self._period):
            self._write()

    def _write(self, replace_file: Callable[[Path, str], None] | None = None) -> None:
        """Replace the file, without fsync: it is not a permanent record."""
        now = self.now()
        with suppress(OSError):  # a full disk is reported when results are written
            (replace_file or _replace)(self._folder / STATUS_FILE, json.dumps(asdict(now)))
        if self._metrics is not None:
            try:
                _replace(self._metrics, format_metrics(now))
                self.metrics_error = None
            except OSError as exc:  # a run does not fail for lack of metrics: its end reports it
                self.metrics_error = output_error(exc, "the file of --metrics")


def remove_progress(runs: Path) -> None:
    """Remove what is left of the progress of cases in the folders of runs that ended or died."""
    for folder in runs.glob(f"*/{FOLDER}"):
        with suppress(OSError, ValueError, ScanError):
            if Status.read(folder.parent).as_observed().state in (*FINAL_STATES, DIED):
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def final_status(status_writer: StatusWriter) -> Iterator[None]:
    """Write the final status of a run, however the block ends."""
    try:
        yield
    except KeyboardInterrupt:  # it was asked for
        status_writer.close("stopped")
        raise
    except BaseException as error:
        code = error.code if isinstance(error, ScanError) else Reason.INTERNAL.code
        status_writer.close("failed", code if isinstance(error, Exception) else "")
        raise
    status_writer.close()


def check_metrics(path: Path) -> None:
    """Refuse a file of metrics that can't be written: its path may be mistyped.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE or DISK_FULL.
    """
    check_replaceable(path, "the file of --metrics")
    draft = path.with_name(f".{path.name}")
    try:
        draft.unlink(missing_ok=True)
        draft.touch(exist_ok=False)
        draft.unlink()
    except OSError as exc:
        raise output_error(exc, "the file of --metrics") from exc


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    try:
        draft.unlink(missing_ok=True)
        with draft.open("x", encoding="utf-8") as file:  # "x" does not follow a link
            file.write(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _replace_or_fill(path: Path, text: str) -> None:
    """Replace a file, or overwrite it in place: a full disk may have no room for another one."""
    try:
        _replace(path, text)
    except OSError:
        with path.open("r+", encoding="utf-8") as file:
            file.write(text)
            file.truncate()


def _gpu_state() -> list[dict[str, Any]]:
    """Return load, memory, temperature and power of each NVIDIA device; [] without a driver."""
    states: list[dict[str, Any]] = []
    with nvml_handles() as handles:
        states += [_device(number, handle) for number, handle in enumerate(handles or ())]
    return states


def _device(number: int, handle: Any) -> dict[str, Any]:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    state = {"device": number, "memory_used": memory.used, "memory_total": memory.total}
    queries: Mapping[str, Any] = {
        "busy_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "celsius": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "watts": lambda: round(pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3, 1),
    }
    for name, query in queries.items():
        try:
            state[name] = query()
        except pynvml.NVMLError:
            state[name] = None
    return state
