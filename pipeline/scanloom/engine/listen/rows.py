"""`FetchRow`: what is to be fetched, from a table of accession numbers or UIDs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from scanloom.core import Reason, ScanError
from scanloom.io.dicom.uids import is_uid
from scanloom.io.output.join_sources import read_text_table

if TYPE_CHECKING:
    from scanloom.io.network.source import Keys

COLUMNS = {
    "accession_number": "AccessionNumber",
    "study_uid": "StudyInstanceUID",
    "series_uid": "SeriesInstanceUID",
    "patient_id": "PatientID",
    "study_date": "StudyDate",
    "modality": "Modality",
}
"""Columns of a table, by the names of our own tables and by DICOM's; any case. Others are left."""
NAMING = ("accession_number", "study_uid", "series_uid", "patient_id")
"""Columns of which a row has a value."""
MAX_CHARACTERS = 64
_WILD = re.compile(r"[*?\\\x00-\x1f]")


@dataclass(frozen=True)
class Question:
    """Limits of all that is fetched.

    Parameters
    ----------
    dates : (str, str)
        First and last StudyDate, YYYYMMDD; "" for no limit.
    modalities : tuple of str
        Of which a series has one; any if empty.
    words : tuple of str
        Each is in the description of the study or of the series; any case.
    """

    dates: tuple[str, str] = ("", "")
    modalities: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    def takes(self, modality: str, *descriptions: str) -> bool:
        """Return whether a series is wanted, by its modality and descriptions."""
        text = "\n".join(descriptions).casefold()
        fits = not self.modalities or modality in self.modalities
        return fits and all(word.casefold() in text for word in self.words)


@dataclass(frozen=True)
class FetchRow:
    """A row of a table, or a study that answers a question.

    Parameters
    ----------
    number : int
        From 1.
    cells : mapping
        What the row says, by `COLUMNS`.
    question : Question
        With the row's own modality.
    fault : str
        Why it can't be asked for.
    """

    number: int
    cells: Mapping[str, str]
    keys: Keys
    question: Question = field(default_factory=Question)
    fault: str = ""


def read_date(text: str) -> str:
    """Return a day as YYYYMMDD, of that form or of YYYY-MM-DD; ValueError for another text."""
    digits = text.strip().replace("-", "")
    if not re.fullmatch(r"\d{8}", digits):
        raise ValueError("a day such as 2026-11-28")
    date.fromisoformat(digits)
    return digits


def read_rows(path: Path, question: Question) -> list[FetchRow]:
    """Read the rows of a CSV or Parquet table; one that can't be asked for has its fault.

    Raises
    ------
    ScanError
        NOT_FOUND, UNREADABLE, DAMAGED; COLUMN_UNKNOWN if no column names anything; NO_MATCH if
        there are no rows.
    """
    names, rows = read_text_table(path)
    known = {dicom.lower(): ours for ours, dicom in COLUMNS.items()}
    known |= {prefix + ours: ours for ours in COLUMNS for prefix in ("", "source_")}
    columns = {name: known[name.strip().lower()] for name in names if name.strip().lower() in known}
    if len(set(columns.values())) < len(columns):
        raise ScanError(Reason.DAMAGED, "two columns of the table have the same meaning")
    if not set(columns.values()) & set(NAMING):
        detail = f"the table has no column {', '.join(NAMING[:-1])} or {NAMING[-1]}"
        raise ScanError(Reason.COLUMN_UNKNOWN, detail)
    if not rows:
        raise ScanError(Reason.NO_MATCH, "the table has no rows")
    return [
        _row(number, {columns[name]: row[name].strip() for name in columns}, question)
        for number, row in enumerate(rows, 1)
    ]


def _row(number: int, cells: Mapping[str, str], question: Question) -> FetchRow:
    from scanloom.io.network.source import Keys

    dates, fault = question.dates, _fault(cells)
    if (day := cells.get("study_date", "")) and not fault:
        digits = read_date(day)
        first, last = dates
        dates = digits, digits
        if (first and digits < first) or (last and digits > last):
            fault = "its date is outside the dates that were asked for"
    modalities = question.modalities
    if own := cells.get("modality", ""):
        if modalities and own.upper() not in modalities:
            fault = fault or "its modality is none of those that were asked for"
        modalities = (own.upper(),)
    keys = Keys(
        accession=cells.get("accession_number", ""),
        study=cells.get("study_uid", ""),
        series=cells.get("series_uid", ""),
        patient=cells.get("patient_id", ""),
        dates=dates,
        modalities=modalities,
    )
    return FetchRow(number, cells, keys, Question(dates, modalities, question.words), fault)


def _fault(cells: Mapping[str, str]) -> str:
    """Return why the values of a row can't be asked for; "" if they can."""
    if not any(cells.get(name) for name in NAMING):
        return "it names nothing"
    for name, value in cells.items():
        if len(value) > MAX_CHARACTERS or _WILD.search(value):
            return f"its {name} is too long, or has a wildcard"
        if name.endswith("_uid") and value and not is_uid(value):
            return f"its {name} is no UID"
    if day := cells.get("study_date", ""):
        try:
            read_date(day)
        except ValueError:
            return "its study_date is no day such as 2026-11-28"
    return ""


def several_patients(studies: Sequence[tuple[str, str, str]]) -> bool:
    """Return whether studies are of several patients: PatientID, issuer and birth date of each.

    Names are not compared: they are written in many ways. An empty value tells nothing.
    """
    return any(
        len({value for value in column if value}) > 1 for column in zip(*studies, strict=True)
    )
