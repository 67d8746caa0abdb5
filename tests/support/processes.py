"""What a process of a test writes, waited for with an end."""

from __future__ import annotations

import subprocess
import threading
from typing import AnyStr

PATIENCE_S = 120.0
"""For a process to begin: two cores may be busy."""


def next_line(process: subprocess.Popen[AnyStr], seconds: float = PATIENCE_S) -> AnyStr:
    """Return the next line of a process's stdout, empty at its end.

    A process that is silent for too long is killed, so that this is its end.
    """
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()
