"""Liveness of processes and runs."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEARTBEAT_TIMEOUT_S = 60.0
"""Seconds without a heartbeat (one per second) after which a run of another host counts as dead."""
FINAL_STATES = ("done", "stopped", "failed")
"""Final states of a run."""
DIED = "died"


def process_start_ticks(process: int) -> str:
    """Return the start of a process in ticks since boot (proc(5)); "0" if it is not running."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return "1" if process == os.getpid() else "0"  # without /proc, only this process is known
    fields = stat.rpartition(")")[2].split()  # the process name before may contain anything
    return "0" if fields[0] in "ZX" else fields[19]  # fields 3 and 22; a zombie has ended


def pid_namespace() -> str:
    """Return the PID namespace of this process: containers may share the name of a host."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def host_id() -> str:
    """Return eight characters that identify this host or container without revealing its name."""
    identity = f"{socket.gethostname()} {pid_namespace()}"
    return hashlib.blake2b(identity.encode(), digest_size=4).hexdigest()


def observed_state(status: Mapping[str, Any]) -> str:
    """Return the state of a run; "died" if it ended without a final state.

    Parameters
    ----------
    status : mapping
        Content of its `status.json`.
    """
    state = str(status["state"])
    if state in FINAL_STATES:
        return state
    if status.get("host") == host_id():
        dead = process_start_ticks(status["process"]) != status["start"]
    else:
        dead = time.time() - status.get("moment", 0.0) > HEARTBEAT_TIMEOUT_S
    return DIED if dead else state
