"""Joins tables of results with the sources of their case ids, for the holders of the key."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from scanloom.core import Reason, ScanError, is_passing, read_error
from scanloom.io.output.measurements import (
    FLOAT_COLUMNS,
    FORMULA_PREFIXES,
    INTEGER_COLUMNS,
    escape_formula,
    unescape_formula,
)
from scanloom.io.output.parquet_file import open_native, open_parquet, read_errors, write_parquet
from scanloom.io.system.regular_files import open_regular_file

if TYPE_CHECKING:
    import pyarrow as pa

ID_COLUMNS = ("case", "case_id", "id")
"""Names of the id column; the first that the table has is used."""
FILE_COLUMN = "file"
"""Column of file ids in a manifest; those of files without a case are looked up too."""
SOURCE_COLUMNS = (
    *("patient_id", "accession_number", "study_date", "study_uid", "series_uid", "path", "phase"),
)
"""Columns of the crosswalk that are added, with the prefix `source_`."""

_ADDED = tuple(f"source_{name}" for name in SOURCE_COLUMNS)

FindSources = Callable[["pa.Array", "pa.Array"], "pa.Table"]
"""Returns the `SOURCE_COLUMNS` of ids (N,), null if unknown; the numbers (N,) distinguish copies of
a file, from 1."""
ReadColumns = Callable[[Sequence[str]], Iterator["pa.RecordBatch"]]

_UNREAD = "the table can't be read"
_NO_CSV = "the table is not a CSV in UTF-8, or not all of its rows have as many cells"
_COPY = "copy"
_FEATURES = ("morph_", "stat_", "ih_", "cm_", "rlm_", "szm_", "ngt_")
"""Beginnings of the columns of radiomics."""
_MAX_CELL = 1 << 24
_QUOTED = '[,"\r\n]'
_NUMBER = r"^([+-]?(0|[1-9][0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]+)?)?$"
"""Cells of a column of numbers; one with zeros before it may be a code."""
_STANDS_OUT = f"^[{''.join(map(re.escape, FORMULA_PREFIXES))}]|{_QUOTED}"
"""Cells that may be a formula, or have to be quoted."""
BATCH_ROWS = 250_000
"""Rows that are in memory at a time."""


def read_ids(path: Path, column: str | None = None) -> pa.Array:
    """Return each case id of a CSV (UTF-8, commas) or Parquet table once, by `ID_COLUMNS`.

    `column` is another column to take.

    Raises
    ------
    ScanError
        NOT_FOUND, UNREADABLE or DAMAGED; COLUMN_UNKNOWN if the table has no such column.
    """
    import pyarrow as pa

    with _open_table(path) as (names, batches):
        name, _ = _columns(names, column)
        chunks = [_ids(batch, name) for batch in batches(_id_columns(names, name))]
        return pa.chunked_array(chunks, pa.string()).unique()


def read_text_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the column names and the rows, as text, of a CSV (UTF-8, commas) or Parquet table.

    The apostrophe before a cell of a CSV that a spreadsheet would execute is not part of its text.

    Raises
    ------
    ScanError
        NOT_FOUND, UNREADABLE or DAMAGED.
    """
    if _is_parquet(path):
        table = _read_parquet(path)
        return list(table.column_names), list(_text_rows(table))
    with _csv_rows(path) as (names, rows):
        return names, [{n: unescape_formula(cell) for n, cell in row.items()} for row in rows]


def join_csv(path: Path, find_sources: FindSources, file: TextIO, column: str | None = None) -> int:
    """Write a table as CSV with the source of each row; return the count of unknown ids.

    A row without an id, such as that of a file that belongs to no series, is left unchanged. So is
    one with an unknown id, and the source that an earlier join, of another output folder, found.

    Cells that a spreadsheet would interpret as a formula get a leading apostrophe; numbers are left
    unchanged.

    Raises
    ------
    ScanError
        As `read_ids`.
    """
    import pyarrow as pa
    from pyarrow import compute

    unknown = 0
    with _open_table(path) as (names, batches):
        ids, kept = _columns(names, column)
        head = csv.writer(file, lineterminator="\n")
        head.writerow([escape_formula(name) for name in (*kept, *_ADDED)])
        for batch in batches(names):
            sources, missing = _sources_of(batch, ids, find_sources)
            unknown += missing
            cells = [_texts(batch.column(name)) for name in kept]
            cells += [compute.fill_null(source, "") for source in sources]
            lines = compute.binary_join_element_wise(*map(_cells, cells), ",")
            [text] = compute.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), "\n")
            file.write(f"{text}\n")
    return unknown


def join_parquet(
    path: Path, find_sources: FindSources, target: Path, column: str | None = None
) -> int:
    """Write a table as Parquet with the source of each row; return the count of unknown ids.

    Formulas are not escaped: no spreadsheet opens Parquet.

    Raises
    ------
    ScanError
        As `read_ids`.
    """
    import pyarrow as pa

    table = _read_parquet(path) if _is_parquet(path) else _read_csv(path)
    ids, kept = _columns(table.column_names, column)
    joined, unknown = table.select(kept), 0
    added: list[list[pa.Array]] = [[] for _ in SOURCE_COLUMNS]
    for batch in table.select(_id_columns(table.column_names, ids, *_ADDED)).to_batches():
        sources, missing = _sources_of(batch, ids, find_sources)
        unknown += missing
        for chunks, source in zip(added, sources, strict=True):
            chunks.append(source)
    for name, chunks in zip(_ADDED, added, strict=True):
        joined = joined.append_column(name, pa.chunked_array(chunks, pa.string()))
    write_parquet(joined, target)
    return unknown


def _sources_of(
    batch: pa.RecordBatch, column: str, find_sources: FindSources
) -> tuple[list[pa.Array], int]:
    """Return `SOURCE_COLUMNS` of some rows, null where unknown, and the number of unknown ids.

    Where an id is unknown, the source that the rows have already is returned.
    """
    import pyarrow as pa
    from pyarrow import compute

    copies = pa.repeat(pa.scalar(1, pa.int64()), len(batch))
    if _COPY in batch.schema.names:
        texts = _texts(batch.column(_COPY))
        # numbers beside empty cells become floats in pandas
        texts = compute.replace_substring_regex(texts, "[.]0*$", "")
        is_number = compute.match_substring_regex(texts, "^[0-9]{1,18}$")
        copies = compute.if_else(is_number, texts, "1").cast(pa.int64())
    sources = find_sources(_ids(batch, column), copies)
    values = [sources.column(name).combine_chunks() for name in SOURCE_COLUMNS]
    is_unknown = compute.is_null(sources.column("path").combine_chunks())  # a source has a path
    for index, name in enumerate(_ADDED):
        if name in batch.schema.names and name != column:
            existing = _texts(batch.column(name))
            is_kept = compute.and_(is_unknown, compute.not_equal(existing, ""))
            values[index] = compute.if_else(is_kept, existing, values[index])
    is_named = compute.not_equal(_trimmed(batch.column(column)), "")
    unknown = compute.and_(is_named, compute.is_null(compute.coalesce(*values)))
    return values, compute.sum(unknown).as_py() or 0


def _cells(texts: pa.Array) -> pa.Array:
    """Return texts as cells of a CSV, as `csv.writer` and `escape_formula` give them."""
    import pyarrow as pa
    from pyarrow import compute

    stands_out = compute.match_substring_regex(texts, _STANDS_OUT)
    cells = texts.filter(stands_out)
    if not len(cells):  # as in most columns
        return texts
    first = compute.utf8_slice_codeunits(cells, 0, 1)
    may_be_formula = compute.is_in(first, value_set=pa.array(FORMULA_PREFIXES))
    if formulas := cells.filter(may_be_formula).to_pylist():
        escaped = pa.array(map(escape_formula, formulas), pa.string())
        cells = compute.replace_with_mask(cells, may_be_formula, escaped)
    is_quoted = compute.match_substring_regex(cells, _QUOTED)
    doubled = compute.replace_substring(cells.filter(is_quoted), '"', '""')
    quoted = compute.binary_join_element_wise('"', doubled, '"', "")
    cells = compute.replace_with_mask(cells, is_quoted, quoted)
    return compute.replace_with_mask(texts, stands_out, cells)


def _id_columns(names: Iterable[str], *columns: str) -> list[str]:
    """Return the columns by which sources are found, `columns` and those of files."""
    return [name for name in names if name in (*columns, FILE_COLUMN, _COPY)]


def _ids(batch: pa.RecordBatch, column: str) -> pa.Array:
    """Return the ids of rows (N,), or those of their files if they belong to no case."""
    from pyarrow import compute

    ids = _trimmed(batch.column(column))
    if FILE_COLUMN not in batch.schema.names:
        return ids
    return compute.if_else(compute.equal(ids, ""), _texts(batch.column(FILE_COLUMN)), ids)


def _trimmed(values: pa.Array) -> pa.Array:
    """Return ids as texts (N,), without the spaces that were pasted with them."""
    from pyarrow import compute

    return compute.utf8_trim_whitespace(_texts(values))


def _columns(names: Sequence[str], column: str | None) -> tuple[str, list[str]]:
    """Return the column of ids, and the columns that are kept: without those of an earlier join.

    Some of their names alone are columns of somebody else, which must not be lost.
    """
    if len(set(names)) != len(names):
        unnamed = "several columns of the table have no name: name them, or delete them"
        same = "two columns of the table have the same name"
        raise ScanError(Reason.DAMAGED, unnamed if names.count("") > 1 else same)
    candidates = (column,) if column is not None else ID_COLUMNS
    ids = next((name for name in candidates if name in names), None)
    if ids is None:
        detail = f"the table has no column {' or '.join(candidates)}"
        raise ScanError(Reason.COLUMN_UNKNOWN, detail)
    own = [name for name in _ADDED if name in names and name != ids]
    if own and len(own) < len(_ADDED) - (ids in _ADDED):
        detail = f"the table has a column {own[0]} already, which `join` would replace: rename it"
        raise ScanError(Reason.DAMAGED, detail)
    return ids, [name for name in names if name not in _ADDED or name == ids]


@contextmanager
def _refused_for(reason: Reason, *errors: type[Exception], detail: str = _UNREAD) -> Iterator[None]:
    """Refuse a table for these exceptions."""
    try:
        yield
    except errors as exc:
        raise ScanError(reason, f"{detail} ({type(exc).__name__})") from exc


def _is_parquet(path: Path) -> bool:
    if not path.exists():
        raise ScanError(Reason.NOT_FOUND, "this table does not exist", str(path))
    with _refused_for(Reason.UNREADABLE, OSError), open_regular_file(path) as file:
        return file.read(4) == b"PAR1"


def _read_parquet(path: Path) -> pa.Table:
    with _refused_for(Reason.DAMAGED, *read_errors()), open_parquet(path) as file:
        return file.read()


def _read_csv(path: Path) -> pa.Table:
    """Read a CSV: texts, but for the numbers of our manifest, measurements and radiomics.

    The type of another column can't be told by its cells: "007", "1e5" and "2025-01-02" are codes
    in some tables.
    """
    import pyarrow as pa

    with _open_table(path) as (names, batches):
        texts = pa.schema([(name, pa.string()) for name in names])
        plain = ([_unescaped(each) for each in batch.columns] for batch in batches(names))
        table = pa.Table.from_batches((pa.record_batch(each, texts) for each in plain), texts)
    for index, name in enumerate(names):
        if name in (*INTEGER_COLUMNS, _COPY):
            table = table.set_column(index, name, _numbers(table[name], pa.int64()))
        elif name in FLOAT_COLUMNS or name.startswith(_FEATURES):
            table = table.set_column(index, name, _numbers(table[name], pa.float64()))
    return table


def _unescaped(cells: pa.Array) -> pa.Array:
    """Return the texts of cells of a CSV (N,)."""
    import pyarrow as pa
    from pyarrow import compute

    may_be_escaped = compute.starts_with(cells, "'")
    texts = [unescape_formula(cell) for cell in cells.filter(may_be_escaped).to_pylist()]
    return compute.replace_with_mask(cells, may_be_escaped, pa.array(texts, pa.string()))


def _numbers(texts: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Return texts as numbers, null if empty; unchanged if one of them is not a number."""
    import pyarrow as pa
    from pyarrow import compute

    if not compute.all(compute.match_substring_regex(texts, _NUMBER), min_count=0).as_py():
        return texts
    try:
        filled = compute.if_else(compute.equal(texts, ""), pa.scalar(None, pa.string()), texts)
        return compute.replace_substring_regex(filled, "^[+]", "").cast(kind)
    except pa.ArrowInvalid:  # such as 1.5 in a column of integers
        return texts


@contextmanager
def _open_table(path: Path) -> Iterator[tuple[list[str], ReadColumns]]:
    """Give the columns of a table, and a function that yields batches of some of them.

    Those of a CSV are texts.
    """
    import pyarrow as pa
    from pyarrow import csv as arrow

    if _is_parquet(path):
        with _refused_for(Reason.DAMAGED, *read_errors()):
            file = open_parquet(path)
        with file:
            yield (
                list(file.schema_arrow.names),
                lambda names: _read(file.iter_batches(BATCH_ROWS, columns=list(names)), _UNREAD),
            )
        return
    with _csv_rows(path) as (names, _):
        pass
    with _refused_for(Reason.UNREADABLE, OSError), open_regular_file(path) as text:
        quotes = sum(block.count(b'"') for block in iter(lambda: text.read(_MAX_CELL), b""))
    if quotes % 2:  # Arrow would take the rest for a cell
        raise ScanError(Reason.DAMAGED, "the table is not a CSV in UTF-8 (a quote is not closed)")

    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        texts = dict.fromkeys(columns, pa.string())
        with (
            _refused_for(Reason.DAMAGED, OSError, pa.ArrowException),
            _refused_for(Reason.DAMAGED, pa.ArrowInvalid, detail=_NO_CSV),
        ):
            reader = arrow.open_csv(
                open_native(path),
                arrow.ReadOptions(block_size=_MAX_CELL),
                arrow.ParseOptions(newlines_in_values=True),
                arrow.ConvertOptions(column_types=texts, include_columns=list(columns)),
            )
        return _read(iter(reader), _NO_CSV)

    yield names, read


def _read(batches: Iterator[pa.RecordBatch], invalid: str) -> Iterator[pa.RecordBatch]:
    """Yield batches; what is raised where they are used is not damage of the table.

    `invalid` is what is said of one whose content is not valid.
    """
    import pyarrow as pa

    while True:
        with (
            _refused_for(Reason.DAMAGED, OSError, pa.ArrowException),
            _refused_for(Reason.DAMAGED, pa.ArrowInvalid, detail=invalid),
        ):
            batch = next(batches, None)
        if batch is None:
            return
        # a block of a CSV may have more rows
        yield from (batch.slice(n, BATCH_ROWS) for n in range(0, len(batch), BATCH_ROWS))


def _text_rows(table: pa.Table) -> Iterator[dict[str, str]]:
    for batch in table.to_batches():
        for row in batch.to_pylist():
            # whole numbers beside empty cells become floats in pandas
            yield {
                name: _text(int(v) if isinstance(v, float) and v.is_integer() else v)
                for name, v in row.items()
            }


def _texts(values: pa.Array) -> pa.Array:
    """Return values as the texts of CSV cells (N,)."""
    import pyarrow as pa
    from pyarrow import compute

    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if pa.types.is_string(values.type) or pa.types.is_integer(values.type):
        return compute.fill_null(values.cast(pa.string()), "")
    return pa.array(map(_text, values.to_pylist()), pa.string())  # numbers as Python writes them


def _text(value: Any) -> str:
    """Return a value as the text of a CSV cell; elements of a list are separated by spaces."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


@contextmanager
def _csv_rows(path: Path) -> Iterator[tuple[list[str], Iterator[dict[str, str]]]]:
    """Yield the column names of a CSV, and an iterator over its rows as text."""
    csv.field_size_limit(_MAX_CELL)
    with _refused_for(Reason.UNREADABLE, OSError):
        with path.open("rb") as head:
            _check_kind(head.readline(_MAX_CELL))
        file = path.open(encoding="utf-8-sig", newline="")
    with file:
        lines = _lines(csv.reader(file, strict=True))
        names = next(lines, [])
        yield names, (_row(names, cells) for cells in lines)


def _check_kind(first_line: bytes) -> None:
    """Refuse what spreadsheets write in place of a CSV with commas, saying so."""
    if first_line.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")):
        raise ScanError(Reason.DAMAGED, "this is a workbook of a spreadsheet, not a table as CSV")
    if b"," not in first_line:
        for separator, name in ((b";", "semicolons"), (b"\t", "tabs")):
            if separator in first_line:
                detail = f"the columns of the table are separated by {name}, not by commas"
                raise ScanError(Reason.DAMAGED, detail)


def _lines(reader: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield the lines that are not empty; errors are converted to ScanError."""
    try:
        yield from filter(None, reader)
    except (OSError, csv.Error, UnicodeDecodeError) as exc:
        if is_passing(exc):
            raise read_error(exc, "the table", Reason.DAMAGED) from exc
        detail = f"the table is not a CSV in UTF-8 ({type(exc).__name__})"
        raise ScanError(Reason.DAMAGED, detail) from exc


def _row(names: Sequence[str], cells: Sequence[str]) -> dict[str, str]:
    if len(cells) != len(names):
        detail = f"a row of the table has {len(cells)} cells instead of {len(names)}"
        raise ScanError(Reason.DAMAGED, detail)
    return dict(zip(names, cells, strict=True))
