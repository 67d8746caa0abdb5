"""Archives of files, zip and tar: what is in them, judged before anything is unpacked.

No member is ever written where its name points to: see `scanloom.io.unpack`.
"""

from __future__ import annotations

import errno
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

from scanloom.core import Reason, ScanError
from scanloom.io.packing import opened_packed, packing_of_start
from scanloom.io.regular import open_regular

IN_ARCHIVE = "\0"
"""Stands between an archive and its member: no path of a file system has it."""
MOST_MEMBERS = 1_000_000
MOST_BYTES = 1 << 36
"""Of an archive, unpacked: 64 GiB."""
MOST_NAMES = 1 << 27
"""Characters of the names of all members."""
MOST_TIMES = 200
"""What grows more than this, and beyond `SMALL`, was made to do harm: an archive, or a file."""
SMALL = 1 << 30
MOST_HEADER = 1 << 14
"""Bytes of what a tar archive says of one member."""

MOST_WORDS = 1000
"""Of a tar archive, about all of its members."""
MOST_REST = 1 << 26
"""Bytes behind the end of a tar archive: writers fill up to 10 KiB."""

_OUT_OF_REACH = frozenset({errno.EIO, errno.EACCES, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT})
"""What a disk or a network says that gives no bytes, whatever they are."""
_ENCRYPTED = 0x2041  # flags of zip: a password, strong encryption, a masked directory
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
_UNIX = 3  # of zip's create_system: the mode of the file stands in external_attr
_PIECE = 1 << 20


class Member(NamedTuple):
    """A file in an archive.

    Parameters
    ----------
    name : str
        As the archive has it; that of a second member with an equal name is put into a folder
        that no archive has, `IN_ARCHIVE` and a number.
    size : int
        Bytes, unpacked, as the archive says.
    reason : Reason or None
        Why it is not unpacked.
    """

    name: str
    size: int
    reason: Reason | None = None


Contents = Generator[tuple[Member, Callable[[], IO[bytes]]]]
"""The members of an archive in order, each with what opens it before the next one is asked for."""


class ArchiveKind(NamedTuple):
    """How archives of a kind are known and read."""

    word: str
    suffixes: tuple[str, ...]
    contents: Callable[[BinaryIO], Contents]


def _zip_contents(file: BinaryIO) -> Contents:
    with zipfile.ZipFile(file) as pack:
        infos = [info for info in pack.infolist() if not info.is_dir()]
        if any(info.flag_bits & _ENCRYPTED for info in infos):
            raise ScanError(Reason.ENCRYPTED, "a zip archive with members that need a password")
        if not {info.compress_type for info in infos} <= set(_METHODS):
            raise ScanError(Reason.DECODER, "a zip archive packed by another method than usual")
        for info in infos:
            mode = info.external_attr >> 16 if info.create_system == _UNIX else 0
            reason = Reason.DUPLICATE_LINK if stat.S_ISLNK(mode) else None
            yield Member(info.filename, info.file_size, reason), partial(pack.open, info)


def _tar_contents(file: BinaryIO) -> Contents:
    packing = packing_of_start(file.read(6))
    file.seek(0)
    with ExitStack() as stack:
        stream = stack.enter_context(opened_packed(file, packing)) if packing else file
        forward = _Forward(stream, None if packing else os.fstat(file.fileno()).st_size)
        pack = stack.enter_context(tarfile.TarFile(fileobj=cast(BinaryIO, forward)))
        place = -1
        while (info := forward.header(pack.next)) is not None:
            if info.size < 0 or info.offset <= place or len(pack.pax_headers) > MOST_WORDS:
                raise ScanError(Reason.DAMAGED, "a tar archive whose members can't be")
            place = info.offset
            pack.members.clear()  # type: ignore[attr-defined]
            if not info.isdir():
                yield _tar_member(info), partial(_opened_member, pack, info)
        forward.check_end()


def _tar_member(info: tarfile.TarInfo) -> Member:
    name = info.name.removeprefix("./").replace(IN_ARCHIVE, "_")
    if info.isreg():
        return Member(name, info.size)
    return Member(
        name, 0, Reason.DUPLICATE_LINK if info.islnk() or info.issym() else Reason.NOT_AN_IMAGE
    )


def _opened_member(pack: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    file = pack.extractfile(info)
    if file is None:
        raise ScanError(Reason.DAMAGED, "a member of a tar archive is no file")
    return file


class _Forward:
    """A stream that is read forward: what `tarfile` is given, so that no header can do harm.

    Headers may say that they are gigabytes long, or lead backwards for ever. `tarfile` also takes
    damage and truncation for the end of an archive.
    """

    def __init__(self, stream: BinaryIO, size: int | None) -> None:
        self._stream, self._size, self._place = stream, size, 0  # None: it can't be sought
        self._left: int | None = MOST_HEADER  # bytes that a header may still have
        self._block = b""  # the last one of headers

    def header(self, read: Callable[[], tarfile.TarInfo | None]) -> tarfile.TarInfo | None:
        """Let `tarfile` read what is said of a member."""
        if self._place:  # else it did when it was made
            self._left = MOST_HEADER
        found = read()
        self._left = None
        return found

    def read(self, size: int) -> bytes:
        """Return so many bytes, fewer at the end."""
        if size < 0 or (self._left is not None and size > self._left):
            raise ScanError(Reason.DAMAGED, "a tar archive with a header that can't be")
        piece = self._stream.read(size)
        self._place += len(piece)
        if self._left is not None:
            self._left -= size
            self._block = piece
        return piece

    def seek(self, place: int) -> int:
        """Move forward."""
        if place < self._place:
            raise ScanError(Reason.DAMAGED, "a tar archive that leads backwards")
        if self._size is not None and place <= self._size:
            self._place = self._stream.seek(place)
        while self._place < place:
            piece = self._stream.read(min(_PIECE, place - self._place))
            if not piece:
                raise EOFError
            self._place += len(piece)
        return self._place

    def tell(self) -> int:
        """Return the byte that is read next."""
        return self._place

    def seekable(self) -> bool:
        """Whether any byte can be gone to: no."""
        return False

    def check_end(self) -> None:
        """Refuse an archive without an end; what is packed is checked behind it."""
        if len(self._block) < tarfile.BLOCKSIZE:
            raise EOFError
        if any(self._block):
            raise ScanError(Reason.DAMAGED, "a tar archive with a header that can't be")
        rest = 0
        while self._size is None and (piece := self._stream.read(_PIECE)):
            rest += len(piece)
            if rest > MOST_REST:
                raise ScanError(Reason.DAMAGED, "a tar archive with other data behind its end")


KINDS = (
    ArchiveKind("zip", (".zip",), _zip_contents),
    ArchiveKind(
        "tar",
        (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz"),
        _tar_contents,
    ),
)
SUFFIXES = tuple(suffix for kind in KINDS for suffix in kind.suffixes)


def kind_of(name: str) -> ArchiveKind | None:
    """Return the kind of archive that a file with this name is."""
    lower = name.lower()
    if not lower.endswith(SUFFIXES):
        return None
    return next(kind for kind in KINDS if lower.endswith(kind.suffixes))


def is_archive(path: Path | str) -> bool:
    """Whether a path names an archive."""
    return kind_of(str(path)) is not None and os.path.isfile(path)  # noqa: PTH113


def list_members(archive: Path) -> tuple[Member, ...]:
    """Return the files in an archive, in order; their sizes are judged.

    Raises
    ------
    ScanError
        DAMAGED, TRUNCATED, ENCRYPTED, DECODER, NOT_FOUND or UNREADABLE; TOO_LARGE before anything
        is unpacked.
    """
    with unpacking("an archive"):
        state = archive.stat()
        return _listed(archive, state.st_size, state.st_mtime_ns, state.st_ino)


@lru_cache(maxsize=16)  # looking through a packed tar archive takes as long as unpacking it
def _listed(archive: Path, *state: int) -> tuple[Member, ...]:
    with closing(open_members(archive)) as contents:
        return tuple(member for member, _ in contents)


def open_members(archive: Path) -> Contents:
    """Give the files in an archive, in order, each with what opens it; errors are foreign ones."""
    kind = kind_of(archive.name)
    if kind is None:
        raise ScanError(Reason.NOT_AN_IMAGE, "no archive by its name")
    with open_regular(archive) as file:
        size = os.fstat(file.fileno()).st_size
        yield from _told_apart(_judged(kind.contents(file), kind.word, size))


def _judged(contents: Contents, word: str, packed: int) -> Contents:
    """Give the members until they are too many, or too large."""
    count = total = names = 0
    for member, opened in contents:
        count, total, names = count + 1, total + member.size, names + len(member.name)
        if count > MOST_MEMBERS or total > MOST_BYTES or names > MOST_NAMES:
            detail = f"a {word} archive of {count} files or more, {total} bytes"
            raise ScanError(Reason.TOO_LARGE, detail)
        if total > SMALL and total > MOST_TIMES * max(packed, 1):
            raise ScanError(Reason.TOO_LARGE, f"a {word} archive that grows to {total} bytes")
        yield member, opened


def _told_apart(contents: Contents) -> Contents:
    """Give names that are there but once, and say which members are archives themselves."""
    seen: Counter[str] = Counter()
    for member, opened in contents:
        name = member.name
        seen[name] += 1
        if seen[name] > 1:
            name = f"{IN_ARCHIVE}{seen[name]}/{name}"
        reason = member.reason or (Reason.NESTED_ARCHIVE if kind_of(name) else None)
        yield Member(name, member.size, reason), opened


@contextmanager
def unpacking(what: str) -> Iterator[None]:
    """Turn what libraries and the system raise about packed files into ScanError."""
    try:
        yield
    except ScanError:
        raise
    except Exception as exc:  # foreign data, foreign code
        raise not_unpacked(exc, what) from exc


def not_unpacked(exc: Exception, what: str) -> ScanError:
    """Return why something packed can't be read: its own fault, or that of where it lies."""
    if isinstance(exc, FileNotFoundError):
        return ScanError(Reason.NOT_FOUND, f"{what} is not there")
    if isinstance(exc, EOFError):
        return ScanError(Reason.TRUNCATED, f"{what} ends too early")
    if isinstance(exc, MemoryError):
        return ScanError(Reason.OUT_OF_MEMORY, f"{what} does not fit into memory")
    detail = f"{what} can't be unpacked ({type(exc).__name__})"
    away = isinstance(exc, OSError) and exc.errno in _OUT_OF_REACH
    return ScanError(Reason.UNREADABLE if away else Reason.DAMAGED, detail)
