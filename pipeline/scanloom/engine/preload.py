"""Preloaded by Dask's workers: they die with who started them, and serve no pages unasked.

What their memory holds is for nobody else.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Any

from scanloom.core import keep_memory_private
from scanloom.engine.child import die_with_parent

die_with_parent()
keep_memory_private()
with suppress(ValueError):  # not in the main thread
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # when a terminal goes, the run says what to do


def dask_setup(worker: Any) -> None:
    """Close the HTTP server, which Dask always opens; called by Dask when the worker runs."""
    import dask

    if not dask.config.get("distributed.worker.http.routes"):
        worker.http_server.stop()
