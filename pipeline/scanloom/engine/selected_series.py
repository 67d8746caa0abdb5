"""The series that `segment` takes at a path, and how a person recognises them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scanloom.cards.card import ModelCard
from scanloom.core import Series, SeriesChoice
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
    from scanloom.engine.segment import SegmentOptions

logger = logging.getLogger(__name__)

_SINGLE = "`--phase 0` was not needed: the scan has a single volume"


@dataclass(frozen=True)
class SelectedSeries:
    """A series to segment.

    Parameters
    ----------
    series : Series
    choice : SeriesChoice
        Its number among the series at the path, and how a person recognises it.
    phase : int or None
        The requested volume; None if the series has a single volume.
    """

    series: Series
    choice: SeriesChoice
    phase: int | None


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


def _selected(
    series: Series, candidates: Sequence[Series], options: SegmentOptions
) -> SelectedSeries:
    number = next(n for n, candidate in enumerate(candidates, 1) if candidate is series)
    # volume 0 of a single one has the case id of the scan
    single = options.phase == 0 and is_single_volume(series, options.read)
    prefix = str(SeriesChoice(number, len(candidates), ""))
    choice = SeriesChoice(
        number,
        len(candidates),
        describe_series(series, _described(series, options), TERMINAL_COLUMNS - len(prefix)),
        (*describe_selection(candidates, options.series, series), *([_SINGLE] if single else [])),
        unused_options(series, options.phase, options.read),
    )
    return SelectedSeries(series, choice, None if single else options.phase)


def _described(series: Series, options: SegmentOptions) -> SeriesInfo:
    try:
        return describe_as_read(series, options.phase, options.read.gaps, options.read.orientation)
    except Exception:  # foreign data: reading the series will say what is wrong
        logger.debug("series not described", exc_info=True)
        return SeriesInfo(modality=series.modality or "")
