"""Unreadable files, and the series to which they may belong.

Slices of a series lie in one folder or in neighbouring folders; an archive counts as a folder. An
unreadable file is therefore assigned by its path alone, in this order:

1. a series in several folders may own any file below their innermost common folder;
2. else the innermost folder around the file that holds slices, at any depth, decides. If these are
   of one study, the file may belong to any of its series. If they are of several studies, it may
   belong to the study of other objects next to the file; without such objects, to the series in
   that very folder, and in the readable folders or archives before and after the file's own.

The last rule keeps one damaged study from casting doubt on all the others of an archive.

A file beside the slices of a series is more than a doubt, and the series is refused: it lies in the
folder of some of them, or in a folder without slices between those of a series in several; and it
is DICOM by its content, or is named like the slices. A copy that failed leaves zeros, encryption
random bytes, a server a page with its error: a file whose name is that of a slice counts as
unreadable whatever its content, unless that is DICOM or another image.
"""

from __future__ import annotations

import itertools
import os
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from scanloom.core import Reason
from scanloom.io.index.walk import FileEntry
from scanloom.io.system.archives import MEMBER_SEPARATOR, archive_kind

MIN_DICOM_BYTES = 132
"""Minimal size of a DICOM file in bytes: preamble and prefix."""

_ANY = "*"  # suffix of an unreadable file that counts whatever its name
_SEVERAL = "\0"  # study of a folder that holds more than one
_DIGITS = re.compile(r"(\d+)")
_SUFFIXES_OF_OTHER_FILES = frozenset(
    (
        *(".bmp", ".csv", ".gif", ".gz", ".htm", ".html", ".ini", ".jpeg", ".jpg", ".json"),
        *(".log", ".md", ".pdf", ".png", ".txt", ".xml", ".yaml", ".yml"),
    )
)
"""Suffixes of notes, pictures and what is compressed: no sign of a slice."""
_Rule = tuple[str, str, str]  # name, folder, study


class DicomFiles(NamedTuple):
    """Files of a DICOM series that were read.

    Parameters
    ----------
    study : str
        Equal for all series of one study; empty if unknown.
    files : sequence of int
        Their indices into the entries.
    slices : bool
        Whether they are slices, not other objects.
    """

    study: str
    files: Sequence[int]
    slices: bool


class LostFiles(NamedTuple):
    """Numbers of unreadable files that may be slices of a series.

    Parameters
    ----------
    unreadable : int
        All of them.
    damaged : int
        Those that can be read, but whose content is damaged.
    beside : int
        Those that lie beside its slices, see the module.
    """

    unreadable: int = 0
    damaged: int = 0
    beside: int = 0


class _Location(NamedTuple):
    """Folder, container (the archive, or else the folder) and suffix of a file, and its fault."""

    folder: str
    container: str
    suffix: str
    damaged: bool = False


class _Neighbour(NamedTuple):
    """An unreadable file as far as its name and content tell that it was a slice."""

    folder: str
    pattern: str
    suffix: str
    is_dicom: bool
    is_foreign: bool


class UnreadableFiles:
    """Counts the unreadable files that may belong to a series.

    Parameters
    ----------
    entries : sequence of FileEntry
    fault_of : function of int
        Code of the reason for which the file with this index can't be read; NOT_AN_IMAGE if its
        content is neither DICOM nor another image; empty otherwise.
    series : iterable of DicomFiles
        All readable series. A file too short for DICOM counts as unreadable if its suffix is that
        of DICOM files in its folder, or if no file of its folder can be read.
    """

    def __init__(
        self,
        entries: Sequence[FileEntry],
        fault_of: Callable[[int], str],
        series: Iterable[DicomFiles],
    ) -> None:
        self._counts: Counter[tuple[_Rule, str, bool]] = Counter()
        self._neighbours_in: defaultdict[str, Counter[_Neighbour]] = defaultdict(Counter)
        self._neighbours_below: defaultdict[str, Counter[_Neighbour]] = defaultdict(Counter)
        faults = {n: fault for n in range(len(entries)) if (fault := fault_of(n))}
        no_images = [n for n, fault in faults.items() if fault == Reason.NOT_AN_IMAGE.code]
        for n in no_images:
            del faults[n]
        excluded = set(faults)
        # Too short for DICOM; pipes are too
        short = [
            n
            for n, entry in enumerate(entries)
            if entry.size < MIN_DICOM_BYTES
            and entry.reason in (None, Reason.NOT_AN_IMAGE)
            and n not in excluded
        ]
        foreign = set(no_images).difference(short)
        foreign = {n for n in foreign if _may_be_named_like_slices(entries[n].path)}
        if not (faults or short or foreign):
            return
        series = list(series)
        located = [(group, {_locate(entries[n].path) for n in group.files}) for group in series]
        self._slices = _studies((group.study, at) for group, at in located if group.slices)
        self._other_objects = _studies(
            (group.study, at) for group, at in located if not group.slices
        )
        apart = self._named_like_slices_next_door(entries, foreign, series)
        foreign -= apart
        for n in apart:
            self._add_neighbour(entries[n].path, "", is_foreign=False)
        for n in (*faults, *short, *foreign):
            self._add_neighbour(entries[n].path, faults.get(n, ""), is_foreign=n in foreign)
        counts = Counter(
            _locate_unreadable(entries[n])._replace(damaged=fault != Reason.UNREADABLE.code)
            for n, fault in faults.items()
        )
        counts.update(_locate_unreadable(entries[n])._replace(damaged=True) for n in apart)
        if short:
            excluded.update(short)
            dicom = {(file.folder, file.suffix) for _, at in located for file in at}
            counts.update(self._possible_slices(entries, short, excluded, dicom))
        if counts:
            self._siblings = _siblings(at for group, at in located if group.slices)
        for location, count in counts.items():
            for rule in self._rules(location):
                self._counts[rule, location.suffix, location.damaged] += count

    def of(self, study: str, paths: Iterable[str]) -> LostFiles:
        """Return how many unreadable files may belong to a series of `study` at these paths."""
        if not (self._counts or self._neighbours_in):
            return LostFiles()
        paths = tuple(paths)
        locations = {_locate(path) for path in paths}
        folders = {location.folder for location in locations}
        suffixes = {_ANY, *(location.suffix for location in locations)}
        common = _common_folder(folders)
        spread = len(folders) > 1
        rules: set[_Rule] = {("below", common, "")} if spread else {("in", common, "")}
        for folder in _ancestors(common):
            if folder != common or not spread:
                rules |= {("all", folder, ""), ("study", folder, study)}
        for folder in {common, *(location.container for location in locations)}:
            if common == folder or common.startswith(folder + "/"):
                rules.add(("beside", folder, ""))

        def count(*damaged: bool) -> int:
            return sum(self._counts[key] for key in itertools.product(rules, suffixes, damaged))

        near = self._beside(folders, paths)
        foreign = sum(number for file, number in near.items() if file.is_foreign)
        return LostFiles(count(False, True) + foreign, count(True) + foreign, near.total())

    def _beside(self, folders: Set[str], paths: Sequence[str]) -> Counter[_Neighbour]:
        """Return the unreadable files that lie beside the slices at these paths, in `folders`."""
        near: Counter[_Neighbour] = Counter()
        for folder in folders & self._neighbours_in.keys():
            near += self._neighbours_in[folder]
        parents = {_parent(folder) for folder in folders}
        if len(folders) > 1 and len(parents) == 1:
            near += self._neighbours_below[parents.pop()]
        if not near:
            return near
        patterns = {_pattern(path) for path in paths}
        suffixes = {_locate(path).suffix for path in paths}
        suffixes.discard("")
        like = {
            file: number
            for file, number in near.items()
            if file.is_dicom or file.pattern in patterns or file.suffix in suffixes
        }
        return Counter(like)

    def _add_neighbour(self, path: str, fault: str, *, is_foreign: bool) -> None:
        """Add an unreadable file; one without a fault has no content of DICOM.

        A file that could be opened often is a note or a mark: its suffix has to be a sign of a
        slice. An archive that can't be unpacked is no slice, but holds a folder of its own.
        """
        if archive_kind(path) is None or MEMBER_SEPARATOR in path:
            location = _locate(path)
            is_dicom = fault not in ("", Reason.UNREADABLE.code)
            name = path[len(_folder(path)) :].lstrip("/" + MEMBER_SEPARATOR)
            is_other = location.suffix in _SUFFIXES_OF_OTHER_FILES or name.startswith(".")
            is_other = is_other and not fault
            suffix = "" if is_dicom or is_other else location.suffix
            file = _Neighbour(location.folder, _pattern(path), suffix, is_dicom, is_foreign)
            self._neighbours_in[location.folder][file] += 1
            if location.folder not in self._slices:
                self._neighbours_below[_parent(location.folder)][file] += 1

    def _named_like_slices_next_door(
        self, entries: Sequence[FileEntry], foreign: Set[int], series: Sequence[DicomFiles]
    ) -> set[int]:
        """Return files without an image whose folder has no slices, but whose names are like some.

        Those slices lie in a folder next to theirs: half of a scan may have been lost.
        """
        apart = {n for n in foreign if _folder(entries[n].path) not in self._slices}
        if not apart:
            return apart
        slices = (entries[n].path for group in series if group.slices for n in group.files)
        names = {(_parent(_folder(path)), _pattern(path)) for path in slices}
        paths = {n: entries[n].path for n in apart}
        return {n for n, p in paths.items() if (_parent(_folder(p)), _pattern(p)) in names}

    def _possible_slices(
        self,
        entries: Sequence[FileEntry],
        short: Sequence[int],
        excluded: set[int],
        dicom: Set[tuple[str, str]],
    ) -> Iterator[_Location]:
        """Yield the locations of files that are too `short` for DICOM, but may have been slices.

        `excluded` are short and unreadable files, `dicom` the folders and suffixes of DICOM files.
        """
        locations = [_locate(entries[n].path) for n in short]
        unread = {file.folder for file in locations if (file.folder, file.suffix) not in dicom}
        unread -= self._slices.keys() | self._other_objects.keys()
        if unread:
            readable = (entry for n, entry in enumerate(entries) if n not in excluded)
            unread.difference_update(_folder(entry.path) for entry in readable)
        for location in locations:
            if location.folder in unread or (location.folder, location.suffix) in dicom:
                yield location._replace(damaged=True)

    def _rules(self, unreadable: _Location) -> Iterator[_Rule]:
        """Yield the rules of which a series must match one to own an unreadable file."""
        for folder in _ancestors(unreadable.folder):
            yield "below", folder, ""
        branch, top = "", unreadable.folder
        while top not in self._slices:
            if not top:
                return
            branch, top = top, _parent(top)
        study = self._other_objects.get(branch, "") if branch else ""
        if study and not study.startswith(_SEVERAL):
            yield "study", top, study
        elif self._slices[top] != _SEVERAL:
            yield "all", top, ""
        elif unreadable.folder == top:
            yield "in", top, ""
        else:
            candidates = (unreadable.container, unreadable.folder)
            own = next((folder for folder in candidates if _parent(folder) == top), "")
            if own:
                yield "in", top, ""
                yield from (("beside", folder, "") for folder in self._neighbours(top, own))

    def _neighbours(self, top: str, own: str) -> list[str]:
        """Return the readable folders or archives next to a folder, in natural order."""
        siblings = self._siblings[top]
        n = bisect_left(siblings, _natural_key(own), key=_natural_key)
        return siblings[max(n - 1, 0) : n + 1]


def _locate_unreadable(entry: FileEntry) -> _Location:
    """Return the location of an unreadable file; for an archive or folder, all files in it."""
    path = entry.path
    is_container = entry.reason is not None and (
        archive_kind(path) is not None or (entry.reason is Reason.UNREADABLE and not entry.inode)
    )
    if is_container and MEMBER_SEPARATOR not in path:
        return _Location(path, path, _ANY)
    return _locate(path)._replace(suffix=_ANY)


def _may_be_named_like_slices(path: str) -> bool:
    """Return whether to compare the name of a file with those of slices: most notes need not be."""
    name = path[len(_folder(path)) :]
    suffix = os.path.splitext(name)[1].lower()
    is_sign = suffix and suffix not in _SUFFIXES_OF_OTHER_FILES
    return bool(is_sign or _DIGITS.search(name)) and archive_kind(path) is None


def _studies(series: Iterable[tuple[str, Set[_Location]]]) -> dict[str, str]:
    """Map each folder to the study of the files in and below it, or to `_SEVERAL`."""
    studies: dict[str, str] = {}
    for known_study, locations in series:
        for folder in {location.folder for location in locations}:
            study = known_study or f"{_SEVERAL}{folder}"
            for ancestor in _ancestors(folder):
                previous = studies.setdefault(ancestor, study)
                if previous == _SEVERAL:
                    break  # so are all folders above
                if previous != study:
                    studies[ancestor] = _SEVERAL
    return studies


def _siblings(series: Iterable[Set[_Location]]) -> dict[str, list[str]]:
    """Map each folder to the folders and archives of slices directly in it, in natural order."""
    children: defaultdict[str, set[str]] = defaultdict(set)
    for locations in series:
        for location in locations:
            for folder in (location.folder, location.container):
                children[_parent(folder)].add(folder)
    return defaultdict(
        list, {parent: sorted(folders, key=_natural_key) for parent, folders in children.items()}
    )


def _natural_key(path: str) -> list[tuple[int, str]]:
    """Return the sort key of a name with numbers by value: 2 before 10."""
    tokens = _DIGITS.split(path.rpartition("/")[2].lower())
    return [(int(token), "") if n % 2 else (0, token) for n, token in enumerate(tokens)]


def _folder(path: str) -> str:
    """Return the folder of a file; an archive counts as one."""
    end = max(path.rfind("/"), path.rfind(MEMBER_SEPARATOR))
    return path[: max(end, 0)].replace(MEMBER_SEPARATOR, "/")


def _locate(path: str) -> _Location:
    folder = _folder(path)
    archive, separator, _ = path.partition(MEMBER_SEPARATOR)
    suffix = os.path.splitext(path)[1].lower()
    if suffix[1:].isdigit():  # the last component of a UID
        suffix = ""
    return _Location(folder, archive if separator else folder, suffix)


def _pattern(path: str) -> str:
    """Return the name of a file with its numbers replaced: slices are numbered."""
    return _DIGITS.sub("#", path[len(_folder(path)) :].lower())


def _parent(folder: str) -> str:
    return folder.rpartition("/")[0]


def _ancestors(folder: str) -> Iterator[str]:
    """Yield a folder and all folders above it."""
    yield folder
    while folder:
        folder = _parent(folder)
        yield folder


def _common_folder(folders: Iterable[str]) -> str:
    """Return the innermost folder that holds all these folders."""
    split = [folder.split("/") for folder in folders]
    first, last = min(split), max(split)
    depth = 0
    while depth < min(len(first), len(last)) and first[depth] == last[depth]:
        depth += 1
    return "/".join(first[:depth])
