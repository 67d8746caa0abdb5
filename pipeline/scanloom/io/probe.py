"""The grid, voxel type and volumes of a series, and options it needs, from its headers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from scanloom.core import Gaps, Grid, ReadOptions, Reason, ScanError, Series, counted
from scanloom.io.formats import FORMATS

MAX_VOLUMES = 10_000
"""Volumes of a series or file that are counted; time points are far fewer."""


def count_volumes(series: Series) -> int:
    """Return the number of volumes in a series or file, of which `phase` selects one.

    Raises
    ------
    ScanError
        As reading the first of them would raise for its headers.
    """
    for phase in range(MAX_VOLUMES):
        try:
            probe(series, phase)
        except ScanError as error:
            if phase and error.reason in (Reason.PHASES, Reason.FOUR_D):
                return phase
            if phase == 0:
                raise
    return MAX_VOLUMES


def is_single_volume(series: Series, options: ReadOptions) -> bool:
    """Return whether a series gives a volume without the choice of one."""
    try:
        probe(series, None, options)
    except ScanError:
        return False
    return True


def unused_options(series: Series, phase: int | None, options: ReadOptions) -> tuple[str, ...]:
    """Return which options the headers of a series override, as sentences without a full stop.

    An option that agrees with the headers is left out.
    """
    sentences = []
    if options.modality and series.modality not in (None, options.modality):
        stated = f"the headers state {series.modality}"
        sentences.append(f"`--modality {options.modality}` was not used: {stated}")
    codes = options.orientation and _stated_axes(series, phase, options)
    if codes and codes != options.orientation:
        sentences.append(
            f"`--orientation {options.orientation}` was not used: the scan states {codes}"
        )
    return tuple(sentences)


def _stated_axes(series: Series, phase: int | None, options: ReadOptions) -> str:
    """Return the axis codes of a series by its headers; empty if they do not state them."""
    try:
        return probe(series, phase, replace(options, orientation=None))[0].axis_codes
    except ScanError:
        return ""


def probe(
    series: Series,
    phase: int | None = None,
    options: ReadOptions = ReadOptions(),
    limit: int | None = None,
) -> tuple[Grid, np.dtype[Any]]:
    """Return the grid of a series and its voxel type after rescale; see `VolumeFormat.probe`.

    Raises
    ------
    ScanError
        As reading the scan would raise for its headers, and as `check_neighbours`.
    """
    outline = FORMATS[series.kind].probe(series.files, phase, options, limit)
    check_neighbours(series, options.gaps)
    return outline


def check_neighbours(series: Series, gaps: Gaps) -> None:
    """Refuse a series beside which files can't be read, unless missing slices are accepted.

    The rest looks complete, also where its first or last slices are lost.

    Raises
    ------
    ScanError
        SLICES_UNREADABLE.
    """
    if series.beside and gaps == "refuse":
        raise neighbours_error(series.beside)


def neighbours_error(count: int) -> ScanError:
    """Return the error for a series beside which so many files can't be read."""
    detail = f"slices may be missing: {counted(count, 'file')} beside its slices can't be used"
    return ScanError(Reason.SLICES_UNREADABLE, detail)
