"""Private temporary folders, removed when their process ends.

If a process was killed, the next one that makes such a folder removes it: a lock of flock(2), which
ends with its process, marks the folders in use.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from scanloom.core import Reason, ScanError
from scanloom.core.process import lock_file
from scanloom.own_python import is_closed

FOLDER_PREFIX = "scanloom-"
"""Prefix of the names of the folders."""
LOCK_NAME = "lock"
"""Name of the lock file in each folder."""


_SYSTEM_FOLDERS = ("/tmp", "/var/tmp", "/usr/tmp")  # noqa: S108 - compared, for a message
_PROBE_BYTES = 1 << 16
"""Least room that processes need for their temporary files."""
_FOR_WORKERS = "for the files of workers"


@contextmanager
def private_temporary_folder(fallback: Path) -> Iterator[Path]:
    """Yield a new folder of mode 0700, which is removed at the end; it has some room.

    Parameters
    ----------
    fallback : Path
        Parent folder if other users could replace entries of the system's temporary folder.

    Raises
    ------
    ScanError
        SCRATCH_FULL if it can't be made, or has no room.
    """
    with scratch_errors(_FOR_WORKERS):
        parent = Path(tempfile.gettempdir())
        if not is_closed(parent.absolute(), sticky=True):
            parent = fallback
        remove_stale_folders(parent)
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
    lock = None
    try:
        with scratch_errors(_FOR_WORKERS):
            lock = lock_folder(folder)
            check_room(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.close()


def check_room(folder: Path) -> None:
    """Refuse a folder for temporary files without room: what fails there says something else.

    Raises
    ------
    ScanError
        SCRATCH_FULL.
    """
    with scratch_errors(_FOR_WORKERS), tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PROBE_BYTES))
        file.flush()


def lock_folder(folder: Path) -> BinaryIO | None:
    """Lock a folder and return its open lock file.

    None if another process holds the lock, or if the system has no flock(2).
    """
    file = (folder / LOCK_NAME).open("ab")
    with suppress(OSError):
        if lock_file(file.fileno(), timeout_s=0):
            return file
    file.close()
    return None


def remove_stale_folders(parent: Path) -> None:
    """Remove this user's folders of processes that were killed: their locks are free."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
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
        SCRATCH_FULL, which names the folder and says for what purpose it is needed.
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
