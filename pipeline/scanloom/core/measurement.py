"""What is measured of a structure."""

from __future__ import annotations

from dataclasses import dataclass

from scanloom.core.reasons import Flag
from scanloom.core.volume import Unit

Box = tuple[tuple[int, int, int], tuple[int, int, int]]


@dataclass(frozen=True)
class Measurement:
    """Size and intensities of one structure in one scan. What can't be known is None, never 0.

    Parameters
    ----------
    model, label : str
        Which structure of which model.
    number : int
        Its value in the label map.
    voxels : int
        How many.
    volume_ml : float
        Voxels times voxel volume.
    mean, sd, p05, p25, median, p75, p95 : float or None
        Of the voxels that are not padding, in `unit`; sd of the population.
    box : ((i, j, k), (i, j, k)) or None
        First and last voxel, both included.
    components : int
        Connected parts (26 neighbours).
    flags : tuple of Flag
        TOUCHES_BORDER, EMPTY, and those of the case.
    """

    model: str
    label: str
    number: int
    voxels: int
    volume_ml: float
    unit: Unit
    mean: float | None
    sd: float | None
    p05: float | None
    p25: float | None
    median: float | None
    p75: float | None
    p95: float | None
    box: Box | None
    components: int
    flags: tuple[Flag, ...] = ()
