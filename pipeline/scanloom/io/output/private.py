"""`OUT/private/`: files that identify sources and the key, readable by their owner alone.

The folder has mode 0700, its files 0600. A file is written to a temporary file, synced to the disk
and renamed, so that a reader sees either the old or the new one. A process that changes a file
holds the lock, so that no change of a concurrent process is lost.

If the file system does not support flock, no lock is taken: one run at a time per OUT is the rule,
and the atomic rename still keeps every file intact.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from scanloom.core import Reason, ScanError
from scanloom.core.process import lock_file
from scanloom.io.identity import key_fingerprint, load_key, read_key
from scanloom.io.system.atomic_write import atomic_write, remove_stale_temporaries
from scanloom.io.system.regular_files import (
    open_descriptor,
    open_link_free,
    read_regular_file,
    refuse_links_below,
)

PRIVATE = "private"
KEY_FINGERPRINT = "key.fingerprint"
CROSSWALK, CROSSWALK_LINES = "crosswalk.parquet", "crosswalk.jsonl"
LEDGER, LEDGER_LINES = "ledger.parquet", "ledger.jsonl"
LOCK = ".lock"
LINK_FREE_ENTRIES = (
    *("cases", ".work", PRIVATE, f"{PRIVATE}/index", "engines", "report", "bids"),
    *("report/data", "private/report", "review", "review/revisions"),
)
"""Subfolders of OUT that must not be links: files in them are removed, or their modes changed."""

MAX_FINGERPRINT_BYTES = 1 << 10
"""Size limit of a fingerprint file."""

_STALE_AFTER_S = 3600
"""Age at which a temporary file is no longer being written: a write takes moments."""

_DAMAGED_FINGERPRINT = (
    f"{PRIVATE}/{KEY_FINGERPRINT} is damaged: if you are sure of the key, remove the file, and the "
    "next run with that key writes it again"
)
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
"""Links are not followed: a dangling link would look like a lock file that was just removed."""


def read_fingerprint(out: Path) -> str | None:
    """Return the fingerprint of the key that made OUT's ids, or None if OUT is not claimed.

    Nothing in OUT is opened through a link from then on, as of `check_links`.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the fingerprint can't be read, or is in a link or one itself.
    """
    check_links(out)
    try:
        text = (
            read_regular_file(out / PRIVATE / KEY_FINGERPRINT, MAX_FINGERPRINT_BYTES)
            .decode("ascii")
            .strip()
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as exc:
        detail = f"permission to read {PRIVATE}/ in the output folder is missing"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail, str(out)) from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ScanError(Reason.OUTPUT_UNWRITABLE, _DAMAGED_FINGERPRINT) from exc
    if not text or not text.isalnum():
        raise ScanError(Reason.OUTPUT_UNWRITABLE, _DAMAGED_FINGERPRINT)
    return text


def check_links(out: Path) -> None:
    """Refuse an OUT with linked subfolders: their targets must not be cleared or restricted.

    From then on, this process opens nothing in OUT through a link.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE, with the name of the subfolder.
    """
    refuse_links_below(out)
    for name in LINK_FREE_ENTRIES:
        if (out / name).is_symlink():
            detail = f"{name} in the output folder is a link: a folder is required"
            raise ScanError(Reason.OUTPUT_UNWRITABLE, detail)


def check_key(out: Path, fingerprint: str) -> None:
    """Refuse a key other than OUT's; an OUT that is not claimed yet accepts any key.

    Raises
    ------
    ScanError
        KEY_MISMATCH; OUTPUT_UNWRITABLE if the private folder can't be read, or a subfolder of OUT
        is a link.
    """
    if read_fingerprint(out) not in (None, fingerprint):
        detail = "the ids in the output folder were made with another key"
        raise ScanError(Reason.KEY_MISMATCH, detail)


def load_key_of(out: Path, file: Path | None) -> bytes:
    """Return the key for the ids of an output folder; errors as for `load_key`.

    A missing key is created only for an OUT that is not claimed yet: for any other, it can't be the
    right one.
    """
    return load_key(file) if read_fingerprint(out) is None else read_key(file)


def read_key_of(out: Path, file: Path | None) -> bytes:
    """Return the key by which the ids of an output folder were made.

    Raises
    ------
    ScanError
        As of `read_key` and `check_key`.
    """
    key = read_key(file)
    check_key(out, key_fingerprint(key))
    return key


@contextmanager
def private_folder(out: Path, fingerprint: str) -> Iterator[Path]:
    """Yield `OUT/private/`, locked and claimed for a key; it is created if missing.

    If the block fails, an OUT that was not claimed before is not claimed after.

    Raises
    ------
    ScanError
        KEY_MISMATCH if OUT belongs to another key; OUTPUT_UNWRITABLE if a subfolder is a link.
    OSError
        If the folder can't be written.
    """
    check_links(out)
    folder = out / PRIVATE
    with locked_folder(folder):
        files = (KEY_FINGERPRINT, CROSSWALK, LEDGER_LINES)
        new = [name for name in files if not (folder / name).exists()]
        try:
            # age decides, since there may be no lock
            remove_stale_temporaries(folder, time.time() - _STALE_AFTER_S)
            if KEY_FINGERPRINT in new:
                line = f"{fingerprint}\n"
                write_private(folder / KEY_FINGERPRINT, lambda path: path.write_text(line))
            check_key(out, fingerprint)
            yield folder
        except BaseException:
            if KEY_FINGERPRINT in new:
                _unclaim(folder, new)
            raise


def write_private(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file, readable by its owner only, as `atomic_write` does.

    Raises
    ------
    OSError
        EPERM if a folder in OUT on the way belongs to another user, who could read it; as of
        `atomic_write`.
    """
    os.close(open_descriptor(path.parent, os.O_RDONLY | os.O_DIRECTORY, owned=True))
    atomic_write(path, write, 0o600)


def append_private(path: Path) -> BinaryIO:
    """Open a log to append to it; it is readable by its owner only.

    Raises
    ------
    OSError
        If it can't be opened, or is a link.
    """
    descriptor = open_link_free(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return os.fdopen(descriptor, "ab")


def _unclaim(folder: Path, new: Sequence[str]) -> None:
    """Remove the files `new`, and the folder if it contains nothing else."""
    with suppress(OSError):
        for name in new:
            (folder / name).unlink(missing_ok=True)
        if {path.name for path in folder.iterdir()} == {LOCK}:
            (folder / LOCK).unlink()
            folder.rmdir()


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created if missing."""
    handle = _open_lock(folder)
    while not _is_current(folder, handle):  # the previous holder removed the folder
        os.close(handle)
        handle = _open_lock(folder)
    try:
        yield
    finally:
        os.close(handle)


def _open_lock(folder: Path) -> int:
    """Return the descriptor of the folder's lock file, locked."""
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        try:
            handle = open_descriptor(folder / LOCK, _LOCK_FLAGS, 0o600, owned=True)
        except FileNotFoundError:  # the folder was removed in between
            continue
        try:
            lock_file(handle)
        except BaseException:
            os.close(handle)
            raise
        return handle


def _is_current(folder: Path, handle: int) -> bool:
    """Return whether the open lock file is still the folder's."""
    try:
        return os.path.samestat((folder / LOCK).stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
