"""Contact between a run and the workers that it starts elsewhere: `Contact` and `Starter`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from scanloom.engine.workflow import Execution

_LEAVING_S = 120.0
"""Longest time before the end of a job at which its workers leave in good order."""


@dataclass(frozen=True)
class Contact:
    """What a worker on another machine must know; a file in the run's private folder says it.

    Parameters
    ----------
    address : str
        Of the scheduler.
    certificate, key : str
        Paths of the run's own, for TLS.
    folder : str
        The working folder of the run, for paths that are relative to it.
    threads : int
        Cases at once in a worker.
    device : str
        Of the workflow.
    workers : int
        On each machine or in each job; 0 for one a GPU.
    interface : str or None
        Network interface to be found at.
    lifetime : float or None
        Seconds after which a worker ends by itself.
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
        """Read it from its file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


class Starter(Protocol):
    """Starts workers somewhere and keeps as many there as were asked for."""

    def keep(self, came: bool) -> None:
        """Start what is missing; `came` says whether a worker ever came.

        Raises
        ------
        ScanError
            CLUSTER if it is no use.
        """

    def close(self) -> None:
        """End all that was started."""


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
    """Write the contact with certificate and key, for the owner alone, while the run goes on."""
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
