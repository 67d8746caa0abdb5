"""Names and paths of the private report, from the crosswalk."""

from __future__ import annotations

from pathlib import Path

from scanloom.core import printable
from scanloom.io.output.crosswalk import find_sources, known_ids, latest_by_id

FIELDS = (
    "patient_id",
    "patient_name",
    "accession_number",
    "study_date",
    "series_number",
    "series_description",
    "path",
)
"""Columns of the crosswalk that the private report shows, in order."""


def private_rows(out: Path) -> dict[str, list[str]]:
    """Return the values of `FIELDS` of each case id in the crosswalk; empty without any.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the crosswalk can't be read.
    """
    latest = latest_by_id(find_sources(out, sorted(known_ids(out))))
    return {
        case_id: [printable(str(getattr(source, field))) for field in FIELDS]
        for case_id, source in latest.items()
    }
