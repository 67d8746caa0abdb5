"""Folder names made of sources: safe, short, and each for one case."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scanloom.io.output.crosswalk import MAX_NAME_BYTES, SourceRecord, folder_name, safe_file_name

ID = "abcdefghijklmnopqrstuvwxyz"


def source(
    path: str = "/scans/liver 01.nii.gz", patient: str = "", number: str = ""
) -> SourceRecord:
    return SourceRecord(ID, "dicom", path, 1, patient_id=patient, series_number=number)


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (source(), "liver_01"),
        (source("/scans/T1.mha"), "T1"),
        (source("/scans/v1.2/scan.nhdr"), "scan"),
        (source("/scans/Doe^Jane"), "Doe_Jane"),
        (source(patient="P-0042", number="3"), "P-0042_3"),
        (source(patient="P-0042"), "P-0042"),
        (source(patient="1.2.3/../..", number="3"), "1_2_3_3"),
        (source(patient="山田 Müller", number="1"), "山田_Müller_1"),
        (source("/scans/..."), ID),
        (source("/"), ID),
        (source("/scans/NUL.nii"), "NUL_"),
    ],
)
def test_names_are_those_of_the_source(record: SourceRecord, name: str) -> None:
    assert folder_name(record, []) == name


def test_of_two_that_have_one_name_the_second_gets_the_end_of_its_id() -> None:
    """Capitals make no second name: some file systems know no difference."""
    assert folder_name(source(), ["LIVER_01"]) == "liver_01-uvwxyz"
    assert folder_name(source(), ["liver_01", "liver_01-uvwxyz"]) == ID


@pytest.mark.thorough
@given(st.text(max_size=300))
def test_any_text_becomes_a_safe_name(text: str) -> None:
    name = safe_file_name(text)
    assert len(name.encode()) <= MAX_NAME_BYTES + 1
    assert not set(name) & set("./\\:*?\"<>|^$`;&'! \t\n\0")
    assert not name.startswith(("-", "."))
    assert name in ("", Path(name).name)
    assert safe_file_name(name) == name
