"""The series that `segment` takes at a path, and how a person recognises them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scanloom.cards.card import ModelCard
from scanloom.core import Reason, Series, SeriesChoice
from scanloom.io.index.inspection import SeriesInfo, describe_as_read
from scanloom.io.index.listing import TERMINAL_COLUMNS, describe_series
from scanloom.io.index.ranking import (
    RankingOptions,
    describe_selection,
    preference_of,
    select_series,
)
from scanloom.io.index.series import find_series
from scanloom.io.probe import is_single_volume, unused_options

if TYPE_CHECKING:
    from scanloom.options import SegmentOptions

_SINGLE = "`--phase 0` was not needed: the scan has a single volume"


@dataclass(frozen=True)
class SelectedSeries:
    """A series to segment.

    Parameters
    ----------
    series : Series
    number, of : int
        Its number in the list of the series at the path, from 1, and the length of that list.
    phase : int or None
        The requested volume; None if the series has a single volume.
    notes, unused : tuple of str
        As in `SeriesChoice`.
    """

    series: Series
    number: int
    of: int
    phase: int | None
    notes: tuple[str, ...]
    unused: tuple[str, ...]

    def described(self, info: SeriesInfo) -> SeriesChoice:
        """Return how a person recognises the series, with its modality and slices."""
        choice = SeriesChoice(self.number, self.of, "", self.notes, self.unused)
        text = describe_series(self.series, info, TERMINAL_COLUMNS - len(str(choice)))
        return replace(choice, text=text)


def select_at(
    path: Path, options: SegmentOptions, cards: Sequence[ModelCard]
) -> tuple[SelectedSeries, ...]:
    """Return the series at a path that `segment` takes with these options.

    Raises
    ------
    ScanError
        As `find_series` and `select_series` do.
    """
    reading = RankingOptions(options.phase, options.read.gaps, options.read.orientation)
    candidates = find_series(path, options.out, archives=options.archives)
    chosen = select_series(candidates, options.series, preference_of(cards), reading)
    return tuple(_selected(series, candidates, options) for series in chosen)


def choice_of(
    selected: SelectedSeries, options: SegmentOptions, reason: Reason | None
) -> SeriesChoice:
    """Return how a person recognises a series: without its slices if it gave no result.

    Parameters
    ----------
    selected : SelectedSeries
    options : SegmentOptions
    reason : Reason or None
        Why there is no result. Then the headers are not read again, to refuse a scan soon.
    """
    series, read = selected.series, options.read
    if reason is not None:
        return selected.described(SeriesInfo(modality=series.modality or ""))
    return selected.described(describe_as_read(series, options.phase, read.gaps, read.orientation))


def _selected(
    series: Series, candidates: Sequence[Series], options: SegmentOptions
) -> SelectedSeries:
    number = next(n for n, candidate in enumerate(candidates, 1) if candidate is series)
    # volume 0 of a single one has the case id of the scan
    single = options.phase == 0 and is_single_volume(series, options.read)
    notes = describe_selection(candidates, options.series, series)
    return SelectedSeries(
        series,
        number,
        len(candidates),
        None if single else options.phase,
        (*notes, *([_SINGLE] if single else [])),
        unused_options(series, options.phase, options.read),
    )
