"""The status file: whole whenever it is read, and right in its numbers."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from scanloom.cli.commands.run import status_line
from scanloom.core import CaseRecord, Reason
from scanloom.core.timing import WindowCount
from scanloom.engine.case_progress import FOLDER, CaseProgress
from scanloom.engine.monitor import Status, StatusWriter, final_status, remove_progress
from scanloom.io.system.scratch_folders import host_id, process_start_ticks
from support import engine_models as em
from support.commands import scanloom, write_tiny_bundle


def test_status_counts_cases_by_outcome(tmp_path: Path) -> None:
    status_writer = StatusWriter("run", tmp_path, period=0.01)
    status_writer.plan(10, before=3, work=7)
    for name, reason in (("a", None), ("b", Reason.MODALITY), ("c", Reason.CRASHED)):
        status_writer.start(name)
        status_writer.finish(CaseRecord(name, reason, "", (), None))
    status_writer.start("d")

    now = status_writer.now()
    status_writer.close("done")

    assert (now.done, now.skipped, now.failed, now.before, now.cases) == (1, 1, 1, 3, 10)
    assert now.reasons == {"CRASHED": 1, "MODALITY": 1}
    assert list(now.in_flight) == ["d"]
    assert now.per_hour
    assert now.left_s == pytest.approx(4 * now.elapsed_s / 3, abs=1.0)
    assert Status.read(tmp_path).state == "done"


def test_a_result_that_a_worker_finds_is_from_before(tmp_path: Path) -> None:
    """As of a copied scan: comparing its content is work, but gives no result of this run."""
    status_writer = StatusWriter("run", tmp_path, period=10.0)
    status_writer.plan(6, before=3, work=3)
    for name in ("a", "b"):
        status_writer.start(name)
        status_writer.finish(CaseRecord(name, None, "", (), tmp_path, reused=True))
    status_writer.plan(1, before=0, work=1)  # of the next study

    now = status_writer.now()
    status_writer.close("done")

    assert (now.cases, now.before, now.recalled, now.done) == (7, 5, 2, 0)
    assert (now.work, now.worked, now.ended) == (4, 2, 5)
    assert "without result" not in status_line(now)


def test_a_case_that_ended_before_the_index_counts_once_it_is_confirmed(tmp_path: Path) -> None:
    status_writer = StatusWriter("run", tmp_path, period=10.0)
    status_writer.add_indexed(7)
    for name in ("a", "b", "c"):
        status_writer.start(name)
    for name in ("a", "b"):
        status_writer.set_aside(name)
    before = status_writer.now()
    assert (before.state, before.indexed, before.begun, before.left_s) == ("indexing", 7, 3, None)
    assert (before.early, before.worked, before.done, list(before.in_flight)) == (2, 0, 0, ["c"])
    rate = before.per_hour

    status_writer.plan(2, before=0, work=2)
    status_writer.confirm()
    status_writer.finish(CaseRecord("b", Reason.CRASHED, "", (), None))
    now = status_writer.now()
    status_writer.close("done")

    assert (now.early, now.done, now.failed, now.worked, now.work) == (0, 0, 1, 1, 2)
    assert rate is not None
    assert now.per_hour is not None
    assert now.per_hour <= rate  # it has both of them already


def test_the_status_has_windows_of_cases_in_flight(tmp_path: Path) -> None:
    """As workers write them; a file that is none of theirs is nothing."""
    status_writer = StatusWriter("run", tmp_path, period=10.0)
    status_writer.plan(3, before=0, work=3)
    for name in ("a", "b", "c"):
        status_writer.start(name)
    working = CaseProgress(tmp_path / FOLDER, "a")
    working.on_step("network")
    working.on_windows(WindowCount("tiny", 0, 9, "cpu", "float32", 2, 3))
    (tmp_path / FOLDER / "b.json").write_text('{"done": "many"}')
    (tmp_path / FOLDER / "c.json").symlink_to("/dev/zero")

    now = status_writer.now()
    working.close()
    later = status_writer.now()
    status_writer.close("done")

    told = {"step": "network", "model": "tiny", "done": 0, "total": 9, "left_s": None}
    assert now.progress == {"a": {**told, "network": 2, "networks": 3}}
    assert (now.work, now.worked, later.progress) == (3, 0, {})


def test_series_that_fail_by_their_headers_do_not_speed_a_run_up(tmp_path: Path) -> None:
    status_writer = StatusWriter("run", tmp_path, period=10.0)
    status_writer.plan(110, before=0, work=10)
    for n in range(100):
        status_writer.finish(CaseRecord(f"series {n}", Reason.SLICE_GAP, "", (), None))
    before = status_writer.now()
    for name in ("a", "b"):
        status_writer.start(name)
        status_writer.finish(CaseRecord(name, None, "", (), None))
    after = status_writer.now()
    status_writer.close("done")

    assert (before.per_hour, before.left_s, before.failed) == (None, None, 100)
    assert after.left_s == pytest.approx(8 * after.elapsed_s / 2, abs=0.2)


def test_status_is_never_half_written(tmp_path: Path) -> None:
    status_writer = StatusWriter("run", tmp_path, period=0.0005)
    status_writer.plan(1000, before=0, work=1000)
    until = time.monotonic() + 0.5
    seen = 0
    while time.monotonic() < until or seen <= 10:
        status_writer.start(f"case{seen}")
        try:
            Status.read(tmp_path)
        except FileNotFoundError:
            continue
        seen += 1
    status_writer.close("stopped")

    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_a_run_whose_process_is_gone_has_died(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        start = process_start_ticks(process.pid)
        reported = Status("run", "running", host=host_id(), process=process.pid, start=start)
        alive = reported.as_observed().state
        process.communicate(b"\n")

    assert (alive, reported.as_observed().state) == ("running", "died")
    mine = replace(reported, process=os.getpid(), start="1")  # the number was given away again
    assert mine.as_observed().state == "died"
    assert replace(reported, state="stopped").as_observed().state == "stopped"


@pytest.mark.parametrize(("silent", "state"), [(30, "collecting"), (90, "died")])
def test_a_run_of_another_host_has_died_when_it_says_nothing_for_a_minute(
    silent: float, state: str
) -> None:
    reported = Status("run", "collecting", host="elsewher", process=os.getpid())
    assert replace(reported, moment=time.time() - silent).as_observed().state == state


def test_a_run_of_a_host_with_a_slow_clock_lives_as_long_as_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scanloom.engine.monitor._NEXT_WRITE_S", 2.0)
    slow = Status("run", "running", host="elsewher", moment=time.time() - 3600)
    file, draft = tmp_path / "status.json", tmp_path / "draft"

    def write(number: int = 0) -> None:
        draft.write_text(json.dumps(asdict(replace(slow, moment=slow.moment + number))))
        draft.replace(file)

    write()
    writer = threading.Timer(0.5, write, [1])
    writer.start()
    assert Status.observe(tmp_path).state == "running"
    writer.join()
    assert Status.observe(tmp_path).state == "died"


def test_progress_of_a_run_that_died_goes(tmp_path: Path) -> None:
    died = Status("died", "running", host=host_id(), process=os.getpid(), start="1")
    ours = replace(died, run="ours", start=process_start_ticks(os.getpid()))
    for status in (died, ours):
        (tmp_path / status.run).mkdir()
        CaseProgress(tmp_path / status.run / FOLDER, "a").on_step("load")
        (tmp_path / status.run / "status.json").write_text(json.dumps(asdict(status)))

    remove_progress(tmp_path)

    assert [path.parent.name for path in tmp_path.glob(f"*/{FOLDER}")] == ["ours"]


@pytest.mark.parametrize("kind", ["device", "folder", "link", "pipe"])
def test_metrics_replace_no_device(tmp_path: Path, kind: str) -> None:
    """Refused before anything is made: a rename over a device would take it from all."""
    metrics = tmp_path / "metrics.prom"
    if kind == "device":
        if os.getuid() != 0:
            pytest.skip("only root can make a device")
        os.mknod(metrics, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    elif kind == "folder":
        metrics.mkdir()
    elif kind == "link":
        metrics.symlink_to("/dev/null")
    else:
        os.mkfifo(metrics)
    scans = tmp_path / "scans"
    scans.mkdir()
    em.make_case(scans, "one")
    workflow, model = tmp_path / "workflow.yaml", write_tiny_bundle(tmp_path / "bundles")
    workflow.write_text(f"name: test\nmodels: [{model}]\n")
    before = metrics.lstat()

    ended = scanloom("run", workflow, scans, "--out", tmp_path / "out", "--metrics", metrics)

    assert (ended.code, "regular file" in ended.err) == (74, True)
    assert not (tmp_path / "out").exists()
    assert metrics.lstat().st_ino == before.st_ino


def test_metrics_follow_no_link_that_somebody_left(tmp_path: Path) -> None:
    victim, metrics = tmp_path / "victim", tmp_path / "metrics.prom"
    victim.write_text("mine")
    (tmp_path / ".metrics.prom").symlink_to(victim)
    (tmp_path / "run").mkdir()

    with final_status(StatusWriter("run", tmp_path / "run", metrics=metrics)):
        pass

    assert victim.read_text() == "mine"
    assert "scanloom" in metrics.read_text()
