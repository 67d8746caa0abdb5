"""`OUT/.work`, where cases are built: recovery from interrupted runs and removal of leftovers.

The name of an entry tells which process builds it, so that the leftovers of a dead process are
recognized at the next start::

    <name>.<host>.<process>.<start>.<random>.new         being built
    ... .ready                                           complete, about to replace an older result
    ... .old                                             the older result, about to be deleted
    <case id>.<digest>.early                             complete, until an index confirms it

`scanloom.io.output.case_folder` replaces a published case by three renames: `.new` to `.ready`, the
case to `.old`, `.ready` to the case. If it was interrupted after the second rename, recovery does
the third; if before, recovery removes `.ready`. A staged result (`.early`) belongs to no process:
a run of its case publishes or removes it.
"""

from __future__ import annotations

import errno
import math
import os
import re
import secrets
import shutil
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from scanloom.core import Reason, ScanError
from scanloom.io.output.layout import case_folder, check_foreign_entries
from scanloom.io.output.private import PRIVATE, check_key, check_links
from scanloom.io.system.atomic_write import fsync_path, remove_stale_temporaries
from scanloom.io.system.disk_errors import output_error
from scanloom.io.system.regular_files import check_folder, open_descriptor, refuse_links_below
from scanloom.io.system.scratch_folders import host_id, process_start_ticks

REMOTE_STALE_AFTER_S = 86_400.0
"""Age of the last change at which a folder that another host was building counts as abandoned."""

HANDSHAKE_PREFIX = "handshake"
"""Name of the file in `.work` by which the workers of a run prove that they see OUT."""

HOLDER = "holder.json"
"""The file in the folder of a run's lock."""

LOCK_PREFIX = "lock"
"""Name of a lock in `.work` that is made, or was given up."""

_RUN_FILE = re.compile(rf"({HANDSHAKE_PREFIX}|{LOCK_PREFIX})\..+")
"""Files of `.work` that a run makes besides its lock and temporary files."""
_BIDS_FOLDER = re.compile(r"bids-[0-9a-f]{8}(-old)?")
"""Folders of `.work` in which `OUT/bids` is rebuilt."""

STAGED = "early"
"""Suffix of the result of a case that began before its archive was indexed."""

State = Literal["new", "ready", "old"]


def make_work_folder(out: Path, entry: str = "") -> None:
    """Make `OUT/.work` for this user alone (mode 0700), if it is missing, and a new folder in it.

    Whoever could enter it could put links in the place of files that are being written: libraries
    open them by their paths. Published folders have the usual modes.

    Parameters
    ----------
    out : Path
        The output folder; created if missing.
    entry : str
        Name of a new folder in `.work`; "" for none.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if it is a link, or belongs to another user than this one, root, or the
        owner of OUT.
    OSError
        If it can't be made.
    """
    refuse_links_below(out)
    work = out / ".work"
    while True:
        out.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            work.mkdir(mode=0o700)
        try:
            folder = open_descriptor(work, os.O_RDONLY | os.O_DIRECTORY, owned=True)
        except FileNotFoundError:
            if work.is_symlink():
                raise
            continue  # another process had no use for it any more
        except OSError as exc:
            if exc.errno not in (errno.ELOOP, errno.EPERM, errno.ENOTDIR):
                raise
            detail = ".work in the output folder is a link, a file, or a folder of another user"
            raise ScanError(Reason.OUTPUT_UNWRITABLE, detail) from exc
        try:
            mode = stat.S_IMODE(os.fstat(folder).st_mode)
            if mode & 0o077:
                os.fchmod(folder, mode & ~0o077)
            if entry:
                os.mkdir(entry, dir_fd=folder)
        except FileNotFoundError:
            continue  # it was removed in between
        finally:
            os.close(folder)
        return


def open_output(out: Path, fingerprint: str) -> None:
    """Check that `out` belongs to this key, and recover from the interrupted runs in it.

    No file is created: the key's fingerprint is written when the first case is published, so that a
    run without a result leaves no trace.

    Raises
    ------
    ScanError
        KEY_MISMATCH if the case ids in `out` were made with another key; OUTPUT_UNWRITABLE if `out`
        can't be read, or contains foreign files under names that scanloom writes to.
    """
    check_key(out, fingerprint)
    check_foreign_entries(out)
    try:
        _recover(out)
    except OSError as exc:
        raise output_error(exc) from exc


def clean_up(out: Path, since: float) -> None:
    """Remove the leftovers of dead processes from `out`; published cases are not touched.

    Temporary files last changed before `since` (seconds since 1970) are removed, so it must lie
    further in the past than any write takes.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if a subfolder is a link.
    OSError
        If a leftover can't be removed.
    """
    check_links(out)
    _recover(out)
    names = ("", "failed", "report", "review", PRIVATE, f"{PRIVATE}/index", ".work")
    runs = [*out.glob("runs/*"), *(out / PRIVATE).glob("runs/*")]
    for folder in (*map(out.joinpath, names), *runs):
        remove_stale_temporaries(folder, since)
    for path in _entries(out):
        with suppress(FileNotFoundError):  # removed by the run of another shard
            if _BIDS_FOLDER.fullmatch(path.name) and path.stat().st_mtime < since:
                shutil.rmtree(path, ignore_errors=True)
            elif _RUN_FILE.fullmatch(path.name):
                # By its process if known, else by its age
                entry = WorkEntry.parse(f"{path.name}.new")
                if entry.is_abandoned(path) if entry else path.stat().st_mtime < since:
                    remove_lock(path)


def remove_lock(path: Path) -> None:
    """Remove a lock that was renamed, or another file of `.work`; foreign files stay."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            (path / HOLDER).unlink(missing_ok=True)
            remove_stale_temporaries(path, math.inf)
            path.rmdir()
        else:
            path.unlink()


def process_file_name(prefix: str) -> str:
    """Return a name for a file in `.work` that is kept only as long as this process lives."""
    return str(WorkEntry.of_this_process(prefix)).removesuffix(".new")


@dataclass(frozen=True)
class WorkEntry:
    """The name of an entry of `.work`: the case, the process that builds it, and its state.

    Parameters
    ----------
    name : str
        Name of the case folder to be.
    host : str
        Host of the process, as `host_id` returns it.
    process : int
        Process ID.
    start : str
        Start time of the process, as `process_start_ticks` returns it.
    random : str
        Makes the name unique.
    state : "new", "ready" or "old"
    """

    name: str
    host: str
    process: int
    start: str
    random: str
    state: State

    @classmethod
    def of_this_process(cls, name: str) -> Self:
        """Return a unique new entry that this process builds."""
        process = os.getpid()
        return cls(
            name, host_id(), process, process_start_ticks(process), secrets.token_hex(4), "new"
        )

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the entry of that file name, or None if it has another format."""
        fields = text.split(".")
        if len(fields) != 6 or not fields[2].isdigit():
            return None
        name, host, process, start, random, state = fields
        if state not in ("new", "ready", "old"):
            return None
        return cls(name, host, int(process), start, random, state)  # type: ignore[arg-type]  # compared

    def is_abandoned(self, path: Path) -> bool:
        """Return whether its process is dead, or is of another host and silent for a day."""
        if self.host == host_id():
            return process_start_ticks(self.process) != self.start
        with suppress(FileNotFoundError):  # removed by another process
            return time.time() - path.stat().st_mtime > REMOTE_STALE_AFTER_S
        return False

    def __str__(self) -> str:
        return f"{self.name}.{self.host}.{self.process}.{self.start}.{self.random}.{self.state}"


def _entries(out: Path) -> list[Path]:
    """Return the entries of `OUT/.work`; none if it is gone, as when no process builds a case."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted((out / ".work").iterdir())
    return []


def _recover(out: Path) -> None:
    """Complete or undo the replacements that dead processes left in `.work`."""
    entries = {path: entry for path in _entries(out) if (entry := WorkEntry.parse(path.name))}
    abandoned = {path: entry for path, entry in entries.items() if entry.is_abandoned(path)}
    for path, entry in abandoned.items():
        if entry.state == "old":
            target, ready = case_folder(out, entry.name), path.with_suffix(".ready")
            if not target.exists():
                check_folder(target.parent)
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    (ready if ready.is_dir() else path).rename(target)
                except OSError:
                    if not target.exists():  # else another process recovered it just now
                        raise
                for folder in (target.parent, target.parent.parent):
                    fsync_path(folder)
    for path in abandoned:
        shutil.rmtree(path, ignore_errors=True)
