"""The index: every file at some paths, the series they make, and what became of each.

It is kept in a file, `index.parquet`, so that a file that did not change (size, time of change,
inode) is not opened again.
It holds paths, UIDs and patient ids: in an output folder it lies in `private/`, else in the
user's cache.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scanloom.core import DICOM, OUTCOMES, Reason, ScanError, Series, home
from scanloom.io.find import FAILED, Group, group_files, look_results
from scanloom.io.helpers import Helpers, ToDescribe
from scanloom.io.identity import case_id, key_fingerprint, study_id
from scanloom.io.index_file import (
    IndexedSeries,
    Rows,
    StoredRows,
    make_rows,
    read_index,
    write_index,
)
from scanloom.io.lost import DicomFiles, LostFiles
from scanloom.io.outfolder import check_unclaimed
from scanloom.io.private import PRIVATE, check_key, private_folder, write_private
from scanloom.io.survey import Description, Look, no_collector
from scanloom.io.unpack import SCRATCH
from scanloom.io.walk import Entry, list_files, stamp_of
from scanloom.own_python import make_private_folder

logger = logging.getLogger(__name__)

INDEX = "index.parquet"
MANY = 3000
"""Files that have to be opened, above which other processes help: they take half a second."""

_LOST = (Reason.DAMAGED, Reason.TRUNCATED)
_CHUNK = 256  # files, or slices of series, that a process gets at once
_LARGEST = 4096  # files of one folder that stay together


@dataclass(frozen=True, eq=False)
class Index:
    """All files that were found, and the series that they make.

    Parameters
    ----------
    rows : Rows
        A row for each file, in a fixed order.
    series : tuple of IndexedSeries
        In the order of `scanloom.io.find.find_series`; those that are skipped last.
    opened : int
        How many files had to be opened this time.
    """

    rows: Rows
    series: tuple[IndexedSeries, ...]
    opened: int

    def counts(self) -> dict[str, int]:
        """Return how many files were found, used and of each outcome: the first is the sum."""
        counted = Counter(outcome for outcome, _ in self.outcomes())
        return {
            "found": len(self.rows),
            **{outcome: counted[outcome] for outcome in ("used", *OUTCOMES)},
        }

    def outcomes(self) -> Iterator[tuple[str, str]]:
        """Give what became of each file: used or an outcome, and the code of the reason."""
        became: dict[str, tuple[str, str]] = {
            reason.code: (reason.outcome, reason.code) for reason in Reason
        }
        became[""] = ("used", "")
        of_groups = [one.what.reason for one in self.rows.series]
        for reason, group in zip(self.rows.reasons, self.rows.groups, strict=True):
            yield became[reason or (of_groups[group] if group >= 0 else "")]

    @cached_property
    def _lost(self) -> LostFiles:
        """Files that may be slices and can't be read."""
        rows = self.rows
        dicom = {n: one for n, one in enumerate(rows.series) if one.kind == DICOM}
        damaged = {n for n, one in dicom.items() if not one.series_uid and one.reason in _LOST}
        return LostFiles(
            rows.entries,
            lambda n: rows.reasons[n] in FAILED or rows.groups[n] in damaged,
            (
                DicomFiles(one.study_uid or one.series_uid, one.files, one.slices)
                for n, one in dicom.items()
                if n not in damaged
            ),
        )

    def _lost_beside(self, one: IndexedSeries) -> int:
        """Return how many files that can't be read may be slices of a series."""
        if one.kind != DICOM:
            return 0
        paths = (self.rows.entries[n].path for n in one.files)
        return self._lost.of(one.study_uid or one.series_uid, paths)

    def stamp(self, one: IndexedSeries) -> str:
        """Return the stamp of a series' files; see `Series`."""
        return stamp_of(self.rows.entries[n] for n in one.files)

    def as_series(self, one: IndexedSeries) -> Series:
        """Return a series as readers take it; what is packed is unpacked for it."""
        return Series(
            kind=one.kind,
            files=tuple(
                SCRATCH.plain(self.rows.entries[n].path, gzipped=self.rows.gzipped[n])
                for n in one.files
            ),
            study_uid=one.study_uid,
            series_uid=one.series_uid,
            modality=one.what.modality or None,
            description=one.what.description,
            lost=self._lost_beside(one),
            stamp=self.stamp(one),
        )


def build_index(
    paths: Sequence[Path | str],
    key: bytes,
    out: Path | None = None,
    *,
    processes: int | None = None,
    archives: bool = False,
) -> Index:
    """Find all files at paths, look at those that are new or changed, and keep what was seen.

    Parameters
    ----------
    paths : sequence of Path or str
        As `scanloom.io.walk.list_files` takes them.
    key : bytes
        Of the ids.
    out : Path or None
        The output folder whose index it is; None for a file in the user's cache folder.
    processes : int or None
        How many help with many files; None for as many as there are cores.
    archives : bool
        Whether archives in folders are looked into.

    Raises
    ------
    ScanError
        NOT_FOUND; KEY_MISMATCH if OUT belongs to another key; OUTPUT_UNWRITABLE or DISK_FULL if its
        index can't be written.
    """
    fingerprint = key_fingerprint(key)
    if out is not None:
        check_key(out, fingerprint)
        check_unclaimed(out)  # the index claims it
    place = cache_file(paths) if out is None else out / PRIVATE / INDEX
    old = read_index(place, fingerprint)
    with Helpers(processes or _cores()) as helpers, no_collector():
        called = helpers.start if old is None else None
        entries = list_files(paths, MANY, called, out, archives=archives)
        same = None if old is None else old.rows_of(entries)
        if same is not None:
            return Index(same, _in_order(same), 0)
        if old is not None and not old.is_whole():
            old = None
        rows, opened = _build(entries, key, old, helpers)
    if out is None:
        _keep_in_cache(rows, place, fingerprint)
    else:
        _keep_in_out(rows, out, fingerprint)
    return Index(rows, _in_order(rows), opened)


def stored_index(out: Path, fingerprint: str) -> Index | None:
    """Return the index that an output folder keeps, None where there is none for this key.

    The files are those that were there when it was made: none is looked at.
    """
    old = read_index(out / PRIVATE / INDEX, fingerprint)
    if old is None or not old.is_whole():
        return None
    rows = old.rows()
    return Index(rows, _in_order(rows), 0)


def cache_file(paths: Sequence[Path | str]) -> Path:
    """Return where the index of some paths is kept for who names no output folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else home() / ".cache") / "scanloom" / "index"
    named = "\0".join(sorted({os.path.abspath(path) for path in paths}))  # noqa: PTH100 links stay
    digest = hashlib.blake2b(os.fsencode(named), digest_size=16).hexdigest()
    return folder / f"{digest}.parquet"


def _cores() -> int:
    allowed = getattr(os, "sched_getaffinity", None)  # Linux
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _build(
    entries: list[Entry], key: bytes, old: StoredRows | None, helpers: Helpers
) -> tuple[Rows, int]:
    """Return a row for each entry, and how many files were opened for it."""
    before = [-1] * len(entries) if old is None else old.unchanged(entries)
    looks, places = look_results(
        entries, [old.looks[row] if old is not None and row >= 0 else None for row in before]
    )
    missing = list(places)
    told: dict[tuple[int, ...], Description] = {}
    if len(missing) > MANY:
        helpers.start()
    chunks = list(_chunks(missing, entries))
    files = [[(places[n], entries[n].size) for n in chunk] for chunk in chunks]
    for chunk, done in zip(chunks, helpers.survey(files), strict=True):
        for n, look in zip(chunk, done.looks, strict=True):
            looks[n] = look
        for numbers, what in done.series:
            told[tuple([chunk[n] for n in numbers])] = what
    whole = [look for look in looks if look is not None]
    groups = group_files(entries, whole)
    known = [_known(_files(group), before, old) for group in groups]
    todo = [
        told.get(_files(group)) or _to_describe(group, entries, whole)
        for group, one in zip(groups, known, strict=True)
        if one is None
    ]
    described = iter(list(_described(todo, helpers)))
    series = []
    for group, one in zip(groups, known, strict=True):
        if one is None:
            series.append(_series(group, next(described), entries, whole, key))
        else:
            series.append(one._replace(files=_files(group)))
    return make_rows(entries, whole, groups, series), len(missing)


def _chunks(missing: Sequence[int], entries: Sequence[Entry]) -> Iterator[list[int]]:
    """Cut the files to open into pieces of work; those of a folder stay together."""
    chunk: list[int] = []
    folder = ""
    for n in missing:
        place = entries[n].path.rpartition(os.sep)[0]
        if (len(chunk) >= _CHUNK and place != folder) or len(chunk) >= _LARGEST:
            yield chunk
            chunk = []
        chunk.append(n)
        folder = place
    if chunk:
        yield chunk


def _files(group: Group) -> tuple[int, ...]:
    return tuple(group.members or group.skipped)


def _known(
    files: Sequence[int], before: Sequence[int], old: StoredRows | None
) -> IndexedSeries | None:
    """Return the series of the old index that had the same files, none of them changed."""
    if old is None or before[files[0]] < 0:
        return None
    number = old.groups[before[files[0]]]
    if number < 0 or {before[n] for n in files} != set(old.series[number].files):
        return None
    return old.series[number]


def _to_describe(
    group: Group, entries: Sequence[Entry], looks: Sequence[Look]
) -> ToDescribe | Description:
    """Return what has to be looked at, or what is known of damaged files."""
    files = _files(group)
    try:
        paths = [SCRATCH.place(entries[n].path) for n in files]
    except ScanError as error:
        return Description(reason=error.code, detail=error.detail)
    if group.kind != DICOM:
        return ToDescribe(group.kind, paths, [])
    packed = [one for n in files if (one := looks[n].packed)]
    lost = [looks[n] for n in files if not looks[n].packed]
    if lost:
        return Description(reason=lost[0].reason, detail=lost[0].detail)
    return ToDescribe(DICOM, paths, packed)


def _described(
    tasks: Sequence[ToDescribe | Description], helpers: Helpers
) -> Iterator[Description]:
    """Give the descriptions in order; small series are sent together."""
    chunks: list[list[ToDescribe]] = [[]]
    size = 0
    for task in tasks:
        if isinstance(task, ToDescribe):
            if size >= _CHUNK:
                chunks.append([])
                size = 0
            chunks[-1].append(task)
            size += len(task.paths)
    done = (one for chunk in helpers.describe(chunks) for one in chunk)
    for task in tasks:
        yield next(done) if isinstance(task, ToDescribe) else task


def _series(
    group: Group,
    what: Description,
    entries: Sequence[Entry],
    looks: Sequence[Look],
    key: bytes,
) -> IndexedSeries:
    files = _files(group)
    try:
        plain = (
            ()
            if group.series
            else tuple(SCRATCH.plain(entries[n].path, gzipped=looks[n].gzipped) for n in files)
        )
        name = case_id(Series(group.kind, plain, group.study, group.series), key)
    except ScanError:
        name = ""
    study = study_id(group.study, key) if group.study else ""
    slices = bool(group.members)
    return IndexedSeries(name, study, group.kind, group.study, group.series, files, slices, what)


def _in_order(rows: Rows) -> tuple[IndexedSeries, ...]:
    """Return the series as `find_series` would number them, those without slices last."""

    def order(one: IndexedSeries) -> tuple[object, ...]:
        first = rows.entries[one.files[0]].path
        return (not one.slices, -len(one.files), one.study_uid, one.series_uid, first)

    return tuple(sorted(rows.series, key=order))


def _keep_in_out(rows: Rows, out: Path, fingerprint: str) -> None:
    try:
        with private_folder(out, fingerprint) as folder:
            for draft in folder.glob(f".{INDEX}.*"):  # left by who died; nobody is writing now
                draft.unlink(missing_ok=True)
            write_private(folder / INDEX, lambda draft: write_index(rows, draft, fingerprint))
    except OSError as exc:
        reason = Reason.DISK_FULL if exc.errno == errno.ENOSPC else Reason.OUTPUT_UNWRITABLE
        raise ScanError(reason, f"the index can't be written ({type(exc).__name__})") from exc


def _keep_in_cache(rows: Rows, path: Path, fingerprint: str) -> None:
    """Keep the index for its owner alone; who has no cache folder does without."""
    try:
        make_private_folder(path.parent)
        path.parent.chmod(0o700)
        write_private(path, lambda draft: write_index(rows, draft, fingerprint))
    except OSError:
        logger.debug("the index can't be kept", exc_info=True)
