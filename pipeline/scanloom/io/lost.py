"""Files that can't be read, and the series to which they might belong.

Slices of a series lie side by side, in a folder or in folders beside each other; an archive is a
folder too. So a file that can't be read is assigned by its place alone, in this order:

1. a series in several folders may own all that lies below the innermost one that holds them all;
2. else the innermost folder around the file that holds slices, at any depth, counts: all its
   series if they are of one study; if of several, those of the study whose other objects lie
   beside the file; else the series that lie in that very folder, and in the readable folders or
   archives before and after the file's own.

The last rule keeps one damaged study from casting doubt on all others of an archive.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from scanloom.core import Reason
from scanloom.io.archives import IN_ARCHIVE, kind_of
from scanloom.io.walk import Entry

SHORTEST = 132
"""Bytes of a DICOM file: its preamble."""

_ANY = "*"  # stands for the suffix of a file that is lost whatever its name
_SEVERAL = "\0"  # stands for the studies of a folder that has more than one
_DIGITS = re.compile(r"(\d+)")
_Rule = tuple[str, str, str]  # its name, a folder, a study


class DicomFiles(NamedTuple):
    """Files of a DICOM series that were read.

    Parameters
    ----------
    study : str
        What is equal for series of one study; empty where nothing says it.
    files : sequence of int
        Their numbers among the entries.
    slices : bool
        Whether they are slices, not other objects.
    """

    study: str
    files: Sequence[int]
    slices: bool


class _Place(NamedTuple):
    folder: str
    holder: str
    suffix: str


class LostFiles:
    """Counts files that can't be read.

    Parameters
    ----------
    entries : sequence of Entry
    is_lost : function of int
        Whether the file with that number can't be read.
    series : iterable of DicomFiles
        All that can. What is too short for DICOM is lost too where it has the suffix of slices,
        beside DICOM files of that suffix, or in a folder where nothing at all can be read.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        is_lost: Callable[[int], bool],
        series: Iterable[DicomFiles],
    ) -> None:
        self._counts: Counter[tuple[_Rule, str]] = Counter()
        lost = [n for n in range(len(entries)) if is_lost(n)]
        gone = set(lost)
        short = [n for n, entry in enumerate(entries) if _is_short(entry) and n not in gone]
        if not lost and not short:
            return
        placed = [(one, {_place(entries[n].path) for n in one.files}) for one in series]
        self._slices = _studies((one.study, places) for one, places in placed if one.slices)
        self._others = _studies((one.study, places) for one, places in placed if not one.slices)
        found = Counter(_lost(entries[n]) for n in lost)
        if short:
            gone.update(short)
            kinds = {(place.folder, place.suffix) for _, places in placed for place in places}
            found.update(self._short(entries, short, gone, kinds))
        if found:
            self._siblings = _siblings(places for one, places in placed if one.slices)
        for one, count in found.items():
            for rule in self._rules(one):
                self._counts[rule, one.suffix] += count

    def of(self, study: str, paths: Iterable[str]) -> int:
        """Return how many might belong to the series of a study that has these files."""
        if not self._counts:
            return 0
        places = {_place(path) for path in paths}
        folders = {place.folder for place in places}
        suffixes = {_ANY, *(place.suffix for place in places)}
        top = _common(folders)
        several = len(folders) > 1
        rules: set[_Rule] = {("below", top, "")} if several else {("in", top, "")}
        for place in _upward(top):
            if place != top or not several:
                rules |= {("all", place, ""), ("study", place, study)}
        for place in {top, *(one.holder for one in places)}:
            if top == place or top.startswith(place + "/"):
                rules.add(("beside", place, ""))
        return sum(self._counts[rule, suffix] for rule in rules for suffix in suffixes)

    def _short(
        self,
        entries: Sequence[Entry],
        short: Sequence[int],
        gone: set[int],
        kinds: Set[tuple[str, str]],
    ) -> Iterator[_Place]:
        """Give those of the files that are too short which may have been slices."""
        places = [_place(entries[n].path) for n in short]
        alone = {one.folder for one in places if (one.folder, one.suffix) not in kinds}
        alone -= self._slices.keys() | self._others.keys()
        if alone:
            others = (entry for n, entry in enumerate(entries) if n not in gone)
            alone.difference_update(_folder(entry.path) for entry in others)
        for one in places:
            if one.folder in alone or (one.folder, one.suffix) in kinds:
                yield one

    def _rules(self, lost: _Place) -> Iterator[_Rule]:
        """Give what a series must fulfil so that a file might belong to it."""
        for place in _upward(lost.folder):
            yield "below", place, ""
        branch, top = "", lost.folder
        while top not in self._slices:
            if not top:
                return
            branch, top = top, _above(top)
        study = self._others.get(branch, "") if branch else ""
        if study and not study.startswith(_SEVERAL):
            yield "study", top, study
        elif self._slices[top] != _SEVERAL:
            yield "all", top, ""
        elif lost.folder == top:
            yield "in", top, ""
        else:
            own = next((p for p in (lost.holder, lost.folder) if _above(p) == top), "")
            if own:
                yield "in", top, ""
                yield from (("beside", place, "") for place in self._neighbours(top, own))

    def _neighbours(self, top: str, own: str) -> list[str]:
        """Return the readable folders or archives before and after one, by name."""
        beside = self._siblings[top]
        n = bisect_left(beside, _natural(own), key=_natural)
        return beside[max(n - 1, 0) : n + 1]


def _lost(entry: Entry) -> _Place:
    """Return where a file is missed; of an archive or a folder, all that is in it."""
    path = entry.path
    whole = entry.reason is not None and (
        kind_of(path) is not None or (entry.reason is Reason.UNREADABLE and not entry.inode)
    )
    if whole and IN_ARCHIVE not in path:
        return _Place(path, path, _ANY)
    return _place(path)._replace(suffix=_ANY)


def _is_short(entry: Entry) -> bool:
    """Whether a file is too short for DICOM, as pipes are."""
    return entry.size < SHORTEST and entry.reason in (None, Reason.NOT_AN_IMAGE)


def _studies(series: Iterable[tuple[str, Set[_Place]]]) -> dict[str, str]:
    """Return the study of the files in and below each folder, or that there are several."""
    found: dict[str, str] = {}
    for said, places in series:
        for folder in {place.folder for place in places}:
            study = said or f"{_SEVERAL}{folder}"
            for place in _upward(folder):
                known = found.setdefault(place, study)
                if known == _SEVERAL:
                    break  # so it is above
                if known != study:
                    found[place] = _SEVERAL
    return found


def _siblings(series: Iterable[Set[_Place]]) -> dict[str, list[str]]:
    """Return the folders and archives of slices by the folder that they lie in, in order."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for places in series:
        for place in {folder for one in places for folder in (one.folder, one.holder)}:
            found[_above(place)].add(place)
    return defaultdict(list, {top: sorted(those, key=_natural) for top, those in found.items()})


def _natural(path: str) -> list[tuple[int, str]]:
    """Return what sorts names as people do: 2 before 10."""
    parts = _DIGITS.split(path.rpartition("/")[2].lower())
    return [(int(part), "") if n % 2 else (0, part) for n, part in enumerate(parts)]


def _folder(path: str) -> str:
    """Return the folder of a file; an archive is one."""
    cut = max(path.rfind("/"), path.rfind(IN_ARCHIVE))
    return path[: max(cut, 0)].replace(IN_ARCHIVE, "/")


def _place(path: str) -> _Place:
    """Return where a file lies: its folder, its archive or else its folder, and its suffix."""
    folder = _folder(path)
    archive, mark, _ = path.partition(IN_ARCHIVE)
    suffix = os.path.splitext(path)[1].lower()  # of zips too
    if suffix[1:].isdigit():  # what follows the last dot of a UID
        suffix = ""
    return _Place(folder, archive if mark else folder, suffix)


def _above(folder: str) -> str:
    return folder.rpartition("/")[0]


def _upward(folder: str) -> Iterator[str]:
    """Give a folder and all above it."""
    yield folder
    while folder:
        folder = _above(folder)
        yield folder


def _common(folders: Iterable[str]) -> str:
    """Return the innermost folder that holds all these folders."""
    parts = [folder.split("/") for folder in folders]
    first, last = min(parts), max(parts)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return "/".join(first[:same])
