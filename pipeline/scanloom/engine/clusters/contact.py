"""Contact between a run and workers elsewhere: `Contact` and `WorkerLauncher`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from scanloom.engine.workflow.schema import Execution

_LEAVING_S = 120.0
"""Longest time before the end of a job at which its workers leave in good order."""


@dataclass(frozen=True)
class Contact:
    """Information for a worker on another machine, in a file of the run's private folder.

    Parameters
    ----------
    address : str
        Address of the scheduler.
    certificate, key : str
        Paths of the run's certificate and key for TLS.
    folder : str
        The working folder of the run, for relative paths.
    threads : int
        Concurrent cases in a worker.
    device : str
        Device of the workflow.
    workers : int
        Workers on each machine or in each job; 0 for one per GPU.
    interface : str or None
        Network interface of the workers.
    lifetime : float or None
        Seconds after which a worker ends by itself; None for no limit.
    """

    address: str
    certificate: str
    key: str
    folder: str
    threads: int
    device: str
    workers: int = 0
    interface: str | None = None
    lifetime: float | None = None

    @classmethod
    def read(cls, path: Path) -> Contact:
        """Read a contact from its file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


class WorkerLauncher(Protocol):
    """Starts workers elsewhere, and replaces those that end."""

    def ensure_running(self, came: bool) -> None:
        """Start the workers that are missing; called repeatedly.

        Parameters
        ----------
        came : bool
            Whether any worker has ever joined.

        Raises
        ------
        ScanError
            CLUSTER if no worker can be expected to join.
        """

    def close(self) -> None:
        """End all workers."""


def make_contact(address: str, execution: Execution) -> Contact:
    """Return the contact of a run whose scheduler has an address."""
    options = execution.cluster
    return Contact(
        address=address,
        certificate="",
        key="",
        folder=str(Path.cwd()),
        threads=execution.in_flight,
        device=execution.device,
        workers=options.gpus,
        interface=options.interface,
        lifetime=_lifetime(options.walltime),
    )


@contextmanager
def contact_file(contact: Contact, security: Any, private: Path) -> Iterator[Path]:
    """Write the contact, certificate and key for the owner alone, and remove them at the end."""
    folder = private.absolute()
    paths = [folder / name for name in ("cluster.json", "cluster-cert.pem", "cluster-key.pem")]
    document = asdict(contact) | {"certificate": str(paths[1]), "key": str(paths[2])}
    texts = (json.dumps(document), security.tls_ca_file, security.tls_worker_key)
    try:
        for path, text in zip(paths, texts, strict=True):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
        yield paths[0]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def _lifetime(walltime: float | None) -> float | None:
    """Return the seconds after which a worker leaves a job, in time before it is killed."""
    return None if not walltime else max(walltime - _LEAVING_S, 0.9 * walltime)
