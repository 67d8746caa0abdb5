"""Cluster on this machine, with a nanny and a worker for each device."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from scanloom.core import Reason, ScanError
from scanloom.engine.clusters.dask_config import (
    ANY_LOOPBACK_PORT,
    PRELOAD,
    close_http_server,
    dask_settings,
    safe_search_path,
    scheduler_spec,
)
from scanloom.engine.machine.gpus import worker_environment
from scanloom.io.system.scratch_folders import check_room, private_temporary_folder

JOIN_TIMEOUT_S = 120.0
"""Time limit for all workers to join."""

START_TIMEOUT_S = 60.0
"""Time limit for a worker process to start; its nanny has twice as long to end it."""

CLOSE_TIMEOUT_S = 30.0
"""Time limit for workers to end in good order."""

POLL_INTERVAL_S = 3.0
"""Time between two checks whether a nanny gave up."""


@contextmanager
def local_cluster(
    devices: Sequence[str], threads: int, private: Path, *, pages: bool = False
) -> Iterator[Any]:
    """Start workers on this machine, on loopback only, with TLS and a key of this run.

    Parameters
    ----------
    devices : sequence of str
        CUDA_VISIBLE_DEVICES of each worker; "" for a CPU worker.
    threads : int
        Concurrent cases in a worker.
    private : Path
        The run's private folder, for Dask's files if the folder for temporary files is not safe.
    pages : bool
        Whether Dask's dashboard is served, on loopback.

    Yields
    ------
    distributed.Client

    Raises
    ------
    ScanError
        CLUSTER if workers do not start in time, those that did are ended; SCRATCH_FULL if there is
        no room for their temporary files.
    """
    import dask
    from distributed import Client, Nanny, SpecCluster
    from distributed.security import Security

    security = Security.temporary()
    common = {
        "nthreads": threads,
        "memory_limit": 0,
        "host": "127.0.0.1",
        "security": security,
        "dashboard_address": ANY_LOOPBACK_PORT,
        "preload": [PRELOAD],
        "death_timeout": START_TIMEOUT_S,
        "silence_logs": 50,
    }
    workers = {
        number: {
            "cls": Nanny,
            "options": {**common, "env": worker_environment(device, len(devices))},
        }
        for number, device in enumerate(devices)
    }
    scheduler = scheduler_spec(security, {"host": "127.0.0.1"}, pages=pages)
    with (
        private_temporary_folder(private) as scratch,
        safe_search_path(scratch),
        dask.config.set(dask_settings(scratch, pages=pages)),
        _children_killed(),
        _cluster_started(
            lambda: SpecCluster(workers, scheduler, security=security, silence_logs=50), scratch
        ) as cluster,
        Client(cluster, security=security, set_as_default=False) as client,
    ):
        if not pages:
            close_http_server(cluster)
        try:
            client.wait_for_workers(len(devices), timeout=JOIN_TIMEOUT_S)
        except (OSError, TimeoutError) as exc:
            check_room(scratch)
            detail = f"not all {len(devices)} workers joined within {JOIN_TIMEOUT_S:.0f} s"
            raise ScanError(Reason.CLUSTER, detail) from exc
        with _workers_replaced(cluster):
            yield client


@contextmanager
def _cluster_started(make: Callable[[], Any], scratch: Path) -> Iterator[Any]:
    """Yield the cluster that `make` starts, and close it, both with a time limit."""
    started: Future[Any] = Future()

    def start() -> None:
        try:
            started.set_result(make())
        except BaseException as exc:  # noqa: BLE001 raised by the waiting thread
            started.set_exception(exc)

    threading.Thread(target=start, name="cluster", daemon=True).start()
    try:
        cluster = started.result(3 * START_TIMEOUT_S)
    except Exception as exc:
        check_room(scratch)
        raise ScanError(Reason.CLUSTER, "the workers of this machine did not start") from exc
    try:
        yield cluster
    finally:
        with suppress(TimeoutError):
            cluster.close(CLOSE_TIMEOUT_S)


@contextmanager
def _children_killed() -> Iterator[None]:
    """Kill the child processes that were started in the block and still run at its end."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()


@contextmanager
def _workers_replaced(cluster: Any) -> Iterator[None]:
    """Replace workers whose nanny gave up: Dask does not replace one that dies at its start."""
    from distributed.core import Status

    over = threading.Event()

    def gave_up() -> list[Any]:
        ended = (Status.closed, Status.failed)
        return [name for name, nanny in list(cluster.workers.items()) if nanny.status in ended]

    async def replace(names: list[Any]) -> None:
        for name in names:
            del cluster.workers[name]
        await cluster.scale_down([])  # restores the requested number

    def keep() -> None:
        while not over.wait(POLL_INTERVAL_S):
            if names := gave_up():
                with suppress(Exception):  # the next check tries again
                    cluster.sync(replace, names)

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join(JOIN_TIMEOUT_S)
