"""Open regular files only: reading a pipe, a socket or a device may never return."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

_SPECIAL = {
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def special_file_name(mode: int) -> str:
    """Return what a file that is neither a regular one nor a folder is, by its mode; else ""."""
    return _SPECIAL.get(stat.S_IFMT(mode), "")


def open_regular_file(path: Path | str) -> BufferedReader:
    """Open a regular file for reading bytes, without blocking.

    Raises
    ------
    OSError
        If it cannot be opened or is not a regular file. A read that would block raises it too.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # it was replaced after the first check
        file.close()
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def read_regular_file(path: Path | str, max_bytes: int) -> bytes:
    """Return the content of a small file, at most `max_bytes` + 1 bytes.

    Raises
    ------
    OSError
        As for `open_regular_file`.
    """
    with open_regular_file(path) as file:
        return file.read(max_bytes + 1)


def open_link_free(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file that scanloom keeps, as `os.open` does, but never through a link.

    Whoever may write to the folder could lay a link there, so that a file elsewhere is read, filled
    or emptied by a user who may do that. Neither the file nor its folder may be a symbolic link,
    and the file has no second name (hard link).

    Parameters
    ----------
    path : Path
    flags : int
        As of `os.open`, without O_TRUNC: what is opened is checked first.
    mode : int
        Mode of a new file, before the umask.

    Raises
    ------
    OSError
        ELOOP if it is a link, EINVAL if it is no regular file.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path.name, flags, mode, dir_fd=folder)
    finally:
        os.close(folder)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        number = errno.ELOOP if stat.S_ISREG(status.st_mode) else errno.EINVAL
        raise OSError(number, os.strerror(number), str(path))
    return descriptor
