"""Joined tables: every row as it was, its source beside it, nothing that a spreadsheet runs."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scanloom.core import ScanError
from scanloom.io.output import join_sources
from scanloom.io.output.crosswalk import SourceRecord
from scanloom.io.output.join_sources import SOURCE_COLUMNS, join_csv, join_parquet, read_ids
from scanloom.io.output.measurements import escape_formula

SOURCES = {
    "aaa": SourceRecord(
        "aaa", "dicom", "/å/one", 3, "", "1.2", "3.4", '=1+1"', "n", "A,1", "20250102"
    ),
    "bbb": SourceRecord("bbb", "nifti", "-dash/b.nii", 1),
}
TABLE = 'case,label,mean,flags\naaa,liver,-12.50,\nbbb,"=HYPERLINK(1)",1e5,X Y\nccc,lung,+3,\n'
ADDED = [f"source_{name}" for name in SOURCE_COLUMNS]


def find_source(row_ids: pa.Array, copies: pa.Array) -> pa.Table:
    pairs = zip(row_ids.to_pylist(), copies.to_pylist(), strict=True)
    found = [
        SOURCES.get(row_id if copy == 1 else f"{row_id}, copy {copy}") for row_id, copy in pairs
    ]
    rows = {name: [source and getattr(source, name) for source in found] for name in SOURCE_COLUMNS}
    return pa.table(rows, pa.schema([(name, pa.string()) for name in SOURCE_COLUMNS]))


def written(path: Path, text: str = TABLE) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def joined(path: Path, column: str | None = None) -> tuple[list[dict[str, str]], int]:
    text = io.StringIO()
    unknown = join_csv(path, find_source, text, column)
    return list(csv.DictReader(io.StringIO(text.getvalue()), strict=True)), unknown


def joined_text(path: Path) -> str:
    text = io.StringIO()
    join_csv(path, find_source, text)
    return text.getvalue()


def test_rows_get_their_source_and_keep_the_rest(tmp_path: Path) -> None:
    rows, unknown = joined(written(tmp_path / os.fsdecode(b"not UTF-8 \xfc.csv")))

    assert unknown == 1
    assert list(rows[0]) == ["case", "label", "mean", "flags", *ADDED]
    assert [row["mean"] for row in rows] == ["-12.50", "1e5", "+3"]
    assert rows[0]["source_patient_id"] == "'=1+1\""
    assert rows[0]["source_accession_number"] == "A,1"
    assert rows[0]["source_path"] == "/å/one"
    assert rows[1]["label"] == "'=HYPERLINK(1)"
    assert rows[1]["source_path"] == "'-dash/b.nii"
    assert {rows[2][name] for name in ADDED} == {""}


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_batches_make_the_text_of_a_whole(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, *_ = whole = joined_text(written(tmp_path / "t.csv")).splitlines(keepends=True)
    monkeypatch.setattr(join_sources, "BATCH_ROWS", rows)
    assert joined_text(tmp_path / "t.csv").splitlines(keepends=True) == whole
    assert len(whole) == 4
    assert joined_text(written(tmp_path / "t.csv", TABLE.splitlines()[0] + "\n")) == head


def test_a_row_without_an_id_is_not_unknown(tmp_path: Path) -> None:
    table = written(tmp_path / "t.csv", "file,case\nf1,aaa\nf2,\nf3,zzz\n")

    assert joined(table)[1] == join_parquet(table, find_source, tmp_path / "t.parquet") == 1


def test_a_file_of_no_case_is_looked_up_by_its_own_id(tmp_path: Path) -> None:
    table = written(tmp_path / "t.csv", "file,copy,case\nf1,1,aaa\naaa,1,\nf3,1,\naaa,2,\n")
    rows, unknown = joined(table)
    assert [row["source_path"] for row in rows] == ["/å/one", "/å/one", "", ""]
    assert unknown == 0
    join_parquet(table, find_source, tmp_path / "t.parquet")
    paths = pq.read_table(tmp_path / "t.parquet").column("source_path").to_pylist()
    assert paths == ["/å/one", "/å/one", None, None]


def test_a_table_may_be_joined_twice(tmp_path: Path) -> None:
    first, second = io.StringIO(), io.StringIO()
    join_csv(written(tmp_path / "t.csv"), find_source, first)
    join_csv(written(tmp_path / "again.csv", first.getvalue()), find_source, second)

    assert first.getvalue() == second.getvalue()


def test_a_column_of_the_table_with_a_name_of_ours_is_not_lost(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "case,source_path\naaa,PACS\n")
    for join in (joined, read_ids, lambda t: join_parquet(t, find_source, tmp_path / "to")):
        with pytest.raises(ScanError, match="source_path already, which `join` would replace"):
            join(path)


@pytest.mark.parametrize(
    "cell",
    ["=1+1", "+1+1", "-1+1", "-2-cmd", "@SUM(1)", "\t=1", "\r=1", "\n=1", "\uff1d1+1", "-", "+a"],
)
def test_formulas_are_escaped(cell: str) -> None:
    assert escape_formula(cell) == f"'{cell}"
    assert escape_formula(escape_formula(cell)) == escape_formula(cell)


@pytest.mark.parametrize(
    "cell", ["-3", "-3,5", "+3.5", "-.5", "-1e-05", "-1.e+5", "-inf", "-nan", "", "a=b"]
)
def test_numbers_and_plain_text_are_left_alone(cell: str) -> None:
    assert escape_formula(cell) == cell


def test_cells_are_written_as_by_the_writer_of_python(tmp_path: Path) -> None:
    """But for a carriage return, which that of some versions leaves unquoted."""
    texts = [
        "a",
        "",
        "a,b",
        'a"b',
        '"',
        "a\nb",
        "a\r\nb",
        " a ",
        "å",
        "=1,2",
        '=1"',
        "-3.5",
        "-3,5",
    ]
    texts += ["\uff1d1", "'", "\t=1", "\n", "\r\n", "+a\nb", "a\x1fb", "\x00"]
    rows = [(n, other) for n in texts for other in texts]
    pq.write_table(
        pa.table({"case": ["x"] * len(rows), "a": [a for a, _ in rows], "b": [b for _, b in rows]}),
        tmp_path / "t",
    )
    text, expected = io.StringIO(newline=""), io.StringIO(newline="")
    assert join_csv(tmp_path / "t", find_source, text) == len(rows)
    writer = csv.writer(expected, lineterminator="\n")
    writer.writerow(["case", "a", "b", *ADDED])
    writer.writerows(["x", *map(escape_formula, row), *[""] * len(ADDED)] for row in rows)
    assert text.getvalue() == expected.getvalue()


def parquet(path: Path) -> Path:
    table = pa.table(
        {
            "case": pa.array(["aaa", "bbb", "ccc"]).dictionary_encode(),
            "mean": [-12.5, None, 3.0],
            "box": [[1, 2], None, [3]],
        }
    )
    pq.write_table(table, path)
    return path


def test_parquet_stays_typed(tmp_path: Path) -> None:
    """And unescaped: no spreadsheet opens it."""
    assert join_parquet(parquet(tmp_path / "t.parquet"), find_source, tmp_path / "to.parquet") == 1
    table = pq.read_table(tmp_path / "to.parquet")
    assert table.column_names == ["case", "mean", "box", *ADDED]
    assert table.column("mean").to_pylist() == [-12.5, None, 3.0]
    assert table.column("source_patient_id").to_pylist() == ['=1+1"', "", None]


def test_parquet_becomes_csv_and_csv_parquet(tmp_path: Path) -> None:
    rows, unknown = joined(parquet(tmp_path / "named.csv"))  # told by content, not by name
    assert unknown == 1
    assert [row["mean"] for row in rows] == ["-12.5", "", "3.0"]
    assert [row["box"] for row in rows] == ["1 2", "", "3"]

    join_parquet(written(tmp_path / "t.csv"), find_source, tmp_path / "to.parquet")
    table = pq.read_table(tmp_path / "to.parquet")
    assert table.column("mean").to_pylist() == [-12.5, 1e5, 3.0]
    assert table.column("source_study_uid").to_pylist() == ["1.2", "", None]


def test_codes_stay_text(tmp_path: Path) -> None:
    """Only the numbers of measurements are numbers in Parquet, and none that looks like a code."""
    codes = ["007", "1e5", "2025-01-02", "NA", "1.10", "true", "90071992547409931", "null"]
    codes += ["'", "'a", "=1", "-A7"]
    head = "subject,case,number,voxels,volume_ml,share,copy,cm_energy\n"
    cells = [escape_formula(code) for code in codes]
    rows = [f"{cell},x,{n}7,{n}.5,{n}5,,2,1e-05\n" for n, cell in enumerate(cells)]
    path = written(tmp_path / "t.csv", head + "".join(rows))
    assert join_parquet(path, find_source, tmp_path / "to.parquet", "subject") == len(codes)
    table = pq.read_table(tmp_path / "to.parquet")
    assert table.column("subject").to_pylist() == codes
    assert table.column("number").to_pylist()[:2] == ["07", "17"]
    assert table.column("voxels").to_pylist()[:2] == ["0.5", "1.5"]
    assert table.column("volume_ml").to_pylist()[:2] == ["05", "15"]
    assert table.column("share").to_pylist() == [None] * len(codes)
    assert {*table.column("copy").to_pylist()} == {2}
    assert {*table.column("cm_energy").to_pylist()} == {1e-5}


def test_the_number_of_a_copy_may_be_a_float(tmp_path: Path) -> None:
    """As pandas has it beside an empty cell."""
    numbers = ["2.0", "", "9" * 30]
    table = "".join(["case,copy\n", *(f"aaa,{n}\n" for n in numbers)])
    rows, unknown = joined(written(tmp_path / "t.csv", table))
    assert [row["source_path"] for row in rows] == ["", "/å/one", "/å/one"]
    assert unknown == 1


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_the_sources_of_other_output_folders_stay(form: str, tmp_path: Path) -> None:
    """A table of several runs is joined with one after the other."""
    told = dict.fromkeys(ADDED, "") | {"source_patient_id": "007", "source_path": "/other"}
    head, names = "case," + ",".join(told) + "\n", ",".join(told.values())
    path = written(tmp_path / "t.csv", f"{head}aaa,{names}\nzzz,{names}\nyyy{',' * len(told)}\n")
    if form == "csv":
        rows, unknown = joined(path)
    else:
        unknown = join_parquet(path, find_source, tmp_path / "to")
        rows = pq.read_table(tmp_path / "to").to_pylist()
    assert [row["source_patient_id"] or "" for row in rows][1:] == ["007", ""]
    assert [row["source_path"] or "" for row in rows] == ["/å/one", "/other", ""]
    assert unknown == 1


@pytest.mark.parametrize("name", ["case", "case_id", "id"])
def test_the_column_of_ids_is_found_or_named(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", f"x,{name}\n1,aaa\n\n2,bbb\n")
    assert read_ids(path).to_pylist() == ["aaa", "bbb"]
    assert read_ids(path, "x").to_pylist() == ["1", "2"]
    assert joined(path, name)[1] == 0


def test_what_a_spreadsheet_saved_is_read(tmp_path: Path) -> None:
    """A byte order mark, Windows line ends, quotes."""
    path = tmp_path / "t.csv"
    path.write_bytes('\ufeff"case","note"\r\n"aaa","two\r\nlines"\r\n'.encode())
    [row], _ = joined(path)
    assert row["note"] == "two\r\nlines"
    assert row["source_study_uid"] == "1.2"


def test_spaces_around_ids_do_not_matter(tmp_path: Path) -> None:
    rows, unknown = joined(written(tmp_path / "t.csv", "case,note\n aaa ,x\n  ,y\n"))
    assert [row["source_study_uid"] for row in rows] == ["1.2", ""]
    assert unknown == 0
    assert rows[0]["case"] == " aaa "


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'\xef\xbb\xbf"case";"v"\r\n"aaa";"1,5"\r\n', "separated by semicolons"),
        (b"case\tv\naaa\t1\n", "separated by tabs"),
        (b"PK\x03\x04\x14\x00,\x00", "a workbook of a spreadsheet"),
        (b"case,v,,\naaa,1,,\n", "several columns of the table have no name"),
        (b"case,v\naaa\n", "not all of its rows have as many cells"),
        (b"case,v\n" + b"aaa,1\n" * 9999 + b"aaa,M\xfcller\n", "not a CSV in UTF-8"),
    ],
)
def test_other_exports_of_a_spreadsheet_are_named(
    content: bytes, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(ScanError, match=told):
        joined(path)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"label,mean\nliver,1\n", "COLUMN_UNKNOWN"),
        (b"", "COLUMN_UNKNOWN"),
        (b"case,case\na,b\n", "DAMAGED"),
        (b"case,label\na\n", "DAMAGED"),
        (b'case\n"a', "DAMAGED"),
        (b"case\n\xff\n", "DAMAGED"),
        (b"case\na\0b\n\xfe", "DAMAGED"),
        (b"PAR1 and no more", "DAMAGED"),
        (None, "NOT_FOUND"),
    ],
)
def test_other_files_are_refused_by_name(content: bytes | None, code: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ScanError) as caught:
        joined(path)
    assert caught.value.code == code
    assert str(tmp_path) not in str(caught.value)
