"""Gives memory that is not needed any more back to the operating system, on Linux; else nothing."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_MADV_DONTNEED = 4
"""Advice of Linux's madvise: pages are dropped, and read from their file if used again."""


def return_free_memory() -> None:
    """Return freed memory that the C library (glibc) keeps for later allocations."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def drop_file_pages(file: Path) -> None:
    """Drop the pages of a file that this process has mapped for reading only."""
    with suppress(AttributeError, OSError, ValueError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        identity = file.stat()
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            addresses, access, _, device, inode, *_ = line.split()
            major, minor = (int(number, 16) for number in device.split(":"))
            same = (os.makedev(major, minor), int(inode)) == (identity.st_dev, identity.st_ino)
            if same and "w" not in access:
                first, last = (int(address, 16) for address in addresses.split("-"))
                madvise(first, last - first, _MADV_DONTNEED)
