"""`--cluster tcp://...` and a scheduler file: Dask that was started by others, on loopback."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from support.cluster_runs import ClusterRun
from support.commands import scanloom
from support.foreign_dask import BLIND, NO_SCANLOOM, OTHER_VERSION, foreign


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
            assert process.wait(240) == 0, run.output
    assert run.done == run.status["done"] == run.scans
    assert not list(run.out.glob("failed/*"))
    assert sum(run.started.values()) <= run.scans + 1


def workers_seen(run: ClusterRun) -> set[str]:
    """Return the child processes that have worked."""
    starts = run.notes / "starts"
    lines = starts.read_text().split("\n") if starts.exists() else []
    return {line.split()[1] for line in lines if line}


@pytest.mark.slow
def test_workers_as_those_of_dask_cuda_keep_their_gpu(tmp_path: Path) -> None:
    """dask-cuda names a resource, and gives each worker all GPUs, its own first."""
    run = ClusterRun(tmp_path, 4, 2.0, "{in_flight: 1}")
    lists = ["0,1", "1,0"]
    with foreign(run) as cluster:
        for gpus in lists:
            environment = {**run.environment, "CUDA_VISIBLE_DEVICES": gpus}
            cluster.worker("", "--resources", "GPU=1", environment=environment)
        with run.going("--cluster", str(cluster.file)) as process:
            children = run.until(
                lambda: seen if len(seen := workers_seen(run)) == 2 else None, "two engines"
            )
            texts = [Path(f"/proc/{child}/environ").read_text().split("\0") for child in children]
            assert process.wait(240) == 0, run.output
    assert run.done == run.scans
    given = [line for text in texts for line in text if line.startswith("CUDA_VISIBLE_DEVICES=")]
    assert sorted(given) == [f"CUDA_VISIBLE_DEVICES={gpus}" for gpus in lists]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preload", "message"),
    [
        (OTHER_VERSION, "workers run scanloom 0.0.7, this is"),
        (NO_SCANLOOM, "1 of 1 workers have no scanloom"),
        (BLIND, "1 of 1 workers don't see the output folder"),
    ],
)
def test_workers_that_can_not_do_the_work_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preload: str, message: str
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
    assert message in ended.err.replace("\n", " ")
    assert not list(run.out.glob(".work/*"))


@pytest.mark.slow
def test_a_lost_scheduler_ends_the_run_with_a_message(tmp_path: Path) -> None:
    run = ClusterRun(tmp_path, 4, 5.0, "{in_flight: 1}")
    with foreign(run) as cluster:
        cluster.worker()
        with run.going("--cluster", str(cluster.file)) as process:
            run.until(lambda: run.started, "the first scan")
            os.kill(cluster.scheduler.pid, signal.SIGKILL)
            assert process.wait(120) == 65
    assert "the connection to the scheduler was lost (CLUSTER)" in run.output.replace("\n", " ")
    assert "Traceback" not in run.output


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("tcp://127.0.0.1:1", "no scheduler answers at this address"),
        ("no-such-file.json", "nor a scheduler file"),
        ("ssh:", "no hosts"),
    ],
)
def test_a_missing_cluster_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, message: str
) -> None:
    run = ClusterRun(tmp_path, 1, 0.0, "{}")
    monkeypatch.setenv("SCANLOOM_KEY", run.environment["SCANLOOM_KEY"])
    monkeypatch.setattr("scanloom.engine.clusters.connect._SCHEDULER_TIMEOUT_S", 1.0)
    where = ("--out", run.out, "--cluster", cluster)
    ended = scanloom("run", run.workflow, run.archive, *where)

    assert ended.code == 65
    assert message in ended.err.replace("\n", " ")
