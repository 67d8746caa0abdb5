"""Worker processes forked from one that has imported everything: runs in tests start at once.

`popen` stands in for `subprocess.Popen` in `scanloom.engine.worker.supervisor`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from support.fork_server import WORKER, ForkedProcess, fork_server


def popen(command: Sequence[str], stdout: Any, env: Mapping[str, str], **_: Any) -> ForkedProcess:
    *_, module, number = command
    assert module == WORKER
    output = stdout.fileno()
    return fork_server().fork(module, [], env, [output, output, int(number)])


WARM_WORKERS = SimpleNamespace(
    Popen=popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
)
"""Stands in for the module `subprocess`."""
