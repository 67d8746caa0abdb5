"""Parquet files whose pages have checksums: a flipped bit is an error when read, not other rows.

All tables of ours are written and read here. Pages of files of older versions have no checksums:
such files are read as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scanloom.core.text import is_utf8

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet


def read_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions raised by reading a damaged or foreign file."""
    import pyarrow as pa

    return OSError, LookupError, TypeError, ValueError, pa.ArrowException


def open_native(path: Path | str, mode: str = "rb") -> pa.NativeFile:
    """Open a file for Arrow, which itself opens none whose path is not UTF-8."""
    import pyarrow as pa

    return pa.OSFile(os.fsencode(path), mode)


@contextmanager
def parquet_writer(
    target: Any, schema: pa.Schema, **options: Any
) -> Iterator[parquet.ParquetWriter]:
    """Yield a writer of a path or an open file; `options` as of `pyarrow.parquet.ParquetWriter`."""
    from pyarrow import parquet

    is_path = isinstance(target, str | Path)
    with (
        open_native(target, "wb") if is_path else nullcontext(target) as file,
        parquet.ParquetWriter(file, schema, write_page_checksum=True, **options) as writer,
    ):
        yield writer


def write_parquet(table: pa.Table, target: Any, **options: Any) -> None:
    """Write a table; `options` as in `parquet_writer`.

    Raises
    ------
    OSError
        If the file can't be written.
    """
    with parquet_writer(target, table.schema, **options) as writer:
        writer.write_table(table)


def open_parquet(source: Any) -> parquet.ParquetFile:
    """Open a file: a path, or an open one.

    Raises
    ------
    Exception
        One of `read_errors`, if it can't be read or is damaged; so does reading its rows.
    """
    from pyarrow import parquet

    if isinstance(source, str | Path):
        # Arrow closes what it has opened
        source = str(source) if is_utf8(str(source)) else open_native(source)
    # Threads would gain nothing, and Arrow's pools now and then abort a process that ends soon
    file = parquet.ParquetFile(source, pre_buffer=False, page_checksum_verification=True)
    metadata = file.metadata
    # The description behind the pages has no checksum. A flipped bit there shows when pages are
    # read, except in a number of rows.
    groups = (metadata.row_group(n) for n in range(metadata.num_row_groups))
    if sum(group.num_rows for group in groups) != metadata.num_rows:
        file.close()
        raise ValueError("the numbers of rows contradict each other")
    return file


def read_parquet(source: Any, columns: Sequence[str], where: Any) -> pa.Table:
    """Return columns of the rows that an expression chooses; errors as `open_parquet`.

    Parameters
    ----------
    source : path or file
    columns : sequence of str
    where : pyarrow.compute.Expression
        Of these columns.
    """
    import pyarrow as pa

    with open_parquet(source) as file:
        batches = file.iter_batches(columns=list(columns), use_threads=False)
        schema = pa.schema([file.schema_arrow.field(name) for name in columns])
        filtered = [batch.filter(where) for batch in batches]
        return pa.Table.from_batches(filtered, schema)
