"""Locks between processes of any machines: folders with a file that names their holder.

A lock is made under another name and renamed: a rename onto a folder that is not empty fails on
every file system, so that of several processes exactly one succeeds, and the lock has its holder's
name from its first moment on. Shares that know neither hard links nor flock(2) can do that.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from scanloom.io.output.work_folder import HOLDER, LOCK_PREFIX, process_file_name, remove_lock
from scanloom.io.system.atomic_write import atomic_write
from scanloom.io.system.regular_files import read_regular_file
from scanloom.io.system.scratch_folders import pid_namespace, process_start_ticks

_MAX_BYTES = 1 << 12
_TIME = "%Y-%m-%dT%H:%M:%S%z"


class Holder(NamedTuple):
    """The process that holds a lock.

    Parameters
    ----------
    host, space : str
        Name of its host, and its PID namespace there.
    process : int
    start : str
        Start of the process, as `process_start_ticks` returns it.
    since : str
        Local time at which it took the lock.
    """

    host: str
    space: str
    process: int
    start: str
    since: str

    @classmethod
    def of_this_process(cls) -> Self:
        """Return this process as the holder of a new lock."""
        process = os.getpid()
        start, since = process_start_ticks(process), time.strftime(_TIME)
        return cls(socket.gethostname(), pid_namespace(), process, start, since)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the holder that the file of a lock describes; None if it describes none."""
        try:
            fields = json.loads(text)
            host, process = str(fields["host"]), int(fields["process"])
            return cls(
                host, str(fields.get("space")), process, str(fields["start"]), str(fields["since"])
            )
        except (ValueError, KeyError, TypeError):
            return None

    @property
    def has_our_host(self) -> bool:
        """Whether its host has the name of this one: containers may share it."""
        return self.host == socket.gethostname()

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this host, and of this container."""
        return self.has_our_host and self.space == pid_namespace()

    @property
    def is_dead(self) -> bool:
        """Whether it was a process here that has ended; of others, nothing is known here."""
        return self.is_here and process_start_ticks(self.process) != self.start

    def __str__(self) -> str:
        return json.dumps(self._asdict())


def take_lock(path: Path, content: str, *, synced: bool = True) -> bool:
    """Make the lock `path` with a file of this content; False if there is a lock already.

    If it is not `synced`, it may say nothing after the machine itself went down.

    Raises
    ------
    OSError
        If it can't be made.
    """
    draft = path.with_name(process_file_name(LOCK_PREFIX))
    draft.mkdir()
    try:
        if synced:
            atomic_write(draft / HOLDER, lambda file: file.write_text(content))
        else:
            (draft / HOLDER).write_text(content)
        if not os.path.lexists(path):  # no empty folder of somebody else is replaced
            try:
                draft.rename(path)
            except OSError as exc:  # shares differ in the error number of a name that is taken
                if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST) and not os.path.lexists(path):
                    raise
            else:
                return True
        return False
    finally:
        remove_lock(draft)


def read_lock(path: Path) -> str | None:
    """Return the content of a lock; None if it is missing, empty if it says nothing."""
    try:
        return read_regular_file(path / HOLDER, _MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return "" if os.path.lexists(path) else None  # a dangling link blocks the name too


def release_lock(path: Path, content: str) -> None:
    """Remove a lock if it has this content.

    Raises
    ------
    OSError
        If it can't be removed.
    """
    # Renamed before it is deleted: another process may have replaced the lock since it was read
    stale = path.with_name(process_file_name(LOCK_PREFIX))
    try:
        path.rename(stale)
    except FileNotFoundError:
        return
    if read_lock(stale) != content:
        with suppress(OSError):  # unless there is another one by now
            stale.rename(path)  # it is the lock of a live process: restore it
            return
    remove_lock(stale)
