"""One run at a time per output folder: a lock that says who holds it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scanloom.core import Reason, ScanError
from scanloom.io.casefolder import output_error, tidy
from scanloom.io.file_lock import lock_file
from scanloom.io.living import process_space, process_start
from scanloom.io.private import check_links
from scanloom.io.regular import read_regular
from scanloom.io.whole import write_whole

WORK = ".work"
MOST_BYTES = 1 << 12
"""Of a lock."""
PATIENCE = 10.0
"""Seconds that another process has to look at a lock."""
TRIES = 100
"""How often a lock may come and go before that is given up."""


@contextmanager
def hold_lock(out: Path, *, shard: str = "", take_over: bool = False) -> Iterator[None]:
    """Hold an output folder for one run; at its end, what died in or before it is cleared away.

    Parameters
    ----------
    out : Path
        The output folder; made if it is not there.
    shard : str
        A run of one shard holds that shard alone.
    take_over : bool
        Whether the lock of a run on another host, or in another container, is taken: from here
        nobody can know whether that one still runs. That of a process which is dead on this host
        is taken without asking.

    Raises
    ------
    ScanError
        LOCKED, naming host, process and start time; DISK_FULL or OUTPUT_UNWRITABLE.
    """
    check_links(out)
    began = time.time()
    path = out / WORK / (f"run-{shard}.lock" if shard else "run.lock")
    mine = json.dumps(
        {
            "host": socket.gethostname(),
            "space": process_space(),
            "process": os.getpid(),
            "start": process_start(os.getpid()),
            "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(out):
            _acquire(path, mine, take_over=take_over)
    except OSError as exc:
        raise output_error(exc) from exc
    try:
        yield
    finally:
        if _read(path) == mine:
            with suppress(OSError, ScanError):  # what stays is cleared by the next run
                tidy(out, began)
            path.unlink(missing_ok=True)


@contextmanager
def _one_at_a_time(out: Path) -> Iterator[None]:
    """Let one process look at locks at once, where the file system knows how (flock)."""
    folder = os.open(out, os.O_RDONLY)
    try:
        with suppress(OSError):  # linking and renaming are all that is left then
            lock_file(folder, timeout_s=PATIENCE)
        yield
    finally:
        os.close(folder)


def _acquire(path: Path, mine: str, *, take_over: bool) -> None:
    """Link the lock into place: of several who try, one comes first."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    write_whole(draft, lambda file: file.write_text(mine))
    try:
        for _ in range(TRIES):
            try:
                os.link(draft, path)
            except FileExistsError:
                _give_up_or_clear(path, take_over=take_over)
            else:
                return
        raise ScanError(Reason.LOCKED, "its lock comes and goes")
    finally:
        draft.unlink(missing_ok=True)


def _give_up_or_clear(path: Path, *, take_over: bool) -> None:
    text = _read(path)
    if text is None:
        return  # just released
    try:
        held = json.loads(text)
        host, process = str(held["host"]), int(held["process"])
        start, since = str(held["start"]), str(held["since"])
        space = str(held.get("space"))
    except (ValueError, KeyError, TypeError):
        host, process, start, since, space = "", 0, "", "", ""
    same_name = host == socket.gethostname()
    here = same_name and space == process_space()
    if (here and process_start(process) != start) or (take_over and not here):
        # Renamed, not deleted: who comes second renames a lock that is not the dead one's any
        # more only if it was taken between our reading and this line
        stale = path.with_name(f"{path.name}.{secrets.token_hex(8)}.stale")
        try:
            path.rename(stale)
        except FileNotFoundError:
            return
        if _read(stale) != text:
            os.link(stale, path)  # it was somebody's: give it back
        if stale.is_dir() and not stale.is_symlink():
            return  # no run made it: whoever did has it still, under another name
        stale.unlink(missing_ok=True)
        return
    if not host:
        detail = f"{WORK}/{path.name} does not say which run holds it: --take-over, if none goes on"
        raise ScanError(Reason.LOCKED, detail)
    there = f"another container of host {host}" if same_name else f"host {host}"
    where = "this host" if here else f"{there}: --take-over, if it surely runs no more"
    raise ScanError(Reason.LOCKED, f"process {process} since {since} on {where}")


def _read(path: Path) -> str | None:
    """Return what a lock says, None where there is none; of what no run wrote, nothing."""
    try:
        return read_regular(path, MOST_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return "" if os.path.lexists(path) else None  # a link to nothing stands in the way too
    except OSError:
        return ""
