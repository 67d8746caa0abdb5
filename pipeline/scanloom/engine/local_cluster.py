"""A cluster on this machine: a nanny and a worker for each device."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from scanloom.core import Reason, ScanError
from scanloom.engine.dask_settings import (
    ANY_PORT,
    PRELOAD,
    careful_path,
    close_pages,
    quiet,
    scheduler_spec,
)
from scanloom.engine.gpus import worker_environment
from scanloom.io.scratch import private_scratch

JOINING = 120.0
"""Seconds that workers have to come."""

STARTING = 60.0
"""Seconds that a worker's process has to start, and half of those that its nanny has to end it."""

CLOSING = 30.0
"""Seconds that workers have to end in good order."""

KEEPING = 3.0
"""Seconds between two looks at whether a nanny gave up."""


@contextmanager
def local_cluster(
    devices: Sequence[str], threads: int, private: Path, *, pages: bool = False
) -> Iterator[Any]:
    """Start workers on this machine: loopback only, TLS with a key of this run, no dashboard.

    Parameters
    ----------
    devices : sequence of str
        One worker each: what its CUDA_VISIBLE_DEVICES says, "" for a CPU worker.
    threads : int
        Cases at once in a worker.
    private : Path
        Of the run: for what Dask keeps in files, if the folder for temporary files is not safe.
    pages : bool
        Whether Dask's pages are served on loopback.

    Yields
    ------
    distributed.Client

    Raises
    ------
    ScanError
        CLUSTER if they don't start, or not in time; what was started of them is ended.
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
        "dashboard_address": ANY_PORT,
        "preload": [PRELOAD],
        "death_timeout": STARTING,
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
        private_scratch(private) as scratch,
        careful_path(scratch),
        dask.config.set(quiet(scratch, pages=pages)),
        _all_ended(),
        _started(
            lambda: SpecCluster(workers, scheduler, security=security, silence_logs=50)
        ) as cluster,
        Client(cluster, security=security, set_as_default=False) as client,
    ):
        if not pages:
            close_pages(cluster)
        try:
            client.wait_for_workers(len(devices), timeout=JOINING)
        except (OSError, TimeoutError) as exc:
            detail = f"not all of its {len(devices)} workers came within {JOINING:.0f} s"
            raise ScanError(Reason.CLUSTER, detail) from exc
        with _kept_up(cluster):
            yield client


@contextmanager
def _started(make: Callable[[], Any]) -> Iterator[Any]:
    """Give the cluster that `make` starts, and close it; neither goes on for ever."""
    made: Future[Any] = Future()

    def start() -> None:
        try:
            made.set_result(make())
        except BaseException as exc:  # noqa: BLE001 told by the thread that waits
            made.set_exception(exc)

    threading.Thread(target=start, name="cluster", daemon=True).start()
    try:
        cluster = made.result(3 * STARTING)
    except Exception as exc:
        raise ScanError(Reason.CLUSTER, "the workers of this machine did not start") from exc
    try:
        yield cluster
    finally:
        with suppress(TimeoutError):
            cluster.close(CLOSING)


@contextmanager
def _all_ended() -> Iterator[None]:
    """End the processes that are left of those that were started in the block."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()


@contextmanager
def _kept_up(cluster: Any) -> Iterator[None]:
    """Start workers again whose nanny gave up: one that dies while it starts is not replaced."""
    from distributed.core import Status

    over = threading.Event()

    def gave_up() -> list[Any]:
        ended = (Status.closed, Status.failed)
        return [name for name, nanny in list(cluster.workers.items()) if nanny.status in ended]

    async def replace(names: list[Any]) -> None:
        for name in names:
            del cluster.workers[name]
        await cluster.scale_down([])  # makes what is there what was asked for

    def keep() -> None:
        while not over.wait(KEEPING):
            if names := gave_up():
                with suppress(Exception):  # the next look tries again
                    cluster.sync(replace, names)

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join(JOINING)
