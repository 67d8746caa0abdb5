"""What a process of a test writes, waited for with an end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
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


def outputs_of_group(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """Return stdout and stderr of a command whose processes are killed together after a time.

    `subprocess.run` kills the first one only, and the others go on.

    Raises
    ------
    subprocess.TimeoutExpired
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
