"""A Parquet table to which rows are appended as lines of JSON, until these are many.

A large table is not written anew for each row: rows are appended, synced to the disk, to a file of
lines beside it, until these are as large as the table. Then the lines become part of the table, and
their file is removed. Whoever reads takes both; a process that died in between left rows twice.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from scanloom.io.output.parquet_file import parquet_writer
from scanloom.io.system.atomic_write import append_synced, cut_half_line, fsync_path
from scanloom.io.system.regular_files import open_link_free, open_regular_file

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_ROWS = 100_000
"""Rows of a group: what is read at a time."""

_CHECKSUM = "crc32"

T = TypeVar("T")


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows as lines; half a line of a dead process is cut off.

    A new file is readable by its owner only.

    Raises
    ------
    OSError
        If they can't be written: then the file is as before.
    """
    text = "".join(map(format_line, rows))
    is_new = not path.exists()
    descriptor = open_link_free(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = cut_half_line(descriptor)
        append_synced(descriptor, text.encode(), size)
    finally:
        os.close(descriptor)
    if is_new:
        fsync_path(path.parent)


def read_lines(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield the rows that were appended; not the half of one that is being written.

    Raises
    ------
    OSError, ValueError
        If a line can't be read.
    """
    for line in file:
        if line.endswith(b"\n"):
            yield parse_line(line)


def format_line(row: Mapping[str, Any]) -> str:
    """Return a row as a line, which ends with a checksum: `parse_line` reads it."""
    text = json.dumps(row, ensure_ascii=False)
    return f'{text[:-1]}, "{_CHECKSUM}": {zlib.crc32(text.encode())}}}\n'


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the row of a line; a line of JSON without a checksum is taken as it is.

    Raises
    ------
    ValueError, TypeError, AttributeError
        If it is not a JSON object, or differs from its checksum.
    """
    row: dict[str, Any] = json.loads(line)
    checksum = row.pop(_CHECKSUM, None)
    if checksum is not None and checksum != zlib.crc32(
        json.dumps(row, ensure_ascii=False).encode()
    ):
        raise ValueError("a line differs from its checksum")
    return row


def read_both(lines: Path, read: Callable[[BinaryIO | None], T]) -> T:
    """Return what `read` makes of a table and its open file of lines, None without it.

    `read` takes the lines first, and is called again if they became part of the table meanwhile:
    what leaves them is in the table by then. So a row may be seen twice, but is never missed.

    Raises
    ------
    OSError
        If the lines can't be opened; as `read`.
    """
    while True:
        try:
            appended = open_regular_file(lines)
        except (FileNotFoundError, NotADirectoryError):
            return read(None)
        with appended:
            result = read(appended)
            # While it is open, no other file has its inode
            if _identity(os.fstat(appended.fileno())) == _identity(file_state(lines)):
                return result


def write_groups(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Write tables one behind the other, in groups of GROUP_ROWS, with a checksum of each page.

    Raises
    ------
    OSError
        If the file can't be written.
    """
    import pyarrow as pa

    with parquet_writer(path, schema) as writer:
        rest = schema.empty_table()
        for table in tables:
            rest = pa.concat_tables([rest, table])
            while rest.num_rows >= GROUP_ROWS:
                writer.write_table(rest.slice(0, GROUP_ROWS))
                rest = rest.slice(GROUP_ROWS)
        if rest.num_rows:
            writer.write_table(rest)


def file_state(path: Path) -> os.stat_result | None:
    """Return the state of a file; None if it is missing."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def file_size(path: Path) -> int:
    """Return the size of a file; 0 if it is missing."""
    state = file_state(path)
    return 0 if state is None else state.st_size


def _identity(state: os.stat_result | None) -> object:
    return None if state is None else (state.st_dev, state.st_ino)
