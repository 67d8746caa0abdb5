"""Preloaded by Dask's workers: they die with who started them, and serve no pages unasked."""

from __future__ import annotations

from typing import Any

from scanloom.engine.child import die_with_parent

die_with_parent()


def dask_setup(worker: Any) -> None:
    """Close the HTTP server, which Dask always opens; called by Dask when the worker runs."""
    import dask

    if not dask.config.get("distributed.worker.http.routes"):
        worker.http_server.stop()
