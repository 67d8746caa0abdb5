"""Plausible ranges of scans for a model, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CT = "CT"


@dataclass(frozen=True)
class Range:
    """From low to high, both included."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Return whether `value` is in the range."""
        return self.low <= value <= self.high


Quantity = Literal["mean_hu", "volume_ml"]


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


@dataclass(frozen=True)
class Checks:
    """Plausible ranges of scans for a model; None for no limit.

    Parameters
    ----------
    low, high : Range or None
        Range of the 1st and of the 99th percentile of the intensities, without padding.
    spacing : Range or None
        Range of the spacing along each axis, mm.
    extent : Range or None
        Range of the field of view along each patient axis, mm.
    refuse : tuple of "intensity", "spacing", "extent"
        Checks that refuse a scan (IMPLAUSIBLE) instead of flagging it.
    hounsfield : bool or None
        Whether intensities that no CT in Hounsfield units has refuse a scan (IMPLAUSIBLE): see
        `scanloom.cards.hounsfield`. None if the input is CT.
    """

    low: Range | None = None
    high: Range | None = None
    spacing: Range | None = None
    extent: Range | None = None
    refuse: tuple[Literal["intensity", "spacing", "extent"], ...] = ()
    hounsfield: bool | None = None

    def needs_hounsfield(self, modality: str) -> bool:
        """Return whether an input of a modality must be in Hounsfield units."""
        return modality == CT if self.hounsfield is None else self.hounsfield
