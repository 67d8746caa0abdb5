"""Pools and the pump: the window holds, losses blame nobody, the case_file is for workers alone."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scanloom.core import Case, CaseRecord, Outputs, ReadOptions, Reason, ScanError, Series
from scanloom.engine.prepare import OutputTarget
from scanloom.engine.retries import MAX_OUTDONE_CASES, MAX_WORKER_LOSSES
from scanloom.engine.run_files import hold_run_lock
from scanloom.engine.worker.messages import CaseFile, ChildSetup
from scanloom.engine.worker.pool import LocalPool, WorkerLostError, WorkerUnfitError, dispatch_cases
from scanloom.engine.worker.supervisor import CaseOutcome, WorkerSupervisor
from scanloom.io.output.work_folder import HOLDER
from scanloom.io.system.scratch_folders import host_id
from support import engine_models as em


def case(name: str) -> Case:
    return Case(name, Series("nifti", (Path(name),)), Outputs(), "", "")


def written(path: Path, cases: Iterable[Case]) -> CaseFile:
    file = CaseFile(path)
    for each in cases:
        file.append(each)
    return file


class Threads:
    """A pool of plain threads; `lose` says how often each case loses its worker."""

    def __init__(
        self, window: int, lose: int = 0, seconds: float = 0.0, error: type = WorkerLostError
    ) -> None:
        self.window, self._lose, self._seconds, self._error = window, lose, seconds, error
        self.starts: Counter[str] = Counter()
        self.most, self._now, self._lock = 0, 0, threading.Lock()
        self.stopped: float | None = None

    def submit(self, case: Case) -> Future[CaseOutcome]:
        future: Future[CaseOutcome] = Future()
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
            self.starts[case.id] += 1
        threading.Thread(target=self._run, args=(case, future)).start()
        return future

    def stop(self, patience: float) -> None:
        self.stopped = patience

    def _run(self, case: Case, future: Future[CaseOutcome]) -> None:
        time.sleep(self._seconds)
        with self._lock:
            self._now -= 1
        if self.starts[case.id] <= self._lose:
            future.set_exception(self._error("killed"))
        else:
            found = self.starts[case.id] > 1  # the lost worker had published it
            record = CaseRecord(case.id, None, "", (), None, reused=found)
            future.set_result(CaseOutcome(record, ()))


def test_the_window_holds_and_tasks_are_taken_as_there_is_room() -> None:
    pool, taken, ended = Threads(4), [], []

    def tasks():
        for n in range(60):
            taken.append(n)
            assert len(taken) - len(ended) <= 5
            yield case(f"t{n}")

    assert dispatch_cases(tasks(), pool, lambda t, o: ended.append(t.id))
    assert sorted(ended) == sorted(f"t{n}" for n in range(60))
    assert pool.most <= 4


def test_a_case_whose_worker_is_lost_runs_again() -> None:
    pool, records = Threads(3, lose=2), []

    assert dispatch_cases(map(case, "abc"), pool, lambda t, o: records.append(o.record))

    assert [(r.reason, r.reused) for r in records] == [(None, False)] * 3
    assert pool.starts == {"a": 3, "b": 3, "c": 3}


def test_a_case_that_always_loses_its_worker_fails() -> None:
    pool, records = Threads(3, lose=1000), []

    assert dispatch_cases(map(case, "a"), pool, lambda t, o: records.append(o.record))

    assert [r.reason for r in records] == [Reason.WORKER_LOST]
    assert pool.starts["a"] == MAX_WORKER_LOSSES


def test_unfit_workers_do_not_count_as_lost_workers() -> None:
    pool, records = Threads(3, lose=3 * MAX_WORKER_LOSSES, error=WorkerUnfitError), []

    assert dispatch_cases(map(case, "ab"), pool, lambda t, o: records.append(o.record))

    assert [r.reason for r in records] == [None, None]


def test_a_case_of_a_retired_worker_runs_again() -> None:
    """A retired worker ends its engine; an outcome without a record does not count."""
    starts: Counter[str] = Counter()

    class Leaving(Threads):
        def submit(self, case: Case) -> Future[CaseOutcome]:
            future: Future[CaseOutcome] = Future()
            starts[case.id] += 1
            record = CaseRecord(case.id, None, "", (), None) if starts.total() > 3 else None
            future.set_result(CaseOutcome(record, ()))
            return future

    records = []

    assert dispatch_cases(map(case, "abc"), Leaving(3), lambda t, o: records.append(o.record))
    assert sorted(r.id for r in records if r) == ["a", "b", "c"]
    assert starts == {"a": 2, "b": 2, "c": 2}


def test_a_pool_without_workers_is_waited_for() -> None:
    """Between two workers the window is 0, which does not end the run."""

    class Late(Threads):
        looks = 0

        @property
        def window(self) -> int:
            self.looks += 1
            return int(self.looks % 3 == 0)

        @window.setter
        def window(self, _: int) -> None: ...

    ended: list[str] = []

    assert dispatch_cases(map(case, "abc"), Late(1, lose=1), lambda t, o: ended.append(t.id))
    assert sorted(ended) == ["a", "b", "c"]


def test_stop_starts_nothing_more() -> None:
    pool, stop, ended = Threads(2, seconds=0.2), threading.Event(), []

    def note(t: Case, o: CaseOutcome) -> None:
        ended.append(t.id)
        stop.set()

    assert not dispatch_cases(map(case, "abcdefgh"), pool, note, stop=stop, drain=3.0)
    assert 1 <= len(ended) <= 2
    assert pool.stopped == 3.0


def test_an_error_of_the_caller_stops_the_pool() -> None:
    pool = Threads(2)

    def full(t: Case, o: CaseOutcome) -> None:
        raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        dispatch_cases(map(case, "abc"), pool, full)
    assert pool.stopped == 0.0


OPTIONS = ReadOptions(orientation="RAS", modality="CT")


def test_a_case_file_returns_each_case_unchanged(tmp_path: Path) -> None:
    odd = Path("/b\udcff\n c.nii")  # bytes that are no UTF-8, and a line break
    series = Series("nifti", (odd, Path("/x/ö.img")), "1.2", "1.3", "CT", "Ü^x")
    odd_case = Case(
        "one", series, Outputs(structures=("liver",), also=("masks",)), "s", "r", OPTIONS, 2
    )
    case_file = written(tmp_path / "case_file", [case("zero"), odd_case])

    assert [each.id for each in case_file] == ["zero", "one"]
    assert CaseFile.read(case_file.path, case_file.offset("one")) == odd_case
    assert len(case_file) == 2
    assert stat.S_IMODE(case_file.path.stat().st_mode) == 0o600


def test_a_lock_keeps_others_out_and_goes_with_its_run(tmp_path: Path) -> None:
    with hold_run_lock(tmp_path), pytest.raises(Exception, match="LOCKED"), hold_run_lock(tmp_path):
        pass
    with hold_run_lock(tmp_path), hold_run_lock(tmp_path, shard="1-of-2"):
        pass
    assert not list((tmp_path / ".work").glob("*lock*"))


def test_the_lock_of_a_dead_process_is_taken(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from scanloom.engine.run_files import hold_run_lock\n"
        "with hold_run_lock(Path(sys.argv[1])): os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
    assert (tmp_path / ".work" / "run.lock").exists()

    with hold_run_lock(tmp_path):
        pass


def test_the_lock_of_another_host_is_taken_only_if_asked(tmp_path: Path) -> None:
    lock = tmp_path / ".work" / "run.lock"
    lock.mkdir(parents=True)
    (lock / HOLDER).write_text('{"host": "elsewhere", "process": 1, "start": "1", "since": "then"}')

    with pytest.raises(Exception, match="on host elsewhere"), hold_run_lock(tmp_path):
        pass
    with hold_run_lock(tmp_path, take_over=True):
        pass
    assert not lock.exists()


def test_the_lock_of_another_container_of_this_host_is_taken_only_if_asked(tmp_path: Path) -> None:
    lock = tmp_path / ".work" / "run.lock"
    with hold_run_lock(tmp_path):
        held = json.loads((lock / HOLDER).read_text())
    dead = {**held, "process": 2**22 + 1, "space": "pid:[1]"}
    lock.mkdir()
    (lock / HOLDER).write_text(json.dumps(dead))

    with pytest.raises(ScanError, match="another container of host"), hold_run_lock(tmp_path):
        pass
    with hold_run_lock(tmp_path, take_over=True):
        pass
    lock.mkdir()
    (lock / HOLDER).write_text(json.dumps({**dead, "space": held["space"]}))
    with hold_run_lock(tmp_path):
        pass


OWN_PROCESSES = ("unshare", "--pid", "--fork", "--mount-proc")
TRY_LOCK = """
import sys
from pathlib import Path
from scanloom.engine.run_files import hold_run_lock
from scanloom.io.system.scratch_folders import observed_state, host_id
told = {"state": "running", "host": sys.argv[2], "process": 1 << 22, "start": "1", "moment": 9e9}
print(observed_state(told), flush=True)
with hold_run_lock(Path(sys.argv[1])):
    pass
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone makes a PID namespace")
def test_a_run_in_another_pid_namespace_of_this_host_is_not_taken_for_dead(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRY_LOCK, str(tmp_path), host_id()]
    if subprocess.run([*OWN_PROCESSES, "true"], check=False).returncode != 0:
        pytest.skip("no PID namespace can be made")
    with hold_run_lock(tmp_path):
        foreign = subprocess.run(
            [*OWN_PROCESSES, *command], capture_output=True, text=True, check=False
        )
        here = subprocess.run(command, capture_output=True, text=True, check=False)
    assert foreign.stdout == "running\n"
    assert "another container of host" in foreign.stderr
    assert here.stdout == "died\n"
    assert "on this host" in here.stderr


def test_one_of_many_processes_takes_a_dead_lock(tmp_path: Path) -> None:
    lock = tmp_path / ".work" / "run.lock"
    inside, most, lockdoor = [0], [0], threading.Lock()
    refused = []

    def take() -> None:
        try:
            with hold_run_lock(tmp_path, take_over=True):
                with lockdoor:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                time.sleep(0.02)
                with lockdoor:
                    inside[0] -= 1
        except Exception as error:  # noqa: BLE001
            refused.append(error)

    for _ in range(10):
        lock.mkdir(parents=True)
        text = '{"host": "elsewhere", "process": 1, "start": "1", "since": "then"}'
        (lock / HOLDER).write_text(text)
        threads = [threading.Thread(target=take) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most[0] == 1
    assert all("LOCKED" in str(error) for error in refused)


POOR_SHARE = """
import errno, fcntl, os, sys, time
from pathlib import Path
def refuse(*arguments, **more):
    raise OSError(int(sys.argv[2]), "a share without it")
os.link = fcntl.flock = refuse
from scanloom.core import ScanError
from scanloom.engine.run_files import hold_run_lock
out, held = Path(sys.argv[1]), 0
while held < 30:
    try:
        with hold_run_lock(out):
            os.close(os.open(out / "held", os.O_CREAT | os.O_EXCL))
            held += 1
            (out / "held").unlink()
    except ScanError as error:
        assert error.code == "LOCKED", error
    time.sleep(0.001)
print(held)
"""


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_share_without_hard_links_and_flock_has_locks(tmp_path: Path, number: int) -> None:
    """One of several competing processes holds the lock at a time; no file of the lock stays."""
    command = [sys.executable, "-c", POOR_SHARE, str(tmp_path), str(number)]
    many = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]

    assert [each.communicate()[0] for each in many] == ["30\n"] * 3
    assert not list((tmp_path / ".work").iterdir())


def test_local_pool(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(b"none")
    models = partial(em.threshold_models, tmp_path / "w.pt")
    setup = ChildSetup(OutputTarget(tmp_path / "out", bytes(32)), models, in_flight=2)
    pool = LocalPool(WorkerSupervisor(setup, 60.0), 2)
    cases = [em.make_case(tmp_path, f"c{n}") for n in range(3)]
    ended = []

    assert dispatch_cases(cases, pool, lambda t, o: ended.append(o.record.reason))
    pool.stop(5.0)

    assert ended == [None] * 3


def pool_without_workers() -> Any:
    from scanloom.engine.clusters.dask_pool import DaskPool

    pool = DaskPool.__new__(DaskPool)
    pool._pending, pool._unfit, pool._workers = {}, {}, frozenset()
    return pool


@pytest.mark.slow
def test_a_result_that_was_lost_with_its_worker_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dask takes all results in one thread, which waited for the lost one for ever."""
    from distributed import Client, LocalCluster
    from distributed import wait as wait_for

    from scanloom.engine.clusters import dask_pool

    monkeypatch.setattr(dask_pool, "_RESULT_TIMEOUT_S", 1.0)
    options = {"processes": False, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(n_workers=1, **options) as cluster, Client(cluster) as client:
        [worker] = cluster.workers.values()
        ended = client.submit(bytes, 3, workers=[worker.address])
        wait_for([ended], 60)
        lose = partial(cluster.scheduler.remove_worker, expected=False)
        cluster.sync(lose, worker.address, stimulus_id="killed")
        # as its callback saw it, a moment before
        ended = SimpleNamespace(status="finished", result=ended.result, release=ended.release)
        future: Future[CaseOutcome] = Future()
        arguments = (ended, case("a"), future)
        threading.Thread(
            target=pool_without_workers()._on_done, args=arguments, daemon=True
        ).start()
        assert isinstance(future.exception(30), WorkerLostError)


@pytest.mark.parametrize(
    ("dismissed", "error"), [({"a": ""}, WorkerUnfitError), ({}, WorkerLostError)]
)
def test_a_case_whose_workers_were_all_dismissed_lost_none(
    dismissed: dict[str, str], error: type
) -> None:
    pool, future = pool_without_workers(), Future[CaseOutcome]()
    pool._unfit = dismissed
    task = SimpleNamespace(status="pending", release=lambda: None)

    def cancel() -> None:
        task.status = "cancelled"
        pool._on_done(task, case("a"), future)  # as Dask's thread may at once

    task.cancel = cancel
    pool._pending[future] = (task, frozenset("a"))

    pool._take_back()

    assert type(future.exception(0)) is error


@pytest.mark.slow
def test_dask_workers_fail_only_the_faulty_case(tmp_path: Path) -> None:
    from scanloom.engine.clusters.connect import local_cluster
    from scanloom.engine.clusters.contact import hold_handshake
    from scanloom.engine.clusters.dask_pool import DaskPool, SupervisorSetup

    out = tmp_path / "out"
    (out / ".work").mkdir(parents=True)
    (tmp_path / "w.pt").write_bytes(b"none")
    models = partial(em.threshold_models, tmp_path / "w.pt")
    setup = ChildSetup(OutputTarget(out, bytes(32)), models, in_flight=2)
    tasks = [em.SUCCEED, em.ABORT, em.SUCCEED, em.SUCCEED, em.RAISE, em.SUCCEED]
    cases = [em.make_case(tmp_path, f"c{n}", task) for n, task in enumerate(tasks)]
    case_file = written(tmp_path / "case_file", cases)
    ended = {}
    with local_cluster(["", ""], 2, tmp_path) as client, hold_handshake(out) as handshake:
        handshake.check(client)
        engines = SupervisorSetup("run", setup, 60.0, tmp_path / "logs", handshake)
        pool = DaskPool(client, case_file, engines)
        assert dispatch_cases(case_file, pool, lambda t, o: ended.update({t.id: o.record}))
        pool.stop(5.0)

    expected = {em.ABORT: Reason.CRASHED, em.RAISE: Reason.INTERNAL}
    assert [ended[c.id].reason for c in cases] == [expected.get(task) for task in tasks]


@pytest.mark.slow
def test_a_worker_whose_cases_succeed_elsewhere_is_retired(tmp_path: Path) -> None:
    from scanloom.engine.clusters.connect import local_cluster
    from scanloom.engine.clusters.contact import hold_handshake
    from scanloom.engine.clusters.dask_pool import DaskPool, PoolLimits, SupervisorSetup

    out = tmp_path / "out"
    (out / ".work").mkdir(parents=True)
    (tmp_path / "w.pt").write_bytes(b"none")
    models = partial(em.full_worker_models, tmp_path / "w.pt", tmp_path / "first", 0.5)
    setup = ChildSetup(OutputTarget(out, bytes(32)), models)
    cases = [em.make_case(tmp_path, f"c{n}") for n in range(12)]
    case_file, ended, faults = written(tmp_path / "case_file", cases), {}, []
    with local_cluster(["", ""], 1, tmp_path) as client, hold_handshake(out) as handshake:
        engines = SupervisorSetup("run", setup, 60.0, tmp_path, handshake)
        pool = DaskPool(client, case_file, engines, PoolLimits(on_unfit=faults.append))
        until = time.monotonic() + 60.0
        while pool.window < 2 and time.monotonic() < until:
            time.sleep(0.1)
        assert dispatch_cases(case_file, pool, lambda t, o: ended.update({t.id: o}))
        pool.stop(5.0)

    assert [ended[c.id].record.reason for c in cases] == [None] * 12
    again = [o for o in ended.values() if len(o.tries) == 2]
    assert {o.tries[0].end for o in again} == {"SCRATCH_FULL"}
    assert MAX_OUTDONE_CASES <= len(again) < 12
    assert faults == [
        f"a worker failed {MAX_OUTDONE_CASES} cases that succeeded elsewhere (SCRATCH_FULL)"
    ]


@pytest.mark.thorough
def test_a_fault_that_all_cases_share_ends_the_work(tmp_path: Path) -> None:
    models = partial(em.unfit_models, tmp_path / "loads", "model", 1000)
    setup = ChildSetup(OutputTarget(tmp_path / "out", bytes(32)), models, in_flight=2)
    pool = LocalPool(WorkerSupervisor(setup, 60.0), 2)
    cases, ended = [em.make_case(tmp_path, f"c{n}") for n in range(4)], []

    with pytest.raises(ScanError) as raised:
        dispatch_cases(cases, pool, lambda t, o: ended.append(t.id))

    assert raised.value.reason is Reason.MODEL_DAMAGED
    assert ended == []
