"""Memory that nobody else may see: it holds the key of all ids, and the words of headers."""

from __future__ import annotations

import sys

_PR_SET_DUMPABLE = 4  # prctl(2)


def keep_memory_private() -> None:
    """Let no core of this process be written, and no other process of the user look into it.

    A core is refused twice: its limit is 0, which systems that pipe cores to a program pass over,
    and the process is not dumpable (core(5), proc(5)). Children get the limit; each asks for the
    rest itself.
    """
    if sys.platform != "linux":
        return
    import ctypes
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
