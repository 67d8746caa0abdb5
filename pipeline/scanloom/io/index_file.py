"""The rows of an index, in memory and as a Parquet file: first those of files, then of series."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from scanloom.core import Reason
from scanloom.io.dicom.elements import Packed
from scanloom.io.find import Group
from scanloom.io.survey import Description, Look
from scanloom.io.walk import Entry

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

FORM = "7"
"""Of the file; with the version of scanloom, since another one may judge otherwise."""

_FORM, _KEY = b"scanloom.index", b"scanloom.key"
_RETRIED = frozenset(reason.code for reason in Reason if reason.retry)
_LOOKED_AGAIN = (Reason.UNREADABLE.code, Reason.SCRATCH_FULL.code)  # nothing of the file


class IndexedSeries(NamedTuple):
    """One series of the index.

    Parameters
    ----------
    id : str
        Its case id; empty where its files can't be read.
    study : str
        Keyed id of the study; empty where there is none.
    kind : str
        Its format: a name of `scanloom.io.formats.FORMATS`.
    study_uid, series_uid : str
    files : tuple of int
        Its slices, by their rows in the index; of a series that is skipped, all its files.
    slices : bool
        Whether any of them may be a slice: others are counted, and can't be chosen.
    what : Description
        What it is like, and what reading it would say. Its last words may hold identity.
    """

    id: str
    study: str
    kind: str
    study_uid: str
    series_uid: str
    files: tuple[int, ...]
    slices: bool
    what: Description

    @property
    def reason(self) -> Reason | None:
        """Why it gives no volume."""
        return Reason[self.what.reason] if self.what.reason else None

    @property
    def status(self) -> str:
        """What became of it: used, skipped, ambiguous or failed."""
        return "used" if self.reason is None else self.reason.outcome


@dataclass(eq=False)
class Rows:
    """What is known of each file.

    Parameters
    ----------
    entries : list of Entry
    reasons : list of str
        Code of why a file is no part of a series that is used; empty where its series decides.
    groups : list of int
        The number of its series in `series`, -1 where it belongs to none.
    gzipped : list of bool
    series : list of IndexedSeries
    looks : callable
        Returns what each file is; it may have to be read first.
    """

    entries: list[Entry]
    reasons: list[str]
    groups: list[int]
    gzipped: list[bool]
    series: list[IndexedSeries]
    looks: Callable[[], list[Look]]

    def __len__(self) -> int:
        return len(self.entries)


class StoredRows:
    """Rows as they were written; what nobody asks for is not read.

    Parameters
    ----------
    path : Path
        The file.
    table : pyarrow.Table
        All columns but those of `looks`.
    """

    def __init__(self, path: Path, table: pa.Table) -> None:
        self._path, self._table = path, table
        self.reasons: list[str] = table.column("reason").to_pylist()
        self.groups: list[int] = table.column("group").to_pylist()
        self.series = _read_series(path, self.groups)
        if not set(self.reasons) <= {"", *(reason.code for reason in Reason)}:
            raise ValueError("a reason that does not exist")

    @cached_property
    def looks(self) -> list[Look]:
        """What each file is."""
        return _read_looks(self._path)

    def is_whole(self) -> bool:
        """Whether `looks` can be read too; damage in them shows only then."""
        try:
            return len(self.looks) == len(self._table)
        except _read_errors():
            return False

    def rows_of(self, entries: list[Entry]) -> Rows | None:
        """Return the rows if these are the files, unchanged, and none has to be tried again."""
        if len(entries) != len(self._table) or self._must_be_tried():
            return None
        table = self._table
        same = (
            np.array_equal(table.column(name).to_numpy(), np.fromiter(values, kind, len(entries)))
            for name, kind, values in (
                ("size", np.int64, (e.size for e in entries)),
                ("mtime_ns", np.int64, (e.mtime_ns for e in entries)),
                ("inode", np.uint64, (e.inode for e in entries)),
            )
        )
        if not all(same) or table.column("unopened").to_pylist() != _unopened(entries):
            return None
        if table.column("path").to_pylist() != [os.fsencode(e.path) for e in entries]:
            return None
        return self._rows(entries)

    def rows(self) -> Rows:
        """Return all rows, of the files as they were."""
        names = ("path", "size", "mtime_ns", "inode", "unopened")
        stored = zip(*(self._table.column(name).to_pylist() for name in names), strict=True)
        return self._rows(
            [
                Entry(os.fsdecode(path), size, time, inode, Reason[why] if why else None)
                for path, size, time, inode, why in stored
            ]
        )

    def _rows(self, entries: list[Entry]) -> Rows:
        gzipped = self._table.column("gzipped").to_pylist()
        return Rows(entries, self.reasons, self.groups, gzipped, self.series, lambda: self.looks)

    def unchanged(self, entries: Sequence[Entry]) -> list[int]:
        """Return for each entry the row of the same file, -1 where it is new or was changed."""
        names = ("path", "size", "mtime_ns", "inode", "unopened")
        stored = zip(*(self._table.column(name).to_pylist() for name in names), strict=True)
        tried = self._must_be_tried()
        places = {key: n for n, key in enumerate(stored) if n not in tried}
        return [
            places.get((os.fsencode(e.path), e.size, e.mtime_ns, e.inode, why), -1)
            for e, why in zip(entries, _unopened(entries), strict=True)
        ]

    def _must_be_tried(self) -> set[int]:
        """Return files that could not be read: that can change without a trace in the file.

        So can whatever else trying again may help.
        """
        failed = {n for n, reason in enumerate(self.reasons) if reason in _LOOKED_AGAIN}
        failed.update(n for one in self.series if one.what.reason in _RETRIED for n in one.files)
        unopened = self._table.column("unopened")
        return {n for n in failed if not unopened[n].as_py()}


def make_rows(
    entries: list[Entry],
    looks: list[Look],
    groups: Sequence[Group],
    series: list[IndexedSeries],
) -> Rows:
    """Return the rows of files that were looked at and grouped."""
    reasons = [look.reason for look in looks]
    numbers = [-1] * len(entries)
    for number, (group, one) in enumerate(zip(groups, series, strict=True)):
        for n in one.files:
            numbers[n] = number
        for n in group.members:
            reasons[n] = ""  # as its series; voxels beside a header are no image on their own
    return Rows(entries, reasons, numbers, [look.gzipped for look in looks], series, lambda: looks)


def write_index(rows: Rows, path: Path, fingerprint: str) -> None:
    """Write rows to a Parquet file: those of files, then those of series.

    Raises
    ------
    OSError
        If it can't be written.
    """
    from pyarrow import parquet

    both = _table(rows)
    said = {_FORM: _form(), _KEY: fingerprint.encode(), _FILES: str(len(rows)).encode()}
    parquet.write_table(
        both.replace_schema_metadata(said),
        path,
        compression="zstd",
        compression_level=1,
        write_page_checksum=True,
    )


def read_index(path: Path, fingerprint: str) -> StoredRows | None:
    """Return what was written for the same key; None if it is not there, older or damaged."""
    try:
        with _opened(path) as file:
            said = file.schema_arrow.metadata or {}
            if said.get(_FORM) != _form() or said.get(_KEY) != fingerprint.encode():
                return None
            if not file.schema_arrow.equals(_table(_NO_ROWS).schema):
                return None
            table = file.read(columns=list(_OF_FILES)).slice(0, int(said[_FILES]))
            return StoredRows(path, table)
    except _read_errors():
        return None


_NOTHING = Packed(b"", b"")
_NO_ROWS = Rows([], [], [], [], [], list)


def _opened(path: Path) -> parquet.ParquetFile:
    """Open the file; a page whose checksum is wrong is an OSError."""
    from pyarrow import parquet

    if not path.is_file():
        raise FileNotFoundError
    return parquet.ParquetFile(path, page_checksum_verification=True)


def _read_errors() -> tuple[type[Exception], ...]:
    """Return what reading a damaged file, or one of others, may raise."""
    import pyarrow as pa

    return OSError, LookupError, TypeError, ValueError, pa.ArrowException


_FILES = b"scanloom.files"
_OF_FILES = ("path", "size", "mtime_ns", "inode", "unopened", "reason", "group", "gzipped")
_OF_LOOKS = ("kind", "gzipped", "study", "series", "look_reason", "detail", "common", "own")
_OF_SERIES = ("id", "study_id", "series_kind", "study_uid", "series_uid", "slices")
_RENAMED = {"reason": "series_reason", "detail": "series_detail"}


def _form() -> bytes:
    return f"{FORM} {version('scanloom')}".encode()


def _unopened(entries: Iterable[Entry]) -> list[str]:
    return ["" if entry.reason is None else entry.reason.code for entry in entries]


def _table(rows: Rows) -> pa.Table:
    import pyarrow as pa

    return pa.concat_tables([_file_table(rows), _series_table(rows)], promote_options="default")


def _file_table(rows: Rows) -> pa.Table:
    import pyarrow as pa

    entries, looks = rows.entries, rows.looks()
    packed = [look.packed or _NOTHING for look in looks]
    words = pa.dictionary(pa.int32(), pa.string())
    columns: dict[str, tuple[list[Any], pa.DataType]] = {
        "path": ([os.fsencode(e.path) for e in entries], pa.binary()),
        "size": ([e.size for e in entries], pa.int64()),
        "mtime_ns": ([e.mtime_ns for e in entries], pa.int64()),
        "inode": ([e.inode for e in entries], pa.uint64()),
        "unopened": (_unopened(entries), words),
        "reason": (rows.reasons, words),
        "group": (rows.groups, pa.int32()),
        "gzipped": (rows.gzipped, pa.bool_()),
        "kind": ([look.kind for look in looks], words),
        "study": ([look.study for look in looks], words),
        "series": ([look.series for look in looks], words),
        "look_reason": ([look.reason for look in looks], words),
        "detail": ([look.detail for look in looks], words),
        "common": ([p.common for p in packed], pa.dictionary(pa.int32(), pa.binary())),
        "own": ([p.own for p in packed], pa.binary()),
    }
    return pa.table({name: pa.array(values, kind) for name, (values, kind) in columns.items()})


def _series_table(rows: Rows) -> pa.Table:
    import pyarrow as pa

    lists = {"shape": pa.int32(), "spacing": pa.float64()}
    kinds = {name: pa.list_(pa.field("element", kind)) for name, kind in lists.items()}
    kinds |= {"number": pa.int64(), "contrast": pa.bool_(), "slices": pa.bool_()}
    values: dict[str, list[Any]] = {
        name: [one[n] for one in rows.series]
        for name, n in zip(_OF_SERIES, (0, 1, 2, 3, 4, 6), strict=True)
    }
    for n, name in enumerate(Description._fields):
        values[_RENAMED.get(name, name)] = [one.what[n] for one in rows.series]
    return pa.table({n: pa.array(v, kinds.get(n, pa.string())) for n, v in values.items()})


def _read_series(path: Path, groups: Sequence[int]) -> list[IndexedSeries]:
    described = [_RENAMED.get(name, name) for name in Description._fields]
    with _opened(path) as file:
        first = int(file.schema_arrow.metadata[_FILES])
        table = file.read(columns=[*_OF_SERIES, *described]).slice(first)
    files: list[list[int]] = [[] for _ in range(len(table))]
    for n, group in enumerate(groups):
        if group >= 0:
            files[group].append(n)
    found = []
    for row, own in zip(table.to_pylist(), files, strict=True):
        what = Description(*(row[name] for name in described))
        what = what._replace(shape=tuple(what.shape), spacing=tuple(what.spacing))
        if what.reason:
            Reason[what.reason]  # KeyError for one that does not exist
        *ids, slices = (row[name] for name in _OF_SERIES)
        found.append(IndexedSeries._make((*ids, tuple(own), slices, what)))
    return found


def _read_looks(path: Path) -> list[Look]:
    with _opened(path) as file:
        first = int(file.schema_arrow.metadata[_FILES])
        table = file.read(columns=list(_OF_LOOKS)).slice(0, first)
    *words, commons, own = (table.column(name).to_pylist() for name in _OF_LOOKS)
    once: dict[bytes, bytes] = {}
    packed = (
        Packed(once.setdefault(common, common), one) if one else None
        for common, one in zip(commons, own, strict=True)
    )
    return [Look(*row) for row in zip(*words, packed, strict=True)]
