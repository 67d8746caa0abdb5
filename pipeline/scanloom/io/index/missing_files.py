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
    paths : sequence of str
    slices : bool
        Whether they are slices, not other objects.
    """

    study: str
    paths: Sequence[str]
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

    What is kept in memory grows with the unreadable files and the folders around them alone. The
    arguments are called for each pass over the files.

    Parameters
    ----------
    suspects : function that returns an iterable of (FileEntry, str)
        The files that can't be read or are too short for DICOM, others too, in any order. The text
        is the code of the reason for which a file can't be read; NOT_AN_IMAGE if its content is
        neither DICOM nor another image; empty otherwise.
    series : function that returns an iterable of DicomFiles
        All readable series; one may come in several pieces. A file too short for DICOM counts as
        unreadable if its suffix is that of DICOM files in its folder, or if no file of its folder
        can be read.
    files : function that returns an iterable of (FileEntry, str)
        All files, like `suspects`.
    """

    def __init__(
        self,
        suspects: Callable[[], Iterable[tuple[FileEntry, str]]],
        series: Callable[[], Iterable[DicomFiles]],
        files: Callable[[], Iterable[tuple[FileEntry, str]]],
    ) -> None:
        self._counts: Counter[tuple[_Rule, str, bool]] = Counter()
        self._neighbours_in: defaultdict[str, Counter[_Neighbour]] = defaultdict(Counter)
        self._neighbours_below: defaultdict[str, Counter[_Neighbour]] = defaultdict(Counter)
        faults: list[tuple[FileEntry, str]] = []
        short: list[FileEntry] = []
        foreign: list[FileEntry] = []
        for entry, fault in suspects():
            if fault and fault != Reason.NOT_AN_IMAGE.code:
                faults.append((entry, fault))
            elif _is_short(entry):
                short.append(entry)
            elif fault and _may_be_named_like_slices(entry.path):
                foreign.append(entry)
        if not (faults or short or foreign):
            return
        around = {_folder(entry.path) for entry in (*short, *foreign)}
        for entry, _ in faults:
            around |= {_folder(entry.path), _locate_unreadable(entry).folder}
        self._read_series(series(), around, short, foreign)
        for entry in short:
            self._add_neighbour(entry.path, "", is_foreign=False)
        counts = Counter(self._possible_slices(short, files))
        for entry, fault in faults:
            self._add_neighbour(entry.path, fault, is_foreign=False)
            damaged = fault != Reason.UNREADABLE.code
            counts[_locate_unreadable(entry)._replace(damaged=damaged)] += 1
        for entry in foreign:
            # Half of a scan may be lost: its folder has no slices, and it is named like those of
            # a folder next to it
            is_apart = _folder(entry.path) not in self._slices
            is_apart &= _name_next_door(entry.path) in self._names_next_door
            self._add_neighbour(entry.path, "", is_foreign=not is_apart)
            if is_apart:
                counts[_locate_unreadable(entry)._replace(damaged=True)] += 1
        for location, count in counts.items():
            for rule in self._rules(location):
                self._counts[rule, location.suffix, location.damaged] += count

    def _read_series(
        self,
        series: Iterable[DicomFiles],
        around: Set[str],
        short: Iterable[FileEntry],
        foreign: Iterable[FileEntry],
    ) -> None:
        """Note what the folders of unreadable files, and those above them, hold of each series."""
        self._slices: dict[str, str] = {}
        self._other_objects: dict[str, str] = {}
        self._dicom: set[tuple[str, str]] = set()  # folders of short files and suffixes there
        self._names_next_door: set[tuple[str, str]] = set()
        above = {folder for each in around for folder in _ancestors(each)}
        of_short = {_folder(entry.path) for entry in short}
        names = {_name_next_door(entry.path) for entry in foreign}
        parents = {parent for parent, _ in names}
        children: defaultdict[str, set[str]] = defaultdict(set)
        for study, paths, slices in series:
            locations = {_locate(path) for path in paths}
            _add_study(self._slices if slices else self._other_objects, study, locations, above)
            self._dicom.update((at.folder, at.suffix) for at in locations if at.folder in of_short)
            if not slices:
                continue
            for at in locations:
                for folder in (at.folder, at.container):
                    if _parent(folder) in above:
                        children[_parent(folder)].add(folder)
            if any(_parent(at.folder) in parents for at in locations):
                self._names_next_door |= names.intersection(map(_name_next_door, paths))
        self._siblings = defaultdict(
            list, {parent: sorted(each, key=_natural_key) for parent, each in children.items()}
        )

    def __bool__(self) -> bool:
        """Whether there is any that may belong to a series."""
        return bool(self._counts or self._neighbours_in)

    def of(self, study: str, paths: Iterable[str]) -> LostFiles:
        """Return how many unreadable files may belong to a series of `study` at these paths."""
        if not self:
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
        slice. An archive that can't be unpacked is not a slice, but holds a folder of its own.
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

    def _possible_slices(
        self,
        short: Iterable[FileEntry],
        files: Callable[[], Iterable[tuple[FileEntry, str]]],
    ) -> Iterator[_Location]:
        """Yield the locations of files that are too `short` for DICOM, but may have been slices."""
        locations = [_locate(entry.path) for entry in short]
        unread = {at.folder for at in locations if (at.folder, at.suffix) not in self._dicom}
        unread -= self._slices.keys() | self._other_objects.keys()
        if unread:
            readable = (
                entry.path
                for entry, fault in files()
                if fault in ("", Reason.NOT_AN_IMAGE.code) and not _is_short(entry)
            )
            unread.difference_update(map(_folder, readable))
        for location in locations:
            if location.folder in unread or (location.folder, location.suffix) in self._dicom:
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


def _is_short(entry: FileEntry) -> bool:
    """Return whether a file is too short for DICOM; a pipe is too."""
    return entry.size < MIN_DICOM_BYTES and entry.reason in (None, Reason.NOT_AN_IMAGE)


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


def _add_study(
    studies: dict[str, str], known_study: str, locations: Set[_Location], above: Set[str]
) -> None:
    """Note the study of files for the folders `above` them, or `_SEVERAL` if there are more."""
    for folder in {location.folder for location in locations}:
        study = known_study or f"{_SEVERAL}{folder}"
        for ancestor in _ancestors(folder):
            if ancestor not in above:
                continue
            previous = studies.setdefault(ancestor, study)
            if previous == _SEVERAL:
                break  # so are all folders above
            if previous != study:
                studies[ancestor] = _SEVERAL


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


def _name_next_door(path: str) -> tuple[str, str]:
    """Return the folder around that of a file, and the pattern of its name."""
    return _parent(_folder(path)), _pattern(path)


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
