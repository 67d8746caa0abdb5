"""`Documents`: small JSON files of a folder, which are read again once they have changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

COARSEST_NS = 3 * 10**9
"""Some file systems tell times in steps of seconds: what has just changed may change again in the
same step, and is looked at again."""

Stamp = tuple[int, int]
"""Time of change, in ns, and inode: two states of a file may have been written in one tick."""


class Documents(Generic[T]):
    """The values of a folder's documents, by the names of their files without `.json`.

    Parameters
    ----------
    read : callable
        Returns the value of a file; None if it has none.
    """

    def __init__(self, folder: Path, read: Callable[[Path], T | None]) -> None:
        self._folder, self._read = folder, read
        self._last: tuple[int, dict[str, tuple[Stamp, T]]] = -1, {}  # one value, for threads

    def values(self) -> dict[str, T]:
        """Return the values as they are now; OSError if the folder can't be listed."""
        seen, (last_seen, known) = state_of(self._folder), self._last
        if seen < 0 or seen != last_seen:
            before, known = known, {}
            for path, stamp in stamped_files(self._folder):
                same = path.stem in before and before[path.stem][0] == stamp
                value = before[path.stem][1] if same else self._read(path)
                if value is not None:
                    known[path.stem] = stamp, value
            self._last = seen, known
        return {name: value for name, (_, value) in known.items()}


def state_of(folder: Path) -> int:
    """Return when a folder changed, in ns; -1 if it may change again without another time."""
    changed = folder.stat().st_mtime_ns
    return changed if time.time_ns() - changed > COARSEST_NS else -1


def stamped_files(folder: Path) -> list[tuple[Path, Stamp]]:
    """Return the documents of a folder with their stamps."""
    documents = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".json") and not entry.name.startswith("."):
                with suppress(FileNotFoundError):  # its state has changed
                    state = entry.stat(follow_symlinks=False)
                    documents.append((Path(entry.path), (state.st_mtime_ns, state.st_ino)))
    return documents
