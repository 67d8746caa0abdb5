"""The spool: what DICOM peers sent, on disk before it was acknowledged.

    SPOOL/
      lock                                 of the one process that receives
      names.lock                           held while a file gets its name, or a study is removed
      incoming/                            data sets that are on their way; emptied at each start
      studies/<study>/<series>/<SOPInstanceUID>.dcm
      journal/2026-11-27.jsonl             a line for each arrival, by UTC day
      clearing/                            studies that are being removed

The folders are the truth. A file in `studies` is whole: its bytes were synced before it got its
name there, and the name before the sender got its answer. Its modification time, and that of its
folder, is the time of its arrival, and its meta header names the sender (SendingApplicationEntity-
Title). The journal makes it easy to follow: a line is written before the file gets its name, so
that a kill may leave a line without its file, never a file without its line. Lines are synced each
second: after a power failure the last ones may be missing, when folders tell. Those who follow it
need the newest lines only: files of earlier days are removed, but for some.

Everything here names patients: folders have mode 0700, files 0600.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from scanloom.core import Reason, ScanError
from scanloom.io.dicom.instance import Instance, same_object
from scanloom.io.dicom.uids import is_uid
from scanloom.io.system.atomic_write import fsync_path
from scanloom.io.system.disk_errors import disk_errors_as_scan_errors
from scanloom.io.system.regular_files import open_link_free, refuse_links_below
from scanloom.io.system.scratch_folders import lock_folder
from scanloom.own_python import make_private_folder

INCOMING, STUDIES, JOURNAL = "incoming", "studies", "journal"
CLEARING, NAMES_LOCK = "clearing", "names.lock"
SUFFIX = ".dcm"

Kept = Literal["new", "same", "changed", "ignored"]
"""What became of an object that arrived: it is there now; it had been, byte by byte; it replaced
another with its SOPInstanceUID; or that one was kept, as the site wants it."""

LOOK_BYTES = 1 << 26
"""A data set that grows looks for room again after so many bytes."""
MOST_DAYS = 30
"""Days of the journal that are kept, of those on which something came."""
_DRAFT = re.compile(r"[0-9a-f]{16}\.part")
_LOCKS = 64
_MAX_KNOWN = 4096
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
"""Errors of a file system without hard links, or with no more of them for a file."""


@dataclass(frozen=True)
class Arrival:
    """A line of the journal.

    Parameters
    ----------
    time : float
        Seconds since 1970.
    outcome : Kept
        Never "same".
    study, series, instance : str
        UIDs.
    sender : str
        Calling AE title.
    """

    time: float
    outcome: Kept
    study: str
    series: str
    instance: str
    sender: str


class IncomingFile:
    """A data set on its way: an open file in `incoming`.

    After an error, such as a full disk, it takes all further bytes and forgets them, so that the
    sender can finish and be told: see `error`.

    Parameters
    ----------
    spool : Spool
        Is asked for room, now and while the file grows.
    heard : callable
        Receives the number of bytes that came.
    """

    def __init__(
        self, path: Path, spool: Spool, heard: Callable[[int], None] = lambda count: None
    ) -> None:
        self.name, self.path = str(path), path
        self.began, self.size = time.monotonic(), 0
        self.error: OSError | None = None
        self._spool, self._unseen, self._heard = spool, LOOK_BYTES, heard
        self._lock = threading.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as exc:
            self.error = exc

    def write(self, data: bytes) -> int:
        """Add bytes."""
        self.size += len(data)
        self._unseen += len(data)
        self._heard(len(data))
        with self._lock:
            if self.error is not None or self._descriptor is None:
                return len(data)
            try:
                if self._unseen >= LOOK_BYTES:
                    self._unseen = 0
                    if not self._spool.has_room():
                        self._give_up(OSError(errno.ENOSPC, "below the reserve"))
                        return len(data)
                view = memoryview(data)
                while view:
                    view = view[os.write(self._descriptor, view) :]
            except OSError as exc:
                self._give_up(exc)
        return len(data)

    def sync(self) -> None:
        """Close the file; its bytes are on the disk then.

        Raises
        ------
        OSError
            If they could not be written.
        """
        with self._lock:
            if self.error is None and self._descriptor is not None:
                try:
                    os.fsync(self._descriptor)
                    self._close()
                except OSError as exc:
                    self._give_up(exc)
            if self.error is not None:
                raise self.error

    def discard(self) -> None:
        """Remove the file, unless it was kept."""
        with self._lock:
            self._give_up(self.error or OSError(errno.ECANCELED, "discarded"))

    def _give_up(self, exc: OSError) -> None:
        self.error = exc
        with suppress(OSError):  # a share that is away; the next start removes the file
            self._close()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class Spool:
    """A spool that this process receives into; a context manager, which holds the lock.

    Parameters
    ----------
    folder : Path
        It is made if missing.
    changed : "newest" or "first"
        Which one to keep of several objects with one SOPInstanceUID in a series.
    reserve : int
        Free bytes below which there is no room; twice the largest study if that is more.

    Raises
    ------
    ScanError
        LOCKED if another process receives into it; OUTPUT_UNWRITABLE or DISK_FULL.
    """

    def __init__(
        self, folder: Path, changed: Literal["newest", "first"] = "newest", reserve: int = 0
    ) -> None:
        self.folder, self._changed, self._reserve = folder, changed, reserve
        self._incoming, self._studies = folder / INCOMING, folder / STUDIES
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        self._known: set[Path] = set()
        self._sizes: dict[str, int] = {}
        self._sizes_lock = threading.Lock()
        refuse_links_below(folder)
        with disk_errors_as_scan_errors():
            for each in (folder, self._incoming, self._studies, folder / JOURNAL):
                make_private_folder(each)
                each.chmod(0o700)
            lock = lock_folder(folder)
            if lock is None:
                detail = "another process receives into this spool, or its disk has no locks"
                raise ScanError(Reason.LOCKED, detail, str(folder))
            self._lock = lock
            for path in self._incoming.iterdir():
                if _DRAFT.fullmatch(path.name):
                    path.unlink()
            for each in (self._studies, folder / JOURNAL, folder, folder.parent):
                fsync_path(each)
            sizes = (study_size(each) for each in _uid_folders(self._studies))
            self._largest = max(sizes, default=0)
            self.journal = Journal(folder / JOURNAL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.journal.close()
        self._lock.close()

    def has_room(self) -> bool:
        """Return whether the disk has more free space than the reserve."""
        free = shutil.disk_usage(self.folder).free
        return free > max(self._reserve, 2 * self._largest)

    def draft(self, heard: Callable[[int], None] = lambda count: None) -> IncomingFile:
        """Begin a data set."""
        return IncomingFile(self._incoming / f"{secrets.token_hex(8)}.part", self, heard)

    def keep(self, draft: IncomingFile, instance: Instance, sender: str) -> Kept:
        """Keep an object that is complete; it is on the disk when this returns.

        Raises
        ------
        OSError
            If it can't be written: then it must not be acknowledged.
        """
        draft.sync()
        folder = self._studies / instance.study / instance.series
        target = folder / f"{instance.uid}{SUFFIX}"
        with self._locks[hash(instance.study) % _LOCKS], _names_locked(self.folder):
            self._make_lasting(folder)
            kept: Kept = "new"
            if target.exists():
                same = same_object(draft.path, target)
                replaces = self._changed == "newest"
                kept = "same" if same else "changed" if replaces else "ignored"
            if kept != "same":
                uids = instance.study, instance.series, instance.uid
                self.journal.append(Arrival(time.time(), kept, *uids, sender))
            if kept == "new":
                name_without_replacing(draft.path, target)
            elif kept == "changed":
                draft.path.replace(target)
            else:  # a process that was killed may have named it without syncing the name
                fsync_path(target)
            fsync_path(folder)
        draft.discard()
        self._count(instance.study, draft.size if kept == "new" else 0)
        return kept

    def _make_lasting(self, folder: Path) -> None:
        """Make the folders of a series, and sync their names once in the life of this process."""
        if folder in self._known and folder.is_dir():
            return
        for each in (folder.parent, folder):
            with suppress(FileExistsError):
                each.mkdir(mode=0o700)
            fsync_path(each.parent)
        if len(self._known) >= _MAX_KNOWN:  # memory stays flat however many come
            self._known.clear()
        self._known.add(folder)

    def _count(self, study: str, size: int) -> None:
        """Add to the size of a study, and remember the largest."""
        with self._sizes_lock:
            if study in self._sizes:
                self._sizes[study] += size
            else:
                if len(self._sizes) >= _MAX_KNOWN:
                    self._sizes.clear()
                self._sizes[study] = study_size(self._studies / study)
            self._largest = max(self._largest, self._sizes[study])


def name_without_replacing(draft: Path, target: Path) -> None:
    """Give a file its name, where nothing is; on a share without hard links by a rename.

    A link never replaces: that nothing is there, a rename has to trust the caller's lock for.

    Raises
    ------
    OSError
    """
    try:
        os.link(draft, target, follow_symlinks=False)
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        draft.rename(target)


@contextmanager
def _names_locked(spool: Path, *, alone: bool = False) -> Iterator[None]:
    """Keep studies from being removed in the block, by any process; or else names from being given.

    Each call has an open file of its own, so that threads share it.
    """
    import fcntl

    descriptor = open_link_free(spool / NAMES_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def remove_study(spool: Path, study: str, until: float, quiet: float) -> bool:
    """Remove a study unless something came since, or may come now; return whether it is gone.

    A kill leaves the whole study, or none of it.

    Parameters
    ----------
    study : str
        StudyInstanceUID.
    until : float
        When its last object may have come, seconds since 1970.
    quiet : float
        Seconds in which no object came, of whatever study: one that comes again has no line, and
        the rest of its study would look like a new one.

    Raises
    ------
    OSError
    """
    incoming, clearing = spool / INCOMING, spool / CLEARING
    make_private_folder(clearing)
    for unfinished in clearing.iterdir():
        shutil.rmtree(unfinished)
    with _names_locked(spool, alone=True):
        if time.time() - incoming.stat().st_mtime < quiet:
            return False
        if any(_DRAFT.fullmatch(path.name) for path in incoming.iterdir()):
            return False
        folder = spool / STUDIES / study
        if not folder.is_dir() or last_arrival(folder) >= until:
            return False
        folder.rename(clearing / study)
    fsync_path(spool / STUDIES)
    shutil.rmtree(clearing / study)
    return True


class Journal:
    """The lines of arrivals in a folder, appended by one process."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._day = folder, ""
        self._descriptor: int | None = None
        self._lock, self._unsynced = threading.Lock(), False

    def append(self, arrival: Arrival) -> None:
        """Append a line: it survives this process at once, and a power failure after `sync`.

        Raises
        ------
        OSError
            If it can't be written: then the file is as before.
        """
        line = (json.dumps(asdict(arrival), separators=(",", ":")) + "\n").encode()
        with self._lock:
            descriptor = self._file_of(arrival.time)
            size = os.fstat(descriptor).st_size
            if os.write(descriptor, line) < len(line):  # the disk is full
                os.ftruncate(descriptor, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._unsynced = True

    def sync(self) -> None:
        """Flush the lines to the disk."""
        with self._lock:
            if self._unsynced and self._descriptor is not None:
                self._unsynced = False
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Flush the lines, and close the file."""
        with suppress(OSError):
            self.sync()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _file_of(self, moment: float) -> int:
        """Return the open file of a day; half a line at its end is ended, and so left out."""
        day = time.strftime("%Y-%m-%d", time.gmtime(moment))
        if self._descriptor is not None:
            if day == self._day:
                return self._descriptor
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
        path = self._folder / f"{day}.jsonl"
        descriptor = open_link_free(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")
        for old in sorted(_journal_files(self._folder))[:-MOST_DAYS]:
            if old != path:  # after a clock was put back
                with suppress(OSError):
                    old.unlink()
        fsync_path(self._folder)
        self._descriptor, self._day = descriptor, day
        return descriptor


def _journal_files(folder: Path) -> Iterator[Path]:
    return folder.glob("????-??-??.jsonl")


# --- reading a spool, while another process receives or none does --------------------------------


class JournalFollower:
    """Follows the journal of a spool, from the end that it has when this is made."""

    def __init__(self, spool: Path) -> None:
        self._folder = spool / JOURNAL
        self._read = self._sizes()

    def _sizes(self) -> dict[Path, int]:
        """Return the sizes of the files, by day."""
        sizes = {}
        for path in sorted(_journal_files(self._folder)):
            with suppress(FileNotFoundError):  # an old one, removed just now
                sizes[path] = path.stat().st_size
        return sizes

    def new(self) -> Iterator[Arrival]:
        """Yield the arrivals since the last call; half a line is left for the next one.

        All files are looked at: if the clock was put back, an earlier day goes on.

        Raises
        ------
        OSError
            If the journal can't be read.
        """
        sizes = self._sizes()
        self._read = {path: read for path, read in self._read.items() if path in sizes}
        for path, size in sizes.items():
            offset = self._read.get(path, 0)
            if size <= offset:
                continue
            with suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    offset += len(line)
                    self._read[path] = offset
                    arrival = _read_line(line)
                    if arrival is not None:
                        yield arrival


def _read_line(line: bytes) -> Arrival | None:
    try:
        arrival = Arrival(**json.loads(line))
        uids = (arrival.study, arrival.series, arrival.instance)
        return arrival if all(map(is_uid, uids)) and arrival.time > 0 else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def received_studies(spool: Path) -> Iterator[Path]:
    """Yield the folder of each study; its name is the StudyInstanceUID."""
    yield from _uid_folders(spool / STUDIES)


def last_arrival(study: Path) -> float:
    """Return when the last object of a study came that it had not had before, seconds since 1970.

    A folder's modification time is that of the last name in it that came, or changed its file.
    """
    return max(each.stat().st_mtime for each in (study, *_uid_folders(study)))


def study_size(study: Path) -> int:
    """Return the bytes of a study."""
    size = 0
    for series in _uid_folders(study):
        with os.scandir(series) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # it is being replaced, or cleared
                    size += entry.stat(follow_symlinks=False).st_size
    return size


def _uid_folders(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_uid(entry.name) and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)
