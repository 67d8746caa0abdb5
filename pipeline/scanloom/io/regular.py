"""Regular files alone: a pipe, a socket or a device may never end, or never begin."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path | str) -> BufferedReader:
    """Open a file for reading bytes, without waiting.

    Raises
    ------
    OSError
        If it can't be opened, or is none; reading what has nothing to give yet raises it too.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 opening some devices does something
        raise OSError(errno.EINVAL, "no regular file")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # it was replaced between the two lines
        file.close()
        raise OSError(errno.EINVAL, "no regular file")
    return file


def read_regular(path: Path | str, most: int) -> bytes:
    """Return the bytes of a small file, `most` and one more at most.

    Raises
    ------
    OSError
        As `open_regular`.
    """
    with open_regular(path) as file:
        return file.read(most + 1)
