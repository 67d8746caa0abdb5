"""Storage of the index: a Parquet file for each part of an archive, and one of all its series.

    index/<digest>.parquet   a part: files of consecutive folders, then the series that they form
    index/<digest>.claim     a part that a process is reading, see `scanloom.io.index.claims`
    index.parquet            the catalogue: all series in order, and the names of the parts

The name of a part is a digest of the states of its files, so that a part with this name is that of
the unchanged files. No reader needs more than one part in memory. Parts that are no longer named
stay for a week: another process may be reading them.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from scanloom.core import Reason
from scanloom.io.dicom.header.elements import EncodedElements
from scanloom.io.formats import VOLUME_FORMATS
from scanloom.io.index.inspection import FileInfo, SeriesInfo
from scanloom.io.index.walk import FileEntry
from scanloom.io.output.parquet_file import (
    open_native,
    open_parquet,
    parquet_writer,
    read_errors,
    write_parquet,
)
from scanloom.io.output.private import write_private
from scanloom.io.output.work_folder import process_file_name
from scanloom.io.system.archives import ARCHIVE_KINDS
from scanloom.io.system.atomic_write import remove_stale_temporaries
from scanloom.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

INDEX_VERSION = "13"
"""File format version. Stored with it are scanloom's own, as another release may classify
differently, and a digest of the suffixes by which files are recognised."""
SORTED_AT_ONCE = 10_000
"""Rows that are sorted in memory; more are sorted in pieces of this size, which are merged."""
MERGED_AT_ONCE = 64
"""Pieces that are merged at once."""

_VERSION_FIELD = b"scanloom.index"
_CONTENT_FIELD, _DIGEST_FIELD = b"scanloom.content", b"scanloom.digest"
_COMPRESSION: dict[str, Any] = {"compression": "zstd", "compression_level": 1}
_ROW_GROUP = 5000  # series that are read at once
_BATCH = 100  # rows of each sorted piece in memory while the pieces are merged
_PIECE = "sorted"  # prefix of the names of sorted pieces
_UNNAMED_FOR_S = 7 * 24 * 3600  # age at which nobody reads a part that the catalogue lacks
_STALE_AFTER_S = 3600  # age at which a draft is no longer being written
_STATE_COLUMNS = ("path", "size", "mtime_ns", "inode", "unopened")
_INFO_COLUMNS = ("kind", "gzipped", "study", "series", "look_reason", "detail", "common", "own")

RETRIED = frozenset(reason.code for reason in Reason if reason.retry)
"""Codes of the reasons that may go without a visible change of the file, see `Reason.retry`."""
_NO_ELEMENTS = EncodedElements(b"", b"")

Row = TypeVar("Row")


class Run(NamedTuple):
    """Consecutive files of a part: rows from `start` to before `stop`."""

    part: int
    start: int
    stop: int


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
    files : tuple of Run
        Its slices, by their rows in the parts of the index; for a skipped series, all its files.
    slices : bool
        Whether any of them may be a slice. A series without slices is counted, but can't be
        selected.
    info : SeriesInfo
        Its metadata, and the result that reading it would have. The last fields may identify a
        patient.
    first, path : str
        Its first file, which may be an archive member; and its only file, a volume's header, or
        the innermost folder or archive of all.
    stamp : str
        Stamp of its files; see `Series`.
    unreadable, damaged : int
        Numbers of unreadable files that may be slices of it; see `Series`.
    pieces : tuple of (part, group)
        The groups of files in parts that belong to it. Empty if that is one, for which its own part
        gives the same `info` and `slices`.
    """

    id: str
    study: str
    kind: str
    study_uid: str
    series_uid: str
    files: tuple[Run, ...]
    slices: bool
    info: SeriesInfo
    first: str = ""
    path: str = ""
    stamp: str = ""
    unreadable: int = 0
    damaged: int = 0
    pieces: tuple[tuple[int, int], ...] = ()

    @property
    def reason(self) -> Reason | None:
        """Reason for which the series gives no volume, or None if it gives one."""
        return Reason[self.info.reason] if self.info.reason else None

    @property
    def status(self) -> str:
        """Outcome of the series: used, skipped, ambiguous or failed."""
        return "used" if self.reason is None else self.reason.outcome

    @property
    def n_files(self) -> int:
        """Number of its files."""
        return sum(stop - start for _, start, stop in self.files)


_SERIES = "series_"  # prefix of their columns: files have a kind and a reason too
_TEXTS = ("id", "study", "kind", "study_uid", "series_uid", "stamp")
_PATHS = ("first", "path")
_NUMBERS = ("unreadable", "damaged")


@dataclass(eq=False)
class Part:
    """Properties of the files of a part, one list per property, and the series that they form.

    Parameters
    ----------
    entries : list of FileEntry
    infos : list of FileInfo
    reasons : list of str
        Code of the reason for which a file is not a slice; empty if the reason of its series
        applies.
    groups : list of int
        Index of the file's group in `series`; -1 if it belongs to none. A file with a reason of its
        own is one of the series' files only if the series has no slices.
    series : list of IndexedSeries
        As if there were no other part.
    keys : list of int or None
        Digest of what tells a series from others; None if it can't go on in another part. Equal
        series have the same, different ones nearly never.
    faults : list of str
        As of `scanloom.io.index.missing_files.UnreadableFiles`.
    inside : tuple of str
        Folders, each with a separator at its end, of volume headers whose voxels are in no file of
        the part: they may lie further below.
    """

    entries: list[FileEntry]
    infos: list[FileInfo]
    reasons: list[str]
    groups: list[int]
    series: list[IndexedSeries]
    keys: list[int | None]
    faults: list[str]
    inside: tuple[str, ...] = ()


class IndexStore:
    """Folder of the parts and path of the catalogue.

    Parameters
    ----------
    path : Path or None
        The catalogue; parts are in the folder of this name without suffix. None for memory.
    writable : callable or None
        `writable(folder)` returns a context in which files can be written to a folder, which is
        made if it is missing. None if nothing is to be written.
    keep_in_memory : bool
        Whether files that can't be written stay in memory; else the error is raised.
    """

    def __init__(
        self,
        path: Path | None = None,
        writable: Callable[[Path], AbstractContextManager[object]] | None = None,
        *,
        keep_in_memory: bool = True,
    ) -> None:
        self._path, self._writable, self._keep_in_memory = path, writable, keep_in_memory
        self._memory: dict[str, pa.Buffer] = {}

    def make_folder(self) -> Path | None:
        """Return the folder of the parts, made if it is missing; None if others can't see it."""
        if self._path is None or self._writable is None:
            return None
        folder = self._path.with_suffix("")
        with suppress(OSError), self._writable(folder):
            return folder
        return None

    def write(self, name: str, write: Callable[[Any], object]) -> None:
        """Write a part, or the catalogue if `name` is empty; `write` gets an open file.

        Other names than those of parts are those of drafts, see `process_file_name`.
        """
        import pyarrow as pa

        def write_draft(draft: Path) -> None:
            with open_native(draft, "wb") as file:
                write(file)

        if self._path is not None and self._writable is not None:
            path = self._file_path(self._path, name)
            try:
                with self._writable(path.parent):
                    write_private(path, write_draft)
            except OSError:
                if not self._keep_in_memory:
                    raise
            else:
                return
        stream = pa.BufferOutputStream()
        write(stream)
        self._memory[name] = stream.getvalue()

    def open(self, name: str) -> parquet.ParquetFile:
        """Open a part or the catalogue; errors as `open_parquet`."""
        return open_parquet(self.source(name))

    def source(self, name: str) -> pa.NativeFile:
        """Open a file to read its bytes."""
        import pyarrow as pa

        if name in self._memory:
            return pa.BufferReader(self._memory[name])
        if self._path is None or not self._file_path(self._path, name).is_file():
            raise FileNotFoundError
        return open_native(self._file_path(self._path, name))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that only this process knows."""
        for name in names:
            self._memory.pop(name, None)
            if self._path is not None:
                with suppress(OSError):
                    self._file_path(self._path, name).unlink(missing_ok=True)

    def keep(self, names: Iterable[str]) -> None:
        """Remove other parts if no catalogue named them for long, and what killed processes left.

        `names` are the parts of the catalogue and of the one before.
        """
        if self._path is None:
            return
        folder, now = self._path.with_suffix(""), time.time()
        named = {f"{name}.parquet" for name in names}
        with suppress(OSError):
            remove_stale_temporaries(folder, now - _STALE_AFTER_S)
            for file in folder.iterdir():
                if file.name in named:
                    os.utime(file)
                elif file.suffix == ".parquet" and file.lstat().st_mtime < now - _UNNAMED_FOR_S:
                    file.unlink()

    def _file_path(self, path: Path, name: str) -> Path:
        if not name:
            return path
        return path.with_suffix("") / (name if name.startswith(_PIECE) else f"{name}.parquet")


def part_name(entries: Sequence[FileEntry], fingerprint: str) -> str:
    """Return the name of the part of these files, as they are now."""
    digest = hashlib.blake2b(_version() + fingerprint.encode(), digest_size=16)
    for path, size, mtime_ns, inode, reason in entries:
        code = "" if reason is None else reason.code
        digest.update(os.fsencode(path) + f"\0\0{size} {mtime_ns} {inode} {code}\n".encode())
    return digest.hexdigest()


class StoredPart:
    """A part in a file; each column is read when it is asked for.

    `digest` tells parts of one name apart: what is tried again may have another result.

    Raises
    ------
    Exception
        One of `read_errors` if the file is missing, damaged or of others; methods too.
    """

    def __init__(self, store: IndexStore, name: str) -> None:
        self.name, self._file = name, store.open(name)
        self._n_files, inside, self.digest = _content_of(self._file, _part_schema())
        self.inside = tuple(inside)

    def check(self) -> None:
        """Read all of the file, so that damage shows."""
        self._file.read(use_threads=False)

    def columns(self, *names: str) -> pa.Table:
        """Return columns of the files."""
        return self._read(*names).slice(0, self._n_files)

    def lists(self, *names: str) -> list[list[Any]]:
        """Return columns of the files as lists."""
        return _lists(self.columns(*names), names)

    def paths(self) -> list[str]:
        """Return the path of each file."""
        return list(map(os.fsdecode, self.lists("path")[0]))

    def entries(self) -> list[FileEntry]:
        """Return the state that each file had."""
        return _entries(self.columns(*_STATE_COLUMNS))

    def infos(self) -> list[FileInfo]:
        """Return the inspection result of each file."""
        return _infos(self.columns(*_INFO_COLUMNS))

    def headers(self) -> list[EncodedElements | None]:
        """Return the elements of each file; None for one that has none."""
        return _headers(*self.lists("common", "own"))

    def files_of(self, groups: Collection[int]) -> Iterator[tuple[int, int, FileEntry, FileInfo]]:
        """Yield the row and group of the files of some groups, their states and inspections."""
        import pyarrow as pa
        from pyarrow import compute

        in_groups = compute.is_in(
            self.columns("group").column(0), value_set=pa.array(sorted(groups), pa.int32())
        )
        table = self.columns("group", *_STATE_COLUMNS, *_INFO_COLUMNS).filter(in_groups)
        rows = compute.indices_nonzero(in_groups).to_pylist()
        group_of_row = table.column("group").to_pylist()
        return zip(rows, group_of_row, _entries(table), _infos(table), strict=True)

    def suspects(self) -> Iterator[tuple[FileEntry, str]]:
        """Yield the files that may be of interest to `UnreadableFiles`, and their faults."""
        from pyarrow import compute

        from scanloom.io.index.missing_files import MIN_DICOM_BYTES

        faults = compute.cast(self.columns("fault").column(0), "string")
        is_suspect = compute.or_(
            compute.not_equal(faults, ""),
            compute.less(self.columns("size").column(0), MIN_DICOM_BYTES),
        )
        if compute.any(is_suspect).as_py():
            entries = _entries(self.columns(*_STATE_COLUMNS).filter(is_suspect))
            yield from zip(entries, faults.filter(is_suspect).to_pylist(), strict=True)

    def keys(self, *, with_slices: bool = False) -> pa.ChunkedArray:
        """Return the key of each series, or of those with slices in this part."""
        table = self._series_columns("key", "slices")
        return (table.filter(table.column(1)) if with_slices else table).column(0)

    def ids(self) -> list[str]:
        """Return the ID of each series."""
        ids: list[str] = self._series_columns("id").column(0).to_pylist()
        return ids

    def series(self) -> list[IndexedSeries]:
        """Return the series that the files form without other parts."""
        return list(_series_rows(self._series_columns(*_SERIES_COLUMNS)))

    def to_retry(self) -> set[int]:
        """Return the files that must be opened again although they have not changed.

        Their reason, or that of their series, is one of `RETRIED`.
        """
        import pyarrow as pa
        from pyarrow import compute

        of_series, of_files = self._series_columns("reason").column(0), self.columns("reason")
        codes = pa.array(sorted(RETRIED))
        if not any(
            compute.any(compute.is_in(compute.cast(column, "string"), value_set=codes)).as_py()
            for column in (of_series, of_files.column(0))
        ):
            return set()
        retried = {n for n, reason in enumerate(of_series.to_pylist()) if reason in RETRIED}
        own, groups, unopened = self.lists("reason", "group", "unopened")
        rows = enumerate(zip(own, groups, unopened, strict=True))
        return {
            n
            for n, (reason, group, code) in rows
            if not code and (reason in RETRIED or (group in retried and not reason))
        }

    def _series_columns(self, *names: str) -> pa.Table:
        return self._read(*(f"{_SERIES}{name}" for name in names)).slice(self._n_files)

    def _read(self, *names: str) -> pa.Table:
        # A part is small: threads would wait for each other
        return self._file.read(columns=list(names), use_threads=False)


def write_part(part: Part, store: IndexStore, name: str) -> None:
    """Write a part: first its files, then its series.

    Raises
    ------
    OSError
        If it can't be written.
    """
    table = _part_table(part)
    content = [len(part.entries), part.inside, _table_digest(table)]
    table = table.replace_schema_metadata(_metadata(content, table.num_rows))
    store.write(name, lambda target: write_parquet(table, target, **_COMPRESSION))


# --- the catalogue --------------------------------------------------------------------------------


class Catalogue(NamedTuple):
    """Content of the catalogue besides the series.

    Parameters
    ----------
    fingerprint : str
        That of the key.
    parts : list of (name, folder)
        The parts in order, and the first folder of each.
    digest : str
        That of the digests of all parts.
    reasons : dict of str to int
        Number of files of each reason code; those that are used have none.
    retry : bool
        Whether the parts must be put together again although none has changed.
    """

    fingerprint: str
    parts: list[tuple[str, str]]
    digest: str
    reasons: dict[str, int]
    retry: bool


class StoredSeries(Sequence[IndexedSeries]):
    """The series of a catalogue, read in batches; the file stays open, even if it is replaced."""

    def __init__(self, file: parquet.ParquetFile) -> None:
        self._file = file

    def __len__(self) -> int:
        rows: int = self._file.metadata.num_rows
        return rows

    def __iter__(self) -> Iterator[IndexedSeries]:
        for batch in self._file.iter_batches(_ROW_GROUP, use_threads=False):
            yield from _series_rows(batch)

    @overload
    def __getitem__(self, index: int) -> IndexedSeries: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[IndexedSeries]: ...
    def __getitem__(self, index: int | slice) -> IndexedSeries | Sequence[IndexedSeries]:
        if isinstance(index, slice):
            return list(itertools.islice(self, *index.indices(len(self))))
        number = range(len(self))[index]
        rows = self._file.read_row_group(number // _ROW_GROUP, use_threads=False).slice(
            number % _ROW_GROUP, 1
        )
        return next(_series_rows(rows))

    def ids(self) -> Iterator[str]:
        """Yield the ID of each series."""
        column = f"{_SERIES}id"
        for batch in self._file.iter_batches(_ROW_GROUP, columns=[column], use_threads=False):
            yield from batch[column].to_pylist()

    def places(self) -> Iterator[tuple[str, str]]:
        """Yield ID and path of each series."""
        columns = [f"{_SERIES}{name}" for name in ("id", "path")]
        for batch in self._file.iter_batches(_ROW_GROUP, columns=columns, use_threads=False):
            ids, paths = (batch[name].to_pylist() for name in columns)
            yield from zip(ids, map(os.fsdecode, paths), strict=True)

    def with_ids(self, ids: Collection[str]) -> Iterator[IndexedSeries]:
        """Yield the series that have one of some IDs."""
        import pyarrow as pa
        from pyarrow import compute

        column, requested = f"{_SERIES}id", pa.array(ids, pa.string())
        for group in range(self._file.num_row_groups):
            of_group = self._file.read_row_group(group, [column], use_threads=False)
            is_wanted = compute.is_in(of_group.column(0), value_set=requested)
            if compute.any(is_wanted).as_py():
                rows = self._file.read_row_group(group, use_threads=False).filter(is_wanted)
                yield from _series_rows(rows)

    def pieces(self, store: IndexStore) -> Iterator[tuple[int, dict[int, IndexedSeries]]]:
        """Yield parts, in order, and the series in several pieces of which groups of them are some.

        Rows that do not fit into memory lie in the store meanwhile.
        """
        from pyarrow import compute

        ordered = placed_sorter(store, 2)
        for batch in self._file.iter_batches(_ROW_GROUP, use_threads=False):
            in_pieces = compute.greater(compute.list_value_length(batch[f"{_SERIES}pieces"]), 0)
            for series in _series_rows(batch.filter(in_pieces)):
                for part, group in series.pieces:
                    ordered.add((part, group, series))
        for part, pieces in itertools.groupby(ordered.rows(), key=itemgetter(0)):
            yield part, {group: series for _, group, series in pieces}


def write_catalogue(
    store: IndexStore, series: Iterable[IndexedSeries], catalogue: Callable[[], Catalogue]
) -> None:
    """Write the catalogue, a batch at a time; `catalogue` is called after the last series.

    Raises
    ------
    OSError
        If it can't be written.
    """
    import pyarrow as pa

    schema = _catalogue_schema()

    def write(target: Any) -> None:
        with parquet_writer(target, schema, **_COMPRESSION) as writer:
            rows, n_rows = iter(series), 0
            while batch := list(itertools.islice(rows, _ROW_GROUP)):
                writer.write_table(pa.table(_series_arrays(batch), schema))
                n_rows += len(batch)
            writer.add_key_value_metadata(_metadata(catalogue()._asdict(), n_rows))

    store.write("", write)


def read_catalogue(store: IndexStore, fingerprint: str) -> tuple[Catalogue, StoredSeries] | None:
    """Return the catalogue; None if it is missing, outdated, damaged or of another key."""
    try:
        file = store.open("")
        catalogue = Catalogue(**_content_of(file, _catalogue_schema()))
        codes = {reason.code for reason in Reason}
        series, n_rows = StoredSeries(file), 0
        for batch in file.iter_batches(_ROW_GROUP, use_threads=False):  # damage shows here
            n_rows += batch.num_rows
            if not codes.issuperset(filter(None, batch[f"{_SERIES}reason"].to_pylist())):
                return None
        if n_rows != len(series):  # Arrow hides rows of a damaged column without an error
            return None
    except read_errors():
        return None
    parts = [(name, folder) for name, folder in catalogue.parts]
    known = catalogue._replace(parts=parts), series
    return known if catalogue.fingerprint == fingerprint else None


# --- sorting --------------------------------------------------------------------------------------


class SpreadFile(NamedTuple):
    """A file of a series that goes on in another part: its series' key, its place, and itself."""

    key: int
    part: int
    row: int
    group: int
    entry: FileEntry
    info: FileInfo


class SortedOnDisk:
    """Sorts rows of which only some are in memory; the others lie in the store meanwhile.

    They are sorted in pieces, of which a batch of each is in memory while they are merged; when
    they are many, they are merged into one longer piece.

    Parameters
    ----------
    store : IndexStore
    key : function of a row
    to_table, to_rows : functions
        Make a table of rows, and rows of a batch of it.
    """

    def __init__(
        self,
        store: IndexStore,
        key: Callable[[Row], Any],
        to_table: Callable[[list[Row]], pa.Table],
        to_rows: Callable[[pa.RecordBatch], Iterable[Row]],
    ) -> None:
        self._store, self._key, self._to_table, self._to_rows = store, key, to_table, to_rows
        self._rows: list[Any] = []
        self._names: list[str] = []

    def add(self, row: Any) -> None:
        """Add a row."""
        self._rows.append(row)
        if len(self._rows) >= SORTED_AT_ONCE:
            self._rows.sort(key=self._key)
            rows, self._rows = self._rows, []
            self._names.append(self._write(rows))
            del rows
            if len(self._names) >= MERGED_AT_ONCE:
                names, self._names = self._names, []
                self._names = [self._write(self._merged(names))]

    def rows(self) -> Iterator[Any]:
        """Yield all rows in order."""
        self._rows.sort(key=self._key)
        names, self._names = self._names, []
        yield from self._merged(names, self._rows)

    def _merged(self, names: Sequence[str], *more: Iterable[Any]) -> Iterator[Any]:
        """Yield the rows of some pieces and `more` rows in order; the pieces are removed."""
        try:
            yield from heapq.merge(*map(self._read, names), *more, key=self._key)
        finally:
            self._store.remove(names)

    def _write(self, rows: Iterable[Any]) -> str:
        """Write rows to a new piece; return its name, by which a dead process is known."""
        import pyarrow as pa

        name, schema = process_file_name(_PIECE), self._to_table([]).schema
        options = pa.ipc.IpcWriteOptions(compression="lz4")

        def write(target: Any) -> None:
            # Not Parquet: its metadata of a hundred pieces would be in memory at once
            with pa.ipc.new_stream(target, schema, options=options) as writer:
                remaining = iter(rows)
                while batch := list(itertools.islice(remaining, _BATCH)):
                    writer.write_table(self._to_table(batch))

        self._store.write(name, write)
        return name

    def _read(self, name: str) -> Iterator[Any]:
        import pyarrow as pa

        with self._store.source(name) as source, pa.ipc.open_stream(source) as batches:
            for batch in batches:
                yield from self._to_rows(batch)


def series_sorter(store: IndexStore) -> SortedOnDisk:
    """Sort series as `find_series` numbers them; skipped ones come last."""

    def order(series: IndexedSeries) -> tuple[object, ...]:
        uids = series.study_uid, series.series_uid
        return (not series.slices, -series.n_files, *uids, series.first)

    import pyarrow as pa

    schema = _catalogue_schema()
    return SortedOnDisk(
        store, order, lambda rows: pa.table(_series_arrays(rows), schema), _series_rows
    )


def placed_sorter(store: IndexStore, numbers: int) -> SortedOnDisk:
    """Sort rows of so many numbers and a series by the first two numbers."""
    import pyarrow as pa

    names = [f"place{n}" for n in range(numbers)]

    def to_table(rows: list[tuple[Any, ...]]) -> pa.Table:
        arrays = _series_arrays([row[-1] for row in rows])
        for n, name in enumerate(names):
            arrays[name] = pa.array([row[n] for row in rows], pa.int64())
        return pa.table(arrays)

    def to_rows(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
        return zip(*(batch[n].to_pylist() for n in names), _series_rows(batch), strict=True)

    return SortedOnDisk(store, lambda row: row[:2], to_table, to_rows)


def file_sorter(store: IndexStore) -> SortedOnDisk:
    """Sort files of spread series by series, then by place."""
    import pyarrow as pa

    places = ("key", "part", "row", "group_of")

    def to_table(files: list[SpreadFile]) -> pa.Table:
        arrays = _file_arrays([file.entry for file in files], [file.info for file in files])
        for n, name in enumerate(places):
            arrays[name] = pa.array([file[n] for file in files], pa.int64())
        return pa.table(arrays)

    def to_rows(batch: pa.RecordBatch) -> Iterator[SpreadFile]:
        numbers = _lists(batch, places)
        rows = zip(*numbers, _entries(batch), _infos(batch), strict=True)
        return itertools.starmap(SpreadFile, rows)

    return SortedOnDisk(store, lambda file: file[:3], to_table, to_rows)


# --- tables ---------------------------------------------------------------------------------------


def _metadata(content: Any, n_rows: int) -> dict[bytes, bytes]:
    """Return metadata of a file of ours; pages have checksums of their own, metadata have none."""
    text = json.dumps([n_rows, content]).encode()
    return {_VERSION_FIELD: _version(), _CONTENT_FIELD: text, _DIGEST_FIELD: _digest(text)}


def _content_of(file: parquet.ParquetFile, schema: pa.Schema) -> Any:
    """Return the content of `_metadata`; ValueError for a file of others or a damaged one."""
    metadata = {**(file.schema_arrow.metadata or {}), **(file.metadata.metadata or {})}
    if metadata.get(_VERSION_FIELD) != _version() or not file.schema_arrow.equals(schema):
        raise ValueError("not an index of this version")
    text = metadata[_CONTENT_FIELD]
    if metadata[_DIGEST_FIELD] != _digest(text):
        raise ValueError("damaged metadata")
    n_rows, content = json.loads(text)
    if n_rows != file.metadata.num_rows:  # Arrow hides the rows beyond a damaged number
        raise ValueError("a damaged number of rows")
    return content


def _table_digest(table: pa.Table) -> str:
    """Return a digest of the content of a table."""
    import pyarrow as pa

    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return hashlib.blake2b(stream.getvalue(), digest_size=8).hexdigest()


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=8).hexdigest().encode()


def _version() -> bytes:
    """Return the versions, and a digest of formats and kinds of archives with their suffixes."""
    formats = [(f.name, f.suffixes, f.detached_suffixes) for f in VOLUME_FORMATS]
    archives = [(kind.name, kind.suffixes) for kind in ARCHIVE_KINDS]
    digest = hashlib.blake2b(repr((formats, archives)).encode(), digest_size=8).hexdigest()
    return f"{INDEX_VERSION} {__version__} {digest}".encode()


def _part_table(part: Part) -> pa.Table:
    import pyarrow as pa

    texts = pa.dictionary(pa.int32(), pa.string())
    files = _file_arrays(part.entries, part.infos) | {
        "reason": pa.array(part.reasons, texts),
        "group": pa.array(part.groups, pa.int32()),
        "fault": pa.array(part.faults, texts),
    }
    series = _series_arrays(part.series) | {f"{_SERIES}key": pa.array(part.keys, pa.int64())}
    return pa.concat_tables([pa.table(files), pa.table(series)], promote_options="default")


@functools.cache
def _part_schema() -> pa.Schema:
    return _part_table(Part([], [], [], [], [], [], [])).schema


def _file_arrays(entries: Sequence[FileEntry], infos: Sequence[FileInfo]) -> dict[str, pa.Array]:
    import pyarrow as pa

    elements = [info.packed or _NO_ELEMENTS for info in infos]
    texts = pa.dictionary(pa.int32(), pa.string())
    columns: dict[str, tuple[list[Any], pa.DataType]] = {
        "path": ([os.fsencode(e.path) for e in entries], pa.binary()),
        "size": ([e.size for e in entries], pa.int64()),
        "mtime_ns": ([e.mtime_ns for e in entries], pa.int64()),
        "inode": ([e.inode for e in entries], pa.uint64()),
        "unopened": (["" if e.reason is None else e.reason.code for e in entries], texts),
        "gzipped": ([info.gzipped for info in infos], pa.bool_()),
        "kind": ([info.kind for info in infos], texts),
        "study": ([info.study for info in infos], texts),
        "series": ([info.series for info in infos], texts),
        "look_reason": ([info.reason for info in infos], texts),
        "detail": ([info.detail for info in infos], texts),
        "common": ([e.common for e in elements], pa.dictionary(pa.int32(), pa.binary())),
        "own": ([e.own for e in elements], pa.binary()),
    }
    return {name: pa.array(values, kind) for name, (values, kind) in columns.items()}


def _lists(table: pa.Table | pa.RecordBatch, names: Iterable[str]) -> list[list[Any]]:
    return [table.column(name).to_pylist() for name in names]


def _entries(table: pa.Table | pa.RecordBatch) -> list[FileEntry]:
    return [
        FileEntry(os.fsdecode(path), size, time_ns, inode, Reason[code] if code else None)
        for path, size, time_ns, inode, code in zip(*_lists(table, _STATE_COLUMNS), strict=True)
    ]


def _infos(table: pa.Table | pa.RecordBatch) -> list[FileInfo]:
    *texts, shared, own = _lists(table, _INFO_COLUMNS)
    return [FileInfo(*row) for row in zip(*texts, _headers(shared, own), strict=True)]


def _headers(shared: Sequence[bytes], own: Sequence[bytes]) -> list[EncodedElements | None]:
    interned: dict[bytes, bytes] = {}
    return [
        EncodedElements(interned.setdefault(common, common), per_file) if per_file else None
        for common, per_file in zip(shared, own, strict=True)
    ]


_OWN = (*_TEXTS, *_PATHS, *_NUMBERS, "slices", "files", "pieces")
_SERIES_COLUMNS = (*_OWN, *SeriesInfo._fields)


@functools.cache
def _catalogue_schema() -> pa.Schema:
    import pyarrow as pa

    return pa.table(_series_arrays([])).schema


def _series_arrays(all_series: Sequence[IndexedSeries]) -> dict[str, pa.Array]:
    import pyarrow as pa

    lists = {"shape": pa.int32(), "spacing": pa.float64()}
    kinds = {name: pa.list_(pa.field("element", kind)) for name, kind in lists.items()}
    kinds |= {"number": pa.int64(), "contrast": pa.bool_()}
    numbers = pa.list_(pa.field("element", pa.int32()))
    columns: dict[str, tuple[list[Any], pa.DataType]] = {
        **{name: ([getattr(s, name) for s in all_series], pa.string()) for name in _TEXTS},
        **{
            name: ([os.fsencode(getattr(s, name)) for s in all_series], pa.binary())
            for name in _PATHS
        },
        **{name: ([getattr(s, name) for s in all_series], pa.int64()) for name in _NUMBERS},
        "slices": ([s.slices for s in all_series], pa.bool_()),
        "files": ([list(itertools.chain(*s.files)) for s in all_series], numbers),
        "pieces": ([list(itertools.chain(*s.pieces)) for s in all_series], numbers),
    }
    for name in SeriesInfo._fields:
        values = [getattr(s.info, name) for s in all_series]
        columns[name] = (values, kinds.get(name, pa.string()))
    return {f"{_SERIES}{name}": pa.array(v, kind) for name, (v, kind) in columns.items()}


def _series_rows(table: pa.Table | pa.RecordBatch) -> Iterator[IndexedSeries]:
    def lists(names: Iterable[str]) -> dict[str, Iterable[Any]]:
        return {name: table.column(f"{_SERIES}{name}").to_pylist() for name in names}

    def tuples(name: str, size: int = 1) -> Iterator[tuple[Any, ...]]:
        """Yield the list of each row as a tuple, of its values or of tuples of `size` of them."""
        from pyarrow import compute

        column = table.column(f"{_SERIES}{name}")
        values = iter(compute.list_flatten(column).to_pylist())
        items = values if size == 1 else zip(*[values] * size, strict=True)
        for length in compute.list_value_length(column).to_pylist():
            yield tuple(itertools.islice(items, length // size))

    ranges = {"shape": tuples("shape"), "spacing": tuples("spacing")}
    info = lists(name for name in SeriesInfo._fields if name not in ranges) | ranges
    own = lists((*_TEXTS, *_PATHS, *_NUMBERS, "slices"))
    for name in _PATHS:
        own[name] = map(os.fsdecode, own[name])
    own["files"] = (tuple(map(Run._make, runs)) for runs in tuples("files", 3))
    own["pieces"] = tuples("pieces", 2)
    own["info"] = map(SeriesInfo, *(info[name] for name in SeriesInfo._fields))
    return map(IndexedSeries, *(own[name] for name in IndexedSeries._fields))
