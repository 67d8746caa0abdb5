"""The cases of a run: which are pending, which ended in earlier runs, and the outcome of each.

Results whose scan has changed or disappeared without giving a new result are found and marked. A
mark is a record in `failed/` of a case that has a result; tables, report and `bids/` then flag
the result as OUTDATED.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from scanloom.core import DICOM, Case, CaseRecord, Reason, ScanError
from scanloom.engine.case.differences import explained_result_state
from scanloom.engine.outcomes import NameSet, Outcome, Outcomes
from scanloom.engine.prepare import Request, with_source_hash
from scanloom.engine.retries import policy_of
from scanloom.engine.worker.messages import CaseFile
from scanloom.engine.workflow.selection import NO_MODALITY, Inputs, Leave, Scope, select
from scanloom.io.formats import count_volumes
from scanloom.io.identity import case_id, source_stamp
from scanloom.io.index.build import Index
from scanloom.io.index.storage import IndexedSeries, StoredSeries
from scanloom.io.output import crosswalk, failures
from scanloom.io.output.layout import case_folder, published_cases
from scanloom.io.output.ledger import Ledger
from scanloom.io.output.private import private_folder
from scanloom.io.output.published import ResultState, read_provenance
from scanloom.io.system.archives import MEMBER_SEPARATOR

COMPARED_AT_ONCE = 5000
"""Cases that are compared with the ledger together."""
SOURCES_AT_ONCE = 10_000
"""Rows that become part of the crosswalk together."""

_WHOLE = (ResultState.CURRENT, ResultState.UNSURE, ResultState.CHANGED)
"""States of results whose files were checked, and whose recipe is that of the case."""

PassOn = Callable[[Iterator[Inputs]], Iterator[Inputs]]
"""Passes on the series of some of many cases."""


class RunCases:
    """Cases of a run or of its plan: pending ones, and the outcomes of all others by series.

    Parameters
    ----------
    index, request
        The index, and the request that selects cases of it, and by which results are current.
    key : bytes
        That of the ids.
    out, scope
        The output folder, and the cases that the run takes.
    series : sequence of IndexedSeries, optional
        Those of the index from which is selected; by default, all.
    pending : list of Case or CaseFile, optional
        Receives the cases to be worked on.
    ledger : Ledger or None
        Knows current results without a look at their folders; for many cases.

    Attributes
    ----------
    pending
        Cases to be worked on.
    entries : dict of str to IndexedSeries
        The series of the first input channel of pending cases that are in a list, by case id.
    copies : list of Case
        Further copies of the volume file of a pending case.
    endings : Outcomes
        Of the cases of each series so far, by series id.
    left_out : Outcomes
        Of series without a case.
    selected : int
        Number of different cases of the shard; of those in `left_out`, the ones of equal ids count.
    total : int
        Number of different cases, also of other shards.
    refused : int
        Number of series that failed by their headers, so that they are no cases.
    work : int
        Number of pending cases.
    """

    def __init__(
        self,
        index: Index,
        request: Request,
        key: bytes,
        out: Path,
        scope: Scope,
        series: Sequence[IndexedSeries] | None = None,
        pending: list[Case] | CaseFile | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._since = pending.end if isinstance(pending, CaseFile) else 0
        self._index, self._request, self._key = index, request, key
        self._out, self._scope, self._ledger = out, scope, ledger
        self._all_series = index.series if series is None else series
        self._folders = crosswalk.renamed_folders(out)
        self._series: dict[str, tuple[str, ...]] = {}  # if they are others than that of its id
        self._ended = Outcomes()
        self._ids, self._names = NameSet(), NameSet()
        self.pending: list[Case] | CaseFile = [] if pending is None else pending
        self.entries: dict[str, IndexedSeries] = {}
        self.copies: list[Case] = []
        self.endings, self.left_out = Outcomes(), Outcomes()
        self.selected = self.total = self.refused = self.work = 0

    @property
    def unstated(self) -> int:
        """Number of series that were not selected because their files state no modality."""
        return sum(entry.detail == NO_MODALITY for entry in self.left_out)

    @property
    def ended(self) -> int:
        """Number of cases of the shard that ended in earlier runs, and are not pending."""
        return len(self._ended)

    @property
    def records(self) -> Iterator[CaseRecord]:
        """The outcomes that cases had in earlier runs."""
        return map(self._record, self._ended)

    @property
    def without_result(self) -> list[CaseRecord]:
        """Records of cases that ended in earlier runs without a result that is current.

        They failed and are not tried again, or their result must not be replaced.
        """
        return [self._record(entry) for entry in self._ended if entry.code]

    def with_result(self, names: set[str]) -> set[str]:
        """Return those of some cases that have a current result of an earlier run."""
        return {entry.id for entry in self._ended if not entry.code and entry.id in names}

    def _record(self, entry: Outcome) -> CaseRecord:
        reason, folder = entry.reason, None
        if reason is None or reason.subject == "result":
            folder = case_folder(self._out, self._folders.get(entry.id, entry.id))
        return CaseRecord(entry.id, reason, entry.detail, (), folder)

    def cases(self) -> Iterator[Case]:
        """Yield the pending cases."""
        pending = self.pending
        return pending.cases(self._since) if isinstance(pending, CaseFile) else iter(pending)

    def has(self, case: str) -> bool:
        """Return whether a case is one of the shard's."""
        return case in self._ids

    def other_results(self) -> set[str]:
        """Return the names of the published cases that are not in the shard."""
        names, other_names = published_cases(self._out).names(), set[str]()
        while batch := list(itertools.islice(names, COMPARED_AT_ONCE)):
            other_names.update(self._names.missing(batch))
        return other_names

    def _candidates(
        self, leave: Leave, fail: Leave, pass_on: PassOn = iter
    ) -> Iterator[tuple[Inputs, Case]]:
        """Yield the cases that the request selects, without files.

        Series that it leaves out are handed over, and those that can't be opened. Only cases whose
        index entries are passed on are made.
        """
        request, index = self._request, self._index
        chosen = select(self._all_series, request.workflow, request.cards, leave, index.store)
        return make_cases(index, pass_on(chosen), request, self._key, fail)

    def compare(self) -> None:
        """Divide the cases by whether they ended in an earlier run; note the outcomes of those.

        Equal volume files are one case, whatever their paths; files of one id that are not equal
        are left out.
        """
        shared = _shared_ids(self._all_series)
        unique, ambiguous = self._unique(shared) if shared else ({}, set[str]())
        seen, waiting = set[str](), set[str]()  # of shared ids
        failed: list[Outcome] = []
        pass_on = partial(self._take_known, shared)
        for inputs, light in self._candidates(self.left_out.append, failed.append, pass_on):
            case, is_own = self._named(light), self._scope.holds(light.id)
            is_copy = case.id in seen
            if hash(inputs[0].id) in shared:
                if is_own:
                    try:
                        case = with_files(self._index, inputs, case)
                    except ScanError as error:
                        failed += _failed(inputs, error)
                        continue
                seen.add(case.id)
            if is_copy:
                if case.id in waiting:
                    self.copies.append(case)
            elif is_own and case.id not in ambiguous:
                if self._take(inputs, unique.get(case.id, case), failed) and case.id in seen:
                    waiting.add(case.id)
            else:
                self.total += 1
                self.selected += is_own
        for entry in failed:
            self.left_out.append(entry)
        # A series that may be readable later was not refused for its headers: the run is incomplete
        self.refused = sum(
            entry.is_failure
            and Reason[entry.code].outcome == "failed"
            and not Reason[entry.code].retry
            and self._scope.holds(entry.id)
            for entry in self.left_out
        )
        detail = "another file has the same id but different content between the samples"
        for name in _ids(self._all_series) if ambiguous else ():
            if name in ambiguous:
                self.left_out.append(Outcome(name, Reason.ID_TAKEN.code, detail))

    def _take_known(self, shared: frozenset[int], chosen: Iterator[Inputs]) -> Iterator[Inputs]:
        """Take the cases whose results are current by the ledger; pass on all others.

        Many are compared at once, before the objects of a case are made.
        """
        if self._ledger is None:
            yield from chosen
            return
        while batch := list(itertools.islice(chosen, COMPARED_AT_ONCE)):
            names = [self._folders.get(inputs[0].id, inputs[0].id) for inputs in batch]
            stamps = [_stamp_of(inputs, self._key) for inputs in batch]
            current = self._ledger.hold(names, self._request.recipe, stamps)
            for inputs, name, is_current in zip(batch, names, current, strict=True):
                case = inputs[0].id
                if (
                    is_current
                    and hash(case) not in shared
                    and not _may_be_several(inputs)
                    and self._scope.holds(case)
                ):
                    series = self._count(inputs, case, name)
                    self._end(Outcome(case, "", ""), series)
                else:
                    yield inputs

    def _take(self, inputs: Inputs, case: Case, failed: list[Outcome]) -> bool:
        """Take a case of the shard; return whether it is pending. It may turn out to be none."""
        outcome = self._earlier_outcome(case)
        if outcome is None:
            try:
                case = with_files(self._index, inputs, case)
            except ScanError as error:
                failed += _failed(inputs, error)
                return False
            self.pending.append(case)
            if isinstance(self.pending, list):
                self.entries[case.id] = inputs[0]
        self.work += outcome is None
        series = self._count(inputs, case.id, case.folder_name)
        if outcome is None:
            return True
        self._end(outcome, series)
        return False

    def _count(self, inputs: Inputs, case: str, folder: str) -> tuple[str, ...]:
        """Count a case of the shard; return the ids of its series."""
        self.total += 1
        self.selected += 1
        self._ids.add(case)
        self._names.add(folder)
        series = tuple(entry.id for entry in inputs)
        if series != (case,):
            self._series[case] = series
        return series

    def _end(self, outcome: Outcome, series: tuple[str, ...]) -> None:
        """Note the outcome that a case had in an earlier run."""
        self._ended.append(outcome)
        self._note(outcome, series)

    def _unique(self, shared: frozenset[int]) -> tuple[dict[str, Case], set[str]]:
        """Return one case for each of the shared ids, and the ids of files that are not equal.

        Ids of volume files are computed from samples of them. Those of their series are among them.
        """
        unique: dict[str, Case] = {}
        ambiguous: set[str] = set()
        for inputs, light in self._candidates(ignore, ignore):
            if hash(inputs[0].id) not in shared or not self._scope.holds(light.id):
                continue
            with suppress(ScanError):  # unreadable: `compare`, or its worker, reports that
                case = with_files(self._index, inputs, self._named(light))
                earlier = unique.setdefault(case.id, case)
                if earlier is case or case.id in ambiguous:
                    continue
                unique[case.id] = with_source_hash(earlier, self._key)
                if with_source_hash(case, self._key).source_hash != unique[case.id].source_hash:
                    ambiguous |= {case.id, inputs[0].id}
        return unique, ambiguous

    def _named(self, case: Case) -> Case:
        """Return a case with the name of its folder."""
        folder = self._folders.get(case.id, case.id)
        return replace(case, folder=folder) if folder != case.folder_name else case

    def note(self, record: CaseRecord) -> None:
        """Note the outcome of a case for each of its series."""
        self._note(_outcome(record), self._series.get(record.id, (record.id,)))

    def _note(self, outcome: Outcome, series: Iterable[str]) -> None:
        for name in series:
            self.endings.append(outcome._replace(id=name) if name != outcome.id else outcome)

    def note_other_shards(self) -> None:
        """Note the outcomes that cases of other shards have by now."""
        if self._scope.shard is None:
            return
        for inputs, light in self._candidates(ignore, ignore):
            case = self._named(light)
            if not self._scope.holds(case.id):
                outcome = self._earlier_outcome(case)
                if outcome is not None:
                    self._note(outcome, (entry.id for entry in inputs))

    def close_ledger(self) -> None:
        """Write what the ledger was told, and let go of it: it takes some 150 bytes a case."""
        if self._ledger is not None:
            self._ledger.gather()
            self._ledger = None

    def _earlier_outcome(self, case: Case) -> Outcome | None:
        """Return how a case ended before, None if it is to be worked on.

        Without a reason, there is a result; a reason with the subject "result" is that of one of
        another recipe or damaged, and may not be replaced. A case whose files may have changed is
        to be worked on: its worker compares their content.
        """
        out, scope = self._out, self._scope
        published = Outcome(case.id, "", "")
        if self._ledger is not None and self._ledger.holds(case):
            return published
        state = None
        try:
            state = explained_result_state(out, case, self._request.cards, replace=scope.replace)
        except ScanError as error:
            if error.reason.retry:  # it can't be read now: its worker tries again
                return None
            return Outcome(case.id, error.code, error.detail)
        finally:
            if self._ledger is not None:
                self._ledger.note(case, whole=state in _WHOLE)
        if state is ResultState.CURRENT:
            return published
        old = failures.previous_failure(out, case.id, case.recipe, case.stamp)
        if old is None or policy_of(old.reason).in_later_run or scope.retry_failed:
            return None
        return Outcome(case.id, old.reason.code, old.detail)


def make_cases(
    index: Index, selected: Iterable[Inputs], request: Request, key: bytes, leave: Leave
) -> Iterator[tuple[Inputs, Case]]:
    """Yield the index entries of each case, and the case, without its files.

    Their names are many, and most cases of an archive may have a result: `with_files` adds them. A
    series of which several volumes are taken is opened, so that its cases have their files. If it
    can't be, it has no case, and is handed over.
    """
    for inputs in selected:
        first, several = inputs[0], _may_be_several(inputs)
        try:
            most = None if several else 0
            series, *channels = (index.as_series(entry, most) for entry in inputs)
            all_phases = several and request.workflow.policy.phases == "all"
            count = count_volumes(series, request.workflow.read_options) if all_phases else 1
        except ScanError as error:
            for outcome in _failed(inputs, error):
                leave(outcome)
            continue
        stamp = _stamp_of(inputs, key)
        for phase in range(count) if several else (None,):
            number = first.id if phase is None else case_id(series, key, phase)
            yield inputs, request.case(number, series, tuple(channels), phase=phase, stamp=stamp)


def with_files(index: Index, inputs: Inputs, case: Case) -> Case:
    """Return a case with the files of its index entries.

    Raises
    ------
    ScanError
        If they lie in an archive that can't be unpacked.
    """
    if case.series.files:
        return case
    series, *channels = map(index.as_series, inputs)
    return replace(case, series=series, further_channels=tuple(channels))


def _may_be_several(inputs: Inputs) -> bool:
    """Return whether the index entries of a case have several volumes, each a case of its own.

    Else the case has the id of the first series.
    """
    return inputs[0].reason in (Reason.PHASES, Reason.FOUR_D)


def _stamp_of(inputs: Inputs, key: bytes) -> str:
    """Return the source stamp of the case of some index entries."""
    return source_stamp([series.stamp for series in inputs], key)


def _outcome(record: CaseRecord) -> Outcome:
    return Outcome(record.id, record.reason.code if record.reason else "", record.detail)


def _failed(inputs: Inputs, error: ScanError) -> list[Outcome]:
    return [Outcome(entry.id, error.code, error.detail) for entry in inputs]


def ignore(_: Outcome) -> None:
    """Leave out a series that is told elsewhere."""


def _ids(series: Iterable[IndexedSeries]) -> Iterator[str]:
    return series.ids() if isinstance(series, StoredSeries) else (each.id for each in series)


def _shared_ids(series: Iterable[IndexedSeries]) -> frozenset[int]:
    """Return the hashes of the ids that several series have."""
    hashes = np.fromiter((hash(name) for name in _ids(series) if name), np.int64)
    values, counts = np.unique(hashes, return_counts=True)
    return frozenset(values[counts > 1].tolist())


def record_sources(out: Path, fingerprint: str, cases: RunCases) -> None:
    """Add the pending cases to the crosswalk, and further copies of their files; many at a time."""
    sources = (
        crosswalk.source_from_series(case.series, case.id, case.phase)
        for case in itertools.chain(cases.cases(), cases.copies)
    )
    while batch := list(itertools.islice(sources, SOURCES_AT_ONCE)):
        with private_folder(out, fingerprint) as private:
            crosswalk.add_sources(private, batch)


class OutdatedMarker:
    """Marks results in an output folder that are outdated by the index of all files found.

    `key` is that of the ids, `recipe` that of the run.
    """

    def __init__(self, out: Path, key: bytes, recipe: str, index: Index) -> None:
        self._out, self._key, self._recipe, self._index = out, key, recipe, index

    def mark(self, series: Iterable[IndexedSeries], cases: RunCases) -> None:
        """Mark outdated results of some series; remove their marks that no longer apply.

        Parameters
        ----------
        series : iterable of IndexedSeries
            The series within the scope of the run.
        cases : RunCases
            The cases of the run; series without a case that failed already have their records.
        """
        failed = {entry.id for entry in cases.left_out if entry.is_failure}
        marked = {
            name
            for name in failures.failed_cases(self._out)
            if name not in failed and not cases.has(name)
        }
        if not marked and not cases.other_results():
            return  # nothing can be outdated: a look at each series is spared
        self._folders = crosswalk.renamed_folders(self._out)
        self._ids_by_path = crosswalk.ids_by_volume_file(self._out)
        self._ids_of_volumes = crosswalk.ids_of_volumes(self._out)
        exclusions = cases.left_out.finder()
        for entry in series:
            results = [*self._results(entry)]
            for case in results:
                if cases.has(case):
                    continue
                exclusion = next(iter(exclusions(entry.id)[-1:]), None)
                reason, detail = self._changed(entry, case, exclusion)
                if reason is not None:
                    marked.discard(case)
                    if case not in failed:
                        record = CaseRecord(case, reason, detail, (), None)
                        failures.write_failure(self._out, record, self._recipe)
            for name in marked.intersection((entry.id, *results)):
                failures.remove_failure(self._out, name)

    def _folder(self, case: str) -> Path:
        return case_folder(self._out, self._folders.get(case, case))

    def _results(self, series: IndexedSeries) -> Iterator[str]:
        """Yield the case ids under which a series has results: its own, its phases', its file's."""

        def has_result(case: str) -> bool:
            return bool(case) and self._folder(case).is_dir()

        if has_result(series.id):
            yield series.id
        if series.series_uid:
            volumes = self._ids_of_volumes.get((series.study_uid, series.series_uid), set())
            yield from filter(has_result, sorted(volumes))
        elif series.kind != DICOM and self._ids_by_path:
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
        self, series: IndexedSeries, case: str, exclusion: Outcome | None
    ) -> tuple[Reason | None, str]:
        """Return why a result does not match the current files; None if it does."""
        try:
            made_by = read_provenance(self._folder(case))
        except (OSError, ValueError, ScanError):
            # One that is damaged, or of another version, is reported by `verify` and the report
            return None, ""
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
