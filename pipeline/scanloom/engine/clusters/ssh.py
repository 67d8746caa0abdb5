"""Workers over the OpenSSH client, with the user's own configuration, agent and known hosts."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from scanloom.core import Reason, ScanError
from scanloom.engine.workflow.schema import Cluster
from scanloom.io.output.private import append_private

PAUSES_S = (0.0, 10.0, 30.0, 120.0, 300.0)
"""Pause before the first connection to a host, the second, and so on; the last one repeats."""

FIRST_PAUSE_S = 1.0
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

    Parameters
    ----------
    hosts : sequence of str
        Hosts as the ssh client takes them: names, user@name, names of its configuration.
    options : Cluster
        ssh_options, python, job_script_prologue.
    contact : Path
        The contact file.
    logs : Path
        Folder for the output of each session.
    """

    def __init__(self, hosts: Sequence[str], options: Cluster, contact: Path, logs: Path) -> None:
        self._hosts, self._options, self._contact, self._logs = hosts, options, contact, logs
        self._sessions: dict[int, subprocess.Popen[bytes]] = {}
        self._tried = dict.fromkeys(range(len(hosts)), 0)
        self._next = dict.fromkeys(range(len(hosts)), 0.0)

    def command(self, host: str) -> list[str]:
        """Return the command that starts the workers of a host."""
        python = self._options.python or sys.executable
        worker = [
            python,
            "-P",
            "-m",
            "scanloom.engine.clusters.remote_worker",
            str(self._contact),
            "--tied",
        ]
        script = "\n".join([*self._options.job_script_prologue, f"exec {shlex.join(worker)}"])
        unattended = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-T"]
        return [
            "ssh",
            *self._options.ssh_options,
            *unattended,
            "--",
            host,
            shlex.join(["sh", "-c", script]),
        ]

    def ensure_running(self, came: bool) -> None:
        """Open the sessions that are missing; see `WorkerLauncher`."""
        now = time.monotonic()
        for number, host in enumerate(self._hosts):
            session = self._sessions.get(number)
            if session is not None and session.poll() is None:
                continue
            if session is not None:
                del self._sessions[number]
                pause = PAUSES_S[min(self._tried[number], len(PAUSES_S) - 1)]
                self._next[number] = now + (pause if came else FIRST_PAUSE_S)
            futile = min(self._tried.values()) >= MAX_FUTILE_ROUNDS
            if not came and futile and not self._sessions:
                raise ScanError(Reason.CLUSTER, "no worker started on any host: see ssh-*.log")
            if now >= self._next[number] and (came or self._tried[number] < MAX_FUTILE_ROUNDS):
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
                return subprocess.Popen(  # noqa: S603
                    self.command(host),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C at the terminal goes to the run only
                )
            except OSError as exc:
                raise ScanError(Reason.CLUSTER, f"no ssh client ({type(exc).__name__})") from exc
