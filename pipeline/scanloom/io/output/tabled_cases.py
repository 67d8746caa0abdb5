"""Tables of cases are made from those that are there: only cases that changed are read.

`private/tabled.parquet` has a row for each case that the tables were made of, with the inode of its
folder, as the ledger has. If a case has the same folder, and is as outdated as it was, its rows are
copied. As with the ledger, some folders are checked each time, and small output folders are read
whole.

A row also has the time of the folder and what `case.json` says of the scan and its models: with the
measurements, this is all that a list of cases is sorted and filtered by (`read_tabled`).

The file describes the very files of the tables that were written with it, by their sizes, times and
inodes. If one was replaced, damaged or copied, or a process died between two of them, all cases are
read: as well if two shards wrote them at the same time.
"""

from __future__ import annotations

import csv
import filecmp
import io
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from scanloom.core import Measurement, ScanError
from scanloom.io.output import ledger
from scanloom.io.output.growing_table import write_groups
from scanloom.io.output.layout import case_folder
from scanloom.io.output.measurements import escape_formula, measurements_of_batch
from scanloom.io.output.parquet_file import open_parquet, parquet_writer, read_errors
from scanloom.io.output.private import PRIVATE, write_private
from scanloom.io.output.published import check_files
from scanloom.io.system.atomic_write import atomic_write
from scanloom.io.system.regular_files import open_regular_file
from scanloom.version import __version__

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray
    from pyarrow import parquet

TABLED = "tabled.parquet"
MEASUREMENTS = "measurements"
"""Name of the table of measurements, without suffix."""
BATCH_ROWS = 20_000
"""Rows of a table that are in memory at a time, and that its groups have."""

Rows = list[dict[str, Any]]
States = dict[str, list[int]]
"""Size, modification time in nanoseconds and inode of files, by name."""
_FILES, _VERSION = b"scanloom.files", b"scanloom.version"
"""Keys of the metadata: states of the files of the tables, and the version that wrote them."""


class ReadCase(NamedTuple):
    """A case as its folder was read.

    Parameters
    ----------
    name, case : str
        Name of its folder, and its id.
    time : int
        Modification time of its folder, in nanoseconds, before its tables were read.
    described : str
        As of `described`.
    """

    name: str
    case: str
    time: int
    described: str


def described(document: dict[str, Any]) -> str:
    """Return the part of a `case.json` that lists are filtered by, as JSON; empty if damaged."""
    with suppress(LookupError, TypeError):
        models = [
            {"name": each["name"], "reference_ranges": each.get("reference_ranges", [])}
            for each in document["models"]
        ]
        source = {"modality": document["source"]["modality"]}
        grid = {"axes": document["grid"]["axes"]}
        return json.dumps({"source": source, "grid": grid, "models": models})
    return ""


class OldTableError(Exception):
    """A table that rows were to be copied from can't be read."""


class TabledCases:
    """The published cases, and which of them have the rows that the tables have.

    Parameters
    ----------
    out : Path
        The output folder.
    outdated : collection of str
        Ids of the cases whose rows have the flag OUTDATED.
    stems : sequence of str
        Names of the tables, without suffixes; not all may be there.
    """

    def __init__(self, out: Path, outdated: Collection[str], stems: Sequence[str]) -> None:
        self._out, self._outdated = out, outdated
        self._files = [f"{stem}.{kind}" for stem in stems for kind in ("parquet", "csv")]
        self._listed = ledger.list_folders(out)
        self._names = self._listed["name"].combine_chunks()
        self._read = [_schema().empty_table()]
        self._new: list[dict[str, Any]] = []
        self._before, stored = self._stored()
        self._unchanged = self._copyable()
        self._is_known = stored is not None
        self._lost = (stored or 0) - int(self._unchanged.sum())

    def is_up_to_date(self, is_whole: Callable[[Path], bool]) -> bool:
        """Return whether the tables would be written as they are.

        `is_whole` says whether a case that the tables do not have can be read.
        """
        return self._is_known and not self._lost and not any(map(is_whole, self.folders()))

    def folders(self) -> Iterator[Path]:
        """Yield the folders of the cases to be read, in order of their names."""
        import numpy as np

        for position in np.flatnonzero(~self._unchanged).tolist():
            yield case_folder(self._out, self._names[position].as_py())

    def read_all(self) -> None:
        """Copy no rows: all cases are to be read."""
        self._unchanged[:] = False
        self._new, self._read = [], self._read[:1]

    def note(self, case: ReadCase, columns: Sequence[str]) -> None:
        """Note a case that was read, and the columns of its features."""
        position = ledger.position_of(self._names, case.name)
        inode, outdated = self._listed["inode"][position].as_py(), case.case in self._outdated
        row = {"inode": inode, "outdated": outdated, "columns": json.dumps(columns)}
        self._new.append(case._asdict() | row)
        if len(self._new) >= BATCH_ROWS:
            self._gather_new()

    def columns(self) -> list[str]:
        """Return all columns of features, in the order of the cases that have them first."""
        texts = self._after()["columns"].unique().to_pylist()
        return list(dict.fromkeys(itertools.chain.from_iterable(map(json.loads, texts))))

    def with_features(self) -> Iterator[Path]:
        """Yield the folders of all cases with features, in order of their names."""
        from pyarrow import compute

        after = self._after()
        for name in after.filter(compute.not_equal(after["columns"], "[]"))["name"]:
            yield case_folder(self._out, name.as_py())

    def copied_names(self) -> Iterator[str]:
        """Yield the names of the cases whose rows are copied, in order."""
        import numpy as np

        return (
            self._names[position].as_py() for position in np.flatnonzero(self._unchanged).tolist()
        )

    def save(self, damaged: Collection[str], written: States) -> None:
        """Store what the tables were made of; cases of which a part was damaged are read again.

        `written` are the files of the tables.

        Where it can't be written, as by another user, all cases are read next time.
        """
        import pyarrow as pa
        from pyarrow import compute

        private = self._out / PRIVATE
        if not private.is_dir() or len(self._names) <= ledger.CHECKED:
            return
        after = self._after()
        whole = compute.invert(compute.is_in(after["name"], pa.array(sorted(damaged), pa.string())))
        files = json.dumps(written).encode()
        schema = _schema().with_metadata({_FILES: files, _VERSION: __version__.encode()})
        rows = after.filter(whole).cast(schema)
        with suppress(OSError):
            write_private(private / TABLED, lambda draft: write_groups(draft, schema, [rows]))

    def _after(self) -> pa.Table:
        """Return the rows of all cases that the tables are made of now, in order of their names."""
        import pyarrow as pa
        from pyarrow import compute

        self._gather_new()
        copied = self._before.filter(pa.array(self._unchanged))
        rows = pa.concat_tables([copied, *self._read]).unify_dictionaries()
        return rows.take(compute.sort_indices(rows["name"]))

    def _gather_new(self) -> None:
        import pyarrow as pa

        self._read.append(pa.Table.from_pylist(self._new, _schema()))
        self._new = []

    def _stored(self) -> tuple[pa.Table, int | None]:
        """Return the row of each folder, null for others, and the number of rows, if known."""
        with (
            suppress(*read_errors()),
            open_regular_file(self._out / PRIVATE / TABLED) as plain,
            open_parquet(plain) as file,
        ):
            metadata = file.schema_arrow.metadata or {}
            is_ours = metadata.get(_VERSION) == __version__.encode()
            if is_ours and json.loads(metadata[_FILES]) == self._file_states():
                groups = (
                    file.read_row_group(group, use_threads=False).cast(_schema())
                    for group in range(file.num_row_groups)
                )
                rows = ledger.rows_of_folders(self._listed, groups, _schema())
                return rows, file.metadata.num_rows
        return ledger.rows_of_folders(self._listed, (), _schema()), None

    def _copyable(self) -> NDArray[np.bool_]:
        """Return for each case whether its rows may be copied."""
        import numpy as np
        import pyarrow as pa
        from pyarrow import compute

        before = self._before
        outdated = compute.is_in(before["case"], pa.array(sorted(self._outdated), pa.string()))
        same = compute.fill_null(compute.equal(outdated, before["outdated"]), False)
        unchanged: NDArray[np.bool_] = np.array(same.to_numpy())
        positions = np.flatnonzero(unchanged)
        if len(self._names) > ledger.CHECKED and self._are_whole(ledger.sample(positions)):
            return unchanged
        return np.zeros_like(unchanged)

    def _are_whole(self, positions: Sequence[int]) -> bool:
        try:
            for position in positions:
                check_files(case_folder(self._out, self._names[position].as_py()))
        except (OSError, ValueError, LookupError, TypeError, ScanError):
            return False
        return True

    def _file_states(self) -> States:
        """Return the state of each file of the tables that is there."""
        paths = [self._out / name for name in self._files]
        return {path.name: _state(path.stat()) for path in paths if path.exists()}


def _schema() -> pa.Schema:
    import pyarrow as pa

    few = pa.dictionary(pa.int32(), pa.string())
    columns = {"name": pa.string(), "inode": pa.uint64(), "case": pa.string()}
    columns |= {"outdated": pa.bool_(), "columns": few, "time": pa.int64(), "described": few}
    return pa.schema(columns.items())


def _state(file: os.stat_result) -> list[int]:
    """Return size, modification time in nanoseconds and inode of a file."""
    return [file.st_size, file.st_mtime_ns, file.st_ino]


class TabledCase(NamedTuple):
    """A case of which a table of measurements was made.

    Parameters
    ----------
    name : str
        Name of its folder.
    time, inode : int
        Those that its folder had before it was read.
    document : dict
        Of its `case.json` what lists are filtered by: modality, axes and models.
    measurements : tuple of Measurement
        Without the flag OUTDATED, which only tables have.
    """

    name: str
    time: int
    inode: int
    document: dict[str, Any]
    measurements: tuple[Measurement, ...]


def read_tabled(out: Path) -> Iterator[TabledCase]:
    """Yield the cases of `measurements.parquet`, in order of their names; no folder is looked at.

    The caller compares inode and time with those that the folder has now. None are yielded if the
    table is another one than that which was written with `private/tabled.parquet`.
    """
    name = f"{MEASUREMENTS}.parquet"
    with (
        suppress(*read_errors()),
        open_regular_file(out / PRIVATE / TABLED) as plain,
        open_regular_file(out / name) as plain_table,
        open_parquet(plain) as file,
        open_parquet(plain_table) as table,
    ):
        metadata = file.schema_arrow.metadata or {}
        state = _state(os.fstat(plain_table.fileno()))
        if (
            metadata.get(_VERSION) != __version__.encode()
            or json.loads(metadata[_FILES])[name] != state
        ):
            return
        measured = itertools.groupby(_measured(table), key=itemgetter(0))
        measured_name, rows = next(measured, _END)
        for case in _rows(file, ("name", "time", "inode", "described")):
            while measured_name and measured_name < case["name"]:
                measured_name, rows = next(measured, _END)
            if case["described"]:
                of_case = tuple(m for _, m in rows) if measured_name == case["name"] else ()
                document = json.loads(case.pop("described"))
                yield TabledCase(**case, document=document, measurements=of_case)


_END: tuple[str, Iterator[tuple[str, Measurement]]] = ("", iter(()))


def _measured(table: parquet.ParquetFile) -> Iterator[tuple[str, Measurement]]:
    for batch in table.iter_batches(BATCH_ROWS, use_threads=False):
        names = batch.column("case").to_pylist()
        yield from zip(names, measurements_of_batch(batch), strict=True)


def _rows(file: parquet.ParquetFile, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    for batch in file.iter_batches(BATCH_ROWS, columns=list(columns), use_threads=False):
        yield from batch.to_pylist()


# --- rows -----------------------------------------------------------------------------------------
# Rows that were read, and rows that are copied, as Parquet and as CSV.


class Copied(NamedTuple):
    """Rows of a table that is there: as Parquet, and the lines of the CSV file."""

    rows: pa.Table
    lines: list[bytes]


def merge_rows(
    stem: Path, schema: pa.Schema, names: Iterator[str], read: Iterator[tuple[str, Rows]]
) -> Iterator[Rows | Copied]:
    """Yield the rows of cases that were read between those that are copied, in order of names.

    Parameters
    ----------
    stem : Path
        The table that is there, without suffix.
    schema : pyarrow.Schema
        Its columns.
    names : iterator of str
        Cases whose rows are copied, in order.
    read : iterator of tuple
        Cases that were read, none of `names`, in order, with their rows.

    Raises
    ------
    OldTableError
        If the table can't be read, has other columns, or its two files have different rows.
    """
    copied, following = next(names, None), next(read, None)
    for rows, lines in _old_batches(stem, schema) if copied is not None else ():
        begin = end = 0  # of the rows to be copied that were not yielded yet
        for case, first, last in _runs(rows["case"]):
            while copied is not None and copied < case:
                copied = next(names, None)
            if begin < end and (copied != case or (following is not None and following[0] < case)):
                yield Copied(rows.slice(begin, end - begin), lines[begin:end])
                begin = end
            while following is not None and following[0] < case:
                yield following[1]
                following = next(read, None)
            if copied == case:
                begin, end = (begin if begin < end else first), last
        if begin < end:
            yield Copied(rows.slice(begin, end - begin), lines[begin:end])
    if following is not None:
        yield following[1]
    yield from (rows for _, rows in read)


def _old_batches(stem: Path, schema: pa.Schema) -> Iterator[tuple[pa.Table, list[bytes]]]:
    """Yield the rows of a table, some at a time, with their lines; errors as `merge_rows`."""
    import pyarrow as pa

    try:
        with (
            open_regular_file(stem.with_suffix(".parquet")) as plain,
            open_regular_file(stem.with_suffix(".csv")) as text,
            open_parquet(plain) as file,
        ):
            records = _records(text)
            if not file.schema_arrow.equals(schema) or next(records, b"") != _lines(schema.names):
                raise ValueError("it has other columns")  # as of a damaged file
            for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
                lines = list(itertools.islice(records, batch.num_rows))
                if len(lines) < batch.num_rows:
                    raise ValueError("it has fewer lines")  # as of a damaged file
                yield pa.Table.from_batches([batch]).cast(schema), lines
            if next(records, None) is not None:
                raise ValueError("it has more lines")  # as of a damaged file
    except read_errors() as exc:
        raise OldTableError(stem.name) from exc


def has_columns(stem: Path, schema: pa.Schema) -> bool:
    """Return whether the table that is there has these columns."""
    with (
        suppress(*read_errors()),
        open_regular_file(stem.with_suffix(".parquet")) as plain,
        open_parquet(plain) as file,
    ):
        return bool(file.schema_arrow.equals(schema))
    return False


def _records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the records of a CSV file, as they are: a quoted cell may have line feeds."""
    record = b""
    for line in file:
        record += line
        if record.count(b'"') % 2 == 0:
            yield record
            record = b""
    if record:
        yield record


def _runs(column: pa.ChunkedArray) -> Iterator[tuple[str, int, int]]:
    """Yield each value of a column with the first row that has it, and the row behind its last."""
    import numpy as np
    from pyarrow import compute

    is_first = compute.not_equal(column[1:], column[:-1]).to_numpy()
    first = np.concatenate([[0], np.flatnonzero(is_first) + 1])
    names = column.take(first).to_pylist()
    return zip(names, first.tolist(), [*first[1:].tolist(), len(column)], strict=True)


def write_rows(
    stem: Path, schema: pa.Schema, pieces: Iterable[Rows | Copied]
) -> tuple[bool, States]:
    """Write rows as `stem`.csv and .parquet, a batch at a time; leave equal files as they are.

    Returns
    -------
    bool
        Whether the files were written, since they differed.
    dict
        The states of these files, also if another process replaces them at once.

    Raises
    ------
    OSError
        If a table can't be written.
    OldTableError
        As `merge_rows`, for its pieces.
    """
    table, text = stem.with_suffix(".parquet"), stem.with_suffix(".csv")
    states = States()

    def write(table_draft: Path, text_draft: Path) -> None:
        write_both(table_draft, text_draft, schema, pieces)
        pairs = ((table_draft, table), (text_draft, text))
        if all(path.is_file() for _, path in pairs):
            states.update((path.name, _state(path.stat())) for _, path in pairs)
            if all(filecmp.cmp(*pair, shallow=False) for pair in pairs):
                raise _EqualError
        states.update((path.name, _state(draft.stat())) for draft, path in pairs)

    try:
        atomic_write(table, lambda table_draft: atomic_write(text, partial(write, table_draft)))
    except _EqualError:
        return False, states
    return True, states


class _EqualError(Exception):
    """The files that would be replaced are equal."""


def write_both(
    table: Path,
    text: Path,
    schema: pa.Schema,
    pieces: Iterable[Rows | Copied],
    metadata: Callable[[int], dict[bytes, bytes]] = lambda _: {},
) -> None:
    """Write rows as Parquet and CSV; `metadata` is called last, with the size of the CSV file."""
    with parquet_writer(table, schema) as writer:
        with text.open("wb") as file:
            file.write(_lines(schema.names))
            for rows in _in_batches(schema, pieces, file):
                writer.write_table(rows)
        writer.add_key_value_metadata(metadata(text.stat().st_size))


def _in_batches(
    schema: pa.Schema, pieces: Iterable[Rows | Copied], text: BinaryIO
) -> Iterator[pa.Table]:
    """Yield rows in groups of BATCH_ROWS, and write their lines."""
    import pyarrow as pa

    tables, count, rows = list[pa.Table](), 0, Rows()

    def gather_rows() -> None:
        if rows:
            tables.append(pa.Table.from_pylist(rows, schema))
            text.write(_lines(schema.names, rows))
            rows.clear()

    for piece in pieces:
        if isinstance(piece, Copied):
            gather_rows()
            tables.append(piece.rows)
            text.writelines(piece.lines)
            count += piece.rows.num_rows
        else:
            rows += piece
            count += len(piece)
        while count >= BATCH_ROWS:
            gather_rows()
            whole = pa.concat_tables(tables).combine_chunks()
            yield whole.slice(0, BATCH_ROWS)
            count -= BATCH_ROWS
            tables = [whole.slice(BATCH_ROWS)]
    gather_rows()
    if count:
        yield pa.concat_tables(tables).combine_chunks()


def _lines(columns: Sequence[str], rows: Iterable[dict[str, Any]] | None = None) -> bytes:
    """Return rows as lines of a CSV file; without any, its head."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if rows is None:
        writer.writeheader()
    else:
        writer.writerows(
            {name: escape_formula(v) if isinstance(v, str) else v for name, v in row.items()}
            for row in rows
        )
    return text.getvalue().encode()
