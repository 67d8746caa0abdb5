"""Preloaded by Dask workers: they die with their parent, and serve no pages unless requested.

Other processes cannot read their memory.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Any

from scanloom.core import keep_memory_private
from scanloom.engine.worker.child_main import die_with_parent

die_with_parent()
keep_memory_private()
with suppress(ValueError):  # not in the main thread
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the run decides when its terminal closes


def dask_setup(worker: Any) -> None:
    """Close the HTTP server, which Dask always opens; Dask calls this when the worker runs."""
    import dask

    if not dask.config.get("distributed.worker.http.routes"):
        worker.http_server.stop()
