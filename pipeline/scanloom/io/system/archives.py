"""Zip and tar archives: their members, checked before anything is unpacked.

A member is never written to the path that its name gives: see `scanloom.io.system.unpacking`.
"""

from __future__ import annotations

import os
import stat
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple, cast

from scanloom.core import Reason, ScanError, is_passing
from scanloom.io.system.compressed_streams import compression_of_start, open_decompressed
from scanloom.io.system.regular_files import open_regular_file

MEMBER_SEPARATOR = "\0"
"""Separator of archive path and member name; no path of a file system contains it."""
MAX_MEMBERS = 1_000_000
MAX_UNPACKED_BYTES = 1 << 36
"""Total size of the members, unpacked: 64 GiB."""
MAX_NAME_CHARACTERS = 1 << 27
"""Total length of the member names, in characters."""
MAX_EXPANSION = 200
"""Largest ratio of unpacked to packed size for archives above `ALWAYS_ALLOWED_BYTES`."""
ALWAYS_ALLOWED_BYTES = 1 << 30
"""Unpacked size in bytes up to which any ratio is accepted."""
MAX_HEADER_BYTES = 1 << 14
"""Bytes of all headers of one tar member."""

MAX_GLOBAL_HEADERS = 1000
"""Number of global (pax) headers of a tar archive."""
MAX_TRAILING_BYTES = 1 << 26
"""Bytes behind the end of a tar archive: writers pad up to 10 KiB."""

_ENCRYPTED = 0x2041  # flags of zip: password, strong encryption, masked directory
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
_UNIX = 3  # zip's create_system for which external_attr holds the mode of the file
_CHUNK_BYTES = 1 << 20


class Member(NamedTuple):
    """A file in an archive.

    Parameters
    ----------
    name : str
        As in the archive. The second member of a name is put into a folder that no archive can
        have: `MEMBER_SEPARATOR` and a number.
    size : int
        Unpacked size in bytes, as the archive gives it.
    reason : Reason or None
        Reason for which the member is not unpacked.
    """

    name: str
    size: int
    reason: Reason | None = None


Contents = Generator[tuple[Member, Callable[[], IO[bytes]]]]
"""Members in order, each with a function that opens it until the next member is requested."""


class ArchiveKind(NamedTuple):
    """Name, file suffixes and reader of a kind of archive."""

    name: str
    suffixes: tuple[str, ...]
    contents: Callable[[BinaryIO], Contents]


def _zip_contents(file: BinaryIO) -> Contents:
    with zipfile.ZipFile(file) as archive:
        infos = [info for info in archive.infolist() if not info.is_dir()]
        if any(info.flag_bits & _ENCRYPTED for info in infos):
            raise ScanError(Reason.ENCRYPTED, "a zip archive with password-protected members")
        if not {info.compress_type for info in infos} <= set(_METHODS):
            raise ScanError(Reason.DECODER, "a zip archive with an unusual compression method")
        for info in infos:
            mode = info.external_attr >> 16 if info.create_system == _UNIX else 0
            reason = Reason.DUPLICATE_LINK if stat.S_ISLNK(mode) else None
            yield Member(info.filename, info.file_size, reason), partial(archive.open, info)


def _tar_contents(file: BinaryIO) -> Contents:
    packing = compression_of_start(file.read(6))
    file.seek(0)
    with ExitStack() as stack:
        stream = stack.enter_context(open_decompressed(file, packing)) if packing else file
        forward = _ForwardStream(stream, None if packing else os.fstat(file.fileno()).st_size)
        archive = stack.enter_context(tarfile.TarFile(fileobj=cast(BinaryIO, forward)))
        previous = -1
        while (info := forward.header(archive.next)) is not None:
            if (
                info.size < 0
                or info.offset <= previous
                or len(archive.pax_headers) > MAX_GLOBAL_HEADERS
            ):
                raise ScanError(Reason.DAMAGED, "a tar archive with invalid headers")
            previous = info.offset
            # TarFile keeps the header of every member that it passed, about 1 KiB each
            archive.members.clear()  # type: ignore[attr-defined]  # not in typeshed
            if not info.isdir():
                opener = partial(archive.extractfile, info)  # of a regular file, never None
                yield _tar_member(info), cast("Callable[[], IO[bytes]]", opener)
        forward.check_end()


def _tar_member(info: tarfile.TarInfo) -> Member:
    name = info.name.removeprefix("./").replace(MEMBER_SEPARATOR, "_")
    if info.isreg():
        return Member(name, info.size)
    return Member(
        name, 0, Reason.DUPLICATE_LINK if info.islnk() or info.issym() else Reason.NOT_AN_IMAGE
    )


class _ForwardStream:
    """A forward-only stream that protects `tarfile` from malicious headers.

    Headers may declare a size of gigabytes, or lead backwards in an endless loop. `tarfile` also
    takes damage and truncation for the end of an archive. `size` is None for a stream that can't
    seek.
    """

    def __init__(self, stream: BinaryIO, size: int | None) -> None:
        self._stream, self._size, self._position = stream, size, 0
        self._header_budget: int | None = MAX_HEADER_BYTES  # bytes; None outside headers
        self._block = b""  # the last header block read

    def header(self, read: Callable[[], tarfile.TarInfo | None]) -> tarfile.TarInfo | None:
        """Let `tarfile` read the headers of a member."""
        if self._position:  # else the first header was read when the TarFile was made
            self._header_budget = MAX_HEADER_BYTES
        info = read()
        self._header_budget = None
        return info

    def read(self, size: int) -> bytes:
        """Return `size` bytes, fewer at the end."""
        if size < 0 or (self._header_budget is not None and size > self._header_budget):
            raise ScanError(Reason.DAMAGED, "a tar archive with an invalid header")
        chunk = self._stream.read(size)
        self._position += len(chunk)
        if self._header_budget is not None:
            self._header_budget -= size
            self._block = chunk
        return chunk

    def seek(self, position: int) -> int:
        """Move forward."""
        if position < self._position:
            raise ScanError(Reason.DAMAGED, "a tar archive that leads backwards")
        if self._size is not None and position <= self._size:
            self._position = self._stream.seek(position)
        while self._position < position:
            chunk = self._stream.read(min(_CHUNK_BYTES, position - self._position))
            if not chunk:
                raise EOFError
            self._position += len(chunk)
        return self._position

    def tell(self) -> int:
        """Return the current position in bytes."""
        return self._position

    def seekable(self) -> bool:
        """Return False: it can't seek backwards."""
        return False

    def check_end(self) -> None:
        """Refuse an archive without an end block; compressed data is checked up to its end."""
        if len(self._block) < tarfile.BLOCKSIZE:
            raise EOFError
        if any(self._block):
            raise ScanError(Reason.DAMAGED, "a tar archive with an invalid header")
        trailing = 0
        while self._size is None and (chunk := self._stream.read(_CHUNK_BYTES)):
            trailing += len(chunk)
            if trailing > MAX_TRAILING_BYTES:
                raise ScanError(Reason.DAMAGED, "a tar archive with other data behind its end")


ARCHIVE_KINDS = (
    ArchiveKind("zip", (".zip",), _zip_contents),
    ArchiveKind(
        "tar", (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz"), _tar_contents
    ),
)
ARCHIVE_SUFFIXES = tuple(suffix for kind in ARCHIVE_KINDS for suffix in kind.suffixes)


def archive_kind(name: str) -> ArchiveKind | None:
    """Return the kind of archive of a file name; None for other files."""
    lower = name.lower()
    if not lower.endswith(ARCHIVE_SUFFIXES):
        return None
    return next(kind for kind in ARCHIVE_KINDS if lower.endswith(kind.suffixes))


def is_archive(path: Path | str) -> bool:
    """Return whether a path is a file with the name of an archive."""
    return archive_kind(str(path)) is not None and os.path.isfile(path)


def list_members(archive: Path) -> tuple[Member, ...]:
    """Return the files in an archive, in order, after checking their number and sizes.

    Raises
    ------
    ScanError
        DAMAGED, TRUNCATED, ENCRYPTED, DECODER, NOT_FOUND or UNREADABLE; TOO_LARGE before anything
        is unpacked.
    """
    with unpack_errors():
        state = archive.stat()
        return _listed(archive, state.st_size, state.st_mtime_ns, state.st_ino)


@lru_cache(maxsize=16)  # listing a compressed tar archive takes as long as unpacking it
def _listed(archive: Path, *state: int) -> tuple[Member, ...]:
    with closing(open_members(archive)) as contents:
        return tuple(member for member, _ in contents)


def open_members(archive: Path) -> Contents:
    """Yield the files in an archive, in order, each with a function that opens it.

    Exceptions of the libraries are not converted: see `unpack_errors`.
    """
    kind = archive_kind(archive.name)
    if kind is None:
        raise ScanError(Reason.NOT_AN_IMAGE, "the file name is not that of an archive")
    with open_regular_file(archive) as file:
        size = os.fstat(file.fileno()).st_size
        yield from _with_unique_names(_within_limits(kind.contents(file), kind.name, size))


def _within_limits(contents: Contents, kind: str, packed_size: int) -> Contents:
    """Yield the members until there are too many, or they are too large."""
    count = total = names = 0
    for member, open_member in contents:
        count, total, names = count + 1, total + member.size, names + len(member.name)
        if count > MAX_MEMBERS or total > MAX_UNPACKED_BYTES or names > MAX_NAME_CHARACTERS:
            detail = f"a {kind} archive of at least {count} files and {total} bytes"
            raise ScanError(Reason.TOO_LARGE, detail)
        if total > ALWAYS_ALLOWED_BYTES and total > MAX_EXPANSION * max(packed_size, 1):
            raise ScanError(Reason.TOO_LARGE, f"a {kind} archive that expands to {total} bytes")
        yield member, open_member


def _with_unique_names(contents: Contents) -> Contents:
    """Rename members with a name that occurred before, and mark nested archives."""
    occurrences: Counter[str] = Counter()
    for member, open_member in contents:
        name = member.name
        occurrences[name] += 1
        if occurrences[name] > 1:
            name = f"{MEMBER_SEPARATOR}{occurrences[name]}/{name}"
        reason = member.reason or (Reason.NESTED_ARCHIVE if archive_kind(name) else None)
        yield Member(name, member.size, reason), open_member


@contextmanager
def unpack_errors() -> Iterator[None]:
    """Convert exceptions of libraries and the system, about an archive, to ScanError."""
    try:
        yield
    except ScanError:
        raise
    except Exception as exc:  # foreign data, foreign code
        raise unpack_error(exc, "an archive") from exc


def unpack_error(exc: Exception, source: str) -> ScanError:
    """Return the error for an exception: `source` is damaged, or can't be accessed."""
    # The most specific first: some of these are OSErrors, whose errno says less
    if isinstance(exc, FileNotFoundError):
        return ScanError(Reason.NOT_FOUND, f"{source} does not exist")
    if isinstance(exc, EOFError):
        return ScanError(Reason.TRUNCATED, f"{source} ends too early")
    if isinstance(exc, MemoryError):
        return ScanError(Reason.OUT_OF_MEMORY, f"{source} does not fit into memory")
    detail = f"{source} can't be unpacked ({type(exc).__name__})"
    return ScanError(Reason.UNREADABLE if is_passing(exc) else Reason.DAMAGED, detail)
