"""`--cluster slurm` on a real SLURM, if one is configured: cases do not fail with their job.

The queue and options of a site come from the environment: SCANLOOM_SLURM, a YAML mapping such as
`{queue: main, interface: lo}`. For node and preemption the SLURM must be a private one, of which
SCANLOOM_SLURM_PRIVATE names the folder with `run/slurmd.NODE.pid`, with a partition `urgent`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from support.cluster_runs import ClusterRun

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(shutil.which("sbatch") is None, reason="SLURM (sbatch) is not here"),
    pytest.mark.skipif("SCANLOOM_SLURM" not in os.environ, reason="SCANLOOM_SLURM is not set"),
]


def make_run(folder: Path, scans: int, seconds: float, workers: int = 2) -> ClusterRun:
    site = {"cores": 1, "memory": "1 GiB", "walltime": "30 min"}
    site |= yaml.safe_load(os.environ["SCANLOOM_SLURM"])
    execution = {"workers": workers, "in_flight": 1, "threads": 1, "cluster": site}
    return ClusterRun(folder, scans, seconds, yaml.safe_dump(execution, default_flow_style=True))


def slurm(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def jobs(run: ClusterRun, state: str = "RUNNING") -> list[str]:
    """Return the jobs of a run that are in a state."""
    names = [folder.name for folder in run.out.glob("private/runs/*")]
    if not names:
        return []
    form = ("--noheader", "--format=%i", f"--states={state}")
    return slurm("squeue", f"--name=scanloom-{names[0]}", *form).split()


def private_folder() -> Path:
    named = os.environ.get("SCANLOOM_SLURM_PRIVATE")
    if named is None:
        pytest.skip("no private SLURM (SCANLOOM_SLURM_PRIVATE)")
    return Path(named)


def check_traces(run: ClusterRun) -> None:
    """Nothing waits in the queue, and the key of the run is gone."""
    run.until(lambda: not jobs(run, "PENDING,RUNNING"), "the end of all jobs", 30.0)
    assert not list(run.out.glob("private/runs/*/cluster*"))


def test_a_cancelled_job_is_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path, 10, 4.0)
    with run.going("--cluster", "slurm") as process:
        run.until(lambda: len(run.started) >= 2 and len(jobs(run)) == 2, "two jobs at work")
        first, second = jobs(run)
        slurm("scancel", first)
        run.until(lambda: set(jobs(run)) - {first, second}, "another job")
        run.check_end(process, 400.0)
    check_traces(run)
    assert sum(run.started.values()) <= run.scans + 1


def test_a_node_that_is_killed_blames_nobody(tmp_path: Path) -> None:
    daemons = private_folder() / "run"
    run = make_run(tmp_path, 10, 4.0)
    with run.going("--cluster", "slurm") as process:
        run.until(lambda: len(run.started) >= 2 and len(jobs(run)) == 2, "two jobs at work")
        node = slurm("squeue", "--noheader", "--format=%N", f"--jobs={jobs(run)[0]}").strip()
        kill_node(daemons / f"slurmd.{node}.pid", run)
        try:
            run.check_end(process, 400.0)
        finally:
            slurm("slurmd", "-N", node)
    check_traces(run)
    assert sum(run.started.values()) <= run.scans + 2


def kill_node(daemon: Path, run: ClusterRun) -> None:
    """Kill the daemon of a node and all that runs on it."""
    import psutil

    below = [psutil.Process(int(daemon.read_text()))]
    node = daemon.name.split(".")[1]
    for process in psutil.process_iter(["environ"]):
        environment = process.info["environ"] or {}
        if environment.get("SLURMD_NODENAME") == node and environment.get("FORMULA"):
            below.append(process)
    for process in below:
        with_signal(process.pid)
    assert len(below) > 1


def with_signal(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def test_a_preempted_job_blames_nobody(tmp_path: Path) -> None:
    private_folder()
    run = make_run(tmp_path, 8, 4.0)
    with run.going("--cluster", "slurm") as process:
        run.until(lambda: len(run.started) >= 2 and len(jobs(run)) == 2, "two jobs at work")
        cores = slurm("sinfo", "--noheader", "--format=%c", "--partition=urgent").split()[0]
        urgent = ("--partition=urgent", f"--cpus-per-task={cores}", "--mem=100M", "--parsable")
        job_options = ("--output=/dev/null", "--wrap=sleep 15")
        job = slurm("sbatch", *urgent, *job_options).strip()
        run.until(lambda: len(jobs(run)) < 2, "the preemption")
        run.check_end(process, 400.0)
        subprocess.run(["scancel", job], check=False, timeout=60)
    check_traces(run)
    assert sum(run.started.values()) <= run.scans + 2


def test_workers_leave_before_the_walltime_and_others_come(tmp_path: Path) -> None:
    run = make_run(tmp_path, 30, 2.0, workers=1)
    run.workflow.write_text(run.workflow.read_text().replace("30 min", "70 s"))
    with run.going("--cluster", "slurm") as process:
        run.check_end(process, 500.0)
    check_traces(run)
    assert sum(run.started.values()) <= run.scans + 4


def test_a_refused_job_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path, 1, 0.0)
    wrong = run.workflow.read_text().replace("cores:", "queue: no-such-queue, cores:")
    run.workflow.write_text(wrong.replace("queue: main,", "").replace(", queue: main", ""))
    with run.going("--cluster", "slurm") as process:
        assert process.wait(120) == 65
    assert "sbatch refused the job" in run.output
    assert "invalid partition" in next(run.out.glob("private/runs/*/slurm.log")).read_text()
