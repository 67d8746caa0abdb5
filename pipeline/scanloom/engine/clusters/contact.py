"""Contact between a run and workers elsewhere: its file, its handshake and the settings of Dask.

The handshake asks whether a worker reads the scans, writes results and runs this version. Workers
of Dask are minimal, and serve no HTTP pages unless requested.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from scanloom.core import Reason, ScanError
from scanloom.engine.worker.messages import CaseFile
from scanloom.engine.workflow.schema import Execution
from scanloom.io.output.private import write_private
from scanloom.io.output.work_folder import HANDSHAKE_PREFIX, make_work_folder, process_file_name
from scanloom.io.system.regular_files import open_regular_file
from scanloom.io.system.scratch_folders import private_temporary_folder
from scanloom.own_python import make_private_folder, own_environment, safe_path
from scanloom.version import __version__

_SPOOL_FILE = "handshake"
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

    def ensure_running(self, joined: bool) -> None:
        """Start the workers that are missing; called repeatedly.

        Parameters
        ----------
        joined : bool
            Whether any worker has ever joined.

        Raises
        ------
        ScanError
            CLUSTER if no worker can be expected to join.
        """

    def close(self) -> None:
        """End all workers."""


@contextmanager
def contact_file(
    address: str, execution: Execution, security: Any, private: Path
) -> Iterator[Path]:
    """Write the contact, certificate and key for the owner alone, and remove them at the end.

    Yields
    ------
    Path
        The file of the contact, in the run's private folder.
    """
    folder, options = private.absolute(), execution.cluster
    paths = [folder / name for name in ("cluster.json", "cluster-cert.pem", "cluster-key.pem")]
    walltime = options.walltime
    contact = Contact(
        address=address,
        certificate=str(paths[1]),
        key=str(paths[2]),
        folder=str(Path.cwd()),
        threads=execution.in_flight,
        device=execution.device,
        workers=options.gpus,
        interface=options.interface,
        # workers leave a job in time before it is killed
        lifetime=max(walltime - _LEAVING_S, 0.9 * walltime) if walltime else None,
    )
    texts = (json.dumps(asdict(contact)), security.tls_ca_file, security.tls_worker_key)
    try:
        for path, text in zip(paths, texts, strict=True):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
        yield paths[0]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class WorkerQuestion:
    """Question to a worker.

    Parameters
    ----------
    token : str
        Path of a file in the output folder, whose random content the worker returns.
    models : tuple of str
        Names from the store, or bundle folders.
    case_file : str or None
        Path of the run's `CaseFile`, of whose first case the worker reads the files.
    spool : (str, str) or None
        Path of a file in the spool of a service, which has no case yet, and its content.
    """

    token: str
    models: tuple[str, ...] = ()
    case_file: str | None = None
    spool: tuple[str, str] | None = None


@dataclass(frozen=True)
class Answer:
    """Answer of a worker, of built-in types only, so that different versions can read it."""

    token: str | None
    version: str
    python: tuple[int, int]
    models: tuple[str | None, ...]
    sees_scans: bool
    reads_scans: bool
    writes: bool


_ABLE = {
    "sees_scans": "don't see the scans",
    "reads_scans": "can't read the scans",
    "writes": "can't write in the output folder",
}
"""Fields of `Answer` that must be true for a worker if they are for this process."""


@dataclass(frozen=True)
class Handshake:
    """A question to workers, and the answer of one that can do the work."""

    question: WorkerQuestion
    expected: Answer

    def check(self, client: Any) -> None:
        """Check that all current workers can do the work.

        Raises
        ------
        ScanError
            CLUSTER if one cannot.
        """
        try:
            answers = client.run(answer, self.question, on_error="return")
        except (OSError, TimeoutError, AssertionError) as exc:  # the last: not serialisable
            detail = f"a worker gave no answer ({type(exc).__name__})"
            raise ScanError(Reason.CLUSTER, detail) from exc
        if not answers:
            raise ScanError(Reason.CLUSTER, "the cluster has no workers")
        fault = describe_mismatch(answers, self.expected)
        if fault is not None:
            raise ScanError(Reason.CLUSTER, fault)


@contextmanager
def hold_handshake(
    out: Path,
    models: Sequence[str] = (),
    digests: Sequence[str] = (),
    case_file: Path | None = None,
    spool: Path | None = None,
) -> Iterator[Handshake]:
    """Keep a token file in the output folder during a run, by which workers are checked.

    Parameters
    ----------
    out : Path
        The output folder.
    models, digests : sequence of str
        Models, whose files must be the same everywhere, and the `card_digest` of each when the
        recipe was made.
    case_file : Path or None
        Path of the run's `CaseFile`; workers must see and read the files of its first case.
    spool : Path or None
        The spool of a service, which workers must read instead: it has no case yet.
    """
    out = out.absolute()
    make_work_folder(out)
    token = out / ".work" / process_file_name(HANDSHAKE_PREFIX)
    token.write_text(os.urandom(16).hex())
    seen = str(case_file.absolute()) if case_file and not spool else None
    known = _spool_token(spool.absolute()) if spool else None
    question = WorkerQuestion(str(token), tuple(models), seen, known)
    try:
        yield Handshake(question, replace(answer(question), models=tuple(digests)))
    finally:
        token.unlink(missing_ok=True)


def answer(question: WorkerQuestion) -> Answer:
    """Answer a question; runs on the worker."""
    try:
        token = Path(question.token).read_text()
    except OSError:
        token = None
    files = _first_case(question.case_file)
    if question.spool is not None:
        files = (Path(question.spool[0]),) if _is_spool(*question.spool) else None
    return Answer(
        token,
        __version__,
        sys.version_info[:2],
        tuple(_model_hash(name) for name in question.models),
        files is not None and all(file.exists() for file in files),
        files is not None and all(map(_can_read, files)),
        _can_write(Path(question.token).parent),
    )


def describe_mismatch(answers: Mapping[str, Any], expected: Answer) -> str | None:
    """Describe why the workers cannot do the work; None if they can.

    `answers` are by address, an exception instead of an answer that failed. Workers are only
    required to match `expected`, the answer of this process.
    """
    # From the cause to its effects: with another version or Python the further answers mean
    # nothing, and without the output folder no file of it can be read or written
    count = len(answers)
    valid = [a for a in answers.values() if isinstance(a, Answer)]
    if len(valid) < count:
        return f"{count - len(valid)} of {count} workers have no scanloom {expected.version}"
    versions = sorted({a.version for a in valid} - {expected.version})
    if versions:
        return f"workers run scanloom {', '.join(versions)}, this is {expected.version}"
    pythons = sorted({a.python for a in valid} - {expected.python})
    if pythons:
        theirs = ", ".join("{}.{}".format(*p) for p in pythons)
        return f"workers run Python {theirs}, this is {'{}.{}'.format(*expected.python)}"
    blind = sum(a.token != expected.token for a in valid)
    if blind:
        return f"{blind} of {count} workers don't see the output folder"
    different = sum(a.models != expected.models for a in valid)
    if different:
        return f"{different} of {count} workers have no or different files of the models"
    for field, problem in _ABLE.items():
        lacking = sum(not getattr(a, field) for a in valid) if getattr(expected, field) else 0
        if lacking:
            return f"{lacking} of {count} workers {problem}"
    return None


def _spool_token(spool: Path) -> tuple[str, str]:
    """Return the path and content of a file by which a spool is known; OSError."""
    make_private_folder(spool)
    path = spool / _SPOOL_FILE
    if not path.exists():
        content = os.urandom(16).hex()
        write_private(path, lambda draft: draft.write_text(content))
    return str(path), path.read_text()


def _is_spool(path: str, content: str) -> bool:
    """Return whether a file of a spool is here: another machine may have a folder of this name."""
    try:
        return Path(path).read_text() == content
    except (OSError, ValueError):
        return False


def _model_hash(name: str) -> str | None:
    from scanloom.cards.card_file import card_digest
    from scanloom.convert.store import find_model

    try:
        return card_digest(find_model(name))
    except ScanError:
        return None


def _first_case(case_file: str | None) -> tuple[Path, ...] | None:
    """Return the files of the first case, of all its inputs; None if it cannot be read."""
    if case_file is None:
        return ()
    try:
        case = CaseFile.read(Path(case_file), 0)
    except (OSError, ValueError):
        return None
    return tuple(file for series in (case.series, *case.further_channels) for file in series.files)


def _can_read(file: Path) -> bool:
    """Return whether a file can be read, by reading: a server (NFS) may ignore permissions."""
    try:
        with open_regular_file(file) as opened:
            opened.read(1)
    except OSError:
        return False
    return True


def _can_write(work: Path) -> bool:
    """Return whether results can be written: create a file, move it as a result, and remove it."""
    draft, cases = work / process_file_name(HANDSHAKE_PREFIX), work.parent / "cases"
    moved = cases / f".{draft.name}"
    try:
        draft.write_bytes(b"")
        if cases.is_dir():
            draft.rename(moved)
    except OSError:
        return False
    finally:
        for path in (draft, moved):
            with suppress(OSError):
                path.unlink()
    return True


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
    "distributed.admin.tick.interval": "1s",  # its default takes 1 % of a core per process
    "distributed.nanny.pre-spawn-environ": {},  # the worker's own: see `worker_environment`
}
"""Settings of workers; their memory is limited by the child process, not by Dask."""

NO_HTTP_ROUTES: dict[str, Any] = {
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}
"""Settings without HTTP routes. `/sitemap.json` still answers: see `close_http_server`."""


@contextmanager
def dask_configured(folder: Path, *, pages: bool = False) -> Iterator[Path]:
    """Configure Dask for the block, and yield a private folder for its files.

    It lies in `folder` if the folder for temporary files is not safe. Dask puts it first in
    `sys.path`. Dask's default is shared by all users of a machine, and belongs to the user who
    creates it first. With `pages`, Dask's dashboard is served.
    """
    import dask
    import distributed  # noqa: F401  # first: leaving `config.set` would remove its defaults

    with private_temporary_folder(folder) as scratch, _safe_search_path(scratch):
        settings = WORKER_SETTINGS | {"temporary-directory": str(scratch)}
        with dask.config.set(settings if pages else settings | NO_HTTP_ROUTES):
            yield scratch


@contextmanager
def _safe_search_path(scratch: Path) -> Iterator[None]:
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
    """Return the specification of a scheduler for `distributed.SpecCluster`.

    It listens on the `host` or `interface` of `listen`; with `pages`, Dask's dashboard is served on
    loopback.
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
