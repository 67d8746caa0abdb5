"""Index of all files at some paths, of the series they form, and of the outcome of each file.

The index is stored as `index.parquet`, so that an unchanged file (size, modification time, inode)
is not opened again. It contains paths, UIDs and patient IDs: in an output folder it lies in
`private/`, otherwise in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from scanloom.core import DICOM, OUTCOMES, Reason, ScanError, Series, user_cache_folder
from scanloom.core.process import core_count
from scanloom.io.formats import neighbours_error
from scanloom.io.identity import case_id, key_fingerprint, study_id
from scanloom.io.index.inspection import FileInfo, SeriesInfo
from scanloom.io.index.missing_files import DicomFiles, LostFiles, UnreadableFiles
from scanloom.io.index.series import FAILED_REASONS, SeriesFiles, group_files, known_infos
from scanloom.io.index.storage import (
    IndexedSeries,
    IndexTable,
    StoredIndex,
    make_table,
    read_index,
    write_index,
)
from scanloom.io.index.walk import FileEntry, list_files, stamp_of
from scanloom.io.index.workers import DescribeTask, HeaderWorkers
from scanloom.io.output.crosswalk import (
    MAX_HEADERS_READ,
    SourceRecord,
    add_sources,
    common_path,
    known_ids,
    path_text,
    source_from_series,
)
from scanloom.io.output.layout import check_foreign_entries
from scanloom.io.output.private import PRIVATE, check_key, private_folder, write_private
from scanloom.io.session import current_session
from scanloom.io.system.archives import MEMBER_SEPARATOR
from scanloom.io.system.disk_errors import output_error
from scanloom.io.system.unpacking import UnpackedFiles
from scanloom.own_python import make_private_folder

logger = logging.getLogger(__name__)

INDEX_NAME = "index.parquet"
MIN_FILES_FOR_WORKERS = 3000
"""Number of files to open above which worker processes are started; this many take 0.5 s."""

_UNREADABLE = (Reason.DAMAGED, Reason.TRUNCATED)
_CHUNK = 256  # files, or slices of series, that a process gets at once
_LARGEST = 4096  # files of one folder that stay in one chunk


@dataclass(frozen=True, eq=False)
class Index:
    """All files that were found, and the series that they form.

    Parameters
    ----------
    table : IndexTable
        One row for each file, in a fixed order.
    opened : int
        Number of files that had to be opened this time.
    """

    table: IndexTable
    opened: int

    @cached_property
    def series(self) -> tuple[IndexedSeries, ...]:
        """The series, in the order in which `find_series` numbers them; skipped ones come last."""

        def order(series: IndexedSeries) -> tuple[object, ...]:
            first = self.table.entries[series.files[0]].path
            return (
                not series.slices,
                -len(series.files),
                series.study_uid,
                series.series_uid,
                first,
            )

        return tuple(sorted(self.table.series, key=order))

    def counts(self) -> dict[str, int]:
        """Return the number of files found, used, and of each outcome; "found" is the sum."""
        counted = Counter(outcome for outcome, _ in self.outcomes())
        return {
            "found": len(self.table),
            **{outcome: counted[outcome] for outcome in ("used", *OUTCOMES)},
        }

    def outcomes(self) -> Iterator[tuple[str, str]]:
        """Yield the outcome of each file ("used" or one of `OUTCOMES`) and its reason code."""
        outcome_of: dict[str, tuple[str, str]] = {
            reason.code: (reason.outcome, reason.code) for reason in Reason
        }
        outcome_of[""] = ("used", "")
        series_reasons = [series.info.reason for series in self.table.series]
        for reason, number in zip(self.table.reasons, self.table.series_numbers, strict=True):
            yield outcome_of[reason or (series_reasons[number] if number >= 0 else "")]

    @cached_property
    def _unreadable(self) -> UnreadableFiles:
        """Files that may be slices but can't be read."""
        table = self.table
        dicom = {n: series for n, series in enumerate(table.series) if series.kind == DICOM}
        damaged = {
            n
            for n, series in dicom.items()
            if not series.series_uid and series.reason in _UNREADABLE
        }

        def fault_of(n: int) -> str:
            if table.series_numbers[n] in damaged:
                return table.series[table.series_numbers[n]].info.reason
            reason = table.reasons[n]
            is_foreign = reason == Reason.NOT_AN_IMAGE.code and not table.kinds[n]
            return reason if is_foreign or reason in FAILED_REASONS else ""

        return UnreadableFiles(
            table.entries,
            fault_of,
            (
                DicomFiles(series.study_uid or series.series_uid, series.files, series.slices)
                for n, series in dicom.items()
                if n not in damaged
            ),
        )

    def _lost(self, series: IndexedSeries) -> LostFiles:
        """Return how many unreadable files may be slices of a series."""
        if series.kind != DICOM:
            return LostFiles()
        paths = (self.table.entries[n].path for n in series.files)
        return self._unreadable.of(series.study_uid or series.series_uid, paths)

    def path_of(self, series: IndexedSeries) -> str:
        """Return the only file of a series, or the innermost folder or archive of all."""
        paths = [self.table.entries[n].path for n in series.files]
        ends = (min(paths), max(paths))  # what these two share, all paths between them share
        return os.path.commonpath([path.split(MEMBER_SEPARATOR)[0] for path in ends])

    def stamp(self, series: IndexedSeries) -> str:
        """Return the stamp of the files of a series; see `Series`."""
        return stamp_of(self.table.entries[n] for n in series.files)

    def as_series(self, series: IndexedSeries) -> Series:
        """Return a series as readers take it; compressed files and archives are unpacked."""
        scratch = current_session().cache(UnpackedFiles)
        return Series(
            kind=series.kind,
            files=tuple(
                scratch.readable_file(self.table.entries[n].path, gzipped=self.table.gzipped[n])
                for n in series.files
            ),
            study_uid=series.study_uid,
            series_uid=series.series_uid,
            modality=series.info.modality or None,
            description=series.info.description,
            **self._lost(series)._asdict(),
            stamp=self.stamp(series),
        )

    def with_neighbours(self) -> Index:
        """Return the index in which a series beside unreadable files is SLICES_UNREADABLE.

        The stored index does not say so: a later one may find these files readable.
        """
        series = []
        for known in self.table.series:
            beside = 0 if known.info.reason else self._lost(known).beside
            if beside:
                error = neighbours_error(beside)
                info = known.info._replace(reason=error.code, detail=error.detail)
                known = known._replace(info=info)
            series.append(known)
        return Index(replace(self.table, series=series), self.opened)


def build_index(
    paths: Sequence[Path | str],
    key: bytes,
    out: Path | None = None,
    *,
    processes: int | None = None,
    archives: bool = False,
) -> Index:
    """List all files at some paths, inspect new and changed ones, and store the index.

    Parameters
    ----------
    paths : sequence of Path or str
        As for `scanloom.io.index.walk.list_files`.
    key : bytes
        Secret key of the case IDs.
    out : Path or None
        Output folder that the index belongs to; None for a file in the user's cache folder.
    processes : int or None
        Number of processes for many files; None for one per core.
    archives : bool
        Whether to search archives inside folders.

    Raises
    ------
    ScanError
        NOT_FOUND; KEY_MISMATCH if OUT belongs to another key; OUTPUT_UNWRITABLE or DISK_FULL if its
        index can't be written.
    """
    fingerprint = key_fingerprint(key)
    if out is not None:
        check_key(out, fingerprint)
        check_foreign_entries(out)  # the index claims it
    path = cached_index_path(paths) if out is None else out / PRIVATE / INDEX_NAME
    stored = read_index(path, fingerprint)
    with closing(HeaderWorkers(processes or core_count())) as workers:
        start_workers = workers.start if stored is None else None
        entries = list_files(paths, MIN_FILES_FOR_WORKERS, start_workers, out, archives=archives)
        unchanged = None if stored is None else stored.rows_of(entries)
        if unchanged is not None:
            return Index(unchanged, 0).with_neighbours()
        if stored is not None and not stored.is_whole():
            stored = None
        table, opened = _build(entries, key, stored, workers)
    if out is None:
        _store_in_cache(table, path, fingerprint)
    else:
        _store_in_output(table, out, fingerprint)
    return Index(table, opened).with_neighbours()


def index_of(paths: Sequence[Path | str], key: bytes) -> Index:
    """Return the index of a few files, which is not stored; the parameters are as above."""
    with closing(HeaderWorkers(core_count())) as workers:
        table, opened = _build(list_files(paths), key, None, workers)
    return Index(table, opened).with_neighbours()


def stored_index(out: Path, fingerprint: str) -> Index | None:
    """Return the index stored in an output folder, or None if it has none for this key.

    It describes the files that existed when it was built; none of them is checked.
    """
    stored = read_index(out / PRIVATE / INDEX_NAME, fingerprint)
    if stored is None or not stored.is_whole():
        return None
    table = stored.to_table()
    return Index(table, 0).with_neighbours()


def cached_index_path(paths: Sequence[Path | str]) -> Path:
    """Return the path of the stored index of some paths outside any output folder."""
    folder = user_cache_folder() / "index"
    joined = "\0".join(sorted({os.path.abspath(path) for path in paths}))  # keeps symbolic links
    digest = hashlib.blake2b(os.fsencode(joined), digest_size=16).hexdigest()
    return folder / f"{digest}.parquet"


def _build(
    entries: list[FileEntry], key: bytes, stored: StoredIndex | None, workers: HeaderWorkers
) -> tuple[IndexTable, int]:
    """Return a row for each entry, and the number of files that were opened."""
    stored_rows = [-1] * len(entries) if stored is None else stored.unchanged(entries)
    infos, described, opened = _inspect(entries, stored_rows, stored, workers)
    groups = group_files(entries, infos)
    series = [_stored_series(_files(group), stored_rows, stored) for group in groups]
    new = [n for n, known in enumerate(series) if known is None]
    tasks = [
        described.get(_files(groups[n])) or _to_describe(groups[n], entries, infos) for n in new
    ]
    for n, info in zip(new, _describe(tasks, workers), strict=True):
        series[n] = _series(groups[n], info, entries, infos, key)
    complete = [known for known in series if known is not None]
    return make_table(entries, infos, groups, complete), opened


def _inspect(
    entries: Sequence[FileEntry],
    stored_rows: Sequence[int],
    stored: StoredIndex | None,
    workers: HeaderWorkers,
) -> tuple[list[FileInfo], dict[tuple[int, ...], SeriesInfo], int]:
    """Inspect the files that the stored index does not have.

    `stored_rows` has the row of each file in the stored index, -1 if it is new or changed. The
    results are an info for each entry; the series whose files were all inspected in one chunk, by
    the indices of the files; and the number of files that were opened.
    """
    infos, paths = known_infos(
        entries,
        [stored.infos[row] if stored is not None and row >= 0 else None for row in stored_rows],
    )
    if len(paths) > MIN_FILES_FOR_WORKERS:
        workers.start()
    chunks = list(_chunks(list(paths), entries))
    files = [[(paths[n], entries[n].size) for n in chunk] for chunk in chunks]
    described: dict[tuple[int, ...], SeriesInfo] = {}
    for chunk, result in zip(chunks, workers.survey(files), strict=True):
        for n, info in zip(chunk, result.infos, strict=True):
            infos[n] = info
        for members, series_info in result.series:
            described[tuple([chunk[n] for n in members])] = series_info
    return [info for info in infos if info is not None], described, len(paths)


def _chunks(to_open: Sequence[int], entries: Sequence[FileEntry]) -> Iterator[list[int]]:
    """Split the files to open into chunks of work; those of one folder stay together."""
    chunk: list[int] = []
    previous = ""
    for n in to_open:
        folder = entries[n].path.rpartition(os.sep)[0]
        if (len(chunk) >= _CHUNK and folder != previous) or len(chunk) >= _LARGEST:
            yield chunk
            chunk = []
        chunk.append(n)
        previous = folder
    if chunk:
        yield chunk


def _files(group: SeriesFiles) -> tuple[int, ...]:
    return tuple(group.members or group.skipped)


def _stored_series(
    files: tuple[int, ...], stored_rows: Sequence[int], stored: StoredIndex | None
) -> IndexedSeries | None:
    """Return the stored series with exactly these files, all of them unchanged."""
    if stored is None or stored_rows[files[0]] < 0:
        return None
    number = stored.series_numbers[stored_rows[files[0]]]
    if number < 0 or {stored_rows[n] for n in files} != set(stored.series[number].files):
        return None
    return stored.series[number]._replace(files=files)


def _to_describe(
    group: SeriesFiles, entries: Sequence[FileEntry], infos: Sequence[FileInfo]
) -> DescribeTask | SeriesInfo:
    """Return the task of describing a series; a finished description if its files are damaged."""
    files, scratch = _files(group), current_session().cache(UnpackedFiles)
    try:
        paths = [scratch.readable_path(entries[n].path) for n in files]
    except ScanError as error:
        return SeriesInfo(reason=error.code, detail=error.detail)
    if group.kind != DICOM:
        return DescribeTask(group.kind, paths, [])
    headers = [packed for n in files if (packed := infos[n].packed)]
    damaged = [infos[n] for n in files if not infos[n].packed]
    if damaged:
        return SeriesInfo(reason=damaged[0].reason, detail=damaged[0].detail)
    return DescribeTask(DICOM, paths, headers)


def _describe(
    tasks: Sequence[DescribeTask | SeriesInfo], workers: HeaderWorkers
) -> Iterator[SeriesInfo]:
    """Yield a description for each task, in order; small series share a chunk."""
    chunks: list[list[DescribeTask]] = [[]]
    size = 0
    for task in tasks:
        if isinstance(task, DescribeTask):
            if size >= _CHUNK:
                chunks.append([])
                size = 0
            chunks[-1].append(task)
            size += len(task.paths)
    results = (info for chunk in workers.describe(chunks) for info in chunk)
    for task in tasks:
        yield next(results) if isinstance(task, DescribeTask) else task


def _series(
    group: SeriesFiles,
    info: SeriesInfo,
    entries: Sequence[FileEntry],
    infos: Sequence[FileInfo],
    key: bytes,
) -> IndexedSeries:
    files, scratch = _files(group), current_session().cache(UnpackedFiles)
    try:
        readable = (
            ()
            if group.series
            else tuple(
                scratch.readable_file(entries[n].path, gzipped=infos[n].gzipped) for n in files
            )
        )
        case = case_id(Series(group.kind, readable, group.study, group.series), key)
    except ScanError:
        case = ""
    study = study_id(group.study, key) if group.study else ""
    slices = bool(group.members)
    return IndexedSeries(case, study, group.kind, group.study, group.series, files, slices, info)


def _store_in_output(table: IndexTable, out: Path, fingerprint: str) -> None:
    try:
        with private_folder(out, fingerprint) as folder:
            write_private(folder / INDEX_NAME, lambda draft: write_index(table, draft, fingerprint))
    except OSError as exc:
        error = output_error(exc, "the index")
        raise ScanError(error.reason, error.detail, str(out)) from exc


def _store_in_cache(table: IndexTable, path: Path, fingerprint: str) -> None:
    """Store the index for its owner only; without a usable cache folder, it is not stored."""
    try:
        make_private_folder(path.parent)
        path.parent.chmod(0o700)
        write_private(path, lambda draft: write_index(table, draft, fingerprint))
    except OSError:
        logger.debug("the index can't be stored", exc_info=True)


# --- rows of the crosswalk ------------------------------------------------------------------------
# Rows of the crosswalk for the series of an index.

BATCH_ROWS = 50_000
"""Rows that are collected before they are written: an archive may have a million series."""


def source_from_index(index: Index, indexed: IndexedSeries) -> SourceRecord:
    """Return the source of a series in an index, case or not; see `source_from_series`.

    From archives, only the files that are read for the patient's ID are unpacked.
    """
    paths = {index.table.entries[n].path.split(MEMBER_SEPARATOR)[0] for n in indexed.files}
    try:
        series = index.as_series(indexed._replace(files=indexed.files[:MAX_HEADERS_READ]))
        source = source_from_series(series, indexed.id)
    except ScanError:  # it cannot be unpacked, which is the series' reason in the index
        source = SourceRecord(
            id=indexed.id,
            kind=indexed.kind,
            path="",
            files=0,
            study_uid=indexed.study_uid,
            series_uid=indexed.series_uid,
        )
    return replace(source, path=path_text(common_path(paths)), files=len(indexed.files))


def record_series(out: Path, fingerprint: str, index: Index, ids: Iterable[str]) -> None:
    """Add the series of an index that have one of these IDs and are not in the crosswalk yet.

    Series without an ID are left out.

    Raises
    ------
    ScanError
        KEY_MISMATCH; OUTPUT_UNWRITABLE if the crosswalk cannot be read.
    OSError
        If the crosswalk cannot be written.
    """
    requested = set(ids) - known_ids(out) - {""}
    missing = (indexed for indexed in index.series if indexed.id in requested)
    while batch := list(itertools.islice(missing, BATCH_ROWS)):
        sources = [source_from_index(index, indexed) for indexed in batch]
        with private_folder(out, fingerprint) as private:
            add_sources(private, sources)
