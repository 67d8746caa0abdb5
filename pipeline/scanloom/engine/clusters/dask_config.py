"""Dask's configuration for runs: minimal workers, and no HTTP pages unless requested."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scanloom.own_python import own_environment, safe_path

_PATHS = ("PYTHONPATH", "PYTHONSAFEPATH")

WORKER_SETTINGS: dict[str, Any] = {
    "distributed.scheduler.allowed-failures": 0,  # the run itself counts losses
    "distributed.scheduler.work-stealing": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.worker.profile.enabled": False,
    "distributed.admin.log-length": 100,
    "distributed.admin.low-level-log-length": 100,
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.deploy.lost-worker-timeout": "1 day",  # its nanny may be restarting it
    "distributed.nanny.pre-spawn-environ": {"MALLOC_TRIM_THRESHOLD_": 65536},
}
"""Settings of workers; their memory is limited by the engine child, not by Dask."""

NO_HTTP_ROUTES: dict[str, Any] = {
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}
"""Settings without HTTP routes. `/sitemap.json` still answers: see `close_http_server`."""


def dask_settings(scratch: Path, *, pages: bool = False) -> dict[str, Any]:
    """Return the settings of a run's Dask processes, with a private folder for their files.

    Dask puts this folder first in `sys.path`. Its default is shared by all users of a machine, and
    belongs to the user who creates it first.

    Parameters
    ----------
    scratch : Path
        An existing private folder.
    pages : bool
        Whether Dask's dashboard is served.
    """
    settings = WORKER_SETTINGS | {"temporary-directory": str(scratch)}
    return settings if pages else settings | NO_HTTP_ROUTES


@contextmanager
def safe_search_path(scratch: Path) -> Iterator[None]:
    """Remove folders that other users can write to from `sys.path`, for the block.

    A worker process inherits the search path and the environment variables of its parent. Folders
    in `scratch` that Dask adds are removed for good.
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


PRELOAD = "scanloom.engine.clusters.dask_preload"

ANY_LOOPBACK_PORT = "127.0.0.1:0"
DASHBOARD_ADDRESS = "127.0.0.1:8787"


def scheduler_spec(security: Any, listen: Mapping[str, str], *, pages: bool) -> dict[str, Any]:
    """Return the specification of a scheduler for `SpecCluster`.

    Parameters
    ----------
    security : distributed.Security
        Holds the key of the run.
    listen : mapping
        `host` or `interface` to listen on.
    pages : bool
        Whether Dask's dashboard is served, on loopback.
    """
    from distributed import Scheduler

    options = {
        "protocol": "tls://",
        "security": security,
        "dashboard": pages,
        "dashboard_address": DASHBOARD_ADDRESS if pages else ANY_LOOPBACK_PORT,
    }
    return {"cls": Scheduler, "options": {**options, **listen}}


def close_http_server(cluster: Any) -> None:
    """Stop a cluster's scheduler from answering over HTTP."""
    cluster.loop.add_callback(cluster.scheduler.http_server.stop)
