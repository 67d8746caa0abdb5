"""Packed files made plain: members of archives, and DICOM files that gzip packed.

They go to a folder of this process alone, which goes away with it; of a process that was killed,
when the next one makes its own: a lock of flock(2), which ends with its process, tells.
"""

from __future__ import annotations

import atexit
import errno
import gzip
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, BinaryIO

from scanloom.core import Reason, ScanError
from scanloom.io.archives import (
    IN_ARCHIVE,
    MOST_TIMES,
    SMALL,
    not_unpacked,
    open_members,
    unpacking,
)
from scanloom.io.scratch import PREFIX, clear_dead, locked

MOST_OF_DISK = 0.8
"""Share of the space that was free at first that may be taken."""
PACKED_FILE = 1 << 32
"""Bytes of one packed DICOM file, unpacked: as many as pixels may have."""
GZIP = b"\x1f\x8b"
MOST_FOLDERS = 20
"""In which a member lies, if they are to be below each other."""
LONGEST_NAME, LONGEST_FOLDER = 200, 80
"""Bytes; file systems take 255, and 4096 in all."""

_PIECE = 1 << 20
_SYSTEMS = ("/tmp", "/var/tmp", "/usr/tmp")  # noqa: S108 names, for a message


def starts_gzip(start: bytes) -> bool:
    """Whether a file is packed by gzip."""
    return start[:2] == GZIP


def inflated_start(packed: bytes, size: int) -> bytes:
    """Return the first `size` bytes of what gzip packed, fewer if `packed` has no more."""
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(packed, size)
    except zlib.error:
        return b""


@contextmanager
def opened_plain(path: Path, limit: int) -> Iterator[BinaryIO]:
    """Open a file, or the first `limit` bytes of what is in it where gzip packed it."""
    with path.open("rb") as file:
        packed = starts_gzip(file.read(2))
        file.seek(0)
        if packed:
            with gzip.GzipFile(fileobj=file) as inner:
                yield BytesIO(inner.read(limit))
        else:
            yield file


class Scratch:
    """The folder of unpacked files; each file is unpacked once."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._lock_file: BinaryIO | None = None  # open as long as this process lives
        self._plain: dict[tuple[str, bool], Path] = {}
        self._origins: dict[Path, Path] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        self._states: dict[str, tuple[int, int, int]] = {}
        self._kept_free = 0.0
        self._lock = threading.Lock()

    def plain(self, path: str, *, gzipped: bool = False) -> Path:
        """Return a file that can be read as it is.

        Parameters
        ----------
        path : str
            As in `scanloom.io.walk.Entry`.
        gzipped : bool
            Whether gzip packed it.

        Raises
        ------
        ScanError
            What `scanloom.io.archives` says of an archive; DAMAGED, UNREADABLE, TOO_LARGE;
            SOURCE_CHANGED if an archive has no such member any more; SCRATCH_FULL, which
            says nothing of the file.
        """
        if not gzipped and IN_ARCHIVE not in path:
            return Path(path)
        with self._lock:
            self._forget_changed(path.split(IN_ARCHIVE)[0])
            if (path, False) not in self._plain and IN_ARCHIVE in path:
                self._unpack(path.split(IN_ARCHIVE)[0])
            if (path, False) not in self._plain and IN_ARCHIVE in path:
                raise ScanError(Reason.SOURCE_CHANGED, "its archive has no such member any more")
            source = self._plain.get((path, False), Path(path))
            if not gzipped:
                return source
            if (path, True) not in self._plain:
                self._plain[path, True] = self._gunzip(source)
                self._origins[self._plain[path, True]] = Path(path.split(IN_ARCHIVE)[0])
            return self._plain[path, True]

    def origin(self, file: Path) -> Path:
        """Return the packed file or archive that a file was unpacked from; itself if it was not."""
        return self._origins.get(file, file)

    def place(self, path: str) -> str:
        """Return where a file lies that may be a member of an archive."""
        return path if IN_ARCHIVE not in path else str(self.plain(path))

    def close(self) -> None:
        """Take away all that was unpacked."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock_file is not None:
            self._lock_file.close()
        self._folder = self._lock_file = None
        self._plain.clear()

    def _forget_changed(self, packed: str) -> None:
        """Forget what was unpacked of a file that has changed since."""
        try:
            found = os.stat(packed)
        except OSError:
            return  # whoever opens it says so
        state = (found.st_size, found.st_mtime_ns, found.st_ino)
        if self._states.setdefault(packed, state) != state:
            old = [key for key in self._plain if key[0].split(IN_ARCHIVE)[0] == packed]
            for key in old:
                del self._plain[key]
            self._states[packed] = state

    def _unpack(self, archive: str) -> None:
        """Unpack all files of an archive, or none."""
        made: dict[str, Path] = {}
        try:
            with unpacking("an archive"), closing(open_members(Path(archive))) as contents:
                for member, opened in contents:
                    if member.reason is not None:
                        continue
                    place = self._member_place(archive, member.name)
                    made[member.name] = place
                    with opened() as packed:
                        self._copy(packed, place, member.size)
        except BaseException:
            for place in made.values():
                place.unlink(missing_ok=True)
            raise
        for name, place in made.items():
            self._plain[archive + IN_ARCHIVE + name, False] = place
            self._origins[place] = Path(archive)

    def _gunzip(self, source: Path) -> Path:
        place = self._place(str(source), source.name.removesuffix(".gz"))
        try:
            with gzip.open(source) as packed:
                most = max(SMALL, MOST_TIMES * source.stat().st_size)
                self._copy(packed, place, min(most, PACKED_FILE))
        except BaseException as exc:
            place.unlink(missing_ok=True)
            if isinstance(exc, Exception) and not isinstance(exc, ScanError):
                raise not_unpacked(exc, "a packed file") from exc
            raise
        return place

    def _member_place(self, archive: str, name: str) -> Path:
        """Return where a member goes: a folder is below its parent, as headers name files."""
        folder, _, last = name.rpartition("/")
        parts = folder.split("/") if folder else []
        if all(map(_is_plain, parts)) and len(parts) <= MOST_FOLDERS:
            return self._place(archive + IN_ARCHIVE, last, parts)
        return self._place(archive + IN_ARCHIVE + folder, last)

    def _place(self, near: str, name: str, parts: Sequence[str] = ()) -> Path:
        """Return where a file goes: files that were beside each other stay so, by their names."""
        with _writing():
            packed = near.split(IN_ARCHIVE)[0]
            key = near, self._states.get(packed, (0, 0, 0))[1]
            number = self._numbers.setdefault(key, len(self._numbers))
            folder = (self._made() / str(number)).joinpath(*parts)
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):  # a file is called so too
                return self._place("/".join([near, *parts]), name)
        name = name.replace("\\", "/").rpartition("/")[2]
        name = os.fsdecode(os.fsencode(name)[-LONGEST_NAME:])  # its end says what it is
        place = folder / (name if name not in ("", ".", "..") else "file")
        if place.exists():
            with _writing():
                place = Path(tempfile.mkdtemp(dir=folder)) / place.name
        return place

    def _made(self) -> Path:
        """Return the folder of this process, which is made for its first file."""
        if self._folder is None:
            clear_dead(Path(tempfile.gettempdir()))
            self._folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # mode 0700
            atexit.register(self.close)
            self._lock_file = locked(self._folder)
            self._kept_free = shutil.disk_usage(self._folder).free * (1 - MOST_OF_DISK)
        return self._folder

    def _copy(self, source: IO[bytes] | gzip.GzipFile, place: Path, limit: int) -> None:
        with _writing():
            room = shutil.disk_usage(place.parent).free - self._kept_free
            target = place.open("xb", buffering=0)
        size = 0
        with target:
            while piece := source.read(_PIECE):
                size += len(piece)
                if size > limit:
                    raise ScanError(Reason.TOO_LARGE, f"a packed file of more than {limit} bytes")
                if size > room:
                    raise ScanError(Reason.SCRATCH_FULL, f"no room to unpack it in {_scratch()}")
                with _writing():
                    left = memoryview(piece)
                    while left:
                        left = left[target.write(left) :]


@contextmanager
def _writing() -> Iterator[None]:
    """Tell what goes wrong with unpacked files from what is wrong with packed ones."""
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ScanError(Reason.SCRATCH_FULL, f"no room to unpack it in {_scratch()}") from exc
        name = errno.errorcode.get(exc.errno or 0, type(exc).__name__)
        detail = f"nothing can be unpacked in {_scratch()} ({name})"
        raise ScanError(Reason.SCRATCH_FULL, detail) from exc


def _scratch() -> str:
    """Return words for the folder for temporary files: a path only where it is the system's."""
    named = next((name for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), None)
    try:
        folder = tempfile.gettempdir()
    except OSError:
        folder = "any folder for temporary files"
    if named and os.path.abspath(os.environ[named]) == folder:  # as tempfile does
        return f"the folder that {named} names"
    return folder if folder in _SYSTEMS else "the folder for temporary files"


def _is_plain(folder: str) -> bool:
    """Whether a folder may be called so, wherever it is made."""
    short = len(os.fsencode(folder)) <= LONGEST_FOLDER
    return folder not in ("", ".", "..") and short and not {"\0", "\\"} & {*folder}


SCRATCH = Scratch()
