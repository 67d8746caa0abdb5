"""Launchers of workers: as SLURM jobs, and over the OpenSSH client.

SLURM jobs that end are replaced, and cancelled at the end. The OpenSSH client runs with the user's
own configuration, agent and known hosts.
"""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from scanloom.core import Reason, ScanError
from scanloom.engine.workflow.schema import Cluster, Execution
from scanloom.io.output.private import append_private

FIRST_LOOK_S, MAX_LOOK_S = 30.0, 180.0
"""Time between two questions to SLURM, whose controller serves all users: doubled each time, and
reset when jobs are submitted."""

FIRST_PAUSE_S, MAX_PAUSE_S = 30.0, 600.0
"""Pause between two submissions that replace ended jobs: doubled each time, and reset after jobs
that lived longer than the maximum."""

MAX_FUTILE_JOBS = 3
"""Jobs that may end before any worker joined, beyond the number requested."""

_PRIVATE_UMASK = 0o077
"""SLURM opens the log of a job with the umask of sbatch: logs may hold paths."""

_COMMAND_TIMEOUT_S = 60.0
"""Time limit for a command of SLURM, whose controller may be busy."""


def worker_script(options: Cluster, contact: Path, *arguments: str) -> str:
    """Return the lines of a shell that become the worker: the site's own ones, then its start."""
    program = [options.python or sys.executable, "-P", "-m"]
    command = [*program, "scanloom.engine.clusters.remote_worker", str(contact), *arguments]
    return "\n".join([*options.job_script_prologue, f"exec {shlex.join(command)}"])


class SlurmJobs:
    """The jobs of a run, identified by their common name.

    The output of SLURM's commands and of each job goes to the folder `logs`.

    Attributes
    ----------
    jobs : int
        Number of jobs.
    arguments : tuple of str
        Arguments of sbatch for each job.
    """

    def __init__(self, execution: Execution, contact: Path, logs: Path) -> None:
        self._options, self._contact, self._logs = execution.cluster, contact, logs
        self.name = f"scanloom-{logs.name}"
        workers = 1 if execution.workers == "auto" else execution.workers
        self.jobs = math.ceil(workers / max(1, self._options.gpus))
        self.arguments = ("--ntasks=1", *self._requested())
        self._submitted = 0
        self._last, self._pause = -math.inf, 0.0
        self._next_look, self._look = -math.inf, FIRST_LOOK_S

    def _requested(self) -> Iterator[str]:
        options = self._options
        requested = {
            "partition": options.queue,
            "account": options.account,
            "time": math.ceil(options.walltime / 60) if options.walltime else None,
            "mem": f"{math.ceil(options.memory / 2**20)}M" if options.memory else None,
            "cpus-per-task": options.cores,
            "gres": f"gpu:{options.gpus}" if options.gpus else None,
        }
        yield from (f"--{name}={value}" for name, value in requested.items() if value is not None)
        for line in options.job_extra_directives:
            yield from shlex.split(line.removeprefix("#SBATCH").strip())

    def script(self) -> str:
        """Return the script of a job."""
        # Jobs are submitted with a umask under which their log is private; results are not: they
        # are written with the umask of this process, which POSIX tells to who sets another one
        mask = os.umask(_PRIVATE_UMASK)
        os.umask(mask)
        worker = worker_script(self._options, self._contact)
        return f"#!/bin/sh\numask {mask:04o}\n{worker}\n"

    def ensure_running(self, joined: bool) -> None:
        """Submit the jobs that are missing; see `WorkerLauncher`.

        A job that SLURM itself requeues (after preemption or the loss of its node) keeps its
        number in the queue, and is not missing.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look, self._look = now + self._look, min(MAX_LOOK_S, 2 * self._look)
        # Without an answer of SLURM none is taken to be missing: jobs would be submitted twice
        alive = self._alive() if self._submitted else 0
        missing = self.jobs - alive if alive is not None else 0
        since = now - self._last
        if missing <= 0 or since < self._pause:
            return
        if not joined and self._submitted >= self.jobs + MAX_FUTILE_JOBS:
            raise ScanError(Reason.CLUSTER, "jobs end before a worker joins: see slurm-*.log")
        # First: a job that is refused is not submitted again at once either
        self._last, self._next_look, self._look = now, now + FIRST_LOOK_S, 2 * FIRST_LOOK_S
        doubled = min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause))
        self._pause = FIRST_PAUSE_S if since > MAX_PAUSE_S else doubled
        for _ in range(missing):
            self._submit()

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
        self._submitted += 1  # first: without an answer, there may be a job all the same
        done = self._call([*command, "--open-mode=append", *self.arguments], self.script())
        if done.returncode:
            raise ScanError(Reason.CLUSTER, "sbatch refused the job: see slurm.log")

    def _call(self, command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
        try:
            done = subprocess.run(  # noqa: S603  # sbatch and the like
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
            detail = f"{command[0]} is not installed on this machine"
            raise ScanError(Reason.CLUSTER, detail) from exc
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(command, os.EX_TEMPFAIL, "", "no answer")
        if done.returncode:
            with append_private(self._logs / "slurm.log") as log:
                log.write(f"{command[0]} ended with {done.returncode}: {done.stderr}\n".encode())
        return done


PAUSES_S = (0.0, 10.0, 30.0, 120.0, 300.0)
"""Pause before the first connection to a host, the second, and so on; the last one repeats."""

FIRST_ROUND_PAUSE_S = 1.0
"""Pause before a host is connected again while no worker has joined yet."""

MAX_FUTILE_ROUNDS = 2
"""Sessions per host that may end before any worker joined."""

_CLOSE_TIMEOUT_S = 5.0
"""Time limit for all sessions to end after their input was closed."""


def host_names(host_list: str, options: Cluster) -> tuple[str, ...]:
    """Return the hosts of `ssh:HOST,HOST`, or else of the workflow.

    Raises
    ------
    ScanError
        CLUSTER without hosts.
    """
    hosts = tuple(host for host in host_list.split(",") if host) or options.hosts
    if not hosts:
        raise ScanError(Reason.CLUSTER, "no hosts: `--cluster ssh:HOST,HOST` or cluster.hosts")
    return hosts


class SshHosts:
    """One ssh session per host, in which its workers run.

    `hosts` are as the ssh client takes them: names, user@name, names of its configuration. The
    output of each session goes to the folder `logs`.
    """

    def __init__(self, hosts: Sequence[str], options: Cluster, contact: Path, logs: Path) -> None:
        self._hosts, self._options, self._contact, self._logs = hosts, options, contact, logs
        self._sessions: dict[int, subprocess.Popen[bytes]] = {}
        self._tried = dict.fromkeys(range(len(hosts)), 0)
        self._next = dict.fromkeys(range(len(hosts)), 0.0)

    def command(self, host: str) -> list[str]:
        """Return the command that starts the workers of a host."""
        script = worker_script(self._options, self._contact, "--tied")
        unattended = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-T"]
        remote = ["--", host, shlex.join(["sh", "-c", script])]
        return ["ssh", *self._options.ssh_options, *unattended, *remote]

    def ensure_running(self, joined: bool) -> None:
        """Open the sessions that are missing; see `WorkerLauncher`."""
        now = time.monotonic()
        for number, host in enumerate(self._hosts):
            session = self._sessions.get(number)
            if session is not None and session.poll() is None:
                continue
            if session is not None:
                del self._sessions[number]
                pause = PAUSES_S[min(self._tried[number], len(PAUSES_S) - 1)]
                self._next[number] = now + (pause if joined else FIRST_ROUND_PAUSE_S)
            futile = min(self._tried.values()) >= MAX_FUTILE_ROUNDS
            if not joined and futile and not self._sessions:
                raise ScanError(Reason.CLUSTER, "no worker started on any host: see ssh-*.log")
            if now >= self._next[number] and (joined or self._tried[number] < MAX_FUTILE_ROUNDS):
                self._sessions[number] = self._open(number, host)
                self._tried[number] += 1

    def close(self) -> None:
        """End all sessions: their workers stop at the end of their input."""
        for session in self._sessions.values():
            if session.stdin is not None:
                with suppress(OSError):  # it has ended
                    session.stdin.close()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for session in self._sessions.values():
            try:
                session.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                session.kill()
                session.wait()

    def _open(self, number: int, host: str) -> subprocess.Popen[bytes]:
        # Outside `try`: a log that can't be written is an error of the disk, not of the client
        with append_private(self._logs / f"ssh-{number}.log") as log:
            try:
                return subprocess.Popen(  # noqa: S603  # ssh
                    self.command(host),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C at the terminal goes to the run only
                )
            except OSError as exc:
                raise ScanError(Reason.CLUSTER, f"no ssh client ({type(exc).__name__})") from exc
