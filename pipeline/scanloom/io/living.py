"""Whether a process still runs."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SILENT = 60.0
"""Seconds after which a run of another host, which says something each second, counts as dead."""
ENDED = ("done", "stopped", "failed")
"""The states that are a run's last word."""
DIED = "died"


def process_start(process: int) -> str:
    """Return when a process began (ticks since boot, proc(5)), "0" where it does not run."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return "1" if process == os.getpid() else "0"  # no /proc: only this process is known
    words = stat.rpartition(")")[2].split()  # the name before may hold anything
    return "0" if words[0] in "ZX" else words[19]  # fields 3 and 22; a zombie runs no more


def process_space() -> str:
    """Return in which PID namespace this process is: containers may share a host's name."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def this_host() -> str:
    """Return eight characters that tell this host, or container, from others without naming it."""
    where = f"{socket.gethostname()} {process_space()}"
    return hashlib.blake2b(where.encode(), digest_size=4).hexdigest()


def state_seen(told: Mapping[str, Any]) -> str:
    """Return the state of a run: "died" where it runs no more and had no last word.

    Parameters
    ----------
    told : mapping
        What its `status.json` says.
    """
    state = str(told["state"])
    if state in ENDED:
        return state
    if told.get("host") == this_host():
        gone = process_start(told["process"]) != told["start"]
    else:
        gone = time.time() - told.get("moment", 0.0) > SILENT
    return DIED if gone else state
