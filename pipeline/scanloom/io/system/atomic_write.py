"""Atomic, durable writing: a file is complete or absent, and on disk when the call returns."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scanloom.core import Reason, ScanError
from scanloom.io.system.regular_files import open_descriptor

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")
"""Name of a temporary folder, and of a file that `write` itself put next to the target."""
_DRAFT = re.compile(r"[0-9a-f]{16}")
"""Name of what is in a temporary folder."""
_TAIL = 1 << 16
"""Bytes at the end of a file in which its last line is looked for."""


def atomic_write(path: Path, write: Callable[[Path], object], mode: int = 0o666) -> None:
    """Let `write` fill a temporary file, as of `private_draft`, then rename it to `path`.

    `write` is called with its path: it exists and is empty. `mode` is before the umask.

    Raises
    ------
    OSError
        If the file can't be written; an existing file is then unchanged.
    """
    with private_draft(path) as draft:
        folder = open_descriptor(draft.parent, os.O_RDONLY | os.O_DIRECTORY)
        target = open_descriptor(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            os.close(os.open(draft.name, new, mode, dir_fd=folder))
            write(draft)
            descriptor = os.open(draft.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
            try:
                if not os.path.samestat(os.fstat(descriptor), draft.stat()):
                    # the folder was moved away and another one put in its place
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(draft.name, path.name, src_dir_fd=folder, dst_dir_fd=target)
            os.fsync(target)
        finally:
            os.close(target)
            os.close(folder)


@contextmanager
def private_draft(path: Path) -> Iterator[Path]:
    """Yield a path, where there is nothing yet, for a new file or folder to be renamed to `path`.

    It is in a new folder next to `path`, which only this user can enter, under a random name:
    where others may write to the folder of `path`, they can put no link in the place of the draft,
    neither between two openings of it nor by moving its folder away. The folder is removed.

    Raises
    ------
    OSError
        If the folder can't be made.
    """
    folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    parent = open_descriptor(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.mkdir(folder.name, 0o700, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        yield folder / secrets.token_hex(8)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def cut_half_line(descriptor: int) -> int:
    """Cut off the half line at the end of a file, which a process that died left; return the size.

    Raises
    ------
    OSError
    """
    size = os.fstat(descriptor).st_size
    while size and not (tail := os.pread(descriptor, _TAIL, max(0, size - _TAIL))).endswith(b"\n"):
        size -= len(tail) - (tail.rfind(b"\n") + 1)
        os.ftruncate(descriptor, size)
    return size


def append_synced(descriptor: int, content: bytes, size: int) -> None:
    """Write to the end of an open file and sync it; if that fails, cut it back to its size.

    Raises
    ------
    OSError
    """
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    except BaseException:
        os.ftruncate(descriptor, size)
        raise


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


def remove_stale_temporaries(folder: Path, since: float) -> None:
    """Remove temporary files in a folder, if it exists, that were last modified before `since`.

    In a temporary folder too, only files with the name of a draft are removed: `.backup.20261124`
    may be somebody's.
    """
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in paths:
        with suppress(FileNotFoundError):  # removed by another process
            if not _TEMPORARY.fullmatch(path.name):
                continue
            if path.is_symlink() or not path.is_dir():
                if path.lstat().st_mtime < since:
                    path.unlink()
                continue
            drafts = [each for each in path.iterdir() if _DRAFT.fullmatch(each.name)]
            if all(each.lstat().st_mtime < since for each in (path, *drafts)):
                with suppress(OSError):  # of another user, or not empty
                    for each in drafts:
                        each.unlink()
                    path.rmdir()


def fsync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk: fsync(2) makes a rename durable."""
    descriptor = open_descriptor(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
