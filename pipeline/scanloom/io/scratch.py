"""Folders for what a process needs for a while: its user's alone, and gone when it is.

A lock of flock(2), which ends with its process, tells those that died.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from scanloom.io.file_lock import lock_file
from scanloom.own_python import is_closed

PREFIX = "scanloom-"
"""Of the folders' names."""
LOCK = "lock"


@contextmanager
def private_scratch(otherwise: Path) -> Iterator[Path]:
    """Give a new folder of mode 0700, which goes away at the end.

    Parameters
    ----------
    otherwise : Path
        Where it is made if others could move it away in the folder for temporary files.
    """
    place = Path(tempfile.gettempdir())
    if not is_closed(place.absolute(), sticky=True):
        place = otherwise
    clear_dead(place)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    lock = locked(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.close()


def locked(folder: Path) -> BinaryIO | None:
    """Return the open lock file of a folder, None if another process holds it or there are none."""
    file = (folder / LOCK).open("ab")
    with suppress(OSError):
        if lock_file(file.fileno(), timeout_s=0):
            return file
    file.close()
    return None


def clear_dead(place: Path) -> None:
    """Take away this user's folders of processes that were killed: nobody holds their lock."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # gone meanwhile
            if folder.lstat().st_uid != os.getuid():
                continue
            if (folder / LOCK).is_file() and (lock := locked(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                lock.close()
