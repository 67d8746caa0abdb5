"""Archive members and gzip-compressed DICOM files, unpacked to temporary files.

They are unpacked to a private folder of this process, which is removed when the process ends. The
folder of a process that was killed is removed by the next process that makes one: see
`scanloom.io.system.scratch_folders`.
"""

from __future__ import annotations

import atexit
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
from scanloom.io.system.archives import (
    ALWAYS_ALLOWED_BYTES,
    MAX_EXPANSION,
    MEMBER_SEPARATOR,
    open_members,
    unpack_error,
    unpack_errors,
)
from scanloom.io.system.scratch_folders import (
    make_locked_folder,
    scratch_errors,
    scratch_full,
)

MAX_DISK_SHARE = 0.8
"""Share of the initially free disk space that may be used."""
MAX_INFLATED_BYTES = 1 << 32
"""Maximal unpacked size of a gzip-compressed DICOM file in bytes, as for its pixels."""
MAX_MEMBER_DEPTH = 20
"""Maximal number of nested folders of a member that are kept."""
MAX_NAME_BYTES, MAX_FOLDER_NAME_BYTES = 200, 80
"""Maximal length of names in bytes; file systems allow 255, and 4096 for a path."""

_CHUNK_BYTES = 1 << 20


def is_gzip(start: bytes) -> bool:
    """Return whether a file with these first bytes is gzip-compressed."""
    return start[:2] == b"\x1f\x8b"


def inflate_start(compressed: bytes, size: int) -> bytes:
    """Return the first `size` bytes of gzip-compressed data, fewer if it has fewer."""
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(compressed, size)
    except zlib.error:
        return b""


@contextmanager
def open_inflated(path: Path, limit: int) -> Iterator[BinaryIO]:
    """Open a file for reading; of a gzip-compressed file, its first `limit` bytes inflated."""
    with path.open("rb") as file:
        compressed = is_gzip(file.read(2))
        file.seek(0)
        if compressed:
            with gzip.GzipFile(fileobj=file) as inflated:
                yield BytesIO(inflated.read(limit))
        else:
            yield file


class UnpackedFiles:
    """Private folder of unpacked files; each file is unpacked once."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._lock_file: BinaryIO | None = None  # open as long as this process lives
        self._unpacked: dict[tuple[str, bool], Path] = {}
        self._origins: dict[Path, Path] = {}
        self._members: dict[Path, str] = {}  # their names in archives
        self._numbers: dict[tuple[str, int], int] = {}
        self._states: dict[str, tuple[int, int, int]] = {}
        self._reserved_bytes = 0.0  # of the disk, to be left free
        self._lock = threading.Lock()

    def readable_file(self, path: str, *, gzipped: bool = False) -> Path:
        """Return the path of a file on disk, unpacked and decompressed if necessary.

        `path` is that of a `scanloom.io.index.walk.FileEntry`.

        Raises
        ------
        ScanError
            The errors of `scanloom.io.system.archives`; DAMAGED, UNREADABLE, TOO_LARGE;
            SOURCE_CHANGED if an archive has no such member any more; SCRATCH_FULL, which is not a
            fault of the file.
        """
        if not gzipped and MEMBER_SEPARATOR not in path:
            return Path(path)
        archive = path.split(MEMBER_SEPARATOR)[0]
        with self._lock:
            self._forget_changed(archive)
            if (path, False) not in self._unpacked and MEMBER_SEPARATOR in path:
                self._unpack(archive)
            if (path, False) not in self._unpacked and MEMBER_SEPARATOR in path:
                raise ScanError(Reason.SOURCE_CHANGED, "the archive has no such member any more")
            source = self._unpacked.get((path, False), Path(path))
            if not gzipped:
                return source
            if (path, True) not in self._unpacked:
                self._unpacked[path, True] = self._gunzip(source)
                self._origins[self._unpacked[path, True]] = Path(archive)
            return self._unpacked[path, True]

    def origin(self, file: Path) -> Path:
        """Return the compressed file or archive of an unpacked file; else the file itself."""
        return self._origins.get(file, file)

    def member_path(self, file: Path) -> str:
        """Return the path of a file from an archive, below that of the archive."""
        return f"{self.origin(file)}/{self._members.get(file, file.name)}"

    def readable_path(self, path: str) -> str:
        """Return the path on disk of a file that may be an archive member."""
        return path if MEMBER_SEPARATOR not in path else str(self.readable_file(path))

    def close(self) -> None:
        """Remove all unpacked files."""
        if self._folder is not None:
            atexit.unregister(self.close)
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock_file is not None:
            self._lock_file.close()
        self._folder = self._lock_file = None
        self._unpacked.clear()

    def _forget_changed(self, source: str) -> None:
        """Forget the unpacked files of an archive or compressed file that has changed."""
        try:
            stat = os.stat(source)
        except OSError:
            return  # opening it will report the error
        state = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        if self._states.setdefault(source, state) != state:
            outdated = [
                key for key in self._unpacked if key[0].split(MEMBER_SEPARATOR)[0] == source
            ]
            for key in outdated:
                del self._unpacked[key]
            self._states[source] = state

    def _unpack(self, archive: str) -> None:
        """Unpack all files of an archive; none if that fails."""
        targets: dict[str, Path] = {}
        try:
            with unpack_errors(), closing(open_members(Path(archive))) as contents:
                for member, open_member in contents:
                    if member.reason is not None:
                        continue
                    target = self._member_path(archive, member.name)
                    targets[member.name] = target
                    with open_member() as data:
                        self._copy(data, target, member.size)
        except BaseException:
            for target in targets.values():
                target.unlink(missing_ok=True)
            raise
        for name, target in targets.items():
            self._unpacked[archive + MEMBER_SEPARATOR + name, False] = target
            self._origins[target], self._members[target] = Path(archive), name

    def _gunzip(self, source: Path) -> Path:
        target = self._new_path(str(source), source.name.removesuffix(".gz"))
        try:
            with gzip.open(source) as data:
                limit = max(ALWAYS_ALLOWED_BYTES, MAX_EXPANSION * source.stat().st_size)
                self._copy(data, target, min(limit, MAX_INFLATED_BYTES))
        except BaseException as exc:
            target.unlink(missing_ok=True)
            if isinstance(exc, Exception) and not isinstance(exc, ScanError):
                raise unpack_error(exc, "a compressed file") from exc
            raise
        return target

    def _member_path(self, archive: str, name: str) -> Path:
        """Return the path for a member; subfolders are kept, since headers refer to other files."""
        folder, _, last = name.rpartition("/")
        folders = folder.split("/") if folder else []
        if all(map(_is_safe_name, folders)) and len(folders) <= MAX_MEMBER_DEPTH:
            return self._new_path(archive + MEMBER_SEPARATOR, last, folders)
        return self._new_path(archive + MEMBER_SEPARATOR + folder, last)

    def _new_path(self, origin: str, name: str, folders: Sequence[str] = ()) -> Path:
        """Return a new path; files of the same origin stay in one folder, under their names."""
        with scratch_errors():
            source = origin.split(MEMBER_SEPARATOR)[0]
            key = origin, self._states.get(source, (0, 0, 0))[1]
            number = self._numbers.setdefault(key, len(self._numbers))
            folder = (self._created_folder() / str(number)).joinpath(*folders)
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):  # a file has the name of the folder
                return self._new_path("/".join([origin, *folders]), name)
        name = name.replace("\\", "/").rpartition("/")[2]
        name = os.fsdecode(os.fsencode(name)[-MAX_NAME_BYTES:])  # keeps the suffix
        path = folder / (name if name not in ("", ".", "..") else "file")
        if path.exists():
            with scratch_errors():
                path = Path(tempfile.mkdtemp(dir=folder)) / path.name
        return path

    def _created_folder(self) -> Path:
        """Return the folder of this process, created for its first file."""
        if self._folder is None:
            self._folder, self._lock_file = make_locked_folder(Path(tempfile.gettempdir()))
            atexit.register(self.close)
            self._reserved_bytes = shutil.disk_usage(self._folder).free * (1 - MAX_DISK_SHARE)
        return self._folder

    def _copy(self, source: IO[bytes] | gzip.GzipFile, target: Path, limit: int) -> None:
        with scratch_errors():
            available = shutil.disk_usage(target.parent).free - self._reserved_bytes
            output = target.open("xb", buffering=0)
        size = 0
        with output:
            while chunk := source.read(_CHUNK_BYTES):
                size += len(chunk)
                if size > limit:  # before the disk: a bomb is a fault of the file
                    detail = f"a compressed file of more than {limit} bytes"
                    raise ScanError(Reason.TOO_LARGE, detail)
                if size > available:
                    raise scratch_full()
                with scratch_errors():
                    remaining = memoryview(chunk)
                    while remaining:
                        remaining = remaining[output.write(remaining) :]


def _is_safe_name(folder: str) -> bool:
    """Return whether a folder of this name can be created anywhere."""
    short = len(os.fsencode(folder)) <= MAX_FOLDER_NAME_BYTES
    return folder not in ("", ".", "..") and short and not {"\0", "\\"} & {*folder}
