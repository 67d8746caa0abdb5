"""Rows of an index, in memory and in a Parquet file: first the files, then the series."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from scanloom.core import Reason
from scanloom.io.dicom.header.elements import EncodedElements
from scanloom.io.formats import VOLUME_FORMATS
from scanloom.io.index.inspection import FileInfo, SeriesInfo
from scanloom.io.index.series import SeriesFiles
from scanloom.io.index.walk import FileEntry
from scanloom.io.system.archives import ARCHIVE_KINDS
from scanloom.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

INDEX_VERSION = "10"
"""File format version. Stored with it are scanloom's own, as another release may classify
differently, and a digest of the suffixes by which files are recognised."""

_VERSION_FIELD = b"scanloom.index"
_KEY_FIELD = b"scanloom.key"
_FILE_COUNT_FIELD = b"scanloom.files"
_STATE_COLUMNS = ("path", "size", "mtime_ns", "inode", "unopened")
_FILE_COLUMNS = (*_STATE_COLUMNS, "reason", "group", "gzipped", "kind")
_INFO_COLUMNS = ("kind", "gzipped", "study", "series", "look_reason", "detail", "common", "own")

_RETRIED = frozenset(reason.code for reason in Reason if reason.retry)
_NO_ELEMENTS = EncodedElements(b"", b"")


class IndexedSeries(NamedTuple):
    """One series of the index.

    Parameters
    ----------
    id : str
        Its case ID; empty if its files can't be read.
    study : str
        Keyed ID of the study; empty if absent.
    kind : str
        Name of the format in `scanloom.io.formats.FORMATS`.
    study_uid, series_uid : str
    files : tuple of int
        Its slices, by their rows in the index; for a skipped series, all its files.
    slices : bool
        Whether any of them may be a slice. A series without slices is counted, but can't be
        selected.
    info : SeriesInfo
        Its metadata, and the result that reading it would have. The last fields may identify a
        patient.
    """

    id: str
    study: str
    kind: str
    study_uid: str
    series_uid: str
    files: tuple[int, ...]
    slices: bool
    info: SeriesInfo

    @property
    def reason(self) -> Reason | None:
        """Reason for which the series gives no volume, or None if it gives one."""
        return Reason[self.info.reason] if self.info.reason else None

    @property
    def status(self) -> str:
        """Outcome of the series: used, skipped, ambiguous or failed."""
        return "used" if self.reason is None else self.reason.outcome


_SERIES = "series_"  # prefix of their columns: files have a kind and a reason too
_SERIES_FIELDS = tuple(name for name in IndexedSeries._fields if name not in ("files", "info"))


@dataclass(eq=False)
class IndexTable:
    """Properties of each file, one list per property, and the series that the files form.

    Parameters
    ----------
    entries : list of FileEntry
    reasons : list of str
        Code of the reason for which a file is not part of a used series; empty if the reason of
        its series applies.
    series_numbers : list of int
        Index of the file's series in `series`; -1 if it belongs to none.
    gzipped : list of bool
    kinds : list of str
        Name of the format of each file; empty if its content is none of `scanloom.io.formats`.
    series : list of IndexedSeries
    infos : callable
        Returns the `FileInfo` of each file; it may have to be read first.
    """

    entries: list[FileEntry]
    reasons: list[str]
    series_numbers: list[int]
    gzipped: list[bool]
    kinds: list[str]
    series: list[IndexedSeries]
    infos: Callable[[], list[FileInfo]]

    def __len__(self) -> int:
        return len(self.entries)


class StoredIndex:
    """Rows read from a file; columns of `infos` are read when they are first needed.

    Parameters
    ----------
    path : Path
        The Parquet file.
    table : pyarrow.Table
        All columns of the files except those of `infos`.
    """

    def __init__(self, path: Path, table: pa.Table) -> None:
        self._path, self._table = path, table
        self.reasons: list[str] = table.column("reason").to_pylist()
        self.series_numbers: list[int] = table.column("group").to_pylist()
        self.series = _read_series(path, self.series_numbers)
        if not set(self.reasons) <= {"", *(reason.code for reason in Reason)}:
            raise ValueError("unknown reason code in the index")

    @cached_property
    def infos(self) -> list[FileInfo]:
        """Stored inspection result of each file."""
        with _open_parquet(self._path) as file:
            first = int(file.schema_arrow.metadata[_FILE_COUNT_FIELD])
            table = file.read(columns=list(_INFO_COLUMNS)).slice(0, first)
        *texts, shared, own = (table.column(name).to_pylist() for name in _INFO_COLUMNS)
        interned: dict[bytes, bytes] = {}
        elements = (
            EncodedElements(interned.setdefault(common, common), per_file) if per_file else None
            for common, per_file in zip(shared, own, strict=True)
        )
        return [FileInfo(*row) for row in zip(*texts, elements, strict=True)]

    def is_whole(self) -> bool:
        """Return whether `infos` can be read too; damage to them is not detected earlier."""
        try:
            return len(self.infos) == len(self._table)
        except _read_errors():
            return False

    def rows_of(self, entries: list[FileEntry]) -> IndexTable | None:
        """Return the rows if exactly these files are stored, unchanged, and none needs a retry."""
        if len(entries) != len(self._table) or self._to_retry():
            return None
        table = self._table
        # Numbers first, then text: nearly every change shows in them, and arrays compare fast
        equal = (
            np.array_equal(table.column(name).to_numpy(), np.fromiter(values, kind, len(entries)))
            for name, kind, values in (
                ("size", np.int64, (e.size for e in entries)),
                ("mtime_ns", np.int64, (e.mtime_ns for e in entries)),
                ("inode", np.uint64, (e.inode for e in entries)),
            )
        )
        if not all(equal) or table.column("unopened").to_pylist() != _unopened(entries):
            return None
        if table.column("path").to_pylist() != [os.fsencode(e.path) for e in entries]:
            return None
        return self._rows(entries)

    def to_table(self) -> IndexTable:
        """Return all rows, with the file states stored in the index."""
        return self._rows(
            [
                FileEntry(os.fsdecode(path), size, time, inode, Reason[code] if code else None)
                for path, size, time, inode, code in self._states()
            ]
        )

    def unchanged(self, entries: Sequence[FileEntry]) -> list[int]:
        """Return the row of each file; -1 if the file is new, changed or must be retried."""
        to_retry = self._to_retry()
        row_of = {state: n for n, state in enumerate(self._states()) if n not in to_retry}
        return [
            row_of.get((os.fsencode(e.path), e.size, e.mtime_ns, e.inode, code), -1)
            for e, code in zip(entries, _unopened(entries), strict=True)
        ]

    def _rows(self, entries: list[FileEntry]) -> IndexTable:
        gzipped, kinds = (self._table.column(name).to_pylist() for name in ("gzipped", "kind"))
        return IndexTable(
            entries=entries,
            reasons=self.reasons,
            series_numbers=self.series_numbers,
            gzipped=gzipped,
            kinds=kinds,
            series=self.series,
            infos=lambda: self.infos,
        )

    def _states(self) -> Iterable[tuple[Any, ...]]:
        columns = (self._table.column(name).to_pylist() for name in _STATE_COLUMNS)
        return zip(*columns, strict=True)

    def _to_retry(self) -> set[int]:
        """Return the rows of files that must be opened again although they have not changed.

        Their reason is one that may go without a visible change of the file, see `Reason.retry`.
        """
        failed = {n for n, reason in enumerate(self.reasons) if reason in _RETRIED}
        failed.update(
            n for series in self.series if series.info.reason in _RETRIED for n in series.files
        )
        unopened = self._table.column("unopened")
        return {n for n in failed if not unopened[n].as_py()}


def make_table(
    entries: list[FileEntry],
    infos: list[FileInfo],
    groups: Sequence[SeriesFiles],
    series: list[IndexedSeries],
) -> IndexTable:
    """Return the rows of files that were inspected and grouped."""
    reasons = [info.reason for info in infos]
    numbers = [-1] * len(entries)
    for number, (group, indexed) in enumerate(zip(groups, series, strict=True)):
        for n in indexed.files:
            numbers[n] = number
        for n in group.members:
            reasons[n] = ""  # that of the series; detached voxels alone would not be an image
    return IndexTable(
        entries=entries,
        reasons=reasons,
        series_numbers=numbers,
        gzipped=[info.gzipped for info in infos],
        kinds=[info.kind for info in infos],
        series=series,
        infos=lambda: infos,
    )


_NO_ROWS = IndexTable([], [], [], [], [], [], list)


def write_index(rows: IndexTable, path: Path, fingerprint: str) -> None:
    """Write rows to a Parquet file: first the files, then the series.

    Raises
    ------
    OSError
        If the file can't be written.
    """
    from pyarrow import parquet

    metadata = {
        _VERSION_FIELD: _version(),
        _KEY_FIELD: fingerprint.encode(),
        _FILE_COUNT_FIELD: str(len(rows)).encode(),
    }
    parquet.write_table(
        _table(rows).replace_schema_metadata(metadata),
        path,
        compression="zstd",
        compression_level=1,
        write_page_checksum=True,
    )


def read_index(path: Path, fingerprint: str) -> StoredIndex | None:
    """Return the stored rows; None if the file is missing, outdated, damaged or of another key."""
    try:
        with _open_parquet(path) as file:
            metadata = file.schema_arrow.metadata or {}
            if metadata.get(_VERSION_FIELD) != _version():
                return None
            if metadata.get(_KEY_FIELD) != fingerprint.encode():
                return None
            if not file.schema_arrow.equals(_table(_NO_ROWS).schema):
                return None
            table = file.read(columns=list(_FILE_COLUMNS)).slice(
                0, int(metadata[_FILE_COUNT_FIELD])
            )
            return StoredIndex(path, table)
    except _read_errors():
        return None


def _open_parquet(path: Path) -> parquet.ParquetFile:
    """Open the file; a page with a wrong checksum raises OSError."""
    from pyarrow import parquet

    if not path.is_file():
        raise FileNotFoundError
    return parquet.ParquetFile(path, page_checksum_verification=True)


def _read_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions raised by reading a damaged or foreign file."""
    import pyarrow as pa

    return OSError, LookupError, TypeError, ValueError, pa.ArrowException


def _version() -> bytes:
    """Return the versions, and a digest of formats and kinds of archives with their suffixes."""
    formats = [(f.name, f.suffixes, f.detached_suffixes) for f in VOLUME_FORMATS]
    archives = [(kind.name, kind.suffixes) for kind in ARCHIVE_KINDS]
    digest = hashlib.blake2b(repr((formats, archives)).encode(), digest_size=8).hexdigest()
    return f"{INDEX_VERSION} {__version__} {digest}".encode()


def _unopened(entries: Iterable[FileEntry]) -> list[str]:
    return ["" if entry.reason is None else entry.reason.code for entry in entries]


def _table(rows: IndexTable) -> pa.Table:
    import pyarrow as pa

    return pa.concat_tables([_file_table(rows), _series_table(rows)], promote_options="default")


def _file_table(rows: IndexTable) -> pa.Table:
    import pyarrow as pa

    entries, infos = rows.entries, rows.infos()
    elements = [info.packed or _NO_ELEMENTS for info in infos]
    texts = pa.dictionary(pa.int32(), pa.string())
    columns: dict[str, tuple[list[Any], pa.DataType]] = {
        "path": ([os.fsencode(e.path) for e in entries], pa.binary()),
        "size": ([e.size for e in entries], pa.int64()),
        "mtime_ns": ([e.mtime_ns for e in entries], pa.int64()),
        "inode": ([e.inode for e in entries], pa.uint64()),
        "unopened": (_unopened(entries), texts),
        "reason": (rows.reasons, texts),
        "group": (rows.series_numbers, pa.int32()),
        "gzipped": (rows.gzipped, pa.bool_()),
        "kind": ([info.kind for info in infos], texts),
        "study": ([info.study for info in infos], texts),
        "series": ([info.series for info in infos], texts),
        "look_reason": ([info.reason for info in infos], texts),
        "detail": ([info.detail for info in infos], texts),
        "common": ([e.common for e in elements], pa.dictionary(pa.int32(), pa.binary())),
        "own": ([e.own for e in elements], pa.binary()),
    }
    return pa.table({name: pa.array(values, kind) for name, (values, kind) in columns.items()})


def _series_table(rows: IndexTable) -> pa.Table:
    import pyarrow as pa

    lists = {"shape": pa.int32(), "spacing": pa.float64()}
    kinds = {name: pa.list_(pa.field("element", kind)) for name, kind in lists.items()}
    kinds |= {"number": pa.int64(), "contrast": pa.bool_(), "slices": pa.bool_()}
    columns: dict[str, list[Any]] = {
        name: [getattr(series, name) for series in rows.series] for name in _SERIES_FIELDS
    }
    columns |= {n: [getattr(s.info, n) for s in rows.series] for n in SeriesInfo._fields}
    arrays = {name: pa.array(v, kinds.get(name, pa.string())) for name, v in columns.items()}
    return pa.table({f"{_SERIES}{name}": array for name, array in arrays.items()})


def _read_series(path: Path, series_numbers: Sequence[int]) -> list[IndexedSeries]:
    columns = [f"{_SERIES}{name}" for name in (*_SERIES_FIELDS, *SeriesInfo._fields)]
    with _open_parquet(path) as file:
        first = int(file.schema_arrow.metadata[_FILE_COUNT_FIELD])
        rows = file.read(columns=columns).slice(first).to_pylist()
    files: list[list[int]] = [[] for _ in rows]
    for n, number in enumerate(series_numbers):
        if number >= 0:
            files[number].append(n)
    all_series = []
    for row, members in zip(rows, files, strict=True):
        info = SeriesInfo(*(row[f"{_SERIES}{name}"] for name in SeriesInfo._fields))
        info = info._replace(shape=tuple(info.shape), spacing=tuple(info.spacing))
        if info.reason:
            Reason[info.reason]  # KeyError for an unknown code
        own = {name: row[f"{_SERIES}{name}"] for name in _SERIES_FIELDS}
        all_series.append(IndexedSeries(**own, files=tuple(members), info=info))
    return all_series
