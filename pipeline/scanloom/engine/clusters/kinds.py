"""Kinds of clusters whose workers are started for a run.

A new kind is a module with a `WorkerLauncher` and an entry of `KINDS`; options of its own are
fields of `scanloom.engine.workflow.schema.Cluster`. The help of the command line derives from
`KINDS`, so launchers are imported only when they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scanloom.engine.clusters.contact import WorkerLauncher
    from scanloom.engine.workflow.schema import Execution

    LauncherFactory = Callable[[Path], WorkerLauncher]
    """Makes a launcher from the path of the contact file."""

LOCAL, NO_CLUSTER = "local", "none"
"""Names of Dask on this machine, and of a run without Dask; they are no kinds."""
WORKER_TIMEOUT_S = 600.0
"""Time limit of a run without a worker."""


@dataclass(frozen=True)
class ClusterKind:
    """Kind of cluster whose workers are started for a run.

    Parameters
    ----------
    launcher : callable
        Return a `LauncherFactory` for the options of a run, the hosts of `--cluster KIND:HOSTS`
        and the run's private folder. Raise CLUSTER if an option is missing.
    worker_timeout_s : float
        Time limit of a run without a worker; unlimited for a queue.
    takes_hosts : bool
        Whether hosts may follow the name: `KIND:HOST,HOST`.
    """

    launcher: Callable[[Execution, str, Path], LauncherFactory]
    worker_timeout_s: float = WORKER_TIMEOUT_S
    takes_hosts: bool = False


def find_kind(cluster: str) -> tuple[ClusterKind, str] | None:
    """Return the kind and hosts of a cluster by its name; None if it is not of these kinds."""
    name, colon, hosts = cluster.partition(":")
    kind = KINDS.get(name)
    return None if kind is None or (colon and not kind.takes_hosts) else (kind, hosts)


def cluster_names() -> tuple[str, ...]:
    """Return the name of each kind as the command line takes it."""
    return tuple(f"{name}:HOSTS" if kind.takes_hosts else name for name, kind in KINDS.items())


def _slurm(execution: Execution, _: str, private: Path) -> LauncherFactory:
    from scanloom.engine.clusters.launchers import SlurmJobs

    return lambda contact: SlurmJobs(execution, contact, private)


def _ssh(execution: Execution, host_list: str, private: Path) -> LauncherFactory:
    from scanloom.engine.clusters.launchers import SshHosts, host_names

    hosts = host_names(host_list, execution.cluster)
    return lambda contact: SshHosts(hosts, execution.cluster, contact, private)


KINDS = {
    # Jobs may wait in the queue for days
    "slurm": ClusterKind(_slurm, worker_timeout_s=math.inf),
    "ssh": ClusterKind(_ssh, takes_hosts=True),
}
"""All kinds by name."""
