"""What a series' headers say of its size, before a voxel is read."""

from __future__ import annotations

from typing import Any

import numpy as np

from scanloom.core import Gaps, Grid, Reason, ScanError, Series
from scanloom.io.formats import FORMATS

MOST_VOLUMES = 10_000
"""Of one series or file; more are no time points."""


def count_phases(series: Series, orientation: str | None = None, gaps: Gaps = "refuse") -> int:
    """Return how many volumes a series or file holds that can be chosen by `phase`.

    Raises
    ------
    ScanError
        What reading any of them would raise for its headers.
    """
    for phase in range(MOST_VOLUMES):
        try:
            read_outline(series, phase, orientation, gaps)
        except ScanError as error:
            if phase and error.reason in (Reason.PHASES, Reason.FOUR_D):
                return phase
            if phase == 0:
                raise
    return MOST_VOLUMES


def read_outline(
    series: Series,
    phase: int | None = None,
    orientation: str | None = None,
    gaps: Gaps = "refuse",
) -> tuple[Grid, np.dtype[Any]]:
    """Return the grid of a series and the type that its voxels will have.

    Parameters
    ----------
    series : Series
        As it was found.
    phase, orientation, gaps
        As in `scanloom.load_volume`.

    Returns
    -------
    (Grid, dtype)

    Raises
    ------
    ScanError
        What reading the scan would raise for its headers.
    """
    probe = FORMATS[series.kind].probe
    return probe(series.files, phase=phase, orientation=orientation, gaps=gaps)
