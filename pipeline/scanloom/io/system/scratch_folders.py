"""Private temporary folders, removed when their process ends.

If a process was killed, the next one that makes such a folder removes it: a lock of flock(2), which
ends with its process, marks the folders in use.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from scanloom.core.process.file_lock import lock_file
from scanloom.own_python import is_closed

FOLDER_PREFIX = "scanloom-"
"""Prefix of the names of the folders."""
LOCK_NAME = "lock"
"""Name of the lock file in each folder."""


@contextmanager
def private_temporary_folder(fallback: Path) -> Iterator[Path]:
    """Yield a new folder of mode 0700, which is removed at the end.

    Parameters
    ----------
    fallback : Path
        Parent folder if other users could replace entries of the system's temporary folder.
    """
    parent = Path(tempfile.gettempdir())
    if not is_closed(parent.absolute(), sticky=True):
        parent = fallback
    remove_stale_folders(parent)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
    lock = lock_folder(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.close()


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
