"""Joins tables of results with the sources of their case ids, for the holders of the key."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from scanloom.core import Reason, ScanError
from scanloom.io.output.crosswalk import SourceRecord
from scanloom.io.output.measurements import escape_formula
from scanloom.io.system.regular_files import open_regular_file

if TYPE_CHECKING:
    import pyarrow as pa

ID_COLUMNS = ("case", "case_id", "id")
"""Names of the id column; the first that the table has is used."""
FILE_COLUMN = "file"
"""Column of file ids in a manifest; those of files without a case are looked up too."""
SOURCE_COLUMNS = ("patient_id", "accession_number", "study_date", "study_uid", "series_uid", "path")
"""Columns of the crosswalk that are added, with the prefix `source_`."""

FindSource = Callable[[str, int], SourceRecord | None]
"""Returns the source of an id; the number distinguishes copies of a file, from 1."""

_COPY = "copy"
_MAX_CELL = 1 << 24


@dataclass(frozen=True)
class JoinedColumns:
    """Columns of a joined table.

    Parameters
    ----------
    ids : str
        Name of the column of ids.
    kept : tuple of str
        Columns of the original table that are kept.
    """

    ids: str
    kept: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """All columns of the joined table, in order."""
        return (*self.kept, *(f"source_{name}" for name in SOURCE_COLUMNS))


def read_ids(path: Path, column: str | None = None) -> set[str]:
    """Return the case ids of a CSV (UTF-8, commas) or Parquet table, by default by `ID_COLUMNS`.

    Raises
    ------
    ScanError
        NOT_FOUND, UNREADABLE or DAMAGED; COLUMN_UNKNOWN if the table has no such column.
    """
    if _is_parquet(path):
        table = _read_parquet(path)
        name = _columns(table.column_names, column).ids
        return {_id(row, name) for row in _text_rows(_id_columns(table, name))}
    with _csv_rows(path) as (names, rows):
        name = _columns(names, column).ids
        return {_id(row, name) for row in rows}


def read_text_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the column names and the rows, as text, of a CSV (UTF-8, commas) or Parquet table.

    Raises
    ------
    ScanError
        NOT_FOUND, UNREADABLE or DAMAGED.
    """
    if _is_parquet(path):
        table = _read_parquet(path)
        return list(table.column_names), list(_text_rows(table))
    with _csv_rows(path) as (names, rows):
        return names, list(rows)


def join_csv(path: Path, find_source: FindSource, file: TextIO, column: str | None = None) -> int:
    """Write a table as CSV with the source of each row; return the count of unknown ids.

    A row without an id, such as that of a file that belongs to no series, is left unchanged.

    Cells that a spreadsheet would interpret as a formula get a leading apostrophe; numbers are left
    unchanged.

    Raises
    ------
    ScanError
        As `read_ids`.
    """
    if _is_parquet(path):
        table = _read_parquet(path)
        return _write_csv(table.column_names, _text_rows(table), find_source, file, column)
    with _csv_rows(path) as (names, rows):
        return _write_csv(names, rows, find_source, file, column)


def join_parquet(
    path: Path, find_source: FindSource, target: Path, column: str | None = None
) -> int:
    """Write a table as Parquet with the source of each row; return the count of unknown ids.

    Formulas are not escaped: no spreadsheet opens Parquet.

    Raises
    ------
    ScanError
        As `read_ids`.
    """
    import pyarrow as pa
    from pyarrow import parquet

    table = _read_parquet(path) if _is_parquet(path) else _read_csv(path)
    columns = _columns(table.column_names, column)
    rows = list(_text_rows(_id_columns(table, columns.ids)))
    row_sources = [find_source(_id(row, columns.ids), _copy(row)) for row in rows]
    joined = table.select(list(columns.kept))
    for name in SOURCE_COLUMNS:
        values = [None if source is None else getattr(source, name) for source in row_sources]
        joined = joined.append_column(f"source_{name}", pa.array(values, pa.string()))
    parquet.write_table(joined, target)
    pairs = zip(rows, row_sources, strict=True)
    return sum(row[columns.ids] != "" and source is None for row, source in pairs)


def _write_csv(
    names: Sequence[str],
    rows: Iterable[Mapping[str, str]],
    find_source: FindSource,
    file: TextIO,
    column: str | None,
) -> int:
    columns = _columns(names, column)
    table = csv.writer(file, lineterminator="\n")
    table.writerow([escape_formula(name) for name in columns.all])
    unknown = 0
    for row in rows:
        source = find_source(_id(row, columns.ids), _copy(row))
        unknown += source is None and row[columns.ids] != ""
        cells = [row[name] for name in columns.kept]
        cells += ["" if source is None else getattr(source, name) for name in SOURCE_COLUMNS]
        table.writerow([escape_formula(cell) for cell in cells])
    return unknown


def _id_columns(table: pa.Table, column: str) -> pa.Table:
    """Return the columns by which sources are found."""
    return table.select([n for n in table.column_names if n in (column, FILE_COLUMN, _COPY)])


def _id(row: Mapping[str, str], column: str) -> str:
    """Return the id of a row, or that of its file if it belongs to no case."""
    return row[column] or row.get(FILE_COLUMN, "")


def _copy(row: Mapping[str, str]) -> int:
    """Return the number of a copy of a file; 1 if the row has none."""
    text = row.get(_COPY, "")
    return int(text) if text.isdecimal() else 1


def _columns(names: Sequence[str], column: str | None) -> JoinedColumns:
    """Find the column of ids, and leave out the columns that an earlier join added."""
    if len(set(names)) != len(names):
        raise ScanError(Reason.DAMAGED, "two columns of the table have the same name")
    candidates = (column,) if column is not None else ID_COLUMNS
    ids = next((name for name in candidates if name in names), None)
    if ids is None:
        detail = f"the table has no column {' or '.join(candidates)}"
        raise ScanError(Reason.COLUMN_UNKNOWN, detail)
    added = {f"source_{name}" for name in SOURCE_COLUMNS}
    return JoinedColumns(ids, tuple(name for name in names if name not in added or name == ids))


@contextmanager
def _read_errors(reason: Reason, *errors: type[Exception]) -> Iterator[None]:
    """Refuse a table for these exceptions."""
    try:
        yield
    except errors as exc:
        raise ScanError(reason, f"the table can't be read ({type(exc).__name__})") from exc


def _is_parquet(path: Path) -> bool:
    if not path.exists():
        raise ScanError(Reason.NOT_FOUND, "this table does not exist", str(path))
    with _read_errors(Reason.UNREADABLE, OSError), open_regular_file(path) as file:
        return file.read(4) == b"PAR1"


def _read_parquet(path: Path) -> pa.Table:
    import pyarrow as pa
    from pyarrow import parquet

    damage = _read_errors(Reason.DAMAGED, OSError, pa.ArrowException)
    with damage, parquet.ParquetFile(path) as file:
        return file.read()


def _read_csv(path: Path) -> pa.Table:
    """Read a CSV with typed columns; ids are text, even if they look like numbers."""
    import pyarrow as pa
    from pyarrow import csv as arrow

    types = dict.fromkeys(ID_COLUMNS, pa.string())
    with _read_errors(Reason.DAMAGED, OSError, pa.ArrowException):
        return arrow.read_csv(path, convert_options=arrow.ConvertOptions(column_types=types))


def _text_rows(table: pa.Table) -> Iterator[dict[str, str]]:
    for batch in table.to_batches():
        for row in batch.to_pylist():
            yield {name: _text(value) for name, value in row.items()}


def _text(value: Any) -> str:
    """Return a value as the text of a CSV cell; elements of a list are separated by spaces."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


@contextmanager
def _csv_rows(path: Path) -> Iterator[tuple[list[str], Iterator[dict[str, str]]]]:
    """Yield the column names of a CSV, and an iterator over its rows as text."""
    csv.field_size_limit(_MAX_CELL)
    with _read_errors(Reason.UNREADABLE, OSError):
        file = path.open(encoding="utf-8-sig", newline="")
    with file:
        lines = _lines(csv.reader(file, strict=True))
        names = next(lines, [])
        yield names, (_row(names, cells) for cells in lines)


def _lines(reader: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield the lines that are not empty; errors are converted to ScanError."""
    try:
        yield from filter(None, reader)
    except (OSError, csv.Error, UnicodeDecodeError) as exc:
        detail = f"the table is not a CSV in UTF-8 ({type(exc).__name__})"
        raise ScanError(Reason.DAMAGED, detail) from exc


def _row(names: Sequence[str], cells: Sequence[str]) -> dict[str, str]:
    if len(cells) != len(names):
        detail = f"a row of the table has {len(cells)} cells instead of {len(names)}"
        raise ScanError(Reason.DAMAGED, detail)
    return dict(zip(names, cells, strict=True))
