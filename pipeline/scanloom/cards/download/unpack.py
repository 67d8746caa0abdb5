"""Copy model folders and unpack zip files within bounds: paths, links, sizes, ratio, count."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from scanloom.core import Reason, ScanError, format_bytes, printable

MAX_FILES: Final = 10_000
"""Number of files of a model; TotalSegmentator's largest task has some 100."""
MAX_MODEL_BYTES: Final = 32 << 30
"""Total size of a model's files."""
MAX_EXPANSION: Final = 20
"""Largest ratio of unpacked to packed size above `ALWAYS_ALLOWED_BYTES`; that of weights is 1.2."""
ALWAYS_ALLOWED_BYTES: Final = 16 << 20
"""Unpacked size up to which any ratio is accepted: plans and configurations are text."""
MAX_DEPTH: Final = 20
MAX_NAME_BYTES: Final = 200
SCAN_SUFFIXES: Final = (".nii", ".nii.gz", ".npz", ".dcm", ".mha", ".nrrd")
"""Suffixes of scans and predictions, which training folders contain: they are left out."""
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED: Final = 0x1
_UNIX: Final = 3
"""Value of a zip's create_system for which external_attr holds the mode of the file."""
_CHUNK_BYTES: Final = 1 << 20
_SHOWN_CHARACTERS: Final = 60


def copy_folder(source: Path, target: Path) -> None:
    """Copy the files of a model folder to a new folder.

    Hidden files, caches and scans are left out. Links to files within the folder are copied as
    files.

    Raises
    ------
    ScanError
        MODEL_UNSAFE if a link leads out of the folder, or the bounds are exceeded; MODEL_DAMAGED if
        a file can't be read.
    OSError
        If a file can't be written.
    """
    bounds, root = _Bounds(), source.resolve()
    for file, name in _files(source):
        if file.is_symlink() and not file.resolve().is_relative_to(root):
            detail = f"{_shown(name)} is a link out of the folder: replace it with the file"
            raise ScanError(Reason.MODEL_UNSAFE, detail)
        try:
            stream = file.open("rb")
        except OSError as exc:
            raise ScanError(Reason.MODEL_DAMAGED, f"{_shown(name)} can't be read") from exc
        with stream:
            bounds.add(os.fstat(stream.fileno()).st_size)
            _write(stream, target, safe_path(name))


def unpack_zip(archive: Path, target: Path) -> None:
    """Unpack the files of a zip archive into a folder; hidden files and scans are left out.

    All names, sizes and types are checked before the first file is written.

    Raises
    ------
    ScanError
        MODEL_UNSAFE for paths that leave the folder, links, special files and archives that expand
        excessively; MODEL_DAMAGED if it is not a zip archive, damaged or encrypted.
    OSError
        If a file can't be written.
    """
    try:
        opened = zipfile.ZipFile(archive)
    except Exception as exc:  # damaged archives raise errors of many types
        raise ScanError(Reason.MODEL_DAMAGED, "the file is not a zip archive") from exc
    with opened:
        members = _checked(opened.infolist(), archive.stat().st_size)
        for info, path in members:
            if _is_wanted(path.as_posix()):
                _unpack_member(opened, info, target, path)


def _checked(
    infos: list[zipfile.ZipInfo], packed_bytes: int
) -> list[tuple[zipfile.ZipInfo, PurePosixPath]]:
    """Return the files of an archive with their safe paths."""
    bounds = _Bounds(packed_bytes)
    members: dict[PurePosixPath, zipfile.ZipInfo] = {}
    for info in infos:
        mode = info.external_attr >> 16 if info.create_system == _UNIX else 0
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
            detail = f"{_shown(info.filename)} is a link or a special file"
            raise ScanError(Reason.MODEL_UNSAFE, detail)
        path = safe_path(info.orig_filename.removesuffix("/"))
        if info.is_dir():
            continue
        if info.flag_bits & _ENCRYPTED or info.compress_type not in _METHODS:
            detail = "the zip archive is encrypted, or compressed by an unusual method"
            raise ScanError(Reason.MODEL_DAMAGED, detail)
        if path in members:
            raise ScanError(Reason.MODEL_UNSAFE, f"{_shown(info.filename)} occurs twice")
        bounds.add(info.file_size)
        members[path] = info
    for path in members:
        if any(parent in members for parent in path.parents):
            raise ScanError(Reason.MODEL_UNSAFE, f"{_shown(str(path))} lies below a file")
    return [(info, path) for path, info in members.items()]


def _unpack_member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path, path: PurePosixPath
) -> None:
    try:
        stream = archive.open(info)
    except Exception as exc:
        raise ScanError(Reason.MODEL_DAMAGED, "the zip archive is damaged") from exc
    with stream:
        _write(stream, target, path)


class _Bounds:
    """Counts files and bytes, and refuses too many.

    Parameters
    ----------
    packed_bytes : int or None
        Size of the archive; None for a folder.
    """

    def __init__(self, packed_bytes: int | None = None) -> None:
        self._packed_bytes = packed_bytes
        self._files = self._bytes = 0

    def add(self, size: int) -> None:
        """Count a file; errors as `unpack_zip`."""
        self._files += 1
        self._bytes += size
        if self._files > MAX_FILES or self._bytes > MAX_MODEL_BYTES:
            detail = f"the model has more than {MAX_FILES} files or {format_bytes(MAX_MODEL_BYTES)}"
            raise ScanError(Reason.MODEL_UNSAFE, detail)
        if self._packed_bytes is None or self._bytes <= ALWAYS_ALLOWED_BYTES:
            return
        if self._bytes > MAX_EXPANSION * self._packed_bytes:
            detail = (
                f"a zip archive of {format_bytes(self._packed_bytes)} would expand to more than"
            )
            raise ScanError(Reason.MODEL_UNSAFE, f"{detail} {format_bytes(self._bytes)}")


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the wanted files of a folder with their names relative to it."""

    def unreadable(exc: OSError) -> None:
        raise ScanError(Reason.UNREADABLE, "a folder of the model can't be read") from exc

    for root, folders, names in os.walk(folder, onerror=unreadable):
        for name in folders:
            if Path(root, name).is_symlink() and _is_wanted(name):
                detail = f"the folder {_shown(name)} is a link: replace it with the folder"
                raise ScanError(Reason.MODEL_UNSAFE, detail)
        folders[:] = sorted(name for name in folders if _is_wanted(name))
        for name in sorted(names):
            file = Path(root, name)
            if _is_wanted(name) and file.is_file():
                yield file, file.relative_to(folder).as_posix()


def _is_wanted(name: str) -> bool:
    """Return whether a file can belong to a model: not hidden, no cache, no scan."""
    levels = PurePosixPath(name).parts
    caches = {"__pycache__", "__MACOSX"} & {*levels}
    hidden = caches or any(level.startswith(".") for level in levels)
    return not hidden and not name.lower().endswith(SCAN_SUFFIXES)


def safe_path(name: str) -> PurePosixPath:
    r"""Return the relative path of a file in a model.

    Raises
    ------
    ScanError
        MODEL_UNSAFE if it is absolute, contains `..`, `\` or control characters, or is too long.
    """
    path = PurePosixPath(name)
    levels = name.split("/")
    safe = (
        name.isprintable()
        and not path.is_absolute()
        and not {"", ".", ".."} & {*levels}
        and not set("\\:") & {*name}
        and len(levels) <= MAX_DEPTH
        and all(len(level.encode()) <= MAX_NAME_BYTES for level in levels)
    )
    if not safe:
        raise ScanError(Reason.MODEL_UNSAFE, f"{_shown(name)} is not a path inside the model")
    return path


def _write(stream: IO[bytes], target: Path, path: PurePosixPath) -> None:
    """Write a new file and flush it to disk."""
    file = target / path
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("xb") as output:
        while chunk := _read(stream):
            output.write(chunk)
        output.flush()
        os.fsync(output.fileno())


def _read(stream: Any) -> bytes:
    """Return the next bytes of a file or a member of an archive."""
    try:
        chunk: bytes = stream.read(_CHUNK_BYTES)
    except Exception as exc:  # a wrong checksum, damaged compression, a lost disk
        raise ScanError(Reason.MODEL_DAMAGED, "a file of the model is damaged") from exc
    return chunk


def _shown(name: str) -> str:
    """Return a file name for a message."""
    short = name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}..."
    return printable(short)
