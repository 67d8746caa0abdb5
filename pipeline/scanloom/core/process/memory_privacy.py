"""Keep process memory private: it holds the key of all ids, and header text."""

from __future__ import annotations

import sys

_PR_SET_DUMPABLE = 4  # prctl(2)


def keep_memory_private() -> None:
    """Disable core dumps of this process, and access to its memory by other processes of the user.

    Two measures are needed: a core size limit of 0, which systems that pipe cores to a program
    ignore, and a process that is not dumpable (core(5), proc(5)). Children inherit only the limit.
    """
    if sys.platform != "linux":
        return
    import ctypes
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
