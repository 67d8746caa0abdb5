"""Usual values of structures: their distribution over a cohort, or the reference ranges of a model.

Volumes and numbers of parts are compared as logarithms, which spread evenly.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from scanloom.cards.card import ReferenceRange
from scanloom.core import Flag, Measurement

MIN_COHORT = 8
"""Minimum number of cases for a comparison; with fewer, the usual values are unknown."""
OUTLIER_Z = 3.5
"""Modified z-score from which a value counts as an outlier (Iglewicz and Hoaglin, 1993)."""
USUAL_SHARE = 0.5
"""Share of a cohort from which the presence of a structure, or at the border, is usual."""
BINS = 40
"""Number of bins of a distribution."""

Quantity = Literal["volume", "intensity", "parts"]
Key = tuple[str, str, Quantity]
"""Model, label and quantity."""

_LOGARITHMIC: tuple[Quantity, ...] = ("volume", "parts")
_MIN_SPREAD: Mapping[Quantity, float] = {"volume": 0.05, "intensity": 0.05, "parts": 0.3}
"""Smallest spread of each quantity: usual values differ at least as much in other cohorts."""
_UNITS: Mapping[Quantity, str] = {"volume": "ml", "intensity": "HU", "parts": ""}
_REFERENCE_QUANTITY: Mapping[str, Quantity] = {"volume_ml": "volume", "mean_hu": "intensity"}


@dataclass(frozen=True)
class Distribution:
    """Distribution of a quantity of a structure, on a linear or a logarithmic axis.

    Parameters
    ----------
    quantity : "volume", "intensity" or "parts"
    unit : str
        Unit of the values; empty for parts.
    first, last : float
        Lowest and highest value of the cohort, or the reference range.
    usual : (low, high)
        Range of usual values: of the cohort by `OUTLIER_Z`, or the reference range.
    counts : tuple of int
        Number of cases in each of `BINS` bins of equal width between first and last; empty for a
        reference range.
    median : float or None
        None for a reference range.
    source : str
        Source of a reference range; empty for a cohort.
    """

    quantity: Quantity
    unit: str
    first: float
    last: float
    usual: tuple[float, float]
    counts: tuple[int, ...] = ()
    median: float | None = None
    source: str = ""

    @property
    def logarithmic(self) -> bool:
        """Whether the axis is logarithmic."""
        return self.quantity in _LOGARITHMIC

    def holds(self, value: float) -> bool:
        """Return whether a value is usual."""
        return self.usual[0] <= value <= self.usual[1]


class Cohort:
    """Measurements of several cases of the same models.

    Parameters
    ----------
    measurements : iterable of Measurement
        Measurements of all cases.
    references : mapping, optional
        Reference ranges of each model, for structures with fewer than `MIN_COHORT` values.
    """

    def __init__(
        self,
        measurements: Iterable[Measurement],
        references: Mapping[str, Sequence[ReferenceRange]] | None = None,
    ) -> None:
        values: dict[Key, list[float]] = defaultdict(list)
        borders: dict[tuple[str, str], list[bool]] = defaultdict(list)
        presence: dict[tuple[str, str], list[bool]] = defaultdict(list)
        for m in measurements:
            presence[m.model, m.label].append(m.voxels > 0)
            if m.voxels:
                borders[m.model, m.label].append(Flag.TOUCHES_BORDER in m.flags)
            for quantity, value in values_of(m).items():
                values[m.model, m.label, quantity].append(value)
        self._at_border, self._present = _mostly(borders), _mostly(presence)
        self._known = {key for key, v in presence.items() if len(v) >= MIN_COHORT}
        self._centre: dict[Key, tuple[float, float]] = {}
        self.distributions: dict[Key, Distribution] = _references(references or {})
        for key, cohort in values.items():
            if len(cohort) >= MIN_COHORT:
                self._centre[key] = _centre(cohort, key[2])
                self.distributions[key] = _distribution(key[2], cohort, self._centre[key])

    def z_score(self, m: Measurement, quantity: Quantity) -> float:
        """Return the modified z-score of a value; 0 if there is none, or too few other cases."""
        value, usual = (
            values_of(m).get(quantity),
            self._centre.get((m.model, m.label, quantity)),
        )
        return 0.0 if usual is None or value is None else _score(value, usual, quantity)

    def reference(self, m: Measurement, quantity: Quantity) -> Distribution | None:
        """Return the reference range that applies to a measurement, for want of a cohort."""
        distribution = self.distributions.get((m.model, m.label, quantity))
        return (
            None
            if distribution is None or distribution.counts or quantity not in values_of(m)
            else distribution
        )

    def is_known(self, m: Measurement) -> bool:
        """Return whether there are enough cases to know if a structure is usually present."""
        return (m.model, m.label) in self._known

    def is_usual(self, m: Measurement) -> bool:
        """Return whether a structure is present in most cases."""
        return (m.model, m.label) in self._present

    def is_usually_cut(self, m: Measurement) -> bool:
        """Return whether a structure reaches the border of the scan in most cases that have it."""
        return (m.model, m.label) in self._at_border


def values_of(m: Measurement) -> dict[Quantity, float]:
    """Return the values of a measurement that are compared: intensities in HU only.

    Other intensities depend on the scanner and its settings.
    """
    values: dict[Quantity, float] = {}
    if m.voxels and m.volume_ml > 0:
        values["volume"] = m.volume_ml
        values["parts"] = float(max(m.components, 1))
    if m.mean is not None and m.unit == "HU":
        values["intensity"] = m.mean
    return values


def _references(references: Mapping[str, Sequence[ReferenceRange]]) -> dict[Key, Distribution]:
    ranges = {}
    for model, stated in references.items():
        for each in stated:
            quantity = _REFERENCE_QUANTITY[each.quantity]
            low, high = each.range.low, each.range.high
            ranges[model, each.structure, quantity] = Distribution(
                quantity, _UNITS[quantity], low, high, (low, high), source=each.source
            )
    return ranges


def _mostly(flags: Mapping[tuple[str, str], Sequence[bool]]) -> set[tuple[str, str]]:
    """Return the structures whose flag is true in most cases of a cohort."""
    return {
        key for key, v in flags.items() if len(v) >= MIN_COHORT and sum(v) >= USUAL_SHARE * len(v)
    }


def _scaled(value: float, quantity: Quantity) -> float:
    return math.log(value) if quantity in _LOGARITHMIC else value


def _score(value: float, usual: tuple[float, float], quantity: Quantity) -> float:
    return (_scaled(value, quantity) - usual[0]) / usual[1]


def _centre(values: Sequence[float], quantity: Quantity) -> tuple[float, float]:
    """Return the median, and the spread: 1.4826 times the median deviation, with a minimum.

    If at least half of the values are equal, it is 1.2533 times the mean deviation (Iglewicz and
    Hoaglin, 1993).
    """
    scaled = [_scaled(value, quantity) for value in values]
    middle = statistics.median(scaled)
    deviations = [abs(v - middle) for v in scaled]
    spread = 1.4826 * statistics.median(deviations) or 1.2533 * statistics.fmean(deviations)
    return middle, max(spread, 0.05 * abs(middle), _MIN_SPREAD[quantity])


def _distribution(
    quantity: Quantity, values: Sequence[float], centre: tuple[float, float]
) -> Distribution:
    """Return the distribution of a cohort's values, with the range that counts as usual."""
    scaled = np.array([_scaled(value, quantity) for value in values])
    edges = float(scaled.min()), float(scaled.max())
    width = (edges[1] - edges[0]) or 1.0
    bins = np.minimum(((scaled - edges[0]) / width * BINS).astype(int), BINS - 1)
    counts = tuple(int(n) for n in np.bincount(bins, minlength=BINS))
    low, high = (centre[0] + sign * OUTLIER_Z * centre[1] for sign in (-1, 1))
    if quantity in _LOGARITHMIC:
        low, high = math.exp(low), math.exp(high)
    return Distribution(
        quantity=quantity,
        unit=_UNITS[quantity],
        first=min(values),
        last=max(values),
        usual=(low, high),
        counts=counts,
        median=statistics.median(values),
    )
