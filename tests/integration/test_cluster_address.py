"""`--cluster tcp://...` and a scheduler file: Dask that was started by others, on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cluster_runs import ClusterRun
from commands import scanloom

OTHER_VERSION = """
import importlib.metadata as metadata
told = metadata.version
metadata.version = lambda name: "0.0.7" if name == "scanloom" else told(name)
"""
NO_SCANLOOM = """
import sys
sys.modules["scanloom"] = None
"""
BLIND = """
from pathlib import Path
def blind(self, *args, read=Path.read_text, **kwargs):
    if "handshake" in self.name:
        raise FileNotFoundError(self)
    return read(self, *args, **kwargs)
Path.read_text = blind
"""


class Foreign:
    """A scheduler and workers of plain Dask, in processes of their own."""

    def __init__(self, run: ClusterRun, stack: ExitStack) -> None:
        self._run, self._stack = run, stack
        self.file = run.folder / "scheduler.json"
        self.scheduler = self.start("scheduler", "--host", "127.0.0.1", "--port", "0")
        run.until(lambda: self.file.exists() and self.file.read_text(), "the scheduler file")

    def start(self, what: str, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.dask_{what}"]
        quiet = ["--scheduler-file", str(self.file), "--no-dashboard", "--dashboard-address", ":0"]
        with (self._run.folder / f"{what}.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, *quiet, *options], env=self._run.environment, stdout=log, stderr=log
            )
        self._stack.callback(end, process)
        return process

    def worker(self, preload: str = "", *options: str) -> subprocess.Popen[bytes]:
        path = self._run.folder / f"preload_{len(preload)}.py"
        path.write_text(preload)
        named = ["--preload", str(path)] if preload else []
        return self.start("worker", "--host", "127.0.0.1", "--nthreads", "1", *named, *options)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def foreign(run: ClusterRun) -> Iterator[Foreign]:
    with ExitStack() as stack:
        yield Foreign(run, stack)


@pytest.mark.slow
def test_workers_that_come_late_take_part_and_one_that_dies_blames_nobody(tmp_path: Path) -> None:
    run = ClusterRun(tmp_path, 8, 3.0, "{in_flight: 1}")
    with foreign(run) as cluster:
        first = cluster.worker("", "--no-nanny")
        with run.going("--cluster", str(cluster.file)) as process:
            run.until(lambda: run.started, "the first scan")
            cluster.worker()
            run.until(lambda: len(workers_seen(run)) == 2, "an engine in the late worker")
            first.send_signal(signal.SIGKILL)
            assert process.wait(240) == 0, run.said
    assert run.done == run.status["done"] == run.scans
    assert not list(run.out.glob("failed/*"))
    assert sum(run.started.values()) <= run.scans + 1


def workers_seen(run: ClusterRun) -> set[str]:
    """Return the engine children that have worked."""
    starts = run.notes / "starts"
    lines = starts.read_text().split("\n") if starts.exists() else []
    return {line.split()[1] for line in lines if line}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preload", "word"),
    [
        (OTHER_VERSION, "workers run scanloom 0.0.7, this is"),
        (NO_SCANLOOM, "1 of 1 workers have no scanloom"),
        (BLIND, "1 of 1 workers don't see the output folder"),
    ],
)
def test_workers_that_can_not_do_the_work_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preload: str, word: str
) -> None:
    run = ClusterRun(tmp_path, 1, 0.0, "{}")
    monkeypatch.setenv("SCANLOOM_KEY", run.environment["SCANLOOM_KEY"])
    with foreign(run) as cluster:
        cluster.worker(preload)
        address = json.loads(cluster.file.read_text())["address"]
        where = ("--out", run.out, "--cluster", address)
        ended = scanloom("run", run.workflow, run.archive, *where)

    assert ended.code == 65
    assert "CLUSTER" in ended.err
    assert word in ended.err.replace("\n", " ")
    assert not list(run.out.glob(".work/*"))


@pytest.mark.slow
def test_a_scheduler_that_goes_ends_the_run_with_a_word(tmp_path: Path) -> None:
    run = ClusterRun(tmp_path, 4, 5.0, "{in_flight: 1}")
    with foreign(run) as cluster:
        cluster.worker()
        with run.going("--cluster", str(cluster.file)) as process:
            run.until(lambda: run.started, "the first scan")
            os.kill(cluster.scheduler.pid, signal.SIGKILL)
            assert process.wait(120) == 65
    assert "its scheduler is gone (CLUSTER)" in run.said.replace("\n", " ")
    assert "Traceback" not in run.said


@pytest.mark.parametrize(
    ("cluster", "word"),
    [
        ("tcp://127.0.0.1:1", "no scheduler answers there"),
        ("no-such-file.json", "nor a scheduler file"),
        ("ssh:", "no hosts"),
    ],
)
def test_a_cluster_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, word: str
) -> None:
    import dask
    import distributed  # noqa: F401  # its options are there before one of them is set

    run = ClusterRun(tmp_path, 1, 0.0, "{}")
    monkeypatch.setenv("SCANLOOM_KEY", run.environment["SCANLOOM_KEY"])
    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        where = ("--out", run.out, "--cluster", cluster)
        ended = scanloom("run", run.workflow, run.archive, *where)

    assert ended.code == 65
    assert word in ended.err.replace("\n", " ")
