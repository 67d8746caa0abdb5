"""Keeps exported networks in the user's cache folder, complete or not at all.

An export is a folder that is named by the hash of all that it depends on. It is written under
another name and renamed, and its files are compared with their hashes whenever it is read. A lock
makes processes that prepare the same network wait for the first of them. An export that was
changed is removed and made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from scanloom.core import user_cache_folder
from scanloom.core.process import lock_file
from scanloom.own_python import is_ours, make_private_folder

logger = logging.getLogger(__name__)

HASHES = "sha256.json"
"""File with the hashes of the others; an export without it is not complete."""
LARGEST_BYTES = 8 * 1024**3
"""Limit of all exports together: those not used for longest are removed first."""


def exports_folder() -> Path:
    """Return the folder of the exports."""
    return user_cache_folder() / "engines"


def export_key(subject: Mapping[str, object]) -> str:
    """Return the key (64 hex digits) of an export from all that it depends on."""
    return hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()


@contextmanager
def cached_export(key: str, write: Callable[[Path], None]) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of an export, and whether it was there; `write` fills it if necessary.

    Without a writable cache folder the export is made in a temporary folder, which is removed at
    the end of the block.

    Parameters
    ----------
    key : str
        From `export_key`.
    write : callable
        Writes the files into an empty folder. Its errors are passed on, and nothing is kept.
    """
    try:
        make_private_folder(exports_folder())
        if not is_ours(exports_folder()):
            raise PermissionError("another user can write to the cache folder")
        with _locked(key):
            folder = exports_folder() / key
            found = is_complete(folder)
            if not found:
                _publish(folder, write)
        os.utime(folder)
    except OSError:
        logger.debug("exported networks can't be cached", exc_info=True)
    else:
        yield folder, found
        return
    with tempfile.TemporaryDirectory(prefix="scanloom-engine-") as temporary:
        write(Path(temporary))
        yield Path(temporary), False


def is_complete(folder: Path) -> bool:
    """Return whether an export's files are those that were written."""
    try:
        hashes = json.loads((folder / HASHES).read_text(encoding="utf-8"))
        present = {path.name for path in folder.iterdir()}
        return present == {HASHES, *hashes} and all(
            _sha256(folder / name) == digest for name, digest in hashes.items()
        )
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _publish(folder: Path, write: Callable[[Path], None]) -> None:
    """Write an export under another name, then rename it; a damaged one is removed before."""
    draft = Path(tempfile.mkdtemp(prefix=".", suffix=f".{os.getpid()}", dir=folder.parent))
    try:
        write(draft)
        names = sorted(path.name for path in draft.iterdir())
        hashes = {name: _sha256(draft / name) for name in names}
        (draft / HASHES).write_text(json.dumps(hashes), encoding="utf-8")
        for path in draft.iterdir():
            _sync(path)
        if folder.exists():
            shutil.rmtree(folder)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _sync(folder.parent)
    _remove_old(keep=folder)


@contextmanager
def _locked(key: str) -> Iterator[None]:
    """Wait for other processes that make the same export; drafts of dead processes are removed."""
    path = exports_folder() / f"{key}.lock"
    with path.open("ab") as file:
        lock_file(file.fileno())
        _remove_drafts()
        yield


def _remove_drafts() -> None:
    """Remove drafts whose process is gone."""
    for draft in exports_folder().glob(".*.*"):
        pid = draft.suffix.removeprefix(".")
        if pid.isdecimal() and not Path("/proc", pid).exists() and Path("/proc/self").exists():
            shutil.rmtree(draft, ignore_errors=True)


def _remove_old(keep: Path) -> None:
    """Remove the exports that were not used for longest, beyond the limit of all together."""
    folders = [path for path in exports_folder().iterdir() if len(path.name) == len(keep.name)]
    left = LARGEST_BYTES
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(OSError):
            left -= sum(path.stat().st_size for path in folder.iterdir())
            if left < 0 and folder != keep:
                shutil.rmtree(folder, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
