"""Workers that can't do the work, on two real ones by address: sent away, nothing lost, no lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.cluster_runs import ClusterRun
from support.foreign_dask import BLIND, NO_SCANLOOM, foreign
from support.real_run import RealRun, other_weights, weights_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("preload", "nanny", "message"),
    [
        (BLIND, "--nanny", "don't see the output folder"),
        (BLIND, "--no-nanny", "don't see the output folder"),
        (NO_SCANLOOM, "--nanny", ""),
    ],
)
def test_an_unfit_late_worker_fails_no_case(
    tmp_path: Path, preload: str, nanny: str, message: str
) -> None:
    run = ClusterRun(tmp_path, 20, 1.0, "{in_flight: 1}")
    with foreign(run) as cluster:
        cluster.worker("", "--no-nanny")
        with run.going("--cluster", str(cluster.file)) as process:
            run.until(lambda: run.started, "the first scan")
            late = cluster.worker(preload, nanny)
            if message:
                assert late.wait(240) == 0  # it leaves, and its nanny with it
            assert process.wait(240) == 0, run.output
    assert run.done == run.status["done"] == run.scans
    assert not list(run.out.glob("failed/*"))
    assert not message or run.status["sent_away"] == {f"1 of 1 workers {message}": 1}
    assert not message or "rejected" in run.output
    assert "Traceback" not in run.output
    assert max(run.started.values()) == 1


NO_READING = "-dac_override,-dac_read_search"
READ_ONLY = 'mount --bind "$0" "$0"; mount -o remount,ro,bind "$0"; exec "$@"'
NO_ENGINE = """
import os, sys
if "scanloom.engine.worker.child_main" in sys.orig_argv:
    os._exit(3)
"""


def test_a_late_worker_whose_engine_does_not_start_fails_no_case(tmp_path: Path) -> None:
    run = ClusterRun(tmp_path, 20, 1.0, "{in_flight: 1}")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NO_ENGINE)
    path = os.pathsep.join((str(tmp_path / "site"), run.environment["PYTHONPATH"]))
    with foreign(run) as cluster:
        cluster.worker("", "--no-nanny")
        with run.going("--cluster", str(cluster.file)) as process:
            run.until(lambda: run.started, "the first scan")
            late = cluster.worker("", environment={**run.environment, "PYTHONPATH": path})
            assert late.wait(240) == 0
            assert process.wait(240) == 0, run.output
    assert run.done == run.status["done"] == run.scans
    assert not list(run.out.glob("failed/*"))
    assert set(run.status["sent_away"]) == {"the worker process ended while starting (exit code 3)"}


def test_two_runs_on_one_cluster_do_not_mix(tmp_path: Path) -> None:
    first_run = ClusterRun(tmp_path / "one", 6, 1.0, "{in_flight: 1}")
    two = ClusterRun(tmp_path / "two", 3, 0.0, "{in_flight: 1}")
    with foreign(first_run) as cluster:
        cluster.worker("", "--no-nanny")
        with first_run.going("--cluster", str(cluster.file)) as first:
            first_run.until(lambda: first_run.started, "the first scan")
            with two.going("--cluster", str(cluster.file)) as second:
                assert second.wait(240) == 0, two.output
            assert first.wait(240) == 0, first_run.output
    for run in (first_run, two):
        assert run.done == run.status["done"] == run.scans
        assert not list(run.out.glob("failed/*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone takes a worker what it may do")
@pytest.mark.parametrize(
    ("before", "message"),
    [
        (("setpriv", f"--bounding-set={NO_READING}", f"--inh-caps={NO_READING}"), "read the scans"),
        (("unshare", "-m", "sh", "-c", READ_ONLY, "{out}"), "write in the output folder"),
    ],
)
def test_a_late_worker_without_permissions_fails_no_case(
    tmp_path: Path, before: tuple[str, ...], message: str
) -> None:
    run = ClusterRun(tmp_path, 12, 1.0, "{in_flight: 1}")
    for scan in run.archive.iterdir():
        scan.chmod(0o600)
        os.chown(scan, 54321, 54321)
    before = tuple(argument.format(out=run.out) for argument in before)
    with foreign(run) as cluster:
        cluster.worker("", "--no-nanny")
        with run.going("--cluster", str(cluster.file)) as process:
            run.until(lambda: run.started, "the first scan")
            late = cluster.worker("", "--local-directory", str(tmp_path / "its"), before=before)
            assert late.wait(240) == 0
            assert process.wait(240) == 0, run.output
    assert run.done == run.status["done"] == run.scans
    assert not list(run.out.glob("failed/*"))
    assert run.status["sent_away"] == {f"1 of 1 workers can't {message}": 1}
    assert max(run.started.values()) == 1


def test_a_late_worker_with_other_weights_gives_no_result(tmp_path: Path) -> None:
    run = RealRun(tmp_path, 40)
    with foreign(run) as cluster:
        cluster.worker("", "--no-nanny")
        with run.real("--cluster", str(cluster.file)) as process:
            run.until(lambda: list(run.out.glob("private/runs/*/engine-*.log")), "the engine")
            foreign_environment = {**run.environment, "XDG_DATA_HOME": str(run.theirs)}
            late = cluster.worker("", "--nanny", environment=foreign_environment)
            assert late.wait(240) == 0
            assert process.wait(300) == 0, run.output
    assert run.hashes == {weights_of(run.ours)}
    assert run.done == run.status["done"] == run.scans
    assert run.status["sent_away"] == {"1 of 1 workers have no or different files of the models": 1}


@pytest.mark.parametrize("where", ["none", "address"])
def test_weights_that_change_in_a_run_end_it_before_they_are_used(
    tmp_path: Path, where: str
) -> None:
    run = RealRun(tmp_path, 40)
    before = weights_of(run.ours)
    with foreign(run) as cluster:
        for _ in range(2 if where == "address" else 0):
            cluster.worker("", "--no-nanny")
        named = "none" if where == "none" else str(cluster.file)
        with run.real("--cluster", named) as process:
            run.until(lambda: run.done, "the first result")
            other_weights(run.ours)
            run.kill_engines()
            assert process.wait(240) == 65, run.output
    assert "MODEL_CHANGED" in run.output
    assert run.hashes == {before}
    assert run.status["state"] == "failed"
    assert not list(run.out.glob("failed/*"))
