"""A case that ends the engine's process fails; cases beside it do not."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from scanloom.core import Case, Reason, ScanError
from scanloom.engine.case_progress import read_progress
from scanloom.engine.prepare import OutputTarget
from scanloom.engine.retries import MAX_CHILD_STARTS, STORAGE_PAUSES_S
from scanloom.engine.worker import supervisor
from scanloom.engine.worker.memory_admission import AdmissionGate
from scanloom.engine.worker.messages import QUEUED, ChildSetup
from scanloom.engine.worker.supervisor import (
    CaseOutcome,
    ChildDiedError,
    ChildProcess,
    WorkerSupervisor,
    child_environment,
)
from support import engine_models as em
from support.warm_workers import WARM_WORKERS


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork child processes from one that has imported everything."""
    monkeypatch.setattr("scanloom.engine.worker.supervisor.subprocess", WARM_WORKERS)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    path.write_bytes(b"none")
    return path


def setup(tmp_path: Path, weights: Path, **changes: object) -> ChildSetup:
    models = partial(em.threshold_models, weights, tmp_path / "starts")
    fields = {
        "output": OutputTarget(tmp_path / "out", bytes(32)),
        "make_predictors": models,
        "in_flight": 3,
    }
    return ChildSetup(**{**fields, **changes})


@pytest.fixture
def engine(tmp_path: Path, weights: Path) -> Iterator[WorkerSupervisor]:
    engine = WorkerSupervisor(setup(tmp_path, weights), time_limit=120.0, log=tmp_path / "log")
    yield engine
    engine.stop()


def run_all(engine: WorkerSupervisor, cases: Sequence[Case]) -> list[CaseOutcome]:
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(engine.run, cases))


def reasons(outcomes: Sequence[CaseOutcome]) -> list[Reason | None]:
    assert all(o.record is not None for o in outcomes)
    return [o.record.reason for o in outcomes if o.record]


@pytest.mark.usefixtures("forked")
def test_cases_are_published(engine: WorkerSupervisor, tmp_path: Path) -> None:
    cases = [em.make_case(tmp_path, f"fine{n}") for n in range(4)]

    outcomes = run_all(engine, cases)

    assert reasons(outcomes) == [None] * 4
    assert {p.name for p in (tmp_path / "out" / "cases").iterdir()} == {c.id for c in cases}
    assert len({line.split()[1] for line in (tmp_path / "starts").read_text().splitlines()}) == 1
    spans = sorted(o.device for o in outcomes if o.device)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


@pytest.mark.usefixtures("forked")
def test_a_process_that_never_starts_is_no_fault_of_a_case(tmp_path: Path, weights: Path) -> None:
    engine = WorkerSupervisor(
        setup(tmp_path, weights, make_predictors=partial(os._exit, 3)), time_limit=60.0
    )

    with pytest.raises(ScanError) as fault:
        engine.run(em.make_case(tmp_path, "one"))
    engine.stop()

    assert fault.value.reason is Reason.ENVIRONMENT


@pytest.mark.usefixtures("forked")
def test_a_panic_of_a_library_is_answered(engine: WorkerSupervisor, tmp_path: Path) -> None:
    """Without an answer its worker waits until the time limit, which then blames the scan."""
    outcomes = run_all(engine, [em.make_case(tmp_path, "panic", em.PANIC)])
    assert reasons(outcomes) == [Reason.INTERNAL]


@pytest.mark.usefixtures("forked")
def test_a_child_that_was_stopped_is_given_up(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not dead, and does not take the case that it is given."""
    child = ChildProcess(setup(tmp_path, weights))
    child.ask(em.make_case(tmp_path, "fine"), 120.0)
    os.kill(child._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(supervisor, "_START_TIMEOUT_S", 0.1)

    with pytest.raises(ChildDiedError) as died:
        child.ask(em.make_case(tmp_path, "one"), 120.0)
    assert died.value.code == -signal.SIGKILL


@pytest.mark.usefixtures("forked")
def test_a_child_that_is_stopped_while_it_starts_is_given_up(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case does not fit into the buffer of its socket."""
    monkeypatch.setattr(supervisor, "_START_TIMEOUT_S", 0.1)
    child = ChildProcess(setup(tmp_path, weights, make_predictors=partial(time.sleep, 600)))
    os.kill(child._process.pid, signal.SIGSTOP)
    case = em.make_case(tmp_path, "one")
    files = case.series.files * 20_000

    with pytest.raises(ScanError, match="not loaded") as late:
        child.ask(replace(case, series=replace(case.series, files=files)), 120.0)
    assert late.value.reason is Reason.ENVIRONMENT


@pytest.mark.slow
def test_only_faulty_cases_fail(tmp_path: Path, weights: Path) -> None:
    engine = WorkerSupervisor(setup(tmp_path, weights), time_limit=20.0)
    tasks = [
        em.SUCCEED,
        em.ABORT,
        em.SUCCEED,
        em.SUCCEED,
        em.HANG_WITH_GIL,
        em.SUCCEED,
        em.RAISE,
        em.SUCCEED,
    ]
    cases = [em.make_case(tmp_path, f"c{n}", task) for n, task in enumerate(tasks)]

    outcomes = run_all(engine, cases)
    engine.stop()

    expected = {
        em.ABORT: Reason.CRASHED,
        em.HANG_WITH_GIL: Reason.CASE_TIMEOUT,
        em.RAISE: Reason.INTERNAL,
    }
    assert reasons(outcomes) == [expected.get(task) for task in tasks]
    assert all(
        o.tries[-1].alone for o in outcomes if o.record and o.record.reason is Reason.CRASHED
    )
    deaths = sum(t.end not in ("done", "INTERNAL") for o in outcomes for t in o.tries)
    assert sum(len(o.tries) for o in outcomes) <= len(cases) + deaths * 3


@pytest.mark.slow
def test_a_case_that_takes_all_memory_fails_alone(tmp_path: Path, weights: Path) -> None:
    engine = WorkerSupervisor(setup(tmp_path, weights, memory_limit=3 << 30), time_limit=60.0)
    cases = [
        em.make_case(tmp_path, f"m{n}", t)
        for n, t in enumerate((em.SUCCEED, em.TAKE_ALL_MEMORY, em.SUCCEED))
    ]

    outcomes = run_all(engine, cases)
    engine.stop()

    assert reasons(outcomes) == [None, Reason.OUT_OF_MEMORY, None]


@pytest.mark.slow
def test_waiting_time_does_not_count_towards_the_time_limit(tmp_path: Path, weights: Path) -> None:
    """Each works for three seconds and waits for two others: more than the limit in all."""
    engine = WorkerSupervisor(setup(tmp_path, weights), time_limit=8.0)

    outcomes = run_all(engine, [em.make_case(tmp_path, f"s{n}", em.SLEEP_3_S) for n in range(3)])
    engine.stop()

    assert reasons(outcomes) == [None] * 3
    assert [len(o.tries) for o in outcomes] == [1, 1, 1]


def test_the_time_of_a_step_counts_once_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a thread that compares it with the limit at that moment, too."""
    case, now, seen = supervisor._RunningCase(), [0.0], list[float]()

    def look_at_the_clock() -> float:
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        seen.append(case.worked)
        monkeypatch.setattr(time, "monotonic", look_at_the_clock)
        return now[0]

    monkeypatch.setattr(time, "monotonic", look_at_the_clock)
    for moment, step in ((0.0, "load"), (100.0, "network"), (120.0, QUEUED), (150.0, "write")):
        now[0] = moment
        case.begin(step)

    assert max(seen) == case.worked == 120.0


@pytest.mark.slow
def test_a_case_killed_from_outside_is_tried_alone_twice(
    engine: WorkerSupervisor, tmp_path: Path
) -> None:
    """The system may have killed it for lack of memory, or a person by mistake."""
    killed = engine.run(em.make_case(tmp_path, "killed", em.KILL_ITSELF))
    fine = engine.run(em.make_case(tmp_path, "fine"))

    assert reasons([killed, fine]) == [Reason.OUT_OF_MEMORY, None]
    assert [t.alone for t in killed.tries] == [False, True, True]
    assert Reason.OUT_OF_MEMORY.retry  # by the next run


@contextmanager
def limited(which: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


@pytest.mark.slow
def test_a_limit_of_processor_time_is_not_taken_for_a_lack_of_memory(
    engine: WorkerSupervisor, tmp_path: Path, weights: Path
) -> None:
    """The limit is met before the first case; and a process is killed as by it within a case."""
    tired = WorkerSupervisor(
        setup(tmp_path, weights, make_predictors=em.tiring_models), time_limit=60.0
    )
    with limited(resource.RLIMIT_CPU, 10**7):
        with pytest.raises(ScanError, match="ulimit -t") as fault:
            tired.run(em.make_case(tmp_path, "fine"))
        killed = engine.run(em.make_case(tmp_path, "killed", em.KILL_ITSELF))
    tired.stop()

    assert fault.value.reason is Reason.ENVIRONMENT
    assert reasons([killed]) == [Reason.ENVIRONMENT]
    assert killed.record
    assert "ulimit -t" in killed.record.detail


@pytest.mark.thorough
@pytest.mark.usefixtures("forked")
def test_stop_ends_a_case_without_a_record(engine: WorkerSupervisor, tmp_path: Path) -> None:
    case = em.make_case(tmp_path, "cut", em.SLEEP_FOREVER)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(engine.run, case)
        while not (tmp_path / "starts").exists():
            assert not coming.done(), coming.result()
            time.sleep(0.05)
        engine.stop()
        outcome = coming.result(timeout=60)

    assert outcome.record is None
    assert not list((tmp_path / "out" / "cases").glob("*"))


@pytest.mark.thorough
def test_the_child_goes_when_the_engine_stops(engine: WorkerSupervisor, tmp_path: Path) -> None:
    engine.run(em.make_case(tmp_path, "one"))
    assert engine._child
    child = psutil.Process(engine._child._process.pid)

    engine.stop(patience=5.0)

    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


WORKER_THAT_DIES = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
from scanloom.engine.case_progress import read_progress
from scanloom.engine.prepare import OutputTarget
from scanloom.engine.worker.supervisor import ChildProcess
from scanloom.engine.worker.messages import ChildSetup

setup = ChildSetup(OutputTarget(Path(sys.argv[1]), bytes(32)), partial(time.sleep, 600))
print(ChildProcess(setup)._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
def test_the_child_of_a_worker_that_dies_at_once_loads_no_models(tmp_path: Path) -> None:
    """It could wait for them for ten minutes, and the kernel reports no parent that is gone."""
    command = [sys.executable, "-c", WORKER_THAT_DIES, str(tmp_path / "out")]
    died = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    assert died.returncode == -signal.SIGKILL

    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(died.stdout))
        try:
            child.wait(60)
        finally:
            child.kill()


def test_a_child_does_not_map_its_memory_anew_for_each_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dask's nannies set a threshold, also in clusters that others have started."""
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    assert "MALLOC_TRIM_THRESHOLD_" not in child_environment()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")  # the user's own
    assert child_environment()["MALLOC_TRIM_THRESHOLD_"] == "1000000"


def test_the_gate_admits_an_exclusive_case_alone() -> None:
    gate, seen, inside = AdmissionGate(3), [], threading.Semaphore(0)

    def visit(n: int) -> None:
        with gate.exclusive() if n % 5 == 0 else gate.shared():
            seen.append((n, "in"))
            time.sleep(0.01)
            seen.append((n, "out"))
        inside.release()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(visit, range(40)))

    now: set[int] = set()
    for n, event in seen:
        now.add(n) if event == "in" else now.remove(n)
        assert len(now) <= 3
        assert len(now) <= 1 or not any(m % 5 == 0 for m in now)


def test_the_gate_counts_what_is_needed() -> None:
    gate, most, now = AdmissionGate(8, capacity=10.0), [0.0], [0.0]
    lock = threading.Lock()

    def visit(need: float) -> None:
        with gate.shared(need):
            with lock:
                now[0] += need
                most[0] = max(most[0], now[0])
            time.sleep(0.005)
            with lock:
                now[0] -= need

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(visit, [4.0, 5.0, 3.0, 12.0, 1.0, 6.0] * 4))

    assert most[0] == 12.0  # it came in alone


@pytest.mark.thorough
@pytest.mark.usefixtures("forked")
def test_a_scan_that_is_away_for_a_moment_is_read_later(
    engine: WorkerSupervisor, tmp_path: Path
) -> None:
    """A network share can vanish for a moment: the case is tried again after a pause."""
    case = replace(em.make_case(tmp_path, "away"), source_hash="")
    [path] = case.series.files
    away = path.rename(tmp_path / "elsewhere")
    pauses = []

    class Pauses(threading.Event):
        """Lets the file come back during the second pause, which is not waited for."""

        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            if len(pauses) == 2:
                away.rename(path)
            return False

    engine._stopped = Pauses()

    outcome = engine.run(case)

    assert [t.end for t in outcome.tries] == ["UNREADABLE", "UNREADABLE", "done"]
    assert pauses == list(STORAGE_PAUSES_S[:2])
    assert outcome.record is not None
    assert outcome.record.reason is None


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("how", "reason", "starts"),
    [
        ("model", Reason.MODEL_DAMAGED, 1),
        ("library", Reason.ENVIRONMENT, MAX_CHILD_STARTS),
        ("memory", Reason.OUT_OF_MEMORY, MAX_CHILD_STARTS),
        ("exit", Reason.ENVIRONMENT, MAX_CHILD_STARTS),
        ("killed", Reason.OUT_OF_MEMORY, MAX_CHILD_STARTS),
    ],
)
def test_faults_that_stop_every_case_fail_no_case(
    tmp_path: Path, weights: Path, how: str, reason: Reason, starts: int
) -> None:
    models = partial(em.unfit_models, tmp_path / "loads", how, 1000)
    engine = WorkerSupervisor(setup(tmp_path, weights, make_predictors=models), time_limit=60.0)

    with ThreadPoolExecutor(4) as pool:
        ended = [pool.submit(engine.run, em.make_case(tmp_path, f"c{n}")) for n in range(4)]
        faults = [each.exception() for each in ended]
    engine.stop()

    assert [isinstance(fault, ScanError) and fault.reason for fault in faults] == [reason] * 4
    assert len((tmp_path / "loads").read_text().splitlines()) == starts


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("how", ["library", "exit"])
def test_a_failed_start_of_the_child_is_repeated(tmp_path: Path, weights: Path, how: str) -> None:
    models = partial(em.unfit_models, tmp_path / "loads", how, MAX_CHILD_STARTS - 1)
    engine = WorkerSupervisor(setup(tmp_path, weights, make_predictors=models), time_limit=60.0)

    [outcome] = run_all(engine, [em.make_case(tmp_path, "one")])
    engine.stop()

    assert reasons([outcome]) == [None]
    assert [t.end for t in outcome.tries] == ["done"]  # the case had no part in it


@pytest.mark.thorough
def test_a_worker_tells_the_progress_of_its_case(tmp_path: Path, weights: Path) -> None:
    """The step that takes a second; nothing remains at its end."""
    folder, seen = tmp_path / "progress", []
    models = partial(em.threshold_models, weights, None, 1.0)
    engine = WorkerSupervisor(
        setup(tmp_path, weights, make_predictors=models, progress=folder), time_limit=120.0
    )
    case = em.make_case(tmp_path, "a")
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(engine.run, case)
        while not ended.done():
            seen.append(read_progress(folder, case.id))
            time.sleep(0.05)
    engine.stop()

    assert "network" in {each["step"] for each in seen if each}
    assert read_progress(folder, case.id) is None
