"""Intensity steps of a model card, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScaleRange:
    """Map [a_min, a_max] linearly to [b_min, b_max] (MONAI ScaleIntensityRange)."""

    a_min: float
    a_max: float
    b_min: float | None
    b_max: float | None
    clip: bool = False


@dataclass(frozen=True)
class ScaleMinMax:
    """Map the scan's own minimum and maximum to [minv, maxv] (MONAI ScaleIntensity)."""

    minv: float = 0.0
    maxv: float = 1.0


@dataclass(frozen=True)
class Normalize:
    """Subtract and divide, by default the scan's own mean and population standard deviation.

    MONAI NormalizeIntensity: with `nonzero`, only voxels that are not 0 are measured and changed;
    a standard deviation of 0 is replaced by 1.

    Parameters
    ----------
    subtrahend, divisor : float or None
        None measures the scan.
    nonzero : bool
        Whether only voxels that are not 0 are measured and changed.
    filled : bool
        Whether only the foreground of `NetworkGrid.crop`, with its holes filled, is measured and
        changed (nnU-Net's `use_mask_for_norm`).
    smallest_divisor : float or None
        A smaller divisor is replaced by this one (nnU-Net: 1e-8); None replaces 0 by 1 (MONAI).
    """

    subtrahend: float | None = None
    divisor: float | None = None
    nonzero: bool = False
    filled: bool = False
    smallest_divisor: float | None = None


@dataclass(frozen=True)
class Clip:
    """Limit intensities to [low, high]."""

    low: float
    high: float


@dataclass(frozen=True)
class Truncate:
    """Drop the fraction of intensities, towards zero (conversion to int32)."""


@dataclass(frozen=True)
class ScaleHistogram:
    """Map intensities from the scan's minimum to the end of its histogram to 0 to 255, and clip.

    The end leaves out the brightest part of the voxels that are not 0, in a histogram of 1000 bins.
    A negative minimum counts as 0 if less than 2 % of the voxels are negative (niimath, after
    FreeSurfer's mri_convert --conform).

    Parameters
    ----------
    brightest : float
        Fraction of the voxels that are not 0.
    """

    brightest: float = 0.02


@dataclass(frozen=True)
class Round:
    """Round to whole numbers, the even one of two, and limit them to 0 to 255 (uint8)."""


@dataclass(frozen=True)
class ScaleQuantiles:
    """Map two quantiles of a scan of whole numbers from 0 to 255 to 0 and 1.

    Parameters
    ----------
    low, high : float
        Quantiles as fractions.
    added : float
        Number that is added to the difference of the quantiles before the division.
    clip : bool
        Whether the result is limited to 0 to 1.
    interpolated : bool
        Whether a quantile between two voxels is interpolated. Otherwise the lower one is rounded
        up, and the upper one down, to the value of a voxel (brainchop).
    """

    low: float
    high: float
    added: float = 0.0
    clip: bool = False
    interpolated: bool = False


IntensityStep = (
    ScaleRange | ScaleMinMax | Normalize | Clip | Truncate | ScaleHistogram | Round | ScaleQuantiles
)
