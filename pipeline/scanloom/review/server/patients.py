"""Names and dates of patients for the list, for reviewers who may see them.

They are read from `OUT/private/` when a list is asked for, and kept in memory only.
"""

from __future__ import annotations

import threading
from pathlib import Path

from scanloom.core import ScanError
from scanloom.io.output.crosswalk import SourceRecord, sources_by_folder, stamp
from scanloom.io.output.private import read_key_of


class PatientNames:
    """The patient of each case in the crosswalk, by the name of its folder.

    Parameters
    ----------
    out : Path
        The output folder.
    key : Path or None
        File with the key of the case ids; None for SCANLOOM_KEY or the user's own key.

    Raises
    ------
    ScanError
        KEY_MISMATCH, or what `read_key` raises, without the key of the folder.
    """

    def __init__(self, out: Path, key: Path | None) -> None:
        read_key_of(out, key)  # refuses another key
        self._out = out
        self._guard = threading.Lock()
        self._stamp: tuple[object, ...] | None = None
        self._rows: dict[str, SourceRecord] = {}

    @property
    def stamp(self) -> tuple[object, ...] | None:
        """A value that changes when the names do."""
        self._current()
        return self._stamp

    def of(self, name: str) -> list[str]:
        """Return patient, date and series of a case, or its file; [] if unknown."""
        row = self._current().get(name)
        if row is None:
            return []
        known = (
            row.patient_name.replace("^", " ").strip() or row.patient_id,
            as_date(row.study_date),
            row.series_description,
        )
        shown = [text for text in known if text]
        return shown or [Path(row.path).name]

    def _current(self) -> dict[str, SourceRecord]:
        with self._guard:
            try:
                current = stamp(self._out)
                if current != self._stamp:
                    self._rows, self._stamp = sources_by_folder(self._out), current
            except (OSError, ScanError):  # it is being replaced, or gone: the list has no names
                self._rows, self._stamp = {}, None
            return self._rows


def as_date(text: str) -> str:
    """Return a date of DICOM (YYYYMMDD) as YYYY-MM-DD; other text as it is."""
    return f"{text[:4]}-{text[4:6]}-{text[6:]}" if len(text) == 8 and text.isdigit() else text
