"""Atomic, durable writing: a file is complete or absent, and on disk when the call returns."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from scanloom.core import Reason, ScanError
from scanloom.io.system.regular_files import open_descriptor

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")


def atomic_write(path: Path, write: Callable[[Path], object], mode: int = 0o666) -> None:
    """Let `write` fill a temporary file next to `path`, then rename it to `path`.

    Parameters
    ----------
    path : Path
        In an existing folder. An existing file is kept until the temporary file is complete.
    write : function of Path
        Called with the path of the temporary file, which exists and is empty.
    mode : int
        Permissions of the file, before the umask.

    Raises
    ------
    OSError
        If the file can't be written; an existing file is then unchanged.
    """
    temporary = temporary_path(path)
    os.close(open_descriptor(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        write(temporary)
        fsync_path(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def check_replaceable(path: Path, description: str) -> None:
    """Refuse to replace a path that exists and is not a regular file: a device, folder or link.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE, with the `description` of the new file.
    """
    with suppress(OSError):  # missing, or not accessible: writing will report it
        if not stat.S_ISREG(path.lstat().st_mode):
            detail = f"{description} would replace a path that is not a regular file"
            raise ScanError(Reason.OUTPUT_UNWRITABLE, detail)


def temporary_path(path: Path) -> Path:
    """Return the path of a hidden temporary file next to `path`, with a random suffix."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def remove_stale_temporaries(folder: Path, since: float) -> None:
    """Remove temporary files in a folder that were last modified before a point in time.

    Parameters
    ----------
    folder : Path
        May be missing.
    since : float
        Seconds since 1970; older temporary files are of writers that died.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # removed by another process
            if _TEMPORARY.fullmatch(path.name) and path.stat().st_mtime < since:
                path.unlink()


def fsync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk: fsync(2) makes a rename durable."""
    descriptor = open_descriptor(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
