"""A flipped bit in a Parquet file is an error when it is read, or changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from scanloom.core import ScanError
from scanloom.io.output.crosswalk import SourceRecord, add_sources, find_sources
from scanloom.io.output.growing_table import append_lines, read_lines
from scanloom.io.output.parquet_file import (
    open_parquet,
    parquet_writer,
    read_errors,
    read_parquet,
    write_parquet,
)
from scanloom.io.output.private import CROSSWALK, PRIVATE


def patients(count: int) -> pa.Table:
    names = [f"PIDZORB{n:03}" for n in range(count)]
    return pa.table({"id": [f"n{n:020}" for n in range(count)], "patient": names})


def test_no_flipped_bit_gives_other_rows() -> None:
    rows, file = patients(30), BytesIO()
    with parquet_writer(file, rows.schema) as writer:
        writer.write_table(rows.slice(0, 20))
        writer.write_table(rows.slice(20))
    content, refused = file.getvalue(), 0
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        try:
            with open_parquet(BytesIO(flipped)) as table:
                read = [table.read_row_group(n) for n in range(table.num_row_groups)]
            assert pa.concat_tables(read).cast(rows.schema).equals(rows)
        except read_errors():
            refused += 1
    assert refused > len(content) / 4


def test_a_path_need_not_be_utf_8(tmp_path: Path) -> None:
    rows, path = patients(3), tmp_path / os.fsdecode(b"M\xfcller.parquet")
    write_parquet(rows, path)
    with open_parquet(path) as file:
        assert file.read().equals(rows)


def test_a_lost_group_of_rows_is_an_error() -> None:
    """The numbers of rows have no checksum, but contradict each other."""
    rows, file = patients(30), BytesIO()
    with parquet_writer(file, rows.schema) as writer:
        writer.write_table(rows.slice(0, 20))
        writer.write_table(rows.slice(20))
    content = file.getvalue()

    def lost_rows(flipped: bytes) -> bool:
        plain = parquet.ParquetFile(BytesIO(flipped))
        return sum(plain.read_row_group(n).num_rows for n in range(2)) < 30

    description = len(content) - int.from_bytes(content[-8:-4], "little") - 8
    with pytest.raises(ValueError, match="contradict"):
        open_parquet(BytesIO(first_flipped(content, description, lost_rows)))


def test_no_flipped_bit_of_a_line_gives_another_row(tmp_path: Path) -> None:
    path, rows = tmp_path / "rows.jsonl", [{"id": "a", "patient": "ZÖRB 1"}, {"id": "b", "n": 7}]
    append_lines(path, rows)
    content = path.read_bytes()
    for place in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            with suppress(ValueError, TypeError, AttributeError):
                for row, expected in zip(read_lines(BytesIO(flipped)), rows, strict=False):
                    # else its checksum has another name: a field that no row has
                    assert row == expected or len(row) > 2


def test_lines_of_an_older_version_are_read() -> None:
    assert list(read_lines(BytesIO(b'{"id": "a"}\n'))) == [{"id": "a"}]


def first_flipped(content: bytes, start: int, is_wanted: Callable[[bytes], bool]) -> bytes:
    """Return the content with the first flipped bit for which it can be read and is wanted."""
    for place in range(start, len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            with suppress(*read_errors()):
                if is_wanted(bytes(flipped)):
                    return bytes(flipped)
    raise AssertionError("no bit was wanted")


def test_a_file_of_an_older_version_is_read(tmp_path: Path) -> None:
    parquet.write_table(patients(3), tmp_path / "old.parquet")

    with open_parquet(tmp_path / "old.parquet") as table:
        assert table.read().equals(patients(3))
    opened = [file.resolve() for file in Path("/proc/self/fd").iterdir()]
    assert tmp_path / "old.parquet" not in opened


def test_rows_are_chosen_by_an_expression(tmp_path: Path) -> None:
    parquet.write_table(patients(3), tmp_path / "rows.parquet")
    is_second = pa.compute.field("patient") == "PIDZORB001"

    found = read_parquet(tmp_path / "rows.parquet", ["patient"], is_second)

    assert found.to_pylist() == [{"patient": "PIDZORB001"}]


def test_a_crosswalk_with_a_flipped_bit_names_no_other_patient(tmp_path: Path) -> None:
    private = tmp_path / PRIVATE
    private.mkdir()
    sources = [
        SourceRecord(f"id{n:02}", "dicom", "/a", 1, patient_id=f"P{n:03}") for n in range(30)
    ]
    add_sources(private, sources)
    path, names = private / CROSSWALK, {source.patient_id for source in sources}

    def names_another(flipped: bytes) -> bool:
        plain = parquet.read_table(BytesIO(flipped))
        return plain.num_rows == 30 and set(plain["patient_id"].to_pylist()) < names

    column = parquet.ParquetFile(path).metadata.row_group(0).column(7)
    assert column.path_in_schema == "patient_id"
    start = column.dictionary_page_offset
    path.write_bytes(first_flipped(path.read_bytes(), start, names_another))

    with pytest.raises(ScanError, match=r"crosswalk\.parquet can't be read"):
        find_sources(tmp_path, [source.id for source in sources])
