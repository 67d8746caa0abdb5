"""Private temporary folders, removed when their process ends.

If a process was killed, the next one that makes such a folder removes it: a lock of flock(2), which
ends with its process, marks the folders in use.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from scanloom.core import Reason, ScanError
from scanloom.core.process import lock_file
from scanloom.own_python import is_closed

FOLDER_PREFIX = "scanloom-"
"""Prefix of the names of the folders."""
HIDDEN_PREFIX = ".scanloom-"
"""Prefix of the names of folders next to a file with a name of the user's, while it is written."""
LOCK_NAME = "lock"
"""Name of the lock file in each folder."""
_LOCK_DRAFT = ".lock"


_SYSTEM_FOLDERS = ("/tmp", "/var/tmp", "/usr/tmp")  # noqa: S108 - compared, for a message
_PROBE_BYTES = 1 << 16
"""Least room that processes need for their temporary files."""
_FOR_WORKERS = "for the files of workers"


@contextmanager
def private_temporary_folder(fallback: Path) -> Iterator[Path]:
    """Yield a new folder of mode 0700, which is removed at the end; it has some room.

    It is in `fallback` if other users could replace entries of the system's temporary folder.

    Raises
    ------
    ScanError
        SCRATCH_FULL if it can't be made, or has no room.
    """
    with ExitStack() as stack:
        with scratch_errors(_FOR_WORKERS):
            parent = Path(tempfile.gettempdir())
            if not is_closed(parent.absolute(), sticky=True):
                parent = fallback
            folder = stack.enter_context(locked_temporary_folder(parent))
            check_room(folder)
        yield folder


@contextmanager
def locked_temporary_folder(parent: Path, prefix: str = FOLDER_PREFIX) -> Iterator[Path]:
    """Yield a new folder of mode 0700 in `parent`, which is removed at the end.

    Those that killed processes left there under the same prefix are removed first.

    Raises
    ------
    OSError
        If it can't be made.
    """
    folder, lock = make_locked_folder(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.close()


def make_locked_folder(parent: Path, prefix: str = FOLDER_PREFIX) -> tuple[Path, BinaryIO | None]:
    """Make a folder of mode 0700 in `parent`; return it with its lock, as of `lock_folder`.

    Those that killed processes left there under the same prefix are removed first.

    Raises
    ------
    OSError
        If it can't be made.
    """
    remove_stale_folders(parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        # Locked before it has its name: another process takes a folder whose lock is free for stale
        lock = lock_folder(folder, _LOCK_DRAFT)
        (folder / _LOCK_DRAFT).rename(folder / LOCK_NAME)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, lock


def check_room(folder: Path) -> None:
    """Refuse a folder for temporary files without room: a failure there says something else.

    Raises
    ------
    ScanError
        SCRATCH_FULL.
    """
    with scratch_errors(_FOR_WORKERS), tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PROBE_BYTES))
        file.flush()


def lock_folder(folder: Path, name: str = LOCK_NAME) -> BinaryIO | None:
    """Lock a folder and return its open lock file, which has this name.

    None if another process holds the lock, or if the system has no flock(2).
    """
    file = (folder / name).open("ab")
    with suppress(OSError):
        if lock_file(file.fileno(), timeout_s=0):
            return file
    file.close()
    return None


def remove_stale_folders(parent: Path, prefix: str = FOLDER_PREFIX) -> None:
    """Remove this user's folders of processes that were killed: their locks are free."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # removed by another process
            if folder.lstat().st_uid != os.getuid():
                continue
            if (folder / LOCK_NAME).is_file() and (lock := lock_folder(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                lock.close()


@contextmanager
def scratch_errors(purpose: str = "to unpack a file") -> Iterator[None]:
    """Convert errors of writing to the temporary folder, as opposed to those of the source.

    Raises
    ------
    ScanError
        SCRATCH_FULL, which names the folder and says why it is needed.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise scratch_full(purpose) from exc
        name = errno.errorcode.get(exc.errno or 0, type(exc).__name__)
        detail = f"nothing can be written {purpose} in {_temporary_folder()} ({name})"
        raise ScanError(Reason.SCRATCH_FULL, detail) from exc


def scratch_full(purpose: str = "to unpack a file") -> ScanError:
    """Return the error for a folder for temporary files that is full, with its name."""
    return ScanError(Reason.SCRATCH_FULL, f"no space {purpose} in {_temporary_folder()}")


def _temporary_folder() -> str:
    """Return a description of the folder for temporary files; a path only if it is the system's."""
    variable = next((name for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), None)
    try:
        folder = tempfile.gettempdir()
    except OSError:
        folder = "any folder for temporary files"
    if variable and os.path.abspath(os.environ[variable]) == folder:  # as tempfile does
        return f"the folder that {variable} names"
    return folder if folder in _SYSTEM_FOLDERS else "the folder for temporary files"


# --- processes that live --------------------------------------------------------------------------
# Liveness of processes and runs.

HEARTBEAT_TIMEOUT_S = 60.0
"""Seconds without a heartbeat (one per second) after which a run of another host counts as dead."""
FINAL_STATES = ("done", "stopped", "failed")
"""Final states of a run."""
DIED = "died"


def process_start_ticks(process: int) -> str:
    """Return the start of a process in ticks since boot (proc(5)); "0" if it is not running."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return "1" if process == os.getpid() else "0"  # without /proc, only this process is known
    fields = stat.rpartition(")")[2].split()  # the process name before may contain anything
    return "0" if fields[0] in "ZX" else fields[19]  # fields 3 and 22; a zombie has ended


def pid_namespace() -> str:
    """Return the PID namespace of this process: containers may share the name of a host."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def host_id() -> str:
    """Return eight characters that identify this host or container without revealing its name."""
    identity = f"{socket.gethostname()} {pid_namespace()}"
    return hashlib.blake2b(identity.encode(), digest_size=4).hexdigest()


def observed_state(status: Mapping[str, Any]) -> str:
    """Return the state of a run by its `status.json`; "died" if it ended without a final state."""
    state = str(status["state"])
    if state in FINAL_STATES:
        return state
    if status.get("host") == host_id():
        dead = process_start_ticks(status["process"]) != status["start"]
    else:
        dead = time.time() - status.get("moment", 0.0) > HEARTBEAT_TIMEOUT_S
    return DIED if dead else state
