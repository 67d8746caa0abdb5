"""Clusters for a run: on this machine, an existing one, or one started for the run."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from scanloom.core import Reason, ScanError
from scanloom.engine.case.models import check_unchanged
from scanloom.engine.clusters import contact
from scanloom.engine.clusters.kinds import LOCAL, WORKER_TIMEOUT_S, cluster_names, find_kind
from scanloom.engine.machine.devices import local_devices, worker_environment
from scanloom.engine.prepare import Request
from scanloom.engine.worker.messages import CaseFile, ChildSetup
from scanloom.engine.worker.pool import Pool
from scanloom.engine.workflow.schema import Execution
from scanloom.io.system.scratch_folders import check_room

_POLL_INTERVAL_S = 3.0
"""Time between two checks that all requested workers are running."""

_SCHEDULER_TIMEOUT_S = 30.0
"""Time limit for the answer of a scheduler."""

_JOIN_TIMEOUT_S = 120.0
"""Time limit for the first worker of a cluster, unless the workflow sets one."""


@contextmanager
def open_pool(
    kind: str,
    request: Request,
    case_file: CaseFile,
    child: ChildSetup,
    on_unfit: Callable[[str], None],
    spool: Path | None = None,
) -> Iterator[Pool]:
    """Start or join the cluster of a run, check its workers, and yield them as a pool.

    Parameters
    ----------
    kind : str
        "local", a name of `scanloom.engine.clusters.kinds`, such as "slurm" or "ssh:HOST,HOST",
        or the address or scheduler file of a cluster.
    request : Request
        Models, workers, threads and device, and the options of the cluster.
    case_file : CaseFile
        The cases, in the run's private folder. All workers must see it, and the output folder.
    child : ChildSetup
        Settings of the child processes.
    on_unfit : callable
        Called with the reason when a worker is dismissed.
    spool : Path or None
        The spool of a service, which all workers must read.

    Raises
    ------
    ScanError
        CLUSTER if the cluster cannot be started or joined, or a worker cannot do the work.
    """
    from scanloom.engine.clusters.dask_pool import DaskPool, PoolLimits, SupervisorSetup

    launched, private = find_kind(kind), case_file.path.parent
    models, digests = request.workflow.models, request.digests
    execution = request.workflow.execution
    held = contact.hold_handshake(child.output.out, models, digests, case_file.path, spool)
    limits = PoolLimits(
        launched[0].worker_timeout_s if launched else WORKER_TIMEOUT_S,
        same_machine=kind == LOCAL,
        check_models=partial(check_unchanged, models, digests),
        on_unfit=on_unfit,
    )
    with open_cluster(kind, execution, private, len(case_file)) as client, held as handshake:
        handshake.check(client)
        setup = SupervisorSetup(private.name, child, execution.time_limit, private, handshake)
        pool = DaskPool(client, case_file, setup, limits)
        try:
            yield pool
        finally:
            pool.stop(5.0)


def open_cluster(
    kind: str, execution: Execution, private: Path, tasks: int
) -> AbstractContextManager[Any]:
    """Return a context manager that starts or joins a cluster and yields a client of it.

    There are no more workers on this machine than `tasks`. `kind` is as in `open_pool`, `private`
    the run's private folder.
    """
    cluster = execution.cluster
    if kind == LOCAL:
        devices = local_devices(execution)[: max(1, tasks)]
        return local_cluster(devices, execution.in_flight, private, pages=cluster.dashboard)
    if launched := find_kind(kind):
        launched_kind, hosts = launched
        wait = cluster.wait or launched_kind.worker_timeout_s
        start = launched_kind.launcher(execution, hosts, private)
        return hosted_cluster(start, execution, private, wait)
    return joined_cluster(kind, cluster.wait or _JOIN_TIMEOUT_S)


def check_cluster(kind: str, execution: Execution) -> None:
    """Check the name and options of a cluster, before anything is created for it.

    Raises
    ------
    ScanError
        CLUSTER if the kind is unknown, or the workflow lacks an option that it needs.
    """
    if kind == LOCAL:
        return
    if launched := find_kind(kind):
        launched_kind, hosts = launched
        launched_kind.launcher(execution, hosts, Path())
    else:
        _named(kind)


@contextmanager
def joined_cluster(address: str, patience: float) -> Iterator[Any]:
    """Join a cluster by its address (tls://..., tcp://...) or its scheduler file.

    Raises
    ------
    ScanError
        CLUSTER if the cluster cannot be reached, or has no worker within `patience` seconds.
    """
    import dask
    from distributed import Client

    named = _named(address)
    with dask.config.set(contact.WORKER_SETTINGS):
        try:
            client = Client(**named, timeout=_SCHEDULER_TIMEOUT_S, set_as_default=False)
        except (OSError, TimeoutError, ValueError, KeyError, TypeError) as exc:
            detail = f"no scheduler answers at this address ({type(exc).__name__})"
            raise ScanError(Reason.CLUSTER, detail) from exc
        with client:
            try:
                client.wait_for_workers(1, timeout=patience)
            except (OSError, TimeoutError) as exc:
                detail = f"the cluster had no worker for {patience:.0f} s"
                raise ScanError(Reason.CLUSTER, detail) from exc
            yield client


def _named(address: str) -> dict[str, str]:
    """Return the arguments by which Dask's client finds a cluster."""
    if "://" in address:
        return {"address": address}
    if Path(address).is_file():
        return {"scheduler_file": address}
    known = ", ".join((LOCAL, *cluster_names()))
    raise ScanError(Reason.CLUSTER, f"neither {known}, nor an address, nor a scheduler file")


@contextmanager
def hosted_cluster(
    start: Callable[[Path], contact.WorkerLauncher],
    execution: Execution,
    private: Path,
    wait: float,
) -> Iterator[Any]:
    """Run the scheduler here, and start workers on other machines for this run.

    Parameters
    ----------
    start : callable
        Makes the launcher of the workers, from the path of the contact file.
    private : Path
        The run's private folder, for the contact file and the key of the run. Both are removed at
        the end.
    wait : float
        Time limit for the first worker in seconds.

    Raises
    ------
    ScanError
        CLUSTER if no worker joins.
    """
    from distributed import Client, SpecCluster
    from distributed.security import Security

    options = execution.cluster
    security = Security.temporary()
    listen = {"interface": options.interface} if options.interface else {}
    scheduler = contact.scheduler_spec(security, listen, pages=options.dashboard)
    with (
        contact.dask_configured(private, pages=options.dashboard),
        SpecCluster({}, scheduler, security=security, silence_logs=50) as cluster,
        Client(cluster, security=security, set_as_default=False) as client,
        contact.contact_file(cluster.scheduler_address, execution, security, private) as path,
    ):
        if not options.dashboard:
            contact.close_http_server(cluster)
        launcher = start(path)
        try:
            _wait_for_first(client, launcher, wait)
            with _repeated(lambda: launcher.ensure_running(joined=True)):
                yield client
        finally:
            launcher.close()


@contextmanager
def _repeated(replace_workers: Callable[[], None]) -> Iterator[None]:
    """Replace workers that ended, in a thread; failures are retried at the next check."""
    over = threading.Event()

    def keep() -> None:
        while not over.wait(_POLL_INTERVAL_S):
            with suppress(Exception):  # the next check tries again
                replace_workers()

    keeper = threading.Thread(target=keep, name="keeper", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join(LOCAL_JOIN_TIMEOUT_S)


def _wait_for_first(client: Any, launcher: contact.WorkerLauncher, wait: float) -> None:
    deadline = time.monotonic() + wait
    while True:
        launcher.ensure_running(joined=False)
        with suppress(TimeoutError):  # none yet: replace workers that ended
            client.wait_for_workers(1, timeout=_POLL_INTERVAL_S)
            return
        if time.monotonic() > deadline:
            raise ScanError(Reason.CLUSTER, f"no worker joined within {wait:.0f} s")


LOCAL_JOIN_TIMEOUT_S = 120.0
"""Time limit for all workers to join."""

START_TIMEOUT_S = 60.0
"""Time limit for a worker process to start; its nanny has twice as long to end it."""

CLOSE_TIMEOUT_S = 30.0
"""Time limit for workers to end in good order."""


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

    Raises
    ------
    ScanError
        CLUSTER if workers do not start in time, those that did are ended; SCRATCH_FULL if there is
        no room for their temporary files.
    """
    from distributed import Client, Nanny, SpecCluster
    from distributed.security import Security

    security = Security.temporary()
    common = {
        "nthreads": threads,
        "memory_limit": 0,
        "host": "127.0.0.1",
        "security": security,
        "dashboard_address": contact.ANY_LOOPBACK_PORT,
        "preload": [contact.PRELOAD],
        "death_timeout": START_TIMEOUT_S,
        "silence_logs": 50,
    }
    environments = [worker_environment(device, devices) for device in devices]
    workers = {
        number: {"cls": Nanny, "options": {**common, "env": environment}}
        for number, environment in enumerate(environments)
    }
    scheduler = contact.scheduler_spec(security, {"host": "127.0.0.1"}, pages=pages)
    with (
        contact.dask_configured(private, pages=pages) as scratch,
        _children_killed(),
        _cluster_started(
            lambda: SpecCluster(workers, scheduler, security=security, silence_logs=50), scratch
        ) as cluster,
        Client(cluster, security=security, set_as_default=False) as client,
    ):
        if not pages:
            contact.close_http_server(cluster)
        try:
            client.wait_for_workers(len(devices), timeout=LOCAL_JOIN_TIMEOUT_S)
        except (OSError, TimeoutError) as exc:
            check_room(scratch)
            detail = f"not all {len(devices)} workers joined within {LOCAL_JOIN_TIMEOUT_S:.0f} s"
            raise ScanError(Reason.CLUSTER, detail) from exc
        with _repeated(lambda: _replace_local_workers(cluster)):
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
        # A nanny has twice START_TIMEOUT_S to end a worker that does not start
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


def _replace_local_workers(cluster: Any) -> None:
    """Replace workers whose nanny gave up: Dask does not replace one that dies at its start."""
    from distributed.core import Status

    ended = (Status.closed, Status.failed)
    names = [name for name, nanny in list(cluster.workers.items()) if nanny.status in ended]

    async def replace() -> None:
        for name in names:
            del cluster.workers[name]
        await cluster.scale_down([])  # restores the requested number

    if names:
        cluster.sync(replace)
