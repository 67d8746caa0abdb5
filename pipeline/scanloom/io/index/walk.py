"""List of the files at some paths: each file once, with its state, in a fixed order.

The state (size, modification time, inode) shows later whether a file has changed. Only a DICOMDIR
and archives are opened here, to list their members.
"""

from __future__ import annotations

import glob
import hashlib
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import tags
from scanloom.io.output.layout import EARLY_ENTRIES, OUTPUT_ENTRIES, is_output_folder
from scanloom.io.system.archives import ARCHIVE_SUFFIXES, MEMBER_SEPARATOR, is_archive, list_members

if TYPE_CHECKING:
    from pydicom import Dataset

BIDS_MARKER = "dataset_description.json"
"""File that marks a folder as a BIDS dataset."""
BIDS_EXCLUDED = ("derivatives", "sourcedata")
"""Folders of a BIDS dataset that do not hold its scans; used only if given explicitly."""
DICOMDIR = "DICOMDIR"

_UNDEFINED_LENGTH = 0xFFFFFFFF  # of a sequence that ends with a delimiter
_STATE = struct.Struct("<qqQ")  # size, mtime_ns, inode
_by_name = attrgetter("name")


class FileEntry(NamedTuple):
    """A file that was found.

    Parameters
    ----------
    path : str
        Absolute; for an archive member: path of the archive, `MEMBER_SEPARATOR`, name of the
        member.
    size, mtime_ns, inode : int
        State of the file, which shows whether it changed; 0 if it can't be queried.
    reason : Reason or None
        Reason for which the file is not opened.
    """

    path: str
    size: int
    mtime_ns: int
    inode: int
    reason: Reason | None = None


class FileWalk:
    """Lists folders with all folders below, files, archives, DICOMDIRs and glob patterns.

    Links to files and folders are followed; each folder is entered once. Unreadable files, pipes,
    sockets and devices are listed with a reason, and not opened. Files that scanloom wrote to an
    output folder are skipped, unless that folder or a path inside it was given explicitly.

    Real paths take precedence over links: linked folders come after all others, and linked files
    after everything else. What is kept in memory is the identity of each folder, and the links.

    Parameters
    ----------
    paths : sequence of Path or str
    out : Path or None
        The caller's output folder; its results are skipped even if it was given explicitly.
    archives : bool
        Whether to list the members of archives inside folders too.

    Raises
    ------
    ScanError
        NOT_FOUND if a path does not exist.
    """

    def __init__(
        self, paths: Sequence[Path | str], out: Path | None = None, *, archives: bool = False
    ) -> None:
        explicit = [os.path.abspath(path) for path in paths]
        self._roots = [root for path in explicit for root in _expand(path)]
        self._walker = _Walker(explicit, out, archives=archives)
        self._linked_roots: list[FileEntry] = []

    def folders(self) -> Iterator[tuple[str, list[FileEntry]]]:
        """Yield each folder and its files, in a fixed order; a path that is a file has its own."""
        listed_below = frozenset(self._roots)
        listed: set[str] = set()  # paths that may be met again: of roots, or of no known folder
        walked: list[str] = []
        # The longest paths first: a named path is never excluded by the folder around it
        for root in sorted(self._roots, key=len, reverse=True):
            is_folder = os.path.isdir(root)
            batches = self._walker.below(root) if is_folder else [_list_root(root)]
            for folder, files in batches:
                new: dict[str, FileEntry] = {}
                for entry in files:
                    if entry.path in listed or (
                        entry.reason is Reason.NESTED_ARCHIVE and entry.path in listed_below
                    ):
                        continue
                    if is_folder:
                        new.setdefault(entry.path, entry)
                    elif os.path.islink(entry.path):  # it waits: a folder may have it too
                        self._linked_roots.append(entry)
                    elif not self._was_walked(entry.path, walked):
                        new.setdefault(entry.path, entry)
                listed.update(e.path for e in files if not is_folder or not e.inode)
                yield folder, list(new.values())
            if is_folder:
                walked.append(root + os.sep)
        for folder, files in self._walker.linked():
            yield folder, [entry for entry in files if entry.path not in listed]

    def links(self, paths_of: Callable[[Set[int]], Iterable[str]]) -> list[FileEntry]:
        """Return the linked files, once all folders are listed.

        A link to a file that was listed, or is the target of an earlier link, is DUPLICATE_LINK.
        `paths_of` returns the listed paths that have one of these inodes.
        """
        links, roots = self._walker.links, self._linked_roots
        linked = {entry.path: entry for entry in (*roots, *links.values())}
        if not linked:
            return []
        inodes = frozenset(entry.inode for entry in linked.values())
        listed = {*paths_of(inodes), *(entry.path for entry in roots)} - links.keys()
        real = {os.path.realpath(path.split(MEMBER_SEPARATOR)[0]) for path in listed}
        marked = []
        for entry in linked.values():
            if entry.path in links:
                target = os.path.realpath(entry.path)
                if target in real:
                    entry = entry._replace(reason=entry.reason or Reason.DUPLICATE_LINK)
                elif target.lower().endswith(ARCHIVE_SUFFIXES):
                    entry = entry._replace(reason=entry.reason or Reason.NESTED_ARCHIVE)
                real.add(target)
            marked.append(entry)
        return marked

    def _was_walked(self, path: str, walked: Iterable[str]) -> bool:
        """Return whether a file that a DICOMDIR names was listed with a folder given explicitly."""
        return path.startswith(tuple(walked)) and self._walker.has_entered(os.path.dirname(path))


def list_files(
    paths: Sequence[Path | str], out: Path | None = None, *, archives: bool = False
) -> list[FileEntry]:
    """Return the files of a `FileWalk`, whose parameters and errors these are."""
    walk = FileWalk(paths, out, archives=archives)
    entries = [entry for _, files in walk.folders() for entry in files]
    linked = walk.links(lambda inodes: (e.path for e in entries if e.inode in inodes))
    return entries + linked


def stamp_of(entries: Iterable[FileEntry]) -> str:
    """Return a hash of size, modification time and inode of files, whatever their paths.

    Files with the same stamp are unchanged; with another stamp, they may have changed. A change
    with an unchanged size, inode and modification time (reset on purpose) is missed.
    """
    states = sorted(_STATE.pack(entry.size, entry.mtime_ns, entry.inode) for entry in entries)
    return hashlib.blake2b(b"".join(states), digest_size=16).hexdigest()


def check_paths(paths: Sequence[Path | str], out: Path | None = None) -> None:
    """Refuse paths without any file, before other work is done.

    The parameters are those of `FileWalk`.

    Raises
    ------
    ScanError
        NOT_FOUND if a path does not exist; NO_IMAGES if no path has a file, such as the mount
        point of a disk that is not mounted.
    """
    walk = FileWalk(paths, out)
    if not (any(files for _, files in walk.folders()) or walk.links(lambda _: ())):
        detail = "there is no file at this path" if len(paths) == 1 else "no path has a file"
        raise ScanError(Reason.NO_IMAGES, detail, "\n".join(map(os.path.abspath, paths)))


def _expand(path: str) -> list[str]:
    """Return the path itself, or the paths that match it as a glob pattern."""
    if os.path.lexists(path):
        return [path]
    if glob.has_magic(path) and (matching := sorted(glob.glob(path, recursive=True))):
        return _outside_outputs(matching, path)
    raise ScanError(Reason.NOT_FOUND, _absence(path), path)


def _absence(path: str) -> str:
    """Return why there is nothing at a path, as far as its text tells."""
    names = path.split(os.sep)
    if any(name.startswith("~") for name in names):
        return "this path does not exist: quotes keep the shell from replacing ~"
    if "\\" in path:
        return "this path does not exist: folders are separated by / here"
    if glob.has_magic(path):
        return "no file matches this pattern"
    return "this path does not exist"


def _outside_outputs(matching: Sequence[str], pattern: str) -> list[str]:
    """Return the matches of a pattern, without results in output folders that it does not name."""
    n_literal = next(n for n, name in enumerate(Path(pattern).parts) if glob.has_magic(name))
    known: dict[str, bool] = {}

    def is_result(path: str) -> bool:
        names = Path(path).parts
        for n in range(n_literal, len(names)):
            if names[n] in OUTPUT_ENTRIES:
                folder = str(Path(*names[:n]))
                if folder not in known:
                    known[folder] = is_output_folder(folder, os.listdir(folder))
                if known[folder]:
                    return True
        return False

    return [path for path in matching if not is_result(path)]


def _list_root(path: str) -> tuple[str, list[FileEntry]]:
    """Return the path of a file, archive or DICOMDIR, and the files that it stands for."""
    if is_archive(path):
        return path, _list_archive(path)
    if os.path.basename(path).upper() == DICOMDIR and os.path.isfile(path):
        return path, _list_dicomdir(path)
    return path, [_entry(path)]


def _entry(path: str) -> FileEntry:
    try:
        state = os.stat(path)
    except OSError:
        return FileEntry(path, 0, 0, 0, Reason.UNREADABLE)
    return _entry_of_state(path, state)


def _entry_of_state(path: str, state: os.stat_result, reason: Reason | None = None) -> FileEntry:
    """Return the entry of an existing file; reading anything but a regular file may never end."""
    if not stat.S_ISREG(state.st_mode):
        reason = reason or Reason.NOT_AN_IMAGE
    return FileEntry(path, state.st_size, state.st_mtime_ns, state.st_ino, reason)


class _Walker:
    """Lists folders recursively; linked folders and files are kept for later.

    `explicit` folders are never excluded; `out` is the caller's output folder; `archives` says
    whether to list the members of archives that were not given explicitly.
    """

    def __init__(self, explicit: Iterable[str], out: Path | None, *, archives: bool) -> None:
        self.links: dict[str, FileEntry] = {}  # links to files, by path
        self._archives = archives
        self._explicit = frozenset(explicit)
        self._out: int | None = None
        with suppress(OSError):
            self._out = _identity(out.stat()) if out else None
        self._entered: set[int] = set()  # identities of folders
        self.linked_folders: list[tuple[str, Reason | None]] = []

    def has_entered(self, folder: str) -> bool:
        """Return whether the files of a folder were listed."""
        try:
            return _identity(os.stat(folder)) in self._entered
        except OSError:
            return False

    def below(
        self, root: str, root_reason: Reason | None = None
    ) -> Iterator[tuple[str, list[FileEntry]]]:
        """Yield a folder and all folders below it with their files, ordered by name."""
        waiting = [(root, root_reason)]
        while waiting:
            folder, reason = waiting.pop()
            listed = self.listing(folder, reason)
            if listed is not None:
                files, folders = listed
                yield folder, files
                waiting.extend(reversed(folders))

    def listing(
        self, folder: str, reason: Reason | None = None
    ) -> tuple[list[FileEntry], list[tuple[str, Reason | None]]] | None:
        """Return the files of a folder and the folders in it; None if it was listed before."""
        try:
            identity = _identity(os.stat(folder))
            with os.scandir(folder) as listing:
                children = sorted(listing, key=_by_name)
        except OSError:
            return [FileEntry(folder, 0, 0, 0, Reason.UNREADABLE)], []
        if identity in self._entered:
            return None
        self._entered.add(identity)
        names = [child.name for child in children]
        bids = BIDS_MARKER in names
        if results := self._results(folder, identity, names):
            children = [child for child in children if child.name not in results]
        folders: list[tuple[str, Reason | None]] = []
        files: list[FileEntry] = []
        for child in children:
            excluded = Reason.LEFT_OUT if bids and child.name in BIDS_EXCLUDED else reason
            try:
                entry = self._child_entry(child, excluded, folders)
            except OSError:
                entry = FileEntry(child.path, 0, 0, 0, Reason.UNREADABLE)
            if entry is None:
                continue
            if entry.reason is Reason.NESTED_ARCHIVE and self._archives:
                files += _list_archive(entry.path)
            else:
                files.append(entry)
        return files, folders

    def linked(self) -> Iterator[tuple[str, list[FileEntry]]]:
        """Yield the linked folders that were not entered yet, with their files."""
        while self.linked_folders:
            yield from self.below(*self.linked_folders.pop(0))

    def _results(self, folder: str, identity: int, names: list[str]) -> frozenset[str]:
        """Return the names in a folder that scanloom wrote, or is about to write, as results."""
        is_own = identity == self._out
        if (is_own or folder not in self._explicit) and is_output_folder(folder, names):
            return OUTPUT_ENTRIES
        return EARLY_ENTRIES if is_own else frozenset()

    def _child_entry(
        self,
        child: os.DirEntry[str],
        reason: Reason | None,
        folders: list[tuple[str, Reason | None]],
    ) -> FileEntry | None:
        """Return the entry of a file; None for a folder, added to a list, and for links."""
        if child.is_dir(follow_symlinks=False):  # first: a listing tells it without another call
            folders.append((child.path, reason))
            return None
        if not child.is_file():
            if child.is_dir():
                self.linked_folders.append((child.path, reason))
                return None
        elif child.is_symlink():
            self.links[child.path] = _entry_of_state(child.path, child.stat(), reason)
            return None
        elif reason is None and child.name.lower().endswith(ARCHIVE_SUFFIXES):
            reason = Reason.NESTED_ARCHIVE
        return _entry_of_state(child.path, child.stat(), reason)


def _identity(state: os.stat_result) -> int:
    """Return device and inode of a folder as one number: an archive has a million folders."""
    return state.st_dev << 64 | state.st_ino


def _list_archive(path: str) -> list[FileEntry]:
    """Return the members of an archive; the archive itself if it is empty or unusable."""
    archive = _entry(path)
    if archive.reason is not None:
        return [archive]
    try:
        members = list_members(Path(path))
    except ScanError as error:
        return [archive._replace(reason=error.reason)]
    if not members:
        return [archive._replace(reason=Reason.NO_IMAGES)]
    return [
        FileEntry(path + MEMBER_SEPARATOR + name, size, archive.mtime_ns, archive.inode, reason)
        for name, size, reason in members
    ]


def _list_dicomdir(path: str) -> list[FileEntry]:
    """Return the DICOMDIR itself and the files that its records reference (PS3.3 F.3)."""
    root = os.path.dirname(path)
    try:
        file_ids = dict.fromkeys(_file_ids(Path(path)))
    except ScanError as error:
        return [_entry(path)._replace(reason=error.reason)]
    entries = [_entry(path)._replace(reason=Reason.NOT_AN_IMAGE)]
    for components in file_ids:
        file = _resolve(root, components)
        if file is None:
            missing = os.path.join(root, *(name.replace(os.sep, "_") for name in components))
            entries.append(FileEntry(missing, 0, 0, 0, Reason.NOT_FOUND))
        else:
            entries.append(_entry(file))
    return entries


def _file_ids(path: Path) -> Iterator[tuple[str, ...]]:
    from pydicom import dcmread

    from scanloom.io.dicom.header.header import pydicom_muted

    try:
        with pydicom_muted():
            directory = dcmread(path, force=True)
            _check_complete(directory)
            records = directory.get("DirectoryRecordSequence") or ()
            ids = [
                record.get_item(tags.REFERENCED_FILE_ID)
                for record in records
                if tags.REFERENCED_FILE_ID in record
            ]
            texts = [_text(element.value) for element in ids]
    except Exception as exc:  # foreign data, foreign code
        raise ScanError(Reason.DAMAGED, f"a DICOMDIR can't be read ({type(exc).__name__})") from exc
    return (tuple(name.strip() for name in text.split("\\")) for text in texts if text)


def _check_complete(directory: Dataset) -> None:
    """Refuse a truncated DICOMDIR, of which pydicom returns the records before its end."""
    stored: Any = (
        directory.get_item(tags.DIRECTORY_RECORD_SEQUENCE)
        if tags.DIRECTORY_RECORD_SEQUENCE in directory
        else None
    )
    value = getattr(stored, "value", None)
    if isinstance(value, bytes) and len(value) < stored.length < _UNDEFINED_LENGTH:
        raise EOFError


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1").strip(" \0")
    if isinstance(value, str):
        return value
    # pydicom's values have no types: this one is a list, or empty
    return "\\".join(map(str, value or ()))  # type: ignore[call-overload]


def _resolve(root: str, components: tuple[str, ...]) -> str | None:
    """Return the path of a File ID, whatever its case; None if it is not a file below the root."""
    path = root
    for name in components:
        if name in ("", ".", "..") or os.sep in name or "\0" in name:
            return None
        if not os.path.lexists(os.path.join(path, name)):
            name = _name_on_disc(path, name)
        path = os.path.join(path, name)
    real, prefix = os.path.realpath(path), os.path.realpath(root) + os.sep
    return path if real.startswith(prefix) and os.path.isfile(real) else None


def _name_on_disc(folder: str, name: str) -> str:
    """Return a name as the folder has it: a mounted disc may show it in lower case or with ";1"."""
    try:
        names = os.listdir(folder)
    except OSError:
        return name
    matching = [n for n in names if n.lower().removesuffix(";1").removesuffix(".") == name.lower()]
    return min(matching, default=name)
