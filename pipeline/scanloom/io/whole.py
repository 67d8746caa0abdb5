"""Files that are there whole or not at all, and on the disk when the call returns."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from scanloom.core import Reason, ScanError

_DRAFT = re.compile(r"\..+\.[0-9a-f]{8}")


def write_whole(path: Path, write: Callable[[Path], object], mode: int = 0o666) -> None:
    """Let `write` fill a draft beside `path`, which then takes its place.

    Parameters
    ----------
    path : Path
        In a folder that is there. What is there already stays until the draft is whole.
    write : function of the draft's path
        The draft is there and empty.
    mode : int
        Of the file, less what the umask takes.

    Raises
    ------
    OSError
        If it can't be written; nothing has changed then.
    """
    draft = draft_of(path)
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        write(draft)
        sync(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync(path.parent)


def check_replaceable(path: Path, what: str) -> None:
    """Refuse a path whose file would be replaced and is none: a device, a folder, a link.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE, which names `what` goes there.
    """
    with suppress(OSError):  # not there, or not to be seen: writing tells
        if not stat.S_ISREG(path.lstat().st_mode):
            detail = f"{what} would replace what is there, which is no regular file"
            raise ScanError(Reason.OUTPUT_UNWRITABLE, detail)


def draft_of(path: Path) -> Path:
    """Return a name for a draft of `path`: hidden, and nobody else's."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def clear_drafts(folder: Path, since: float) -> None:
    """Take away the drafts in a folder that were last changed before a moment.

    Parameters
    ----------
    folder : Path
        Need not be there.
    since : float
        Seconds since 1970; who writes needs less time than has gone by since.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # somebody took it away
            if _DRAFT.fullmatch(path.name) and path.stat().st_mtime < since:
                path.unlink()


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk: fsync(2) makes a rename safe."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
