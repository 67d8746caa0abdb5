"""What the system limits for each process (ulimit), and what may be said of who meets a limit."""

from __future__ import annotations

import signal
import sys

from scanloom.core.errors import ScanError
from scanloom.core.reasons import Reason

PROCESSOR_TIME = "the processor time of a process (ulimit -t)"
FILE_SIZE = "the size of files of a process (ulimit -f)"


def is_limited(what: str) -> bool:
    """Whether this process, and those it starts, have a limit: AS, CPU or FSIZE, as RLIMIT_*."""
    if sys.platform != "linux":
        return False
    import resource

    limit: int = getattr(resource, f"RLIMIT_{what}")
    return resource.getrlimit(limit)[0] != resource.RLIM_INFINITY


def limit_met(code: int) -> ScanError | None:
    """Return what ended a process if a limit may have; `code` is negative for a signal.

    The hard limit of processor time kills without a word, as the system does for memory.
    """
    if code == -signal.SIGXFSZ:
        return ScanError(Reason.ENVIRONMENT, f"the system limits {FILE_SIZE}")
    if code == -signal.SIGXCPU:
        return ScanError(Reason.ENVIRONMENT, f"the system limits {PROCESSOR_TIME}")
    if code == -signal.SIGKILL and is_limited("CPU"):
        detail = f"its process was killed: the system limits {PROCESSOR_TIME}; or for memory?"
        return ScanError(Reason.ENVIRONMENT, detail)
    return None
