"""Clusters that a run may use: this machine, or one that is there already."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scanloom.core import Reason, ScanError
from scanloom.engine.workflow import Execution

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
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}
"""Thin workers whose memory is the engine child's affair; no page and no number over HTTP."""

PRELOAD = "scanloom.engine.preload"


LOCAL = "local"


@contextmanager
def open_cluster(kind: str, execution: Execution, out: Path, tasks: int) -> Iterator[Any]:
    """Start or join the cluster of a run, and check that it can do the work.

    Parameters
    ----------
    kind : str
        "local", or the address or scheduler file of a cluster.
    execution : Execution
        Workers, threads and device of the workflow.
    out : Path
        The output folder, which all workers must see.
    tasks : int
        How many cases there are: no more local workers than these.

    Yields
    ------
    distributed.Client

    Raises
    ------
    ScanError
        CLUSTER.
    """
    if kind == LOCAL:
        devices = local_devices(execution)[: max(1, tasks)]
        opened = local_cluster(devices, execution.in_flight)
    else:
        opened = joined_cluster(kind)
    with opened as client:
        check_workers(client, out)
        yield client


def local_devices(execution: Execution) -> list[str]:
    """Return one entry a worker: the GPU that it sees, or "" for the CPU."""
    gpus = [] if execution.device == "cpu" else visible_gpus()
    if not gpus:
        return [""] * (1 if execution.workers == "auto" else execution.workers)
    count = len(gpus) if execution.workers == "auto" else execution.workers
    return [gpus[n % len(gpus)] for n in range(count)]


def visible_gpus() -> list[str]:
    """Return the UUIDs of GPUs and MIG slices that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [part for part in named.split(",") if part.strip()]
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [uuid for n in range(pynvml.nvmlDeviceGetCount()) for uuid in _uuids(n)]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _uuids(number: int) -> list[str]:
    """Return the UUID of a GPU, or those of the slices that it is cut into."""
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    slices = []
    with suppress(pynvml.NVMLError):
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
        for n in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) if current else 0):
            with suppress(pynvml.NVMLError):  # a place for a slice that is empty
                part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, n)
                slices.append(str(pynvml.nvmlDeviceGetUUID(part)))
    return slices or [str(pynvml.nvmlDeviceGetUUID(handle))]


@contextmanager
def local_cluster(devices: Sequence[str], threads: int) -> Iterator[Any]:
    """Start workers on this machine: loopback only, TLS with a key of this run, no dashboard.

    Parameters
    ----------
    devices : sequence of str
        One worker each: what its CUDA_VISIBLE_DEVICES says, "" for a CPU worker.
    threads : int
        Cases at once in a worker.

    Yields
    ------
    distributed.Client
    """
    import dask
    from distributed import Client, Nanny, Scheduler, SpecCluster
    from distributed.security import Security

    security = Security.temporary()
    common = {
        "nthreads": threads,
        "memory_limit": 0,
        "host": "127.0.0.1",
        "security": security,
        "dashboard_address": None,
        "preload": [PRELOAD],
        "silence_logs": 50,
    }
    workers = {
        number: {
            "cls": Nanny,
            "options": {**common, "env": {"CUDA_VISIBLE_DEVICES": device} if device else {}},
        }
        for number, device in enumerate(devices)
    }
    scheduler = {
        "cls": Scheduler,
        "options": {
            "host": "127.0.0.1",
            "protocol": "tls://",
            "security": security,
            "dashboard": False,
            "dashboard_address": None,
        },
    }
    with (
        dask.config.set(QUIET),
        SpecCluster(workers, scheduler, security=security, silence_logs=50) as cluster,
        Client(cluster, security=security) as client,
    ):
        client.wait_for_workers(len(devices), timeout=120)
        yield client


@contextmanager
def joined_cluster(address: str) -> Iterator[Any]:
    """Join a cluster by its address (tls://..., tcp://...) or its scheduler file.

    Raises
    ------
    ScanError
        CLUSTER if it can't be reached, or has no worker.
    """
    import dask
    from distributed import Client

    named = {"scheduler_file": address} if Path(address).is_file() else {"address": address}
    with dask.config.set(QUIET):
        try:
            client = Client(**named, timeout=30)
            client.wait_for_workers(1, timeout=120)
        except (OSError, TimeoutError, ValueError) as exc:
            raise ScanError(
                Reason.CLUSTER, f"no scheduler or no worker answers ({type(exc).__name__})"
            ) from exc
        with client:
            yield client


def check_workers(client: Any, out: Path) -> None:
    """Check that every worker sees the output folder, and is of this version of scanloom.

    Raises
    ------
    ScanError
        CLUSTER if one does not.
    """
    nonce = os.urandom(16).hex()
    token = out / ".work" / f"handshake-{os.getpid()}"
    token.write_text(nonce)
    try:
        answers = client.run(_handshake, str(token))
    finally:
        token.unlink(missing_ok=True)
    blind = sum(seen != nonce for seen, _, _ in answers.values())
    if blind:
        raise ScanError(Reason.CLUSTER, f"{blind} of {len(answers)} workers don't see the output")
    versions = {told for _, told, _ in answers.values()} - {version("scanloom")}
    pythons = {python for _, _, python in answers.values()} - {sys.version_info[:2]}
    if versions or pythons:
        detail = f"workers run scanloom {sorted(versions)}, Python {sorted(pythons)}, not this one"
        raise ScanError(Reason.CLUSTER, detail)


def _handshake(token: str) -> tuple[str | None, str, tuple[int, int]]:
    try:
        seen = Path(token).read_text()
    except OSError:
        seen = None
    return seen, version("scanloom"), sys.version_info[:2]
