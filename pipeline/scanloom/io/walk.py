"""Which files lie at a path: each once, with what tells whether it changed, and in a fixed order.

Nothing is opened here but a DICOMDIR and archives, for the list of their members.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scanloom.core import Reason, ScanError
from scanloom.io.archives import IN_ARCHIVE, SUFFIXES, is_archive, list_members
from scanloom.io.outfolder import FIRST_WRITTEN, WRITTEN, is_output

if TYPE_CHECKING:
    from pydicom import Dataset

BIDS_MARK = "dataset_description.json"
"""The file that makes a folder a BIDS dataset."""
BIDS_LEFT_OUT = ("derivatives", "sourcedata")
"""Folders of a BIDS dataset that hold other things than its scans; used where they are named."""
DICOMDIR = "DICOMDIR"

_REFERENCED, _RECORDS = 0x00041500, 0x00041220  # ReferencedFileID, DirectoryRecordSequence
_OPEN = 0xFFFFFFFF  # the length of a sequence whose end is marked
_STATE = struct.Struct("<qqQ")  # size, mtime_ns, inode
_by_name = attrgetter("name")


class Entry(NamedTuple):
    """A file that was found.

    Parameters
    ----------
    path : str
        Absolute; that of a member of an archive is the archive's, `IN_ARCHIVE` and its name.
    size, mtime_ns, inode : int
        They tell whether it changed; 0 where it can't be looked at.
    reason : Reason or None
        Why it is not opened at all.
    """

    path: str
    size: int
    mtime_ns: int
    inode: int
    reason: Reason | None = None


def list_files(
    paths: Sequence[Path | str],
    many: int = 0,
    on_many: Callable[[], None] | None = None,
    out: Path | None = None,
    *,
    archives: bool = False,
) -> list[Entry]:
    """Return all files at paths: files, folders with all below, archives, DICOMDIRs, patterns.

    Links to files and folders are followed, each folder being entered once. What can't be looked
    at is an entry too, with its reason, and so is what is no regular file: a pipe, a socket, a
    device, none of which is ever opened. What scanloom wrote into an output folder is none, unless
    that folder, or something in it, was named.

    Parameters
    ----------
    paths : sequence of Path or str
    many, on_many
        What is called as soon as there are more files than that: who helps with them can come
        while the others are listed.
    out : Path or None
        The output folder of who asks: what scanloom writes there is no entry, even if it was named.
    archives : bool
        Whether archives in folders are looked into too, not only those that are named.

    Raises
    ------
    ScanError
        NOT_FOUND if there is nothing at a path.
    """
    found: dict[str, Entry] = {}
    named = [os.path.abspath(path) for path in paths]  # noqa: PTH100
    places = [place for path in named for place in _places(path)]
    looked_into = frozenset(places)
    walk = _Walk(named, out, archives=archives)
    for place in sorted(places, key=len, reverse=True):  # what was named is never left out
        for entry in _at(place, walk):
            if entry.reason is Reason.NESTED_ARCHIVE and entry.path in looked_into:
                continue
            found.setdefault(entry.path, entry)
            if on_many and len(found) > many:
                on_many()
                on_many = None
    for entry in walk.linked():
        found.setdefault(entry.path, entry)
    return _links_once(list(found.values()), walk.links)


def stamp_of(entries: Iterable[Entry]) -> str:
    """Return a hash over size, time of change and inode of files, wherever they lie.

    Files with the same stamp have not been changed in between; another stamp says that they may
    have been. A change that keeps all three of a file (its time of change set back on purpose) is
    not seen.
    """
    states = sorted(_STATE.pack(entry.size, entry.mtime_ns, entry.inode) for entry in entries)
    return hashlib.blake2b(b"".join(states), digest_size=16).hexdigest()


def check_paths(paths: Sequence[Path | str], out: Path | None = None) -> None:
    """Refuse paths at which there is no file; told before anything is done about them.

    Parameters are those of `list_files`.

    Raises
    ------
    ScanError
        NOT_FOUND if there is nothing at a path; NO_IMAGES if there is no file at any, such as at
        the place of a disk that is not mounted.
    """
    named = [os.path.abspath(path) for path in paths]  # noqa: PTH100
    walk = _Walk(named, out)
    places = [place for path in named for place in _places(path)]
    files = (entry for place in places for entry in _at(place, walk))
    if next(itertools.chain(files, walk.linked()), None) is None:
        raise ScanError(Reason.NO_IMAGES, "there is no file at any of these paths")


def _places(path: str) -> list[str]:
    """Return the path, or what a glob pattern matches."""
    if os.path.lexists(path):
        return [path]
    if glob.has_magic(path) and (matching := sorted(glob.glob(path, recursive=True))):  # noqa: PTH207
        return _outside_outputs(matching, path)
    raise ScanError(Reason.NOT_FOUND, "nothing at a path that was given")


def _outside_outputs(matching: Sequence[str], pattern: str) -> list[str]:
    """Return what a pattern matches, without what lies in output folders that it does not name."""
    named = next(n for n, part in enumerate(Path(pattern).parts) if glob.has_magic(part))
    known: dict[str, bool] = {}

    def written(place: str) -> bool:
        parts = Path(place).parts
        for n in range(named, len(parts)):
            if parts[n] in WRITTEN:
                folder = str(Path(*parts[:n]))
                if folder not in known:
                    known[folder] = is_output(folder, os.listdir(folder))  # noqa: PTH208
                if known[folder]:
                    return True
        return False

    return [place for place in matching if not written(place)]


def _at(path: str, walk: _Walk) -> Iterable[Entry]:
    if os.path.isdir(path):  # noqa: PTH112
        return walk.below(path)
    if is_archive(path):
        return _in_archive(path)
    if os.path.basename(path).upper() == DICOMDIR and os.path.isfile(path):  # noqa: PTH113, PTH119
        return _in_dicomdir(path)
    return [_entry(path)]


def _entry(path: str) -> Entry:
    try:
        state = os.stat(path)  # noqa: PTH116
    except OSError:
        return Entry(path, 0, 0, 0, Reason.UNREADABLE)
    return _seen(path, state)


def _seen(path: str, state: os.stat_result, reason: Reason | None = None) -> Entry:
    """Return the entry of what is there; what is no regular file might never end."""
    if not stat.S_ISREG(state.st_mode):
        reason = reason or Reason.NOT_AN_IMAGE
    return Entry(path, state.st_size, state.st_mtime_ns, state.st_ino, reason)


class _Walk:
    """Goes through folders; those behind links come last, so that a link never hides the real one.

    `links` are the entries that are links to files.

    Parameters
    ----------
    named : iterable of str
        The folders that are not left out, whatever they are.
    out : Path or None
        The output folder of who asks.
    archives : bool
        Whether archives are looked into that are not named.
    """

    def __init__(
        self, named: Iterable[str] = (), out: Path | None = None, *, archives: bool = False
    ) -> None:
        self.links: set[str] = set()
        self._archives = archives
        self._named = frozenset(named)
        self._out = _identity(out)
        self._entered: set[tuple[int, int]] = set()
        self._linked: list[tuple[str, Reason | None]] = []

    def below(self, folder: str, reason: Reason | None = None) -> Iterator[Entry]:
        """Give the files of a folder and of all folders below it, by name."""
        waiting = [(folder, reason)]
        while waiting:
            place, why = waiting.pop()
            try:
                state = os.stat(place)  # noqa: PTH116
                with os.scandir(place) as items:
                    inside = sorted(items, key=_by_name)
            except OSError:
                yield Entry(place, 0, 0, 0, Reason.UNREADABLE)
                continue
            identity = state.st_dev, state.st_ino
            if identity in self._entered:
                continue
            self._entered.add(identity)
            names = [item.name for item in inside]
            bids = BIDS_MARK in names
            if ours := self._written(place, identity, names):
                inside = [item for item in inside if item.name not in ours]
            folders: list[tuple[str, Reason | None]] = []
            for item in inside:
                left_out = bids and item.name in BIDS_LEFT_OUT
                try:
                    entry = self._look(item, Reason.LEFT_OUT if left_out else why, folders)
                except OSError:
                    entry = Entry(item.path, 0, 0, 0, Reason.UNREADABLE)
                if entry is None:
                    continue
                if entry.reason is Reason.NESTED_ARCHIVE and self._archives:
                    yield from _in_archive(entry.path)
                else:
                    yield entry
            waiting.extend(reversed(folders))

    def linked(self) -> Iterator[Entry]:
        """Give the files of the folders that links led to, unless they were given already."""
        while self._linked:
            yield from self.below(*self._linked.pop(0))

    def _written(self, place: str, identity: tuple[int, int], names: list[str]) -> frozenset[str]:
        """Return what scanloom wrote, or is about to write, into a folder that was not named."""
        own = identity == self._out
        if (own or place not in self._named) and is_output(place, names):
            return WRITTEN
        return FIRST_WRITTEN if own else frozenset()

    def _look(
        self,
        item: os.DirEntry[str],
        reason: Reason | None,
        folders: list[tuple[str, Reason | None]],
    ) -> Entry | None:
        """Return the entry of a file; None for folders, which are noted."""
        if item.is_dir(follow_symlinks=False):
            folders.append((item.path, reason))
            return None
        if not item.is_file():
            if item.is_dir():
                self._linked.append((item.path, reason))
                return None
        elif item.is_symlink():
            self.links.add(item.path)
        elif reason is None and item.name.lower().endswith(SUFFIXES):
            reason = Reason.NESTED_ARCHIVE
        return _seen(item.path, item.stat(), reason)


def _identity(folder: Path | None) -> tuple[int, int] | None:
    """Return what tells a folder from all others, None where it is not there."""
    try:
        state = folder.stat() if folder else None
    except OSError:
        return None
    return (state.st_dev, state.st_ino) if state else None


def _links_once(entries: list[Entry], links: set[str]) -> list[Entry]:
    """Mark links to files that are among the entries themselves, or were linked to before."""
    if not links:
        return entries
    inodes = {e.inode for e in entries if e.path in links}
    files = {e.path.split(IN_ARCHIVE)[0] for e in entries if e.inode in inodes}
    real = {os.path.realpath(path) for path in files if path not in links}
    once = []
    for entry in entries:
        if entry.path in links:
            target = os.path.realpath(entry.path)
            if target in real:
                once.append(entry._replace(reason=entry.reason or Reason.DUPLICATE_LINK))
                continue
            real.add(target)
            if target.lower().endswith(SUFFIXES):
                entry = entry._replace(reason=entry.reason or Reason.NESTED_ARCHIVE)
        once.append(entry)
    return once


def _in_archive(path: str) -> list[Entry]:
    """Return the members of an archive; itself, where it has none or can't be used."""
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
        Entry(path + IN_ARCHIVE + name, size, archive.mtime_ns, archive.inode, reason)
        for name, size, reason in members
    ]


def _in_dicomdir(path: str) -> list[Entry]:
    """Return the DICOMDIR itself and the files that its records name (PS3.3 F.3)."""
    root = os.path.dirname(path)  # noqa: PTH120
    try:
        named_files = dict.fromkeys(_file_ids(Path(path)))
    except ScanError as error:
        return [_entry(path)._replace(reason=error.reason)]
    entries = [_entry(path)._replace(reason=Reason.NOT_AN_IMAGE)]
    for parts in named_files:
        named = _below(root, parts)
        if named is None:
            shown = os.path.join(root, *(part.replace(os.sep, "_") for part in parts))  # noqa: PTH118
            entries.append(Entry(shown, 0, 0, 0, Reason.NOT_FOUND))
        else:
            entries.append(_entry(named))
    return entries


def _file_ids(path: Path) -> Iterator[tuple[str, ...]]:
    from pydicom import dcmread

    from scanloom.io.dicom.headers import quiet

    try:
        with quiet():
            directory = dcmread(path, force=True)
            _check_whole(directory)
            records = directory.get("DirectoryRecordSequence") or ()
            ids = [record.get_item(_REFERENCED) for record in records if _REFERENCED in record]
            texts = [_text(element.value) for element in ids]
    except Exception as exc:  # foreign data, foreign code
        detail = f"a DICOMDIR can't be read ({type(exc).__name__})"
        raise ScanError(Reason.DAMAGED, detail) from exc
    return (tuple(p.strip() for p in text.split("\\")) for text in texts if text)


def _check_whole(directory: Dataset) -> None:
    """Refuse a DICOMDIR that ends too early: pydicom takes the records before its end."""
    stored: Any = directory.get_item(_RECORDS) if _RECORDS in directory else None
    value = getattr(stored, "value", None)
    if isinstance(value, bytes) and len(value) < stored.length < _OPEN:
        raise EOFError


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1").strip(" \0")
    return value if isinstance(value, str) else "\\".join(map(str, value or ()))  # type: ignore[call-overload]


def _below(root: str, parts: tuple[str, ...]) -> str | None:
    """Return a file that a DICOMDIR names, whatever its case; None if it is not below the root."""
    place = root
    for part in parts:
        if part in ("", ".", "..") or os.sep in part or "\0" in part:
            return None
        if not os.path.lexists(os.path.join(place, part)):  # noqa: PTH118
            part = _other_case(place, part)
        place = os.path.join(place, part)  # noqa: PTH118
    real, inside = os.path.realpath(place), os.path.realpath(root) + os.sep
    return place if real.startswith(inside) and os.path.isfile(real) else None  # noqa: PTH113


def _other_case(folder: str, name: str) -> str:
    """Return the name as it is in the folder: discs are read with small letters, or with ";1"."""
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return name
    matching = [n for n in names if n.lower().removesuffix(";1").removesuffix(".") == name.lower()]
    return min(matching, default=name)
