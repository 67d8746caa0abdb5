"""Find and mark results whose scan has changed or disappeared without giving a new result.

A mark is a record in `failed/` of a case that has a result; tables, report and `bids/` then flag
the result as OUTDATED.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scanloom.core import CaseRecord, Reason, Series
from scanloom.engine.workflow.selection import LeftOut
from scanloom.io.identity import case_id, source_stamp
from scanloom.io.index.build import Index
from scanloom.io.index.storage import IndexedSeries
from scanloom.io.output.crosswalk import case_folders, ids_by_volume_file
from scanloom.io.output.failures import failed_cases, remove_failure, write_failure
from scanloom.io.output.layout import CASES
from scanloom.io.output.published import read_provenance
from scanloom.io.system.archives import MEMBER_SEPARATOR

_CHANGED = "the scan has changed and no longer gives this case"


@dataclass(frozen=True)
class OutdatedMarker:
    """Mark outdated results in an output folder.

    Parameters
    ----------
    out : Path
        The output folder.
    key : bytes
        The key of the ids.
    recipe : str
        The recipe of the run.
    """

    out: Path
    key: bytes
    recipe: str

    def mark(
        self,
        index: Index,
        series: Iterable[IndexedSeries],
        left_out: Sequence[LeftOut],
        cases: set[str],
    ) -> None:
        """Mark outdated results of some series; remove their marks that no longer apply.

        Parameters
        ----------
        index : Index
            The index of all files found.
        series : iterable of IndexedSeries
            The series within the scope of the run.
        left_out : sequence of LeftOut
            Series without a case; those that failed already have their records.
        cases : set of str
            The ids of the run's cases.
        """
        exclusions = {entry.series.id: entry for entry in left_out}
        failed = {name for name, entry in exclusions.items() if entry.reason.expects_result}
        folders, marked = case_folders(self.out), failed_cases(self.out) - cases - failed
        ids_by_path = ids_by_volume_file(self.out)
        for entry in series:
            for case in self._results(index, entry, folders, ids_by_path):
                if case in cases:
                    continue
                exclusion = exclusions.get(entry.id)
                reason, detail = self._changed(index, entry, case, folders, exclusion)
                if reason is not None:
                    marked.discard(case)
                    if case not in failed:
                        record = CaseRecord(case, reason, detail, (), None)
                        write_failure(self.out, record, self.recipe)
            if entry.id in marked:
                remove_failure(self.out, entry.id)

    def _results(
        self,
        index: Index,
        series: IndexedSeries,
        folders: Mapping[str, str],
        ids_by_path: Mapping[str, set[str]],
    ) -> Iterator[str]:
        """Yield the case ids under which a series has results: its own, its phases', its file's."""

        def has_result(case: str) -> bool:
            return bool(case) and (self.out / CASES / folders.get(case, case)).is_dir()

        if has_result(series.id):
            yield series.id
        if series.series_uid:
            source = Series(series.kind, (), series.study_uid, series.series_uid)
            phases = (case_id(source, self.key, phase) for phase in itertools.count())
            yield from itertools.takewhile(has_result, phases)
        elif len(series.files) == 1 and ids_by_path:
            path, in_archive, _ = _first_path(index, series).partition(MEMBER_SEPARATOR)
            current = {entry.id for entry in index.series} if in_archive else {series.id}
            yield from filter(has_result, sorted(ids_by_path.get(path, set()) - current))

    @staticmethod
    def _candidates(index: Index, series: IndexedSeries, case: str) -> Sequence[IndexedSeries]:
        """Return the series that a result may come from: for an archive, each file inside it."""
        archive, in_archive, _ = _first_path(index, series).partition(MEMBER_SEPARATOR)
        if not in_archive or series.series_uid or case == series.id:
            return (series,)
        prefix = archive + MEMBER_SEPARATOR
        return [entry for entry in index.series if _first_path(index, entry).startswith(prefix)]

    def _changed(
        self,
        index: Index,
        series: IndexedSeries,
        case: str,
        folders: Mapping[str, str],
        exclusion: LeftOut | None,
    ) -> tuple[Reason | None, str]:
        """Return why a result does not match the current files; None if it does."""
        try:
            made_by = read_provenance(self.out / CASES / folders.get(case, case))
        except (OSError, ValueError):
            return None, ""  # a damaged result is reported by `verify` and the report
        first, *further = made_by.stamp.split() or [""]
        reason = None if exclusion is None else exclusion.reason
        lacks_channel = bool(further) and reason is Reason.CHANNEL_MISSING
        candidates = self._candidates(index, series, case)
        stamps = {source_stamp([index.stamp(entry)], self.key) for entry in candidates}
        if first in stamps and not lacks_channel:
            return None, ""
        if exclusion is not None and case == series.id:
            return exclusion.reason, exclusion.detail
        return Reason.SOURCE_CHANGED, _CHANGED


def _first_path(index: Index, series: IndexedSeries) -> str:
    return index.table.entries[series.files[0]].path
