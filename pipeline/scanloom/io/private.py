"""`OUT/private/`: what names sources and the key, for the owner alone.

The folder has mode 0700, its files 0600. A file is written whole beside its place, brought to the
disk and renamed, so that who reads sees the old one or the new one. Who changes a file holds the
lock, so that of two processes neither loses what the other one added.

Locks of flock(2) end with their process. Where a file system has none, the lock is left out: one
run at a time per OUT is the rule, and a rename still keeps every file whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from scanloom.core import Reason, ScanError
from scanloom.io.file_lock import lock_file
from scanloom.io.regular import read_regular
from scanloom.io.whole import write_whole

PRIVATE = "private"
KEY_FINGERPRINT = "key.fingerprint"
CROSSWALK = "crosswalk.parquet"
LOCK = ".lock"
NEVER_LINKS = (".work", PRIVATE, "report", "report/thumbs", "bids")
"""Parts of OUT in which files are taken away or closed to others."""

MOST_BYTES = 1 << 10
"""Of a fingerprint."""

DEAD_AFTER = 3600
"""Seconds after which a draft is no longer being written: it takes a moment."""

_NO_FINGERPRINT = (
    f"{PRIVATE}/{KEY_FINGERPRINT} is damaged: if you are sure of the key, take it away, and the "
    "next run with that key writes it anew"
)
_LOCKING = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
"""A link to nothing in the lock's place would seem to be taken away for ever."""


def known_fingerprint(out: Path) -> str | None:
    """Return the fingerprint of the key that OUT's ids were made with, None where it has none.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if it can't be read.
    """
    try:
        text = read_regular(out / PRIVATE / KEY_FINGERPRINT, MOST_BYTES).decode("ascii").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as exc:
        raise ScanError(Reason.OUTPUT_UNWRITABLE, "its private folder can't be read") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ScanError(Reason.OUTPUT_UNWRITABLE, _NO_FINGERPRINT) from exc
    if not text or not text.isalnum():
        raise ScanError(Reason.OUTPUT_UNWRITABLE, _NO_FINGERPRINT)
    return text


def check_links(out: Path) -> None:
    """Refuse an OUT of which a part is a link: what it leads to is not ours to clear or to close.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE, which names the part.
    """
    for part in NEVER_LINKS:
        if (out / part).is_symlink():
            raise ScanError(
                Reason.OUTPUT_UNWRITABLE, f"its {part} is a link: a folder has to be there"
            )


def check_key(out: Path, fingerprint: str) -> None:
    """Refuse a key that is not OUT's; an OUT that is not claimed yet takes any.

    Raises
    ------
    ScanError
        KEY_MISMATCH; OUTPUT_UNWRITABLE if its private folder can't be read, or a part of it is a
        link.
    """
    check_links(out)
    if known_fingerprint(out) not in (None, fingerprint):
        raise ScanError(Reason.KEY_MISMATCH, "the ids in it were made with another key")


@contextmanager
def private_folder(out: Path, fingerprint: str) -> Iterator[Path]:
    """Give `OUT/private/`, claimed for a key and locked; it is made where it is not there.

    Where the block fails, OUT is left as unclaimed as it was.

    Parameters
    ----------
    out : Path
        The output folder, made if it is not there.
    fingerprint : str
        Of the key, as `scanloom.io.identity.key_fingerprint` gives it.

    Raises
    ------
    ScanError
        KEY_MISMATCH if OUT belongs to another key; OUTPUT_UNWRITABLE if a part of it is a link.
    OSError
        If it can't be written.
    """
    check_links(out)
    folder = out / PRIVATE
    with _locked(folder):
        new = [name for name in (KEY_FINGERPRINT, CROSSWALK) if not (folder / name).exists()]
        try:
            _clear_drafts(folder)
            if KEY_FINGERPRINT in new:
                line = f"{fingerprint}\n"
                write_private(folder / KEY_FINGERPRINT, lambda draft: draft.write_text(line))
            check_key(out, fingerprint)
            yield folder
        except BaseException:
            if KEY_FINGERPRINT in new:
                _unclaim(folder, new)
            raise


def write_private(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file for its owner alone, as `scanloom.io.whole.write_whole` does."""
    write_whole(path, write, 0o600)


def _clear_drafts(folder: Path) -> None:
    """Take away what died half-written; by its age, since there may be no lock."""
    for name in (KEY_FINGERPRINT, CROSSWALK):
        for draft in folder.glob(f".{name}.*"):
            with suppress(FileNotFoundError):  # somebody took it away
                if time.time() - draft.stat().st_mtime > DEAD_AFTER:
                    draft.unlink()


def _unclaim(folder: Path, new: Sequence[str]) -> None:
    """Take away the files that were not there before, and the folder if nothing else is in it."""
    with suppress(OSError):
        for name in new:
            (folder / name).unlink(missing_ok=True)
        if {path.name for path in folder.iterdir()} == {LOCK}:
            (folder / LOCK).unlink()
            folder.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it is not there."""
    handle = _open_lock(folder)
    while not _is_current(folder, handle):  # who held it before took the folder away
        os.close(handle)
        handle = _open_lock(folder)
    try:
        yield
    finally:
        os.close(handle)


def _open_lock(folder: Path) -> int:
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        try:
            handle = os.open(folder / LOCK, _LOCKING, 0o600)
        except FileNotFoundError:  # taken away between the two lines
            continue
        try:
            lock_file(handle)
        except BaseException:
            os.close(handle)
            raise
        return handle


def _is_current(folder: Path, handle: int) -> bool:
    try:
        return os.path.samestat((folder / LOCK).stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
