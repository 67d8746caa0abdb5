"""The parts of an archive put together: the catalogue of all series.

Most series lie in one part, whose description of them holds. The files of all others are sorted by
their series, and these are described again. What unreadable files mean for a series follows from
the folders of the whole archive. One part is in memory at a time, with the key of each series, 8
bytes, and the unreadable files.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scanloom.core import DICOM
from scanloom.io.formats import neighbours_error
from scanloom.io.index.missing_files import DicomFiles, LostFiles, UnreadableFiles
from scanloom.io.index.parts import (
    KnownFiles,
    describe_groups,
    group_files_of,
    is_damaged,
    runs_of,
)
from scanloom.io.index.series import group_files
from scanloom.io.index.storage import (
    RETRIED,
    Catalogue,
    IndexedSeries,
    IndexStore,
    Run,
    SpreadFile,
    StoredPart,
    file_sorter,
    series_sorter,
    write_catalogue,
)
from scanloom.io.index.walk import FileEntry
from scanloom.io.index.workers import HeaderWorkers

if TYPE_CHECKING:
    import pyarrow as pa

_DESCRIBED_AT_ONCE = 5000  # files of spread series


def merge_parts(
    parts: Sequence[tuple[str, str]],
    digest: str,
    store: IndexStore,
    fingerprint: str,
    key: bytes,
    workers: HeaderWorkers,
) -> None:
    """Write the catalogue of these parts, which are names and first folders, and have a `digest`.

    Raises
    ------
    OSError
        If it can't be written.
    """
    merge = _Merge([name for name, _ in parts], store, key, workers)
    ordered = series_sorter(store)
    for series in merge.series():
        ordered.add(series)
    write_catalogue(
        store,
        ordered.rows(),
        lambda: Catalogue(
            fingerprint, list(parts), digest, dict(sorted(merge.reasons.items())), merge.retry
        ),
    )


class _Merge:
    """One pass over parts that gives their series; then `reasons` and `retry` are known."""

    def __init__(
        self, names: Sequence[str], store: IndexStore, key: bytes, workers: HeaderWorkers
    ) -> None:
        self._names, self._store, self._key, self._workers = names, store, key, workers
        self._spread, self._with_slices = self._spread_keys()
        self.reasons: Counter[str] = Counter()
        self.retry = False
        self._unreadable = UnreadableFiles(
            lambda: itertools.chain.from_iterable(part.suspects() for _, part in self._parts()),
            lambda: itertools.chain.from_iterable(map(self._dicom_files, self._parts())),
            lambda: itertools.chain.from_iterable(
                zip(part.entries(), part.lists("fault")[0], strict=True)
                for _, part in self._parts()
            ),
        )

    def series(self) -> Iterator[IndexedSeries]:
        """Yield all series of the archive, in any order."""
        spread = file_sorter(self._store)
        for number, part in self._parts():
            yield from self._series_of_part(number, part, spread.add)
        yield from self._spread_series(spread.rows())

    def _parts(self) -> Iterator[tuple[int, StoredPart]]:
        for number, name in enumerate(self._names):
            yield number, StoredPart(self._store, name)

    def _spread_keys(self) -> tuple[pa.Array, NDArray[np.bool_]]:
        """Return the keys of series in several parts, ascending, and whether they have slices."""
        import pyarrow as pa

        buffer = array("q")
        for _, part in self._parts():
            buffer.frombytes(part.keys().drop_null().to_numpy().tobytes())
        keys = np.frombuffer(buffer, np.int64)
        keys.sort()
        spread = np.unique(keys[1:][keys[1:] == keys[:-1]])
        with_slices = np.zeros(len(spread), np.bool_)
        for _, part in self._parts() if len(spread) else ():
            with_slices |= np.isin(spread, part.keys(with_slices=True).drop_null().to_numpy())
        return pa.array(spread), with_slices

    def _spread_slices(self, keys: pa.ChunkedArray) -> list[bool | None]:
        """Return for each key whether its series has slices anywhere; None if it is not spread."""
        from pyarrow import compute

        numbers = compute.index_in(keys, value_set=self._spread).to_pylist()
        return [None if n is None else bool(self._with_slices[n]) for n in numbers]

    def _dicom_files(self, numbered: tuple[int, StoredPart]) -> Iterator[DicomFiles]:
        """Yield the readable DICOM series of a part, or pieces of them."""
        _, part = numbered
        all_series, elsewhere = part.series(), self._spread_slices(part.keys())
        paths = part.paths()
        reasons, groups = part.lists("reason", "group")
        files: list[list[str]] = [[] for _ in all_series]
        slices = [
            series.slices if anywhere is None else anywhere
            for series, anywhere in zip(all_series, elsewhere, strict=True)
        ]
        for path, reason, group in zip(paths, reasons, groups, strict=True):
            if group >= 0 and not (reason and slices[group]):
                files[group].append(path)
        for n, series in enumerate(all_series):
            if series.kind == DICOM and files[n] and not is_damaged(series):
                yield DicomFiles(series.study_uid or series.series_uid, files[n], slices[n])

    def _series_of_part(
        self, number: int, part: StoredPart, add_spread: Callable[[SpreadFile], None]
    ) -> Iterator[IndexedSeries]:
        """Yield the series that lie in this part alone; hand over the files of all others."""
        all_series, keys = part.series(), part.keys()
        elsewhere = self._spread_slices(keys)
        reasons, groups = part.lists("reason", "group")
        paths = part.paths() if self._unreadable else []
        final: list[IndexedSeries | None] = []
        for n, series in enumerate(all_series):
            if elsewhere[n] is not None:
                final.append(None)
                continue
            own_paths = (paths[k] for run in series.files for k in range(*run[1:])) if paths else ()
            checked = self._checked(series, own_paths)
            pieces = ((number, n),) if checked.info != series.info else ()
            runs = tuple(run._replace(part=number) for run in series.files)
            final.append(checked._replace(files=runs, pieces=pieces))
        yield from filter(None, final)
        for (reason, group), count in Counter(zip(reasons, groups, strict=True)).items():
            of_series = final[group] if group >= 0 else None
            if reason or of_series is not None:
                self.reasons[reason or (of_series.info.reason if of_series else "")] += count
        spread = {
            n: key for n, key in enumerate(keys.to_pylist()) if final[n] is None and key is not None
        }
        if spread:
            for row, group, entry, info in part.files_of(spread):
                add_spread(SpreadFile(spread[group], number, row, group, entry, info))

    def _spread_series(self, files: Iterable[SpreadFile]) -> Iterator[IndexedSeries]:
        """Yield the series of these files, which come series by series."""
        batch: list[SpreadFile] = []
        for _, of_series in itertools.groupby(files, key=attrgetter("key")):
            batch += of_series
            if len(batch) >= _DESCRIBED_AT_ONCE:
                yield from self._described(batch)
                batch = []
        if batch:
            yield from self._described(batch)

    def _described(self, files: Sequence[SpreadFile]) -> Iterator[IndexedSeries]:
        entries: list[FileEntry] = [file.entry for file in files]
        infos = [file.info for file in files]
        groups = group_files(entries, infos)
        described = describe_groups(
            groups, entries, infos, {}, KnownFiles(), self._key, self._workers
        )
        for group, series in zip(groups, described, strict=True):
            own = [files[n] for n in group_files_of(group)]
            all_files = [files[n] for n in (*group.members, *group.skipped)]
            checked = self._checked(series, (file.entry.path for file in own))
            self.retry = self.retry or series.info.reason in RETRIED
            if group.members:
                self.reasons[checked.info.reason] += len(own)
            runs: list[Run] = []
            for part, in_part in itertools.groupby(own, key=attrgetter("part")):
                runs += runs_of([file.row for file in in_part], part)
            yield checked._replace(
                files=tuple(runs),
                pieces=tuple(dict.fromkeys((file.part, file.group) for file in all_files)),
            )

    def _checked(self, series: IndexedSeries, paths: Iterable[str]) -> IndexedSeries:
        """Return a series as the unreadable files leave it: beside some it is refused.

        Its part does not say so: a later index may find these files readable.
        """
        lost = LostFiles()
        if series.kind == DICOM and self._unreadable:
            lost = self._unreadable.of(series.study_uid or series.series_uid, paths)
        info = series.info
        if lost.beside and not info.reason:
            error = neighbours_error(lost.beside)
            info = info._replace(reason=error.code, detail=error.detail)
        return series._replace(info=info, unreadable=lost.unreadable, damaged=lost.damaged)
