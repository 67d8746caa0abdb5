"""Start Python processes that import nothing from folders which other users can write to.

Python searches for modules next to a script, in the working folder (`-m`, `-c`), in PYTHONPATH and
in folders that libraries add. A user who can write to one of them can run code as the user who
starts Python there.
"""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

_PATH = "PYTHONPATH"


def own_python(*arguments: str) -> list[str]:
    """Return a command line for this Python that keeps the working folder off `sys.path`."""
    return [sys.executable, "-P", *arguments]


def let_idle_threads_sleep() -> None:
    """Let OpenBLAS's threads sleep when they are idle, before NumPy is imported.

    NumPy and SciPy have a copy each. Their threads wait actively for 2^26 cycles after they have
    started, and after each product: 0.03 s of a processor per thread.
    """
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # 2^4 cycles, the fewest


def own_environment() -> dict[str, str]:
    """Return the environment of a child process with a safe search path, which it passes on."""
    path = os.pathsep.join(safe_path(filter(None, os.environ.get(_PATH, "").split(os.pathsep))))
    return {**os.environ, "PYTHONSAFEPATH": "1", _PATH: path}


def safe_path(entries: Iterable[str]) -> list[str]:
    """Return the entries of a search path to which no other user can add a module, in order.

    Folders of this Python installation and of the program are always kept.

    Parameters
    ----------
    entries : iterable of str
        "" and relative entries refer to the working folder; they become absolute.
    """
    kept = []
    own_folders = _own_folders()
    for entry in entries:
        path = Path(entry).absolute()
        if any(path.is_relative_to(folder) for folder in own_folders) or is_closed(path):
            kept.append(str(path))
    return list(dict.fromkeys(kept))


def is_closed(path: Path, *, sticky: bool = False) -> bool:
    """Return whether only this user and root can change the file or folder at a path.

    Parameters
    ----------
    path : Path
        Absolute. If it does not exist, the nearest existing parent decides.
    sticky : bool
        Whether to accept a parent like /tmp, where other users can add files but not move ours.
    """
    try:
        # Both the link and its target: either could be exchanged
        for target in (path, path.resolve()):
            nearest = next(p for p in (target, *target.parents) if p.exists())
            if not all(
                is_ours(p, sticky=sticky or p != nearest) for p in (nearest, *nearest.parents)
            ):
                return False
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        return False
    return True


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents with access for this user only.

    Raises
    ------
    OSError
        If a folder can't be created.
    """
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)


def is_ours(path: Path, *, sticky: bool = False) -> bool:
    """Return whether a path belongs to this user or root, and no other user can write to it.

    Parameters
    ----------
    path : Path
        Links are followed; parent folders are not checked.
    sticky : bool
        Whether to accept a folder with the sticky bit, such as /tmp.

    Raises
    ------
    OSError
        If the path does not exist.
    """
    status = path.stat()
    if status.st_uid not in (0, os.getuid()):
        return False
    # In a sticky folder others can add files, but not replace ours
    if sticky and status.st_mode & stat.S_ISVTX:
        return True
    # Many systems make folders writable for a group that has only this user
    if status.st_mode & stat.S_IWOTH:
        return False
    return not status.st_mode & stat.S_IWGRP or _is_private_group(status.st_gid)


def _is_private_group(number: int) -> bool:
    """Return whether a group is root's, or has this user as its only member."""
    import grp
    import pwd

    if number == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _own_folders() -> set[Path]:
    """Return the folders of this Python installation and of this program."""
    paths = sysconfig.get_paths()
    libraries = {Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return {Path(sys.prefix), Path(sys.base_prefix), *libraries, Path(__file__).parents[2]}
