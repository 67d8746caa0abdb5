"""The grid, voxel type and number of volumes of a series, from its headers alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from scanloom.core import Gaps, Grid, Reason, ScanError, Series
from scanloom.io.formats import FORMATS

MAX_VOLUMES = 10_000
"""Volumes of a series or file that are counted; time points are far fewer."""


def count_volumes(series: Series, orientation: str | None = None, gaps: Gaps = "refuse") -> int:
    """Return the number of volumes in a series or file, of which `phase` selects one.

    Raises
    ------
    ScanError
        As reading the first of them would raise for its headers.
    """
    for phase in range(MAX_VOLUMES):
        try:
            probe(series, phase, orientation, gaps)
        except ScanError as error:
            if phase and error.reason in (Reason.PHASES, Reason.FOUR_D):
                return phase
            if phase == 0:
                raise
    return MAX_VOLUMES


def probe(
    series: Series,
    phase: int | None = None,
    orientation: str | None = None,
    gaps: Gaps = "refuse",
    limit: int | None = None,
) -> tuple[Grid, np.dtype[Any]]:
    """Return the grid of a series and the type of its voxels after rescale.

    Parameters
    ----------
    series : Series
    phase, orientation, gaps
        As in `scanloom.load_volume`.
    limit : int or None
        Largest size of the decoded voxels in bytes.

    Returns
    -------
    (Grid, dtype)

    Raises
    ------
    ScanError
        As reading the scan would raise for its headers.
    """
    probe = FORMATS[series.kind].probe
    return probe(series.files, phase=phase, orientation=orientation, gaps=gaps, limit=limit)
