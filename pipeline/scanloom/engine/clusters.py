"""Clusters that a run may use: this machine, one that is there already, or one it starts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scanloom.core import Reason, ScanError
from scanloom.engine.book import CaseBook
from scanloom.engine.cluster_contact import Starter, contact_file, make_contact
from scanloom.engine.dask_settings import (
    QUIET,
    careful_path,
    close_pages,
    quiet,
    scheduler_spec,
)
from scanloom.engine.gpus import local_devices
from scanloom.engine.handshake import Handshake
from scanloom.engine.local_cluster import local_cluster
from scanloom.engine.models import check_same
from scanloom.engine.pool import Pool
from scanloom.engine.worker_messages import Setup
from scanloom.engine.workflow import Execution, Workflow
from scanloom.io.scratch import private_scratch

LOCAL, SLURM, SSH, KUBERNETES = "local", "slurm", "ssh", "kubernetes"
HOSTED = (SLURM, SSH, KUBERNETES)
"""Clusters whose workers are started for the run."""

KEEPING = 3.0
"""Seconds between two looks at whether all workers that were asked for are there."""

ANSWERING = 30.0
"""Seconds that a scheduler has to answer."""

JOINING = 120.0
"""Seconds that the workers of a cluster have to come, unless the workflow says it."""


@dataclass(frozen=True)
class Job:
    """What a run has for its workers.

    Parameters
    ----------
    out, private : Path
        The output folder and the run's private folder: all workers must see both.
    book : CaseBook
        Of the cases.
    child : Setup
        For the engines.
    digests : tuple of str
        The `card_digest` of each model when the recipe was made.
    on_unfit : callable
        Is told why a worker was sent away.
    """

    out: Path
    private: Path
    book: CaseBook
    child: Setup
    digests: tuple[str, ...]
    on_unfit: Callable[[str], None]


@contextmanager
def open_pool(kind: str, workflow: Workflow, job: Job) -> Iterator[Pool]:
    """Start or join the cluster of a run, check that it can do the work, and give its workers.

    Parameters
    ----------
    kind : str
        "local", "slurm", "ssh" or "ssh:HOST,HOST", "kubernetes", or the address or scheduler
        file of a cluster.
    workflow : Workflow
        Models, workers, threads and device, and the options of its cluster.
    job : Job
        What is to be done.

    Raises
    ------
    ScanError
        CLUSTER.
    """
    from scanloom.engine.dask_pool import DaskPool, Terms
    from scanloom.engine.dask_worker import EngineSetup

    shake = Handshake(job.out, workflow.models, job.digests, job.book.path)
    terms = Terms(
        patience_of(kind),
        same_machine=kind == LOCAL,
        check_models=partial(check_same, workflow.models, job.digests),
        on_unfit=job.on_unfit,
    )
    with open_cluster(kind, workflow, job.private, len(job.book)) as client, shake:
        shake.check(client)
        setup = EngineSetup(
            job.private.name,
            job.child,
            workflow.execution.time_limit,
            job.private,
            shake.question,
            shake.expected,
        )
        pool = DaskPool(client, job.book, setup, terms)
        try:
            yield pool
        finally:
            pool.stop(5.0)


def open_cluster(
    kind: str, workflow: Workflow, private: Path, tasks: int
) -> AbstractContextManager[Any]:
    """Return what starts or joins a cluster, as `open_pool`, and gives a client of it.

    Parameters
    ----------
    kind, workflow
        As there.
    private : Path
        The run's private folder.
    tasks : int
        How many cases there are: no more workers than these.
    """
    execution = workflow.execution
    cluster = execution.cluster
    if kind == LOCAL:
        devices = local_devices(execution)[: max(1, tasks)]
        return local_cluster(devices, execution.in_flight, private, pages=cluster.dashboard)
    if kind.partition(":")[0] in HOSTED:
        wait = cluster.wait or patience_of(kind)
        return hosted_cluster(starter_of(kind, execution, private), execution, private, wait)
    return joined_cluster(kind, cluster.wait or JOINING)


def check_cluster(kind: str, execution: Execution) -> None:
    """Refuse what is no cluster, before anything is made for it.

    Raises
    ------
    ScanError
        CLUSTER if it is none, or if the workflow lacks what it needs.
    """
    if kind == LOCAL:
        return
    if kind.partition(":")[0] in HOSTED:
        starter_of(kind, execution, Path())
    else:
        _named(kind)


def patience_of(kind: str) -> float:
    """Return for how many seconds a run goes on without a worker: as long as a queue takes."""
    queued = kind in (SLURM, KUBERNETES)
    return float("inf") if queued else 600.0


def starter_of(kind: str, execution: Execution, private: Path) -> Callable[[Path], Starter]:
    """Return what starts workers, once it is told where the contact file lies.

    Raises
    ------
    ScanError
        CLUSTER if the workflow lacks what it needs.
    """
    name, _, said = kind.partition(":")
    if name == SLURM:
        from scanloom.engine.slurm import SlurmJobs, read_orders

        orders = read_orders(execution)
        return lambda contact: SlurmJobs(orders, contact, private)
    if name == KUBERNETES:
        from scanloom.engine.kubernetes import KubernetesJob

        return lambda contact: KubernetesJob(execution, contact, private)
    from scanloom.engine.ssh import SshHosts

    hosts = tuple(host for host in said.split(",") if host) or execution.cluster.hosts
    if not hosts:
        raise ScanError(Reason.CLUSTER, "no hosts: `--cluster ssh:HOST,HOST` or cluster.hosts")
    return lambda contact: SshHosts(hosts, execution.cluster, contact, private)


@contextmanager
def joined_cluster(address: str, patience: float) -> Iterator[Any]:
    """Join a cluster by its address (tls://..., tcp://...) or its scheduler file.

    Raises
    ------
    ScanError
        CLUSTER if it can't be reached, or has no worker within `patience` seconds.
    """
    import dask
    from distributed import Client

    named = _named(address)
    with dask.config.set(QUIET):
        try:
            client = Client(**named, timeout=ANSWERING, set_as_default=False)
        except (OSError, TimeoutError, ValueError, KeyError, TypeError) as exc:
            detail = f"no scheduler answers there ({type(exc).__name__})"
            raise ScanError(Reason.CLUSTER, detail) from exc
        with client:
            try:
                client.wait_for_workers(1, timeout=patience)
            except (OSError, TimeoutError) as exc:
                detail = f"it had no worker for {patience:.0f} s"
                raise ScanError(Reason.CLUSTER, detail) from exc
            yield client


def _named(address: str) -> dict[str, str]:
    """Return how Dask's client is told where a cluster is."""
    if "://" in address:
        return {"address": address}
    if Path(address).is_file():
        return {"scheduler_file": address}
    known = ", ".join((LOCAL, *HOSTED))
    raise ScanError(Reason.CLUSTER, f"neither {known}, nor an address, nor a scheduler file")


@contextmanager
def hosted_cluster(
    start: Callable[[Path], Starter], execution: Execution, private: Path, wait: float
) -> Iterator[Any]:
    """Have the scheduler here, and workers on other machines that are started for this run.

    Parameters
    ----------
    start : callable
        Makes the starter of the workers, from the path of the contact file.
    execution : Execution
        Threads, device and cluster options.
    private : Path
        The run's private folder, for the contact file and the key of the run; both go at the end.
    wait : float
        Seconds that the first worker has to come.

    Yields
    ------
    distributed.Client

    Raises
    ------
    ScanError
        CLUSTER if no worker comes.
    """
    import dask
    from distributed import Client, SpecCluster
    from distributed.security import Security

    options = execution.cluster
    security = Security.temporary()
    listen = {"interface": options.interface} if options.interface else {}
    scheduler = scheduler_spec(security, listen, pages=options.dashboard)
    with (
        private_scratch(private) as scratch,
        careful_path(scratch),
        dask.config.set(quiet(scratch, pages=options.dashboard)),
        SpecCluster({}, scheduler, security=security, silence_logs=50) as cluster,
        Client(cluster, security=security, set_as_default=False) as client,
        contact_file(make_contact(cluster.scheduler_address, execution), security, private) as path,
    ):
        if not options.dashboard:
            close_pages(cluster)
        starter = start(path)
        try:
            _wait_for_first(client, starter, wait)
            with _keeping(starter):
                yield client
        finally:
            starter.close()


def _wait_for_first(client: Any, starter: Starter, wait: float) -> None:
    until = time.monotonic() + wait
    while True:
        starter.keep(came=False)
        with suppress(TimeoutError):  # none yet: look after those that start
            client.wait_for_workers(1, timeout=KEEPING)
            return
        if time.monotonic() > until:
            raise ScanError(Reason.CLUSTER, f"no worker came within {wait:.0f} s")


@contextmanager
def _keeping(starter: Starter) -> Iterator[None]:
    """Replace workers that are gone, beside the run; what can't be had is tried again."""
    over = threading.Event()

    def keep() -> None:
        while not over.wait(KEEPING):
            with suppress(ScanError, OSError):  # the next look tries again
                starter.keep(came=True)

    keeper = threading.Thread(target=keep, name="keeper", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()
