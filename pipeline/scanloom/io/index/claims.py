"""Claims of parts: processes of several machines that index one archive read each part once.

    index/<part>.claim   a part that a process is reading
    index/merge.claim    the catalogue that a process is making

Claims only save work. Parts are named by the files that they describe, so that one that is read
twice is the same, and nothing is wrong if two processes hold one claim: where the share has no
atomic rename, or a process is taken for dead that only slept.

A claim is taken over if its process is dead, which is known on its own host at once, or if nothing
touched it for `SILENT_AFTER_S`. Its age is the difference between the times that the share itself
gave to two files, so that the clocks of the machines do not matter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import utime
from pathlib import Path

from scanloom.io.output.folder_lock import Holder, read_lock, release_lock, take_lock
from scanloom.io.output.work_folder import WorkEntry, process_file_name, remove_lock

MERGE = "merge"
"""Name of the claim of the catalogue."""
BEAT_S = 10.0
"""Seconds between two touches of a claim."""
SILENT_AFTER_S = 180.0
"""Age at which a claim is taken over: NFS shows other machines a time up to 60 s late (nfs(5))."""
POLL_S = 0.5
"""Seconds between two looks at the claims of others."""

_SUFFIX = ".claim"
_CLOCK = "clock"


class Claims:
    """The claims of this process in the folder of the parts.

    Parameters
    ----------
    folder : Path or None
        None if no other process can see the parts: then everything can be claimed.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._held: dict[Path, str] = {}
        self._ended = threading.Event()
        self._beat: threading.Thread | None = None

    @contextmanager
    def claim(self, name: str, *, wait: bool = False) -> Iterator[bool]:
        """Claim a piece of work for the time of the block, and give whether that succeeded.

        With `wait`, it always does in the end.
        """
        path = None if self._folder is None else self._folder / f"{name}{_SUFFIX}"
        while not (is_ours := path is None or self._take(path)) and wait:
            self.pause()
        try:
            yield is_ours
        finally:
            content = self._held.pop(path, None) if path and is_ours else None
            if path and content:
                with suppress(OSError):  # another process will see that this one is gone
                    release_lock(path, content)

    def pause(self) -> None:
        """Wait before another look at the claims of others."""
        time.sleep(POLL_S)

    def close(self) -> None:
        """Stop touching claims, and remove what dead processes left."""
        self._ended.set()
        if self._beat:
            self._beat.join()
        with suppress(OSError):
            for path in self._folder.iterdir() if self._folder else ():
                entry = WorkEntry.parse(f"{path.name}.new")  # drafts and clocks
                if entry and entry.is_abandoned(path):
                    remove_lock(path)
                content = read_lock(path) if path.suffix == _SUFFIX else None
                if content is not None and self._is_abandoned(path, content):
                    release_lock(path, content)

    def _take(self, path: Path) -> bool:
        content = read_lock(path)
        with suppress(OSError):
            if content is not None:
                if not self._is_abandoned(path, content):
                    return False
                release_lock(path, content)
            own = str(Holder.of_this_process())
            if not take_lock(path, own, synced=False):
                return False
            self._held[path] = own
            if self._beat is None:
                self._beat = threading.Thread(target=self._touch, daemon=True)
                self._beat.start()
        return True  # also in a folder where nothing can be claimed

    def _is_abandoned(self, path: Path, content: str) -> bool:
        holder = Holder.parse(content)
        return (holder is not None and holder.is_dead) or self._age_s(path) > SILENT_AFTER_S

    def _age_s(self, path: Path) -> float:
        """Return the seconds since a claim was touched, by the clock of the share."""
        clock = path.with_name(process_file_name(_CLOCK))
        try:
            clock.touch()
            utime(clock)  # now, as the share has it
            return clock.stat().st_mtime - path.stat().st_mtime
        except FileNotFoundError:
            return 0.0  # just released
        finally:
            clock.unlink(missing_ok=True)

    def _touch(self) -> None:
        while not self._ended.wait(BEAT_S):
            for path in list(self._held):
                with suppress(OSError):
                    utime(path)
