"""Preloaded by Dask's workers: they die with who started them, and serve no pages unasked."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Any

from scanloom.engine.child import die_with_parent

die_with_parent()
with suppress(ValueError):  # not in the main thread
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # when a terminal goes, the run says what to do


def dask_setup(worker: Any) -> None:
    """Close the HTTP server, which Dask always opens; called by Dask when the worker runs."""
    import dask

    if not dask.config.get("distributed.worker.http.routes"):
        worker.http_server.stop()
