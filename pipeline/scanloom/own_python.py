"""Processes of this program: they import nothing from where another user can write.

Python looks for modules beside a script, in the working folder (`-m`, `-c`), in PYTHONPATH and
wherever a library adds a folder. Who can write to one of them can have code run by whoever starts
Python there.
"""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

_PATH = "PYTHONPATH"
_ANYBODY, _GROUP = stat.S_IWOTH, stat.S_IWGRP


def own_python(*words: str) -> list[str]:
    """Return a command of this Python that leaves its working folder off `sys.path`."""
    return [sys.executable, "-P", *words]


def own_environment() -> dict[str, str]:
    """Return the variables for a process of this program; its children are careful too."""
    path = os.pathsep.join(safe_path(filter(None, os.environ.get(_PATH, "").split(os.pathsep))))
    return {**os.environ, "PYTHONSAFEPATH": "1", _PATH: path}


def safe_path(entries: Iterable[str]) -> list[str]:
    """Return the entries of a search path to which no other user can add a module, as they stand.

    What belongs to this Python stays: what is running comes from there.

    Parameters
    ----------
    entries : iterable of str
        "" and relative ones mean the working folder; they become absolute.
    """
    kept = []
    own = _own_places()
    for entry in entries:
        path = Path(entry).absolute()
        if any(path.is_relative_to(place) for place in own) or is_closed(path):
            kept.append(str(path))
    return list(dict.fromkeys(kept))


def is_closed(path: Path, *, sticky: bool = False) -> bool:
    """Whether only this user and root decide what lies at a path.

    Parameters
    ----------
    path : Path
        Absolute; where it is not there, what matters is who can make it.
    sticky : bool
        Whether others may write beside what lies there, as in /tmp: they can't move it.
    """
    if not hasattr(os, "getuid"):
        return True
    try:
        for place in (path, path.resolve()):
            there = next(p for p in (place, *place.parents) if p.exists())
            if not all(is_ours(p, sticky=sticky or p != there) for p in (there, *there.parents)):
                return False
    except (OSError, RuntimeError):  # RuntimeError: links in a ring
        return False
    return True


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone.

    Raises
    ------
    OSError
        If one can't be made.
    """
    for place in (*reversed(folder.parents), folder):
        if not place.is_dir():
            place.mkdir(mode=0o700, exist_ok=True)


def is_ours(path: Path, *, sticky: bool = False) -> bool:
    """Whether a file or folder is this user's or root's, and nobody else may write to it.

    Parameters
    ----------
    path : Path
        Links are followed; what is above it is not looked at.
    sticky : bool
        Whether others may write to a folder in which they can move nothing of ours, as /tmp.

    Raises
    ------
    OSError
        If it is not there.
    """
    if not hasattr(os, "getuid"):
        return True
    found = path.stat()
    if found.st_uid not in (0, os.getuid()):
        return False
    if sticky and found.st_mode & stat.S_ISVTX:
        return True
    if found.st_mode & _ANYBODY:
        return False
    return not found.st_mode & _GROUP or _is_private_group(found.st_gid)


def _is_private_group(number: int) -> bool:
    """Whether a group is root's, or has this user alone: many systems make such a one for each."""
    import grp
    import pwd

    if number == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _own_places() -> set[Path]:
    """Return where this Python and this program lie."""
    paths = sysconfig.get_paths()
    libraries = {Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return {Path(sys.prefix), Path(sys.base_prefix), *libraries, Path(__file__).parents[2]}
