"""Case registry of an output folder: folder names of the cases, and records of failed ones."""

from __future__ import annotations

import logging
from pathlib import Path

from scanloom.core import Case, CaseRecord, ScanError
from scanloom.io.output.crosswalk import add_sources, case_folders, folder_name, source_from_series
from scanloom.io.output.failures import is_failure, remove_failure, write_failure
from scanloom.io.output.private import private_folder, read_fingerprint
from scanloom.options import FolderNaming

logger = logging.getLogger(__name__)


class CaseRegistry:
    """Case registry of one output folder.

    Parameters
    ----------
    out : Path
        The output folder, which need not exist.
    fingerprint : str
        Fingerprint of the key of the ids.
    names : "id" or "source"
        Whether folders of new cases are named by case id or by source.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the crosswalk can't be read.
    """

    def __init__(self, out: Path, fingerprint: str, names: FolderNaming) -> None:
        self.out, self.fingerprint, self.names = out, fingerprint, names
        self._folders = case_folders(out)
        self._unwritten: list[tuple[Case, CaseRecord]] = []

    def folder_name(self, case: Case) -> str:
        """Return the name of a case's folder in `OUT/cases/`; an existing folder keeps its name."""
        if case.id not in self._folders:
            self._folders[case.id] = self._new_name(case)
        return self._folders[case.id]

    def note(self, case: Case, record: CaseRecord) -> None:
        """Record the outcome of a case; failures are written once OUT has any result.

        If no case succeeds, nothing is written. Failure to write a record is not fatal: the caller
        has already received it.
        """
        if record.reason is not None:
            self._unwritten.append((case, record))
        try:
            if record.reason is None:
                remove_failure(self.out, case.id)
            if self._unwritten and read_fingerprint(self.out) == self.fingerprint:
                self._write()
        except (OSError, ScanError):
            logger.debug("a failure can't be written", exc_info=True)

    def _new_name(self, case: Case) -> str:
        cases = self.out / "cases"
        if self.names == "id" or (cases / case.id).is_dir():
            return case.id
        existing = [path.name for path in cases.iterdir()] if cases.is_dir() else []
        return folder_name(
            source_from_series(case.series, case.id), [*existing, *self._folders.values()]
        )

    def _write(self) -> None:
        sources = [source_from_series(case.series, case.id) for case, _ in self._unwritten]
        with private_folder(self.out, self.fingerprint) as private:
            add_sources(private, sources)
        for case, record in self._unwritten:
            if is_failure(record):
                write_failure(self.out, record, case.recipe, case.stamp)
        self._unwritten.clear()
