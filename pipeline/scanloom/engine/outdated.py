"""Results of scans that are no longer what they were, and have no new result: found and marked.

A mark is a record in `failed/` of a case that has a result: tables, report and `bids/` then flag
that result as OUTDATED.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scanloom.core import CaseRecord, Reason, Series
from scanloom.engine.select import LeftOut
from scanloom.io.archives import IN_ARCHIVE
from scanloom.io.crosswalk import case_folders, volume_files
from scanloom.io.failures import failed_cases, forget_failure, write_failure
from scanloom.io.identity import case_id, source_stamp
from scanloom.io.index import Index
from scanloom.io.index_file import IndexedSeries
from scanloom.io.outfolder import CASES
from scanloom.io.published import read_made

CHANGED = "the scan has changed, and no longer gives this case"


@dataclass(frozen=True)
class Marker:
    """Marks results in an output folder.

    Parameters
    ----------
    out : Path
        The output folder.
    key : bytes
        Of the ids.
    recipe : str
        Of the run.
    """

    out: Path
    key: bytes
    recipe: str

    def mark(
        self,
        index: Index,
        series: Iterable[IndexedSeries],
        left: Sequence[LeftOut],
        cases: set[str],
    ) -> None:
        """Mark results of these series that no case of the run makes anew; take other marks away.

        Parameters
        ----------
        index : Index
            All files that were found.
        series : iterable of IndexedSeries
            Those that the run is about.
        left : sequence of LeftOut
            Series of which no case was made; those that failed have their records already.
        cases : set of str
            The ids of the run's cases.
        """
        why = {one.series.id: one for one in left}
        failed = {name for name, one in why.items() if one.reason.wanted}
        folders, marked = case_folders(self.out), failed_cases(self.out) - cases - failed
        places = volume_files(self.out)
        for one in series:
            for number in self._results(index, one, folders, places):
                if number in cases:
                    continue
                reason, detail = self._changed(index, one, number, folders, why.get(one.id))
                if reason is not None:
                    marked.discard(number)
                    if number not in failed:
                        record = CaseRecord(number, reason, detail, (), None)
                        write_failure(self.out, record, self.recipe)
            if one.id in marked:
                forget_failure(self.out, one.id)

    def _results(
        self,
        index: Index,
        one: IndexedSeries,
        folders: Mapping[str, str],
        places: Mapping[str, set[str]],
    ) -> Iterator[str]:
        """Give the ids under which a series may have results: its own, its phases, its file's."""

        def is_there(number: str) -> bool:
            return bool(number) and (self.out / CASES / folders.get(number, number)).is_dir()

        if is_there(one.id):
            yield one.id
        if one.series_uid:
            series = Series(one.kind, (), one.study_uid, one.series_uid)
            phases = (case_id(series, self.key, phase) for phase in itertools.count())
            yield from itertools.takewhile(is_there, phases)
        elif len(one.files) == 1 and places:
            path, packed, _ = index.rows.entries[one.files[0]].path.partition(IN_ARCHIVE)
            still = {other.id for other in index.series} if packed else {one.id}
            yield from filter(is_there, sorted(places.get(path, set()) - still))

    @staticmethod
    def _may_be(index: Index, one: IndexedSeries, number: str) -> Sequence[IndexedSeries]:
        """Return what a result may have been made of: of a file in an archive, any of its files."""
        place, packed, _ = index.rows.entries[one.files[0]].path.partition(IN_ARCHIVE)
        if not packed or one.series_uid or number == one.id:
            return (one,)
        paths = ((each, index.rows.entries[each.files[0]].path) for each in index.series)
        return [each for each, path in paths if path.startswith(place + IN_ARCHIVE)]

    def _changed(
        self,
        index: Index,
        one: IndexedSeries,
        number: str,
        folders: Mapping[str, str],
        left: LeftOut | None,
    ) -> tuple[Reason | None, str]:
        """Return why a result is not that of the files that are there; None where it is."""
        try:
            made = read_made(self.out / CASES / folders.get(number, number))
        except (OSError, ValueError):
            return None, ""  # damaged: that is told elsewhere
        first, *others = made.stamp.split() or [""]
        lacking = bool(others) and left is not None and left.reason is Reason.CHANNEL_MISSING
        may_be = self._may_be(index, one, number)
        stamps = {source_stamp([index.stamp(each)], self.key) for each in may_be}
        if first in stamps and not lacking:
            return None, ""
        if left is not None and number == one.id:
            return left.reason, left.detail
        return Reason.SOURCE_CHANGED, CHANGED
