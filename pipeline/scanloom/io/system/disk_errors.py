"""Operating system errors on scanloom's own files, as `ScanError`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from scanloom.core import Reason, ScanError

_FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk and of an exhausted quota."""

_CAUSES = {
    errno.EACCES: "permission is missing, EACCES",
    errno.EPERM: "permission is missing, EPERM",
    errno.EROFS: "the disk is read-only, EROFS",
    errno.ENOTDIR: "a file is where a folder is needed, ENOTDIR",
    errno.EEXIST: "a file is where a folder is needed, EEXIST",
    errno.ENOENT: "its folder is missing, ENOENT",
    errno.ELOOP: "a link is in its place, ELOOP",
    errno.ENAMETOOLONG: "the path is too long, ENAMETOOLONG",
}
"""Causes that a person can remove."""

_NOT_FROM_A_DISK = (
    *(ConnectionError, TimeoutError, ChildProcessError, ProcessLookupError),
    *(InterruptedError, BlockingIOError),
)
"""Subclasses of OSError that file input and output does not raise."""


def output_error(exc: OSError, subject: str = "the results") -> ScanError:
    """Return the ScanError for a failed write of `subject`, without the system's own message."""
    if exc.errno in _FULL_DISK:
        return ScanError(Reason.DISK_FULL, f"no space left for {subject}", _path(exc))
    detail = f"{subject} can't be written ({_name(exc)})"
    return ScanError(Reason.OUTPUT_UNWRITABLE, detail, _path(exc))


def disk_error(error: Exception) -> ScanError | None:
    """Return the ScanError for a disk error on one of scanloom's own files.

    Errors on the files of a scan never get here: their readers map them to UNREADABLE.

    Returns
    -------
    ScanError or None
        None if `error` is not a disk error.
    """
    if not isinstance(error, OSError) or error.errno is None:
        return None
    if isinstance(error, _NOT_FROM_A_DISK):
        return None
    if error.errno in _FULL_DISK:
        return output_error(error, "one of scanloom's own files")
    detail = f"one of scanloom's own files can't be read or written ({_name(error)})"
    return ScanError(Reason.OUTPUT_UNWRITABLE, detail, _path(error))


@contextmanager
def disk_errors_as_scan_errors() -> Iterator[None]:
    """Convert disk errors on scanloom's own files in the block to ScanError.

    Raises
    ------
    ScanError
        DISK_FULL or OUTPUT_UNWRITABLE.
    """
    try:
        yield
    except OSError as exc:
        known = disk_error(exc)
        if known is None:
            raise
        raise known from exc


def _path(exc: OSError) -> str:
    """Return the path that the system could not write; empty if it named none."""
    return os.fsdecode(exc.filename) if isinstance(exc.filename, str | bytes | os.PathLike) else ""


def _name(exc: OSError) -> str:
    """Return the cause in words, or else the system's name for it."""
    number = exc.errno or 0
    return _CAUSES.get(number) or errno.errorcode.get(number, type(exc).__name__)
