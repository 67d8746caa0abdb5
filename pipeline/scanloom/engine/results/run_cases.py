"""The cases of a run: which are pending, which ended in earlier runs, and the outcome of each.

Results whose scan has changed or disappeared without giving a new result are found and marked. A
mark is a record in `failed/` of a case that has a result; tables, report and `bids/` then flag
the result as OUTDATED.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from scanloom.cards.card import ModelCard
from scanloom.core import Case, CaseRecord, Reason, ScanError, Series
from scanloom.engine.case.differences import explained_result_state
from scanloom.engine.prepare import Request, id_conflicts, make_cases, unique_cases
from scanloom.engine.results.tables import CaseEnding
from scanloom.engine.retries import policy_of
from scanloom.engine.workflow.selection import NO_MODALITY, Inputs, LeftOut, Scope, select
from scanloom.io.identity import case_id, source_stamp
from scanloom.io.index.build import Index
from scanloom.io.index.storage import IndexedSeries
from scanloom.io.output import crosswalk, failures
from scanloom.io.output.layout import case_folder
from scanloom.io.output.private import private_folder
from scanloom.io.output.published import ResultState, read_provenance
from scanloom.io.system.archives import MEMBER_SEPARATOR


class RunCases:
    """Cases of a run or of its plan: pending ones, and the outcomes of all others by series.

    `cards` are the models, to say in what results of another recipe differ.

    Attributes
    ----------
    own : list of Case
        Cases of this run's shard, as they were added: equal volume files are added several times.
    entries : dict of str to IndexedSeries
        The series of their first input channel, by case id.
    pending : list of Case
        Cases to be worked on.
    records : list of CaseRecord
        The outcomes that all other cases of the shard had in earlier runs.
    endings : dict of str to list of CaseEnding
        Outcomes of the cases of each series so far, by series id.
    left_out : list of LeftOut
        Series without a case.
    selected : int
        Number of different cases of the shard; of those in `left_out`, the ones of equal ids count.
    refused : int
        Number of series that failed by their headers, so that they are no cases.
    """

    def __init__(self, out: Path, scope: Scope, cards: Sequence[ModelCard] = ()) -> None:
        self._out, self._scope, self._cards = out, scope, cards
        self._series: dict[str, tuple[str, ...]] = {}
        self._other_shards: list[tuple[tuple[str, ...], Case]] = []
        self.own: list[Case] = []
        self.entries: dict[str, IndexedSeries] = {}
        self.pending: list[Case] = []
        self.records: list[CaseRecord] = []
        self.endings: dict[str, list[CaseEnding]] = {}
        self.left_out: list[LeftOut] = []
        self.selected = self.refused = 0

    @classmethod
    def of_index(
        cls,
        index: Index,
        request: Request,
        key: bytes,
        out: Path,
        scope: Scope,
        series: Sequence[IndexedSeries] | None = None,
    ) -> RunCases:
        """Return the cases of an index, or of some of its series, that a request selects."""
        run_cases = cls(out, scope, request.cards)
        series = index.series if series is None else series
        chosen, left_out = select(series, request.workflow, request.cards)
        run_cases.add(make_cases(index, chosen, request, key, left_out))
        unique, ambiguous = unique_cases(run_cases.own, key)
        run_cases.selected = len(unique) + len(ambiguous)
        # A series that may be readable later was not refused for its headers: the run is incomplete
        run_cases.refused = sum(
            entry.reason.outcome == "failed"
            and not entry.reason.retry
            and scope.holds(entry.series.id)
            for entry in left_out
        )
        run_cases.left_out = left_out + id_conflicts(ambiguous, series)
        run_cases.compare(unique)
        return run_cases

    @property
    def total(self) -> int:
        """Number of different cases, also of other shards."""
        return len({*self._series, *(case.id for _, case in self._other_shards)})

    @property
    def unstated(self) -> int:
        """Number of series that were not selected because their files state no modality."""
        return sum(entry.detail == NO_MODALITY for entry in self.left_out)

    @property
    def blocked(self) -> list[CaseRecord]:
        """Records of cases with a stale or damaged result that must not be replaced."""
        return [r for r in self.records if r.reason is not None and r.reason.subject == "result"]

    def add(self, cases: Iterable[tuple[Inputs, Case]]) -> None:
        """Add cases with their index entries, and name their folders."""
        folders = crosswalk.case_folders(self._out)
        for inputs, case in cases:
            named = replace(case, folder=folders.get(case.id, ""))
            series = tuple(entry.id for entry in inputs)
            if self._scope.holds(case.id):
                self._series[case.id], self.entries[case.id] = series, inputs[0]
                self.own.append(named)
            else:  # without its file names, which are many
                light = replace(named, series=replace(case.series, files=()), further_channels=())
                self._other_shards.append((series, light))

    def compare(self, cases: Iterable[Case]) -> None:
        """Divide cases by whether they ended in an earlier run; note the outcomes of those."""
        for case in cases:
            record = self._earlier_outcome(case)
            if record is None:
                self.pending.append(case)
            else:
                self.records.append(record)
                self.note(record)

    def note(self, record: CaseRecord) -> None:
        """Note the outcome of a case for each of its series."""
        ending = CaseEnding(record.reason.code if record.reason else "", record.detail)
        for series in self._series[record.id]:
            self.endings.setdefault(series, []).append(ending)

    def note_other_shards(self) -> None:
        """Note the outcomes that cases of other shards have by now."""
        for series, case in self._other_shards:
            record = self._earlier_outcome(case)
            if record is not None:
                self._series[case.id] = series
                self.note(record)

    def _earlier_outcome(self, case: Case) -> CaseRecord | None:
        """Return how a case ended before, None if it is to be worked on.

        A reason of None stands for a result; a reason with the subject "result" for one that is of
        another recipe or damaged, and may not be replaced. A case whose files may have changed is
        to be worked on: its worker compares their content.
        """
        out, scope, folder = self._out, self._scope, case_folder(self._out, case.folder_name)
        try:
            state = explained_result_state(out, case, self._cards, replace=scope.replace)
        except ScanError as error:
            return CaseRecord(case.id, error.reason, error.detail, (), folder)
        if state is ResultState.CURRENT:
            return CaseRecord(case.id, None, "", (), folder)
        old = failures.previous_failure(out, case.id, case.recipe, case.stamp)
        if old is None or policy_of(old.reason).in_later_run or scope.retry_failed:
            return None
        return CaseRecord(case.id, old.reason, old.detail, (), None)


def record_sources(
    out: Path, fingerprint: str, cases: Iterable[Case], pending: Iterable[Case]
) -> None:
    """Add the cases that are new or pending to the crosswalk, all at once."""
    known = crosswalk.known_ids(out) - {case.id for case in pending}
    new = [
        crosswalk.source_from_series(case.series, case.id) for case in cases if case.id not in known
    ]
    if new:
        with private_folder(out, fingerprint) as private:
            crosswalk.add_sources(private, new)


class OutdatedMarker:
    """Marks results in an output folder that are outdated by the index of all files found.

    `key` is that of the ids, `recipe` that of the run.
    """

    def __init__(self, out: Path, key: bytes, recipe: str, index: Index) -> None:
        self._out, self._key, self._recipe, self._index = out, key, recipe, index
        self._folders, self._ids_by_path = (
            crosswalk.case_folders(out),
            crosswalk.ids_by_volume_file(out),
        )

    def mark(
        self, series: Iterable[IndexedSeries], left_out: Sequence[LeftOut], cases: set[str]
    ) -> None:
        """Mark outdated results of some series; remove their marks that no longer apply.

        Parameters
        ----------
        series : iterable of IndexedSeries
            The series within the scope of the run.
        left_out : sequence of LeftOut
            Series without a case; those that failed already have their records.
        cases : set of str
            The ids of the run's cases.
        """
        exclusions = {entry.series.id: entry for entry in left_out}
        failed = {name for name, entry in exclusions.items() if entry.reason.expects_result}
        marked = failures.failed_cases(self._out) - cases - failed
        for entry in series:
            for case in self._results(entry):
                if case in cases:
                    continue
                reason, detail = self._changed(entry, case, exclusions.get(entry.id))
                if reason is not None:
                    marked.discard(case)
                    if case not in failed:
                        record = CaseRecord(case, reason, detail, (), None)
                        failures.write_failure(self._out, record, self._recipe)
            if entry.id in marked:
                failures.remove_failure(self._out, entry.id)

    def _folder(self, case: str) -> Path:
        return case_folder(self._out, self._folders.get(case, case))

    def _results(self, series: IndexedSeries) -> Iterator[str]:
        """Yield the case ids under which a series has results: its own, its phases', its file's."""

        def has_result(case: str) -> bool:
            return bool(case) and self._folder(case).is_dir()

        if has_result(series.id):
            yield series.id
        if series.series_uid:
            source = Series(series.kind, (), series.study_uid, series.series_uid)
            phases = (case_id(source, self._key, phase) for phase in itertools.count())
            yield from itertools.takewhile(has_result, phases)
        elif len(series.files) == 1 and self._ids_by_path:
            path, in_archive, _ = series.first.partition(MEMBER_SEPARATOR)
            current = {entry.id for entry in self._index.series} if in_archive else {series.id}
            yield from filter(has_result, sorted(self._ids_by_path.get(path, set()) - current))

    def _candidates(self, series: IndexedSeries, case: str) -> Sequence[IndexedSeries]:
        """Return the series that a result may come from: for an archive, each file inside it."""
        archive, in_archive, _ = series.first.partition(MEMBER_SEPARATOR)
        if not in_archive or series.series_uid or case == series.id:
            return (series,)
        prefix = archive + MEMBER_SEPARATOR
        return [each for each in self._index.series if each.first.startswith(prefix)]

    def _changed(
        self, series: IndexedSeries, case: str, exclusion: LeftOut | None
    ) -> tuple[Reason | None, str]:
        """Return why a result does not match the current files; None if it does."""
        try:
            made_by = read_provenance(self._folder(case))
        except (OSError, ValueError):
            return None, ""  # a damaged result is reported by `verify` and the report
        first, *further = made_by.stamp.split() or [""]
        reason = None if exclusion is None else exclusion.reason
        lacks_channel = bool(further) and reason is Reason.CHANNEL_MISSING
        candidates = self._candidates(series, case)
        stamps = {source_stamp([entry.stamp], self._key) for entry in candidates}
        if first in stamps and not lacks_channel:
            return None, ""
        if exclusion is not None and case == series.id:
            return exclusion.reason, exclusion.detail
        return Reason.SOURCE_CHANGED, "the scan has changed and no longer gives this case"
