"""What a series' headers say of its size, before a voxel is read."""

from __future__ import annotations

from typing import Any

import numpy as np

from scanloom.core import Gaps, Grid, Series


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
    if series.kind == "nifti":
        from scanloom.io.nifti import nifti_outline

        return nifti_outline(series.files, phase, orientation)
    if series.kind == "itk":
        from scanloom.io.itk import itk_outline

        return itk_outline(series.files, phase, orientation)
    from scanloom.io.dicom.series import dicom_outline

    return dicom_outline(series.files, phase, gaps)
