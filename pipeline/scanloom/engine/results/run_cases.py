"""The cases of a run: which are pending, which ended in earlier runs, and the outcome of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scanloom.core import Case, CaseRecord
from scanloom.engine.results.tables import CaseOutcome
from scanloom.engine.workflow.scope import Scope
from scanloom.engine.workflow.selection import Inputs
from scanloom.io.output.crosswalk import add_sources, case_folders, known_ids, source_from_series
from scanloom.io.output.private import private_folder
from scanloom.io.output.published import OTHER_RECIPE


@dataclass(frozen=True)
class EarlierOutcomes:
    """Cases of a selection, divided by whether they ended in an earlier run.

    Parameters
    ----------
    pending : sequence of Case
        Cases to be worked on.
    records : sequence of CaseRecord
        The outcomes of all other cases, in order.
    """

    pending: Sequence[Case]
    records: Sequence[CaseRecord]

    @classmethod
    def read(cls, out: Path, cases: Iterable[Case], scope: Scope) -> EarlierOutcomes:
        """Return the division of some cases by the contents of an output folder."""
        pending, records = [], []
        for case in cases:
            record = scope.before(out, case)
            if record is None:
                pending.append(case)
            else:
                records.append(record)
        return cls(pending, records)

    @property
    def blocked(self) -> list[CaseRecord]:
        """Records of cases with a stale or damaged result that must not be replaced."""
        return [record for record in self.records if _is_blocked(record)]

    @property
    def finished(self) -> list[CaseRecord]:
        """Records of cases that need no work: published, or failed before."""
        return [record for record in self.records if not _is_blocked(record)]


def _is_blocked(record: CaseRecord) -> bool:
    return record.reason is not None and record.reason.subject == "result"


class RunCases:
    """Cases of one run, and their outcomes by series.

    Parameters
    ----------
    out : Path
        The output folder.
    scope : Scope
        The cases that the run takes.
    explain : callable or None
        Returns the differences between a published case, by its folder, and the request.
    """

    def __init__(
        self, out: Path, scope: Scope, explain: Callable[[Path], str] | None = None
    ) -> None:
        self._out, self._scope, self._explain = out, scope, explain
        self._series: dict[str, tuple[str, ...]] = {}
        self._other_shards: list[tuple[tuple[str, ...], Case]] = []
        self._endings: dict[str, list[CaseOutcome]] = {}

    @property
    def endings(self) -> Mapping[str, Sequence[CaseOutcome]]:
        """Outcomes of the cases of each series so far, by series id."""
        return self._endings

    def of_this_shard(self, cases: Iterable[tuple[Inputs, Case]]) -> list[Case]:
        """Return the cases of this run's shard, with their folders; remember those of others."""
        folders = case_folders(self._out)
        own: list[Case] = []
        for inputs, case in cases:
            named = replace(case, folder=folders.get(case.id, ""))
            series = tuple(entry.id for entry in inputs)
            if self._scope.holds(case.id):
                self._series[case.id] = series
                own.append(named)
            else:  # without its file names, which are many
                light = replace(named, series=replace(case.series, files=()), further_channels=())
                self._other_shards.append((series, light))
        return own

    def earlier_outcomes(self, cases: Iterable[Case]) -> EarlierOutcomes:
        """Return which cases are pending; note the outcomes of all others."""
        earlier = EarlierOutcomes.read(self._out, cases, self._scope)
        explained = [self._explained(record) for record in earlier.records]
        earlier = EarlierOutcomes(earlier.pending, explained)
        for record in earlier.records:
            self.note(record)
        return earlier

    def _explained(self, record: CaseRecord) -> CaseRecord:
        """Add the differences to the record of a case with a result of another recipe."""
        if self._explain is None or record.detail != OTHER_RECIPE or record.folder is None:
            return record
        return replace(record, detail=f"{record.detail}: {self._explain(record.folder)}")

    def note(self, record: CaseRecord) -> None:
        """Note the outcome of a case for each of its series."""
        ending = CaseOutcome(record.reason.code if record.reason else "", record.detail)
        for series in self._series[record.id]:
            self._endings.setdefault(series, []).append(ending)

    def note_other_shards(self) -> None:
        """Note the outcomes that cases of other shards have by now."""
        for series, case in self._other_shards:
            record = self._scope.before(self._out, case)
            if record is not None:
                self._series[case.id] = series
                self.note(record)


def record_sources(
    out: Path, fingerprint: str, cases: Iterable[Case], pending: Iterable[Case]
) -> None:
    """Add the cases that are new or pending to the crosswalk, all at once."""
    known = known_ids(out) - {case.id for case in pending}
    new = [source_from_series(case.series, case.id) for case in cases if case.id not in known]
    if new:
        with private_folder(out, fingerprint) as private:
            add_sources(private, new)
