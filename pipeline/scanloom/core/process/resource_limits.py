"""Resource limits of a process (ulimit), and errors for processes that reached one."""

from __future__ import annotations

import signal
import sys

from scanloom.core.errors import ScanError
from scanloom.core.reasons import Reason

PROCESSOR_TIME = "the processor time of a process (ulimit -t)"
FILE_SIZE = "the size of files of a process (ulimit -f)"


def is_limited(resource_name: str) -> bool:
    """Return whether this process and its children have a limit: AS, CPU or FSIZE (RLIMIT_*)."""
    if sys.platform != "linux":
        return False
    import resource

    limit: int = getattr(resource, f"RLIMIT_{resource_name}")
    return resource.getrlimit(limit)[0] != resource.RLIM_INFINITY


def limit_met(code: int) -> ScanError | None:
    """Return the error for a process that a limit may have ended; None if no limit did.

    `code` is its exit code, negative for a signal. The hard limit of processor time sends SIGKILL,
    as the out-of-memory killer does.
    """
    if code == -signal.SIGXFSZ:
        return ScanError(Reason.ENVIRONMENT, f"the system limits {FILE_SIZE}")
    if code == -signal.SIGXCPU:
        return ScanError(Reason.ENVIRONMENT, f"the system limits {PROCESSOR_TIME}")
    if code == -signal.SIGKILL and is_limited("CPU"):
        detail = f"the process was killed: the system limits {PROCESSOR_TIME}, or memory ran out"
        return ScanError(Reason.ENVIRONMENT, detail)
    return None
