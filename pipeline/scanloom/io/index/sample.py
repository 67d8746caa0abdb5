"""Random sample of the folders of an archive, and totals of the archive that follow from it.

What is sampled are units: folders with all that lies below them, and files or archives that stand
beside them. The archive is listed from the top, a level at a time, until a share of a level is
enough units, and never so deep that a study, or at least a series, lies in several of them. In
order of their parents and then of their sizes, units of equal number form strata of which two are
drawn at random each: the variance between those two is that of the total.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scanloom.core import Reason, ScanError, counted
from scanloom.io.index.build import Index, index_of_files, index_of_walk
from scanloom.io.index.walk import DICOMDIR, FileEntry, FileWalk, list_files
from scanloom.io.system.archives import MEMBER_SEPARATOR

LEAST = 20
"""Units of the smallest sample: below it, intervals of 95 % held the truth in fewer than 90 %."""
_AIMED = 200  # units at which a sample gains little from smaller ones
_MOST_LISTED = 20_000  # folders: a second on a local disk, a minute or two on a share
_PAIRS = 10  # of neighbouring units that are opened to see whether they share a study or series
_FIRST_FILES = 3  # of each: the first one may be a text
_ALL_LOOSE = 2000  # files beside folders of which all are taken
_MOST_LOOSE = 20_000  # files of one folder that can't be sampled
_CONFIDENCE = 0.95
_LEAST_DF = 3  # with fewer degrees of freedom, rare amounts had no upper end

_Folder = tuple[str, Reason | None]


class Unit(NamedTuple):
    """A unit of the sample, taken as a whole.

    Parameters
    ----------
    kind : str
        A folder with all that is below it, a file or archive, or the loose files in a folder.
    parent, path : str
    size : int
        Entries of a folder, bytes of a file, number of loose files; -1 if unknown.
    reason : Reason or None
        Reason for which its files are not opened.
    is_leaf : bool
        Whether it is known to have no folder inside.
    """

    kind: Literal["folder", "file", "loose"]
    parent: str
    size: int
    path: str
    reason: Reason | None = None
    is_leaf: bool = False


class Estimate(NamedTuple):
    """Total of an archive.

    Parameters
    ----------
    sampled : float
        Total of the sample.
    total, low, high : float
        Estimated total, and its interval of 95 %.
    """

    sampled: float
    total: float
    low: float
    high: float


class FolderSample(FileWalk):
    """A `FileWalk` over a random share of an archive; the same arguments give the same sample.

    A link to a folder or file of the archive itself counts as a duplicate, wherever that lies.

    Parameters
    ----------
    paths, out, archives
        As of `FileWalk`.
    size : float
        The share of the units, below 1, or their number.
    key : bytes
        Secret key of the ids, for the few files that are opened to compare units.
    whole : str
        What lies in one unit: "study", or "series" if nothing is chosen among those of a study.
    seed : int or None
        Start of the random numbers; None for a digest of the paths.

    Attributes
    ----------
    units : list of Unit
        The sample, in order of the strata.
    found, listed : int
        Units of the archive, and folders that were listed to find them.
    missed : float
        Share of the largest folder outside the sample in the entries of all, or of the largest
        archive in the bytes of all; 0 if that is not known.

    Raises
    ------
    ScanError
        NOT_FOUND if a path does not exist; SAMPLE if too few units can be sampled.
    """

    def __init__(
        self,
        paths: Sequence[Path | str],
        size: float,
        key: bytes,
        out: Path | None = None,
        *,
        archives: bool = False,
        whole: Literal["study", "series"] = "study",
        seed: int | None = None,
    ) -> None:
        super().__init__(paths, out)  # archives are units: they are not listed yet
        self._key, self._with_archives, self._whole = key, archives, whole
        self._inside = tuple({os.path.realpath(root) + os.sep for root in self._roots})
        self._loose: dict[str, list[FileEntry]] = {}
        self.listed = 0
        frame = self._frame(size)
        self.found = len(frame)
        super().__init__(paths, out, archives=archives)  # no folder was entered yet
        text = "\0".join(sorted(os.path.abspath(path) for path in paths))
        digest = hashlib.blake2b(os.fsencode(text), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(digest, "big") if seed is None else seed)
        self._draw(frame, size, rng)
        self._numbers = {(each.kind == "loose", each.path): n for n, each in enumerate(self.units)}
        for n, unit in enumerate(self.units):
            if os.path.basename(unit.path).upper() == DICOMDIR:  # its files lie around it
                self._numbers[False, os.path.dirname(unit.path)] = n

    def _draw(self, frame: list[Unit], size: float, rng: np.random.Generator) -> None:
        """Choose the units of the sample, and note the size of the stratum of each."""
        loose = [unit for unit in frame if unit.kind == "loose"]
        certain = loose if sum(unit.size for unit in loose) <= _ALL_LOOSE else []
        rest = sorted(unit for unit in frame if unit.kind != "loose" or not certain)
        requested = round(size * len(rest)) if size < 1 else int(size)
        if requested < LEAST and requested < len(rest):
            which = f"{requested} of {counted(len(rest), 'folder')}"
            enough = f"`--sample {LEAST}` would do" if len(rest) > 2 * LEAST else "leave it out"
            raise ScanError(Reason.SAMPLE, f"{which} say too little of the others: {enough}")
        if requested >= len(rest):
            strata = [rest]
        else:
            bounds = np.linspace(0, len(rest), requested // 2 + 1).round().astype(int)
            strata = [rest[start:stop] for start, stop in itertools.pairwise(bounds)]
        self.units, sizes, numbers = [], list[int](), list[int]()
        for number, stratum in enumerate(filter(None, (certain, *strata))):
            is_whole = stratum is certain or requested >= len(rest)
            count = len(stratum) if is_whole else 2
            drawn = rng.choice(len(stratum), count, replace=False)
            self.units += [stratum[n] for n in sorted(drawn)]
            sizes.append(len(stratum))
            numbers += [number] * count
        self._sizes, self._strata = np.array(sizes), np.array(numbers)
        shares = {unit.kind: _share(unit.kind, self.units, frame) for unit in self.units}
        self._shares = np.array([shares[unit.kind] for unit in self.units])
        sample = frozenset(self.units)
        self.missed = max(_largest_share(frame, kind, sample) for kind in ("folder", "file"))

    # --- the units of the archive -----------------------------------------------------------------

    def _frame(self, size: float) -> list[Unit]:
        """Return all units of the deepest level that is needed, and loose files above it.

        Empty folders are left out.
        """
        level = [
            Unit("folder", "", -1, root)
            if os.path.isdir(root)
            else Unit("file", os.path.dirname(root), os.lstat(root).st_size, root, is_leaf=True)
            for root in self._roots
        ]
        if self._are_divided([level]):
            detail = f"a {self._whole} lies in several of these paths: give the folder around them"
            raise ScanError(Reason.SAMPLE, detail)
        links: set[str] = set()
        loose: list[Unit] = []
        while size >= 1 or size * len(level) < _AIMED:
            if all(unit.is_leaf for unit in level) or not self._is_cheap(level):
                break
            below = [self._below(unit, links) for unit in level]
            # The entries of a folder are known now, whether its folders are taken or not
            level = [
                unit if unit.is_leaf else unit._replace(size=sum(max(1, u.size) for u in units))
                for unit, units in zip(level, below, strict=True)
            ]
            if self._are_divided(below):
                break
            level = [unit for units in below for unit in units if unit.kind != "loose"]
            loose += [unit for units in below for unit in units if unit.kind == "loose"]
        if self._is_cheap(level):
            level = [self._sized(unit) for unit in level]
        if large := next((unit for unit in loose if unit.size > _MOST_LOOSE), None):
            detail = f"{counted(large.size, 'file')} lie in one folder, which can't be divided"
            raise ScanError(Reason.SAMPLE, detail, large.path)
        return [unit for unit in level if unit.size] + loose

    def _is_cheap(self, level: Sequence[Unit]) -> bool:
        """Return whether the folders of a level can be listed."""
        unlisted = sum(not unit.is_leaf and unit.size < 0 for unit in level)
        return self.listed + unlisted <= _MOST_LISTED

    def _below(self, unit: Unit, links: set[str]) -> list[Unit]:
        """Return what a folder divides into; itself if it has neither folders nor archives."""
        if unit.is_leaf:
            return [unit]
        self.listed += 1
        listed = self._walker.listing(unit.path, unit.reason)
        if listed is None:
            return []
        files, folders = listed
        for path, reason in self._new_links(links):
            folders.append((path, reason))
        for entry in self._walker.links.values():
            is_inside = self._is_inside(os.path.realpath(entry.path))
            files.append(_duplicate(entry) if is_inside else entry)
        self._walker.links.clear()
        named = frozenset(self._roots)  # a path that was given is a unit of the first level
        units = [
            Unit("folder", unit.path, -1, path, reason)
            for path, reason in folders
            if path not in named
        ]
        units += [
            Unit("file", unit.path, entry.size, entry.path, is_leaf=True)
            for entry in files
            if self._with_archives and entry.reason is Reason.NESTED_ARCHIVE
        ]
        if not units:
            return [unit._replace(size=len(files), is_leaf=True)] if files else []
        taken = {below.path for below in units}
        rest = [entry for entry in files if entry.path not in taken and entry.path not in named]
        if rest:
            self._loose[unit.path] = rest
            units.append(Unit("loose", unit.path, len(rest), unit.path))
        return units

    def _new_links(self, known: set[str]) -> Iterator[_Folder]:
        """Yield the linked folders that were just listed, if they lead out of the archive."""
        for path, reason in self._walker.linked_folders:
            target = os.path.realpath(path)
            if target not in known and not self._is_inside(target):
                known.add(target)
                yield path, reason
        self._walker.linked_folders.clear()

    def _sized(self, unit: Unit) -> Unit:
        """Return a unit with its size."""
        if unit.size >= 0:
            return unit
        self.listed += 1
        try:
            return unit._replace(size=len(os.listdir(unit.path)))
        except OSError:
            return unit._replace(size=1)

    def _is_inside(self, path: str) -> bool:
        return (path + os.sep).startswith(self._inside)

    def _are_divided(self, families: Sequence[Sequence[Unit]]) -> bool:
        """Return whether a study or series lies in neighbours of a family, as a few files tell."""
        pairs: list[Sequence[Unit]] = []
        for family in families:
            units = [unit for unit in family if unit.kind != "loose"]
            if len(units) > 1:
                pairs += [units[:2]] if len(families) > 1 else list(itertools.pairwise(units))
        step = max(1, math.ceil(len(pairs) / _PAIRS))
        first = [[self._first_files(unit) for unit in pair] for pair in pairs[::step]]
        files = {file.path: file for pair in first for unit in pair for file in unit}
        if not files:
            return False
        indexed = (
            (f.entry, f.series) for f in index_of_files([*files.values()], self._key).files()
        )
        names = {file: s.study if self._whole == "study" else s.id for file, s in indexed if s}
        return any(
            {names.get(file) for file in left} & {names.get(file) for file in right} - {None, ""}
            for left, right in first
        )

    def _first_files(self, unit: Unit) -> list[FileEntry]:
        """Return the first files below a unit."""
        listed = (
            file
            for _, files in FileWalk([unit.path]).folders()
            for file in files
            if not file.reason
        )
        return list(itertools.islice(listed, _FIRST_FILES))

    # --- the files of the sample ------------------------------------------------------------------

    def folders(self) -> Iterator[tuple[str, list[FileEntry]]]:
        """Yield the folders of the sample and their files."""
        for unit in sorted(self.units, key=lambda unit: unit.path):
            if unit.kind == "loose":
                yield unit.path, self._loose[unit.path]
            elif unit.kind == "folder":
                yield from self._walker.below(unit.path, unit.reason)
            else:
                yield unit.path, list_files([unit.path])
        while self._walker.linked_folders:
            path, reason = self._walker.linked_folders.pop(0)
            if not self._is_inside(os.path.realpath(path)):
                yield from self._walker.below(path, reason)

    def links(self, paths_of: Callable[[Set[int]], Iterable[str]]) -> list[FileEntry]:
        """Return the linked files of the sample; one that leads to the archive is a duplicate."""
        return [
            _duplicate(entry) if self._is_inside(os.path.realpath(entry.path)) else entry
            for entry in super().links(paths_of)
        ]

    def index(self) -> Index:
        """Return the index of the sample; it is kept in the user's cache folder."""
        return index_of_walk(self, ["sample", *self._roots], self._key)

    def unit_of(self, path: str) -> int:
        """Return the number of the unit that a file of the sample belongs to."""
        name = path.partition(MEMBER_SEPARATOR)[0]
        units = [(False, name), (True, os.path.dirname(name))]  # an archive beside loose files
        units += [(False, str(folder)) for folder in Path(name).parents]
        return next(self._numbers[unit] for unit in units if unit in self._numbers)

    # --- totals of the archive --------------------------------------------------------------------

    def total(self, values: ArrayLike) -> Estimate:
        """Return the total of the archive from the amount of each unit of the sample.

        Parameters
        ----------
        values : (N,) array-like
            Amounts, none negative.

        Notes
        -----
        The total and variance of a stratified sample are those of W. G. Cochran, Sampling
        Techniques (1977), sections 5.3 and 5.4, with the degrees of freedom of 5.4 (Satterthwaite).
        The interval is symmetric on a logarithmic scale, since amounts of folders are skewed. It is
        widened to the total that follows from the share of the sample in the entries of all: the
        variance does not tell of large folders outside the sample.
        """
        from scipy import stats

        amounts: NDArray[np.float64] = np.asarray(values, np.float64)
        counts = np.bincount(self._strata)
        means = np.bincount(self._strata, amounts) / counts
        squares = np.bincount(self._strata, (amounts - means[self._strata]) ** 2)
        total = float((self._sizes * means).sum())
        unsampled = self._sizes * (self._sizes - counts)  # none in a stratum of which all is taken
        variances = unsampled * squares / np.maximum(counts - 1, 1) / counts
        variance = float(variances.sum())
        sampled, by_entries = float(amounts.sum()), float((amounts / self._shares).sum())
        factor = 1.0
        if variance:
            freedom = max(variance**2 / float((variances**2).sum()), _LEAST_DF)
            quantile = float(stats.t.ppf((1 + _CONFIDENCE) / 2, freedom))
            factor = math.exp(min(quantile * math.sqrt(variance) / total, 700.0))
        low, high = min(total / factor, by_entries), max(total * factor, by_entries)
        return Estimate(sampled, total, max(low, sampled), high)


def _share(kind: str, sample: Sequence[Unit], frame: Sequence[Unit]) -> float:
    """Return the share of a sample in the entries or bytes of all units of a kind.

    It is that in their number if the size of one is unknown.
    """
    sizes, of_all = ([unit.size for unit in each if unit.kind == kind] for each in (sample, frame))
    return sum(sizes) / sum(of_all) if min(of_all) > 0 else len(sizes) / len(of_all)


def _largest_share(frame: Sequence[Unit], kind: str, sample: Set[Unit]) -> float:
    """Return the share of the largest unit of a kind outside a sample in the size of all."""
    units = [unit for unit in frame if unit.kind == kind]
    largest = max((unit.size for unit in units if unit not in sample), default=0)
    return max(0.0, largest / max(1, sum(unit.size for unit in units)))


def _duplicate(entry: FileEntry) -> FileEntry:
    return entry._replace(reason=entry.reason or Reason.DUPLICATE_LINK)
