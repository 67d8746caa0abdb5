"""Jobs of the sandbox's children in tests: they really crash, hang and use up memory."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from scanloom.core import Reason, ScanError
from scanloom.io.system.sandbox import report_progress, shared_empty


def give_back(value: Any) -> Any:
    return value


def fill(array: np.ndarray, value: float) -> int:
    """Write into the caller's array; return this process."""
    array[...] = value
    return os.getpid()


def make(count: int) -> tuple[str, np.ndarray, np.ndarray]:
    """Return arrays that are made here, in shared memory and not."""
    shared = shared_empty((2, count), np.int16)
    shared[...] = np.arange(count)
    return "made", shared.T, np.arange(count)[::2]


def segfault() -> None:
    ctypes.string_at(8)


def abort() -> None:
    os.abort()


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def tire() -> None:
    """Use up the processor time that the process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (1, hard))
    while time.process_time() < 20.0:
        sum(range(1_000_000))  # reports alone wait for their reader more than they compute
        report_progress()


def hang() -> None:
    """Hold the interpreter's lock in C code, as a decoder in an endless loop does."""
    re.match("(a|a)*b", "a" * 64)


def wait(seconds: float) -> float:
    """Compute nothing, as a process without a core, or before a disk that does not answer."""
    time.sleep(seconds)
    return seconds


def dawdle(steps: int, seconds: float) -> int:
    for _ in range(steps):
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        report_progress()
    return steps


def swallow(size: int) -> int:
    return int(np.ones(size, np.uint8).sum())


def swallow_in_c(size: int) -> None:
    """Allocate as C code does that believes in malloc."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.memset(libc.malloc(size), 1, size)


def refuse() -> None:
    raise ScanError(Reason.TRUNCATED, "cut")


def have_a_fault() -> None:
    raise KeyError("Test^Nobody")


def babble() -> None:
    """Write bytes that are no message."""
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\xff" * 4096)
        except OSError:
            continue
    time.sleep(60)


def tell_and_hang(path: Path) -> None:
    """Leave this process' number in a file, and hang."""
    draft = path.with_suffix(".draft")
    draft.write_text(str(os.getpid()))
    draft.replace(path)
    hang()
