"""`Measurement`: size and intensities of one structure; `ReferenceRange`: their usual values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scanloom.core.grid import Box
from scanloom.core.reasons import Flag
from scanloom.core.volume import Unit


@dataclass(frozen=True)
class Measurement:
    """Size and intensities of one structure in one scan. Unknown values are None, never 0.

    Parameters
    ----------
    model, label : str
        Names of the model and the structure.
    number : int
        The structure's value in the label map.
    voxels : int
        Number of voxels.
    volume_ml : float
        Volume in ml.
    unit : "HU", "a.u." or "unknown"
        Unit of the intensities.
    mean, sd, p05, p25, median, p75, p95 : float or None
        Intensity statistics over voxels that are not padding; `sd` is that of the population.
    box : Box or None
        The bounding box.
    components : int
        Number of connected components (26 neighbours).
    flags : tuple of Flag
        TOUCHES_BORDER, EMPTY, EXPERIMENTAL, OUT_OF_RANGE and the case's flags.
    share : float or None
        Volume as a share of that of `share_of`, if requested; None of an empty whole, or if a model
        was not run on one of them (CROP_EMPTY).
    share_of : str or None
        The whole: MODEL/LABEL, several joined by " + ".
    asymmetry : float or None
        Asymmetry index of `asymmetry_of`, in percent, positive if the left is larger, if requested;
        None if both are empty, or a model was not run on one (CROP_EMPTY).
    asymmetry_of : str or None
        Structures of the left and of the right side, as `share_of`, with " : " between them.
    entropy, disagreement : float or None
        Mean of the maps of uncertainty in the structure, 0 to 1, if they were requested.

    Notes
    -----
    A further field needs a default, since results of earlier versions lack it.
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
    share: float | None = None
    share_of: str | None = None
    asymmetry: float | None = None
    asymmetry_of: str | None = None
    entropy: float | None = None
    disagreement: float | None = None


Quantity = Literal["mean_hu", "volume_ml"]


@dataclass(frozen=True)
class Range:
    """From low to high, both included."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Return whether `value` is in the range."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class ReferenceRange:
    """Usual range of a measurement of a structure, for results without a cohort.

    Parameters
    ----------
    structure : str
        Label of the structure.
    quantity : "mean_hu" or "volume_ml"
        The measurement: mean intensity of a scan in HU, or volume in ml.
    range : Range
        The usual values.
    source : str
        Where the range comes from, as a sentence.
    """

    structure: str
    quantity: Quantity
    range: Range
    source: str
