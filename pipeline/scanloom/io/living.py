"""Whether a process still runs."""

from __future__ import annotations

import os
from pathlib import Path


def process_start(process: int) -> str:
    """Return when a process began (ticks since boot, proc(5)), "0" where it does not run."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return "1" if process == os.getpid() else "0"  # no /proc: only this process is known
    words = stat.rpartition(")")[2].split()  # the name before may hold anything
    return "0" if words[0] in "ZX" else words[19]  # fields 3 and 22; a zombie runs no more
