"""Workers as SLURM jobs: submits them, replaces those that end, and cancels them."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from scanloom.core import Reason, ScanError
from scanloom.engine.workflow.schema import Execution
from scanloom.io.output.private import append_private

FIRST_PAUSE_S, MAX_PAUSE_S = 10.0, 600.0
"""Pause between two submissions that replace ended jobs: doubled each time, and reset after jobs
that lived longer than the maximum."""

MAX_FUTILE_JOBS = 3
"""Jobs that may end before any worker joined, beyond the number requested."""

_PRIVATE_UMASK = 0o077
"""SLURM opens the log of a job with the umask of sbatch: logs may hold paths."""

_COMMAND_TIMEOUT_S = 60.0
"""Time limit for a command of SLURM, whose controller may be busy."""


@dataclass(frozen=True)
class JobSpec:
    """Jobs to be submitted.

    Parameters
    ----------
    jobs : int
        Number of jobs.
    arguments : tuple of str
        Arguments of sbatch for each job.
    prologue : tuple of str
        Lines of the job's script before the worker.
    python : str
        The interpreter on the nodes.
    """

    jobs: int
    arguments: tuple[str, ...]
    prologue: tuple[str, ...]
    python: str


def job_spec(execution: Execution) -> JobSpec:
    """Return the jobs that the workers of a workflow need."""
    options = execution.cluster
    workers = 1 if execution.workers == "auto" else execution.workers
    requested = {
        "partition": options.queue,
        "account": options.account,
        "time": math.ceil(options.walltime / 60) if options.walltime else None,
        "mem": f"{math.ceil(options.memory / 2**20)}M" if options.memory else None,
        "cpus-per-task": options.cores,
        "gres": f"gpu:{options.gpus}" if options.gpus else None,
    }
    arguments = [f"--{name}={value}" for name, value in requested.items() if value is not None]
    for line in options.job_extra_directives:
        arguments += shlex.split(line.removeprefix("#SBATCH").strip())
    return JobSpec(
        jobs=math.ceil(workers / max(1, options.gpus)),
        arguments=("--ntasks=1", *arguments),
        prologue=options.job_script_prologue,
        python=options.python or sys.executable,
    )


class SlurmJobs:
    """The jobs of a run, identified by their common name.

    Parameters
    ----------
    orders : JobSpec
        The jobs to be submitted.
    contact : Path
        The contact file.
    logs : Path
        Folder for the output of SLURM's commands and of each job.
    """

    def __init__(self, orders: JobSpec, contact: Path, logs: Path) -> None:
        self._orders, self._contact, self._logs = orders, contact, logs
        self.name = f"scanloom-{logs.name}"
        self._submitted = 0
        self._last, self._pause = -math.inf, 0.0

    def script(self) -> str:
        """Return the script of a job."""
        worker = [
            self._orders.python,
            "-P",
            "-m",
            "scanloom.engine.clusters.remote_worker",
            str(self._contact),
        ]
        # Jobs are submitted with a umask under which their log is private; results are not: they
        # are written with the umask of this process, which POSIX tells to who sets another one
        mask = os.umask(_PRIVATE_UMASK)
        os.umask(mask)
        begin = ("#!/bin/sh", f"umask {mask:04o}")
        return "\n".join([*begin, *self._orders.prologue, f"exec {shlex.join(worker)}", ""])

    def ensure_running(self, came: bool) -> None:
        """Submit the jobs that are missing; see `WorkerLauncher`.

        A job that SLURM itself requeues (after preemption or the loss of its node) keeps its
        number in the queue, and is not missing.
        """
        alive = self._alive() if self._submitted else 0
        missing = self._orders.jobs - alive if alive is not None else 0
        since = time.monotonic() - self._last
        if missing <= 0 or since < self._pause:
            return
        if not came and self._submitted >= self._orders.jobs + MAX_FUTILE_JOBS:
            raise ScanError(Reason.CLUSTER, "jobs end before a worker joins: see slurm-*.log")
        for _ in range(missing):
            self._submit()
        self._last = time.monotonic()
        doubled = min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause))
        self._pause = FIRST_PAUSE_S if since > MAX_PAUSE_S else doubled

    def close(self) -> None:
        """Cancel all jobs."""
        if self._submitted:
            self._call(["scancel", f"--name={self.name}", "--me"])

    def _alive(self) -> int | None:
        """Return the number of queued and running jobs; None if SLURM does not answer."""
        queue = self._call(["squeue", "--me", f"--name={self.name}", "--noheader", "--format=%T"])
        if queue.returncode:
            return None
        return sum(state not in ("", "COMPLETING") for state in queue.stdout.split("\n"))

    def _submit(self) -> None:
        log = str(self._logs.absolute()).replace("%", "%%") + "/slurm-%j.log"
        command = ["sbatch", "--parsable", f"--job-name={self.name}", f"--output={log}"]
        done = self._call([*command, "--open-mode=append", *self._orders.arguments], self.script())
        if done.returncode:
            raise ScanError(Reason.CLUSTER, "sbatch refused the job: see slurm.log")
        self._submitted += 1

    def _call(self, command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
        try:
            done = subprocess.run(  # noqa: S603
                command,
                input=text,
                capture_output=True,
                text=True,
                timeout=_COMMAND_TIMEOUT_S,
                check=False,
                umask=_PRIVATE_UMASK,
                env={**os.environ, "SLURM_UMASK": f"{_PRIVATE_UMASK:04o}"},
            )
        except FileNotFoundError as exc:
            raise ScanError(
                Reason.CLUSTER, f"{command[0]} is not installed on this machine"
            ) from exc
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(command, os.EX_TEMPFAIL, "", "no answer")
        if done.returncode:
            with append_private(self._logs / "slurm.log") as log:
                log.write(f"{command[0]} ended with {done.returncode}: {done.stderr}\n".encode())
        return done
