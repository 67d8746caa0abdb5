"""Moments of a run by what it does to its files: at one of them, all its processes are killed.

Python's audit hooks report each operation before it happens; they are counted over all processes of
a run by formula (`formula_run.py`). FORMULA_TRACE: a file to which each operation is appended, a
line each. FORMULA_KILL: `COUNT PATTERN`; at the COUNT-th operation that `PATTERN` of fnmatch
describes, such as `rename */index.parquet`, every process of the run gets SIGKILL. FORMULA_COUNTER:
the file in which those are counted.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from contextlib import suppress
from fnmatch import translate
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def watch_operations() -> None:
    """Follow the environment from now on, in this process."""
    trace = os.environ.get("FORMULA_TRACE")
    count, _, pattern = os.environ.get("FORMULA_KILL", "").partition(" ")
    if not trace and not pattern:
        return
    is_wanted = re.compile(translate(pattern)).match
    counter = os.open(os.environ["FORMULA_COUNTER"], os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    lock = threading.Lock()
    log = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if trace else -1

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        operation = _operation(event, arguments)
        if not operation:
            return
        if trace:
            os.write(log, f"{os.getpid()} {operation}\n".encode())
        if pattern and is_wanted(operation):
            with lock:
                os.write(counter, b"x")
                is_reached = os.lseek(counter, 0, os.SEEK_CUR) == int(count)
            if is_reached:
                kill_all(Path(os.environ["FORMULA"]))

    sys.addaudithook(hook)


def _operation(event: str, arguments: tuple[Any, ...]) -> str:
    """Return `open PATH`, `rename PATH` (the new one), `mkdir`, `remove` or `rmdir`; else nothing.

    Files are opened to be written.
    """
    if event == "open":
        path, _, flags = arguments
        if not isinstance(path, str | bytes) or not isinstance(flags, int) or not flags & _WRITES:
            return ""
        return f"open {os.fsdecode(path)}"
    if event == "os.rename":
        _, path, _, folder = arguments
    elif event in ("os.mkdir", "os.remove", "os.rmdir"):
        path, folder = arguments[0], arguments[-1]
    else:
        return ""
    text = os.fsdecode(path)
    if folder >= 0:
        with suppress(OSError):
            text = str(Path(f"/proc/self/fd/{folder}").readlink() / text)
    return f"{event.removeprefix('os.')} {text}"


def kill_all(notes: Path) -> None:
    """Kill every process of a run, this one last if it is one."""
    from support.formula_run import processes

    found = processes(notes)
    for process in found:
        if process != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    if os.getpid() in found:
        os.kill(os.getpid(), signal.SIGKILL)
