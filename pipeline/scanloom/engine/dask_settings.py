"""How Dask is set up for runs: thin workers, no pages, nothing that can be reached unasked."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scanloom.own_python import own_environment, safe_path

_PATHS = ("PYTHONPATH", "PYTHONSAFEPATH")

QUIET: dict[str, Any] = {
    "distributed.scheduler.allowed-failures": 0,  # the run counts losses itself
    "distributed.scheduler.work-stealing": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.worker.profile.enabled": False,
    "distributed.admin.log-length": 100,
    "distributed.admin.low-level-log-length": 100,
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.deploy.lost-worker-timeout": "1 day",  # not while its nanny starts it again
    "distributed.nanny.pre-spawn-environ": {"MALLOC_TRIM_THRESHOLD_": 65536},
}
"""Thin workers whose memory is the engine child's affair, with the threads they are given."""

NO_PAGES: dict[str, Any] = {
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}
"""No page and no number over HTTP. `/sitemap.json` would answer still: see `close_pages`."""


def quiet(scratch: Path, *, pages: bool = False) -> dict[str, Any]:
    """Return the settings of Dask's processes of a run, which keep their files in a folder of ours.

    Dask puts that folder at the head of `sys.path`; its own is shared by all users of a machine,
    and belongs to whoever makes it first.

    Parameters
    ----------
    scratch : Path
        A private folder that is there.
    pages : bool
        Whether Dask's pages are served.
    """
    settings = QUIET | {"temporary-directory": str(scratch)}
    return settings if pages else settings | NO_PAGES


@contextmanager
def careful_path(scratch: Path) -> Iterator[None]:
    """Keep off `sys.path`, for a while, what others can write; and `scratch` from then on.

    A worker's process takes over the path of the one that starts it, and its variables.
    """
    before, during = list(sys.path), safe_path(sys.path)
    variables, own = {name: os.environ.get(name) for name in _PATHS}, own_environment()
    os.environ.update({name: own[name] for name in _PATHS})
    sys.path[:] = during
    try:
        yield
    finally:
        added = [p for p in sys.path if p not in during and not Path(p).is_relative_to(scratch)]
        sys.path[:] = [*added, *before]
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


PRELOAD = "scanloom.engine.preload"

ANY_PORT = "127.0.0.1:0"
PAGES = "127.0.0.1:8787"


def scheduler_spec(security: Any, listen: Mapping[str, str], *, pages: bool) -> dict[str, Any]:
    """Return what a `SpecCluster` makes its scheduler of.

    Parameters
    ----------
    security : distributed.Security
        With the key of the run.
    listen : mapping
        Where: `host` or `interface`.
    pages : bool
        Whether Dask's pages are served, on loopback.
    """
    from distributed import Scheduler

    options = {
        "protocol": "tls://",
        "security": security,
        "dashboard": pages,
        "dashboard_address": PAGES if pages else ANY_PORT,
    }
    return {"cls": Scheduler, "options": {**options, **listen}}


def close_pages(cluster: Any) -> None:
    """Stop a cluster's scheduler from answering over HTTP."""
    cluster.loop.add_callback(cluster.scheduler.http_server.stop)
