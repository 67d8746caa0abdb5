"""What OUT knows of its cases beside their results: their folders, and why some have none."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from scanloom.core import Case, CaseRecord, ScanError
from scanloom.io.crosswalk import add_sources, case_folders, source_of
from scanloom.io.failures import forget_failure, is_failure, write_failure
from scanloom.io.private import known_fingerprint, private_folder
from scanloom.io.source_names import folder_name

logger = logging.getLogger(__name__)

Names = Literal["id", "source"]


class Books:
    """The books of one output folder.

    Parameters
    ----------
    out : Path
        The output folder, which need not exist.
    fingerprint : str
        Of the key.
    names : "id" or "source"
        What a case's folder is called if it has none yet.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the crosswalk can't be read.
    """

    def __init__(self, out: Path, fingerprint: str, names: Names) -> None:
        self.out, self.fingerprint, self.names = out, fingerprint, names
        self._folders = case_folders(out)
        self._unwritten: list[tuple[Case, CaseRecord]] = []

    def folder_name(self, case: Case) -> str:
        """Return what the case's folder in `OUT/cases/` is called: it keeps the name it has."""
        if case.id not in self._folders:
            self._folders[case.id] = self._new_name(case)
        return self._folders[case.id]

    def note(self, case: Case, record: CaseRecord) -> None:
        """Keep in mind what became of a case; written down as soon as OUT has any result.

        A run that gave nothing at all leaves nothing. That a record can't be written is no reason
        to stop: whoever asked was told.
        """
        if record.reason is not None:
            self._unwritten.append((case, record))
        try:
            if record.reason is None:
                forget_failure(self.out, case.id)
            if self._unwritten and known_fingerprint(self.out) == self.fingerprint:
                self._write()
        except (OSError, ScanError):
            logger.debug("not written down", exc_info=True)

    def _new_name(self, case: Case) -> str:
        cases = self.out / "cases"
        if self.names == "id" or (cases / case.id).is_dir():
            return case.id
        there = [path.name for path in cases.iterdir()] if cases.is_dir() else []
        return folder_name(source_of(case.series, case.id), [*there, *self._folders.values()])

    def _write(self) -> None:
        sources = [source_of(case.series, case.id) for case, _ in self._unwritten]
        with private_folder(self.out, self.fingerprint) as private:
            add_sources(private, sources)
        for case, record in self._unwritten:
            if is_failure(record):
                write_failure(self.out, record, case.recipe, case.stamp)
        self._unwritten.clear()
