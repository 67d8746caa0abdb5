"""Rows of a table of studies: what they name, and what can't be asked for."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from scanloom.core import Reason, ScanError
from scanloom.engine.listen.rows import FetchRow, Question, read_rows, several_patients

pytest.importorskip("pynetdicom")


ANY = Question()


def read(tmp_path: Path, text: str, question: Question = ANY) -> list[FetchRow]:
    table = tmp_path / "wanted.csv"
    table.write_text(text)
    return read_rows(table, question)


def test_columns_have_our_names_or_those_of_dicom(tmp_path: Path) -> None:
    text = "AccessionNumber,note,Study_UID,source_patient_id,MODALITY\nA1,x,1.2.3,P,ct\n"
    (row,) = read(tmp_path, text)

    keys = row.keys
    assert (keys.accession, keys.study, keys.patient, keys.series) == ("A1", "1.2.3", "P", "")
    assert keys.modalities == row.question.modalities == ("CT",)
    assert (row.number, row.fault) == (1, "")


def test_leading_zeros_stay(tmp_path: Path) -> None:
    table = tmp_path / "wanted.parquet"
    parquet.write_table(pa.table({"accession_number": ["0012", "7"]}), table)

    rows = read_rows(table, Question())
    assert [row.keys.accession for row in rows] == ["0012", "7"]
    assert read(tmp_path, "accession_number\n0012\n")[0].keys.accession == "0012"


def test_ids_are_those_before_a_table_was_joined(tmp_path: Path) -> None:
    """Without the apostrophe of formulas, and without the decimals that pandas gives them."""
    assert read(tmp_path, "source_patient_id\n'-A7\n")[0].keys.patient == "-A7"
    table = tmp_path / "wanted.parquet"
    parquet.write_table(
        pa.table({"accession_number": [12.0, None], "patient_id": ["", "P"]}), table
    )
    assert [row.keys.accession for row in read_rows(table, Question())] == ["12", ""]


@pytest.mark.parametrize(
    ("columns", "cells", "fault"),
    [
        ("accession_number", "A*", "its accession_number is too long, or has a wildcard"),
        ("accession_number", "A\\B", "its accession_number is too long, or has a wildcard"),
        ("patient_id", "P" * 65, "its patient_id is too long, or has a wildcard"),
        ("study_uid", "../../etc", "its study_uid is no UID"),
        ("series_uid", "1..2", "its series_uid is no UID"),
        ("accession_number,study_date", "A,2026", "its study_date is no day such as 2026-11-28"),
        ("accession_number,study_date", ",2026-01-02", "it names nothing"),
        ("accession_number,study_date", "A,20250102", "its date is outside the dates"),
        ("accession_number,modality", "A,MR", "its modality is none of those"),
    ],
)
def test_a_row_that_cannot_be_asked_for_says_why(
    columns: str, cells: str, fault: str, tmp_path: Path
) -> None:
    question = Question(("20260101", ""), ("CT",))
    (row,) = read(tmp_path, f"{columns}\n{cells}\n", question)
    assert row.fault.startswith(fault)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name,modality\nA,CT\n", Reason.COLUMN_UNKNOWN),
        ("study_uid,StudyInstanceUID\n1,2\n", Reason.DAMAGED),
        ("accession_number\n", Reason.NO_MATCH),
        ("accession_number\nA,B\n", Reason.DAMAGED),
    ],
)
def test_a_table_that_names_nothing_is_refused(text: str, reason: Reason, tmp_path: Path) -> None:
    with pytest.raises(ScanError) as refused:
        read(tmp_path, text)
    assert refused.value.reason is reason


def test_words_are_in_either_description() -> None:
    question = Question(("", ""), ("CT", "MR"), ("thorax", "VENOUS"))

    assert question.takes("CT", "CT Thorax", "venous 5.0")
    assert not question.takes("CT", "CT Thorax", "native")
    assert not question.takes("PT", "thorax venous")


@pytest.mark.parametrize(
    ("found", "several"),
    [
        ([("1", "", ""), ("1", "A", "1950")], False),
        ([("1", "", ""), ("2", "", "")], True),
        ([("1", "A", ""), ("1", "B", "")], True),
        ([("1", "", "1950"), ("1", "", "1951")], True),
        ([("", "", "")], False),
    ],
)
def test_patients_differ_by_id_issuer_or_birth_date(
    found: list[tuple[str, str, str]], several: bool
) -> None:
    assert several_patients(found) is several
