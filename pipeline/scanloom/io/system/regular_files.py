"""Open regular files only, and nothing in an output folder through a link.

Reading a pipe, a socket or a device may never return. An output folder may be one that other users
write to: a link that they place there would let this process read, or overwrite, any file of its
user. `refuse_links_below` names such folders; from then on the functions here refuse each link
below them, in the middle of a path too. They open folder after folder, so that a link that is
placed meanwhile is not followed either. Links on the way to the folder itself are the user's own.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from io import BufferedReader
from pathlib import Path

_link_free = set[str]()
"""Absolute paths of folders below which links are refused."""
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags for a folder that is passed through: permission to read its entries is not needed."""

_SPECIAL = {
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def special_file_name(mode: int) -> str:
    """Return the kind of a file that is neither regular nor a folder, by its mode; else ""."""
    return _SPECIAL.get(stat.S_IFMT(mode), "")


def refuse_links_below(folder: Path | str) -> None:
    """Let this process open nothing below a folder through a link from now on."""
    _link_free.update((_absolute(folder), os.path.realpath(folder)))


def _absolute(path: Path | str) -> str:
    """Return an absolute path without `..`, which names the file that the system would open.

    `..` of a link is the folder above the link's target. A folder that refuses links has none
    below it, so that `..` is taken off the name there: the path stays below that folder.
    """
    absolute, path = os.sep, os.fspath(path)
    # The working folder may be gone, which does not concern an absolute path
    for component in (path if os.path.isabs(path) else f"{os.getcwd()}/{path}").split(os.sep):
        if component == "..":
            inside = _root_above(absolute) is not None
            absolute = os.path.dirname(absolute if inside else os.path.realpath(absolute))
        elif component not in ("", os.curdir):
            absolute = os.path.join(absolute, component)
    return absolute


def _root_above(absolute: str) -> str | None:
    """Return the outermost folder above a path that refuses links."""
    roots = [each for each in _link_free if absolute.startswith(each.rstrip(os.sep) + os.sep)]
    return min(roots, key=len, default=None)


def open_descriptor(path: Path | str, flags: int, mode: int = 0o666, *, owned: bool = False) -> int:
    """Open a file or folder, without following links below the folders that refuse them.

    Parameters
    ----------
    path : Path or str
    flags, mode : int
        As of `os.open`.
    owned : bool
        Below a folder that refuses links, also refuse files of another user than this one,
        root, or the owner of that folder: he could read the content. So are the folders
        on the way.

    Raises
    ------
    OSError
        ELOOP if a part of the path is a link and must not be; EPERM if it belongs to another user;
        as of `os.open`.
    """
    absolute = _absolute(path)
    root = _root_above(absolute)
    flags |= os.O_CLOEXEC
    if root is None:
        return os.open(path, flags, mode)
    *folders, name = os.path.relpath(absolute, root).split(os.sep)
    inside = os.open(root, _FOLDER & ~os.O_NOFOLLOW)
    owners = {0, os.geteuid(), os.fstat(inside).st_uid}
    try:
        for folder in folders:
            outer, inside = inside, _open_in(inside, folder, _FOLDER, 0)
            os.close(outer)
            if owned and os.fstat(inside).st_uid not in owners:
                raise OSError(errno.EPERM, "a folder of another user")
        opened = _open_in(inside, name, flags | os.O_NOFOLLOW, mode)
    finally:
        os.close(inside)
    if owned and os.fstat(opened).st_uid not in owners:
        os.close(opened)
        raise OSError(errno.EPERM, "a file of another user")
    return opened


def _open_in(folder: int, name: str, flags: int, mode: int) -> int:
    try:
        return os.open(name, flags, mode, dir_fd=folder)
    except NotADirectoryError:  # what the system says of a link where a folder is required
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


def check_folder(folder: Path | str) -> None:
    """Refuse a folder that is reached through a link, before something is made in it.

    Missing parts of the path are not refused.

    Raises
    ------
    OSError
        As of `open_descriptor`.
    """
    try:
        os.close(open_descriptor(folder, os.O_RDONLY | os.O_DIRECTORY))
    except FileNotFoundError:
        if os.path.lexists(folder):  # a link to nowhere
            raise
    except PermissionError:
        pass  # what is made in it will say so


def open_regular_file(path: Path | str) -> BufferedReader:
    """Open a regular file for reading bytes, without blocking.

    Raises
    ------
    OSError
        If it cannot be opened or is not a regular file. A read that would block raises it too.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    descriptor = open_descriptor(path, os.O_RDONLY | os.O_NONBLOCK)
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


def sha256_of(path: Path | str) -> str:
    """Return the SHA-256 of a file, hexadecimal; errors as for `open_regular_file`."""
    with open_regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_link_free(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file that scanloom keeps, as `os.open` does, but never through a link.

    Whoever may write to the folder could lay a link there, so that a file elsewhere is read, filled
    or emptied by a user who may do that. Neither the file nor its folder may be a symbolic link,
    and the file has no second name (hard link). Nor may they belong to another user, as of
    `open_descriptor`: he could read additions, such as a comment.

    Parameters
    ----------
    path : Path
    flags : int
        As of `os.open`, without O_TRUNC: the open file is checked first.
    mode : int
        Mode of a new file, before the umask.

    Raises
    ------
    OSError
        ELOOP if it is a link, EINVAL if it is not a regular file, EPERM if it is another user's.
    """
    folder = open_descriptor(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, owned=True)
    try:
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path.name, flags, mode, dir_fd=folder)
    finally:
        os.close(folder)
    root = _root_above(_absolute(path))
    owners = root and {0, os.geteuid(), os.stat(root).st_uid}
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        number = errno.ELOOP if stat.S_ISREG(status.st_mode) else errno.EINVAL
        raise OSError(number, os.strerror(number), str(path))
    if owners and status.st_uid not in owners:
        os.close(descriptor)
        raise OSError(errno.EPERM, "a file of another user")
    return descriptor
