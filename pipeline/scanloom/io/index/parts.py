"""Parts of an archive: how it is cut, and how the files of one part are read.

A part is a run of consecutive folders as they are listed, mostly whole subtrees, up to a number of
files; a folder is never divided. Where a stored part began, a new one begins, so that a change
moves no other part.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from scanloom.core import DICOM, Reason, ScanError, Series
from scanloom.io.formats import VOLUME_FORMATS
from scanloom.io.identity import case_id, study_id
from scanloom.io.index.inspection import FileInfo, SeriesInfo
from scanloom.io.index.series import FAILED_REASONS, SeriesFiles, group_files, known_infos
from scanloom.io.index.storage import IndexedSeries, Part, Run, StoredPart
from scanloom.io.index.walk import FileEntry, stamp_of
from scanloom.io.index.workers import DescribeTask, HeaderWorkers
from scanloom.io.session import current_session
from scanloom.io.system.archives import MEMBER_SEPARATOR
from scanloom.io.system.unpacking import UnpackedFiles

PART_FILES = 20_000
"""Files of a part, unless a single folder has more: some 40 MiB while it is read."""
MIN_FILES_FOR_WORKERS = 3000
"""Number of files to open above which worker processes are started; this many take 0.5 s."""

UNREADABLE = (Reason.DAMAGED, Reason.TRUNCATED)
"""Reasons of a DICOM series without UIDs whose files can't be read."""
_CHUNK = 256  # files, or slices of series, that a process gets at once
_LARGEST = 4096  # files of one folder that stay in one chunk


class KnownFiles:
    """Files that were inspected earlier, and the series that they formed, by their states."""

    def __init__(self) -> None:
        self.infos: dict[FileEntry, FileInfo] = {}
        self._series: dict[frozenset[FileEntry], IndexedSeries] = {}

    def add(self, part: StoredPart) -> None:
        """Add the files of a stored part, without those that must be opened again."""
        entries = part.entries()
        retried = {entries[n] for n in part.to_retry()}
        known = zip(entries, part.infos(), strict=True)
        self.infos.update((entry, info) for entry, info in known if entry not in retried)
        for series in part.series():
            files = frozenset(entries[n] for run in series.files for n in range(*run[1:]))
            if not files & retried:
                self._series[files] = series

    def series_of(self, files: Iterable[FileEntry]) -> IndexedSeries | None:
        """Return the series that had exactly these files, all of them unchanged."""
        return self._series.get(frozenset(files))


def read_part(
    entries: Sequence[FileEntry], known: KnownFiles, key: bytes, workers: HeaderWorkers
) -> tuple[Part, int]:
    """Inspect files, group them into series and describe these.

    The number of files that were opened is returned too.
    """
    infos, described, opened = _inspect(entries, known, workers)
    groups = group_files(entries, infos)
    series = describe_groups(groups, entries, infos, described, known, key, workers)
    reasons = [info.reason for info in infos]
    numbers = [-1] * len(entries)
    for number, group in enumerate(groups):
        for n in (*group.members, *group.skipped):
            numbers[n] = number
        for n in group.members:
            reasons[n] = ""  # that of the series; detached voxels alone would not be an image
    faults = [
        _fault(info, reason, series[number] if number >= 0 else None)
        for info, reason, number in zip(infos, reasons, numbers, strict=True)
    ]
    keys = [_key_of(group, entries) for group in groups]
    headers = (entries[group.members[0]].path for group in groups if group.elsewhere)
    inside = tuple(sorted({os.path.dirname(path) + os.sep for path in headers}))
    part = Part(list(entries), infos, reasons, numbers, series, keys, faults, inside)
    return part, opened


def may_go_on(entries: Sequence[FileEntry], folder: str) -> bool:
    """Return whether voxels of a volume among these files may lie in a following folder.

    It may be so by the names of the files; whether it is so, reading them tells.
    """
    suffixes = tuple(suffix for each in VOLUME_FORMATS for suffix in each.detached_suffixes)
    return any(
        entry.path.lower().endswith(suffixes)
        and folder.startswith(os.path.dirname(entry.path) + os.sep)
        for entry in entries
    )


def describe_groups(
    groups: Sequence[SeriesFiles],
    entries: Sequence[FileEntry],
    infos: Sequence[FileInfo],
    described: Mapping[tuple[int, ...], SeriesInfo],
    known: KnownFiles,
    key: bytes,
    workers: HeaderWorkers,
) -> list[IndexedSeries]:
    """Return the series of groups; their runs are those of the entries.

    `described` are series by their files, as of `inspect_chunk`; `key` is that of the case IDs.
    """
    series = [_known_series(group, entries, known) for group in groups]
    new = [n for n, stored in enumerate(series) if stored is None]
    tasks = [
        described.get(group_files_of(groups[n])) or _to_describe(groups[n], entries, infos)
        for n in new
    ]
    for n, info in zip(new, _describe(tasks, workers), strict=True):
        series[n] = _series(groups[n], info, entries, infos, key)
    return [each for each in series if each is not None]


def group_files_of(group: SeriesFiles) -> tuple[int, ...]:
    """Return the files of a series: its slices, or all files of a series without any."""
    return tuple(group.members or group.skipped)


def _inspect(
    entries: Sequence[FileEntry], known: KnownFiles, workers: HeaderWorkers
) -> tuple[list[FileInfo], dict[tuple[int, ...], SeriesInfo], int]:
    """Inspect the files that are not known.

    The results are an info for each entry; the series whose files were all inspected in one chunk,
    by the indices of the files; and the number of files that were opened.
    """
    infos, paths = known_infos(entries, [known.infos.get(entry) for entry in entries])
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


def _fault(info: FileInfo, reason: str, series: IndexedSeries | None) -> str:
    """Return why a file can't be read, as of `UnreadableFiles`."""
    if not reason and series is not None and is_damaged(series):
        return series.info.reason
    is_foreign = reason == Reason.NOT_AN_IMAGE.code and not info.kind
    return reason if is_foreign or reason in FAILED_REASONS else ""


def is_damaged(series: IndexedSeries) -> bool:
    """Return whether these are DICOM files that can't be read."""
    return series.kind == DICOM and not series.series_uid and series.reason in UNREADABLE


def _key_of(group: SeriesFiles, entries: Sequence[FileEntry]) -> int | None:
    """Return the digest of what tells a DICOM series from others, see `group_files`."""
    if group.kind != DICOM:
        return None
    folder = "" if group.series else os.path.dirname(entries[group_files_of(group)[0]].path)
    fields = (group.study, group.series, folder, str(group.damaged))
    text = "\0".join(fields).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)


def _known_series(
    group: SeriesFiles, entries: Sequence[FileEntry], known: KnownFiles
) -> IndexedSeries | None:
    files = group_files_of(group)
    series = known.series_of(entries[n] for n in files)
    return None if series is None else series._replace(files=runs_of(files))


def runs_of(files: Iterable[int], part: int = 0) -> tuple[Run, ...]:
    """Return rows of a part, in ascending order, as runs."""
    runs: list[Run] = []
    for n in files:
        if runs and runs[-1].stop == n:
            runs[-1] = runs[-1]._replace(stop=n + 1)
        else:
            runs.append(Run(part, n, n + 1))
    return tuple(runs)


def _to_describe(
    group: SeriesFiles, entries: Sequence[FileEntry], infos: Sequence[FileInfo]
) -> DescribeTask | SeriesInfo:
    """Return the task of describing a series; a finished description if its files are damaged."""
    files, scratch = group_files_of(group), current_session().cache(UnpackedFiles)
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
    files, scratch = group_files_of(group), current_session().cache(UnpackedFiles)
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
    paths = [entries[n].path for n in files]
    # A volume's header names it; what the first and the last slice share, all between them share
    ends = (min(paths), max(paths)) if group.kind == DICOM else paths[:1]
    return IndexedSeries(
        id=case,
        study=study_id(group.study, key) if group.study else "",
        kind=group.kind,
        study_uid=group.study,
        series_uid=group.series,
        files=runs_of(files),
        slices=bool(group.members),
        info=info,
        first=paths[0],
        path=os.path.commonpath([path.split(MEMBER_SEPARATOR)[0] for path in ends]),
        stamp=stamp_of(entries[n] for n in files),
    )
