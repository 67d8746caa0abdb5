"""Find outliers among results: each structure is compared with the same structure in the cohort.

The findings of a case add up to a score. It is not a probability: it only orders the cases for
review, and the report lists the findings behind it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Measurement, plain_number
from scanloom.core.grid import Box
from scanloom.core.measurement import ReferenceRange
from scanloom.review.scratch import Columns

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
    references : mapping, optional
        Reference ranges of each model, for structures with fewer than `MIN_COHORT` values.
    folder : Path, optional
        Where values may be kept meanwhile that are too many for memory.
    """

    def __init__(
        self,
        measurements: Iterable[Measurement],
        references: Mapping[str, Sequence[ReferenceRange]] | None = None,
        folder: Path | None = None,
    ) -> None:
        values = Columns[Key](folder)
        presence = defaultdict[tuple[str, str], list[int]](lambda: [0, 0])  # of how many, how many
        borders = defaultdict[tuple[str, str], list[int]](lambda: [0, 0])
        for m in measurements:
            _count(presence[m.model, m.label], m.voxels > 0)
            if m.voxels:
                _count(borders[m.model, m.label], Flag.TOUCHES_BORDER in m.flags)
            for quantity, value in values_of(m).items():
                values.add((m.model, m.label, quantity), value)
        self.usual = _mostly(presence)
        """Model and label of the structures that are present in most cases."""
        self.usually_cut = _mostly(borders)
        """Those that reach the border of the scan in most cases that have them."""
        self.known = {key for key, (count, _) in presence.items() if count >= MIN_COHORT}
        """Those of which there are enough cases to know if they are usually present."""
        self._centre: dict[Key, tuple[float, float]] = {}
        # read after the measurements, whose cases may name them
        self.distributions: dict[Key, Distribution] = _references(references or {})
        for key in values:
            if values.count(key) >= MIN_COHORT:
                cohort = values.read(key)
                self._centre[key] = _centre(cohort, key[2])
                self.distributions[key] = _distribution(key[2], cohort, self._centre[key])

    def as_json(self) -> str:
        """Return all of it as JSON."""
        sets = [sorted(each) for each in (self.usual, self.usually_cut, self.known)]
        centres = [[*key, *centre] for key, centre in self._centre.items()]
        distributions = [[*key[:2], asdict(each)] for key, each in self.distributions.items()]
        return json.dumps([*sets, centres, distributions])

    @classmethod
    def from_json(cls, text: str) -> Cohort:
        """Return the cohort that `as_json` described.

        Raises
        ------
        LookupError, TypeError, ValueError
            If the text is not from `as_json`.
        """
        cohort = cls(())
        *sets, centres, distributions = json.loads(text)
        cohort.usual, cohort.usually_cut, cohort.known = (
            {(model, label) for model, label in each} for each in sets
        )
        cohort._centre = {
            (model, label, quantity): (middle, spread)
            for model, label, quantity, middle, spread in centres
        }
        for model, label, each in distributions:
            lists = {name: tuple(each[name]) for name in ("usual", "counts")}
            key = model, label, each["quantity"]
            cohort.distributions[key] = Distribution(**each | lists)
        return cohort

    def z_score(self, key: Key, value: float) -> float:
        """Return the modified z-score of a value of `values_of`; 0 with too few other cases."""
        centre = self._centre.get(key)
        if centre is None:
            return 0.0
        return (_scaled(value, key[2]) - centre[0]) / centre[1]

    def reference(self, key: Key) -> Distribution | None:
        """Return the reference range that applies to a value, for want of a cohort."""
        distribution = self.distributions.get(key)
        return None if distribution is None or distribution.counts else distribution


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


def _count(numbers: list[int], is_so: bool) -> None:
    numbers[0] += 1
    numbers[1] += is_so


def _mostly(counts: Mapping[tuple[str, str], Sequence[int]]) -> set[tuple[str, str]]:
    """Return the structures that something is true of in most cases of a cohort."""
    return {
        key
        for key, (count, matching) in counts.items()
        if count >= MIN_COHORT and matching >= USUAL_SHARE * count
    }


def _scaled(value: float, quantity: Quantity) -> float:
    return math.log(value) if quantity in _LOGARITHMIC else value


def _all_scaled(values: NDArray[np.float64], quantity: Quantity) -> NDArray[np.float64]:
    """Return the values as `_scaled` does, whose last digit NumPy's logarithm has not always."""
    one_by_one = (_scaled(value, quantity) for value in memoryview(values))
    return np.fromiter(one_by_one, float, len(values))


def _centre(values: NDArray[np.float64], quantity: Quantity) -> tuple[float, float]:
    """Return the median, and the spread: 1.4826 times the median deviation, with a minimum.

    If at least half of the values are equal, it is 1.2533 times the mean deviation (Iglewicz and
    Hoaglin, 1993).
    """
    scaled = _all_scaled(values, quantity)
    middle = float(np.median(scaled))
    deviations = np.abs(scaled - middle)
    # the factors make each that of the standard deviation, if values are distributed normally
    spread = 1.4826 * float(np.median(deviations)) or 1.2533 * statistics.fmean(deviations)
    # equal values in a small cohort must not make outliers of all others
    return middle, max(spread, 0.05 * abs(middle), _MIN_SPREAD[quantity])


def _distribution(
    quantity: Quantity, values: NDArray[np.float64], centre: tuple[float, float]
) -> Distribution:
    """Return the distribution of a cohort's values, with the range that counts as usual."""
    scaled = _all_scaled(values, quantity)
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
        first=float(values.min()),
        last=float(values.max()),
        usual=(low, high),
        counts=counts,
        median=float(np.median(values)),
    )


IMBALANCE_RATIO = 1.8
"""Volume ratio from which the left and the right structure of a pair count as different."""
MIN_PAIR_ML = 1.0
"""Volume in ml below which pairs are not compared: a single voxel would matter."""
REVIEW_THRESHOLD = 1.0
"""Score from which a case needs review; a structure at the border alone does not reach it."""
UNKNOWN_FACTOR = 0.3
"""Factor of a finding's weight if the cohort is too small to know the usual values."""
REFERENCE_FACTOR = 0.5
"""Factor of the weight of a value outside the reference range of its model."""
QUANTITIES: tuple[Quantity, ...] = ("volume", "intensity", "parts")

Kind = Literal["volume", "empty", "parts", "imbalance", "side", "border", "intensity", "scan"]
_WEIGHT: Mapping[Kind, float] = {
    "side": 5.0,
    "volume": 3.0,
    "empty": 3.0,
    "intensity": 2.0,
    "imbalance": 2.0,
    "parts": 1.5,
    "border": 0.5,
}
_SCAN_WEIGHT: Mapping[Flag, float] = {
    Flag.HU_IMPLAUSIBLE: 2.0,
    Flag.DIRECTION_IMPLAUSIBLE: 2.0,
    Flag.NOT_HOUNSFIELD: 1.0,
    Flag.SPACING_IMPLAUSIBLE: 1.0,
    Flag.ATTRIBUTES_CONTRADICT: 1.0,
    Flag.FORMS_DISAGREE: 1.0,
    Flag.GAPS_INTERPOLATED: 1.0,
    Flag.HEAD_IN_VIEW: 1.0,
    Flag.FOV_IMPLAUSIBLE: 0.5,
    Flag.TILT_IMPLAUSIBLE: 0.5,
}
"""Flags of a scan that call for review regardless of the result, with their weights."""


@dataclass(frozen=True)
class Finding:
    """A property of one structure that calls for review.

    Parameters
    ----------
    structure : str
        Display name of the structure, or "scan".
    weight : float
        Share in the score of the case.
    text : str
        Description for the reviewer.
    value : (Key, float) or None
        The value that is unusual, if it is a value, to be shown in its distribution.
    subjects : tuple of Measurement
        Measurements of the structures that it concerns, where they were found.
    """

    kind: Kind
    structure: str
    weight: float
    text: str
    value: tuple[Key, float] | None = None
    subjects: tuple[Measurement, ...] = ()


def find_outliers(measurements: Sequence[Measurement], cohort: Cohort, axes: str) -> list[Finding]:
    """Return the findings of a case, those of the highest weight first.

    Parameters
    ----------
    axes : str
        Axis codes of its grid, such as "LPS", to compare sides; empty if they are unknown.
    """
    findings = [finding for m in measurements for finding in _compare(m, cohort)]
    flags = dict.fromkeys(flag for m in measurements for flag in m.flags)
    findings += [
        Finding("scan", "scan", _SCAN_WEIGHT[f], f.text) for f in flags if f in _SCAN_WEIGHT
    ]
    findings += _of_pairs(measurements, axes)
    return sorted(findings, key=lambda entry: (-entry.weight, entry.structure, entry.kind))


def risk_score(findings: Sequence[Finding]) -> float:
    """Return the review priority of a case: the n-th finding counts 1 / n of its weight.

    Structures at the border count as a single finding: the scan ends there for all of them.
    """
    borders = [finding for finding in findings if finding.kind == "border"]
    counted = [finding for finding in findings if finding.kind != "border"] + borders[:1]
    return sum(finding.weight / (n + 1) for n, finding in enumerate(counted))


def _compare(m: Measurement, cohort: Cohort) -> list[Finding]:
    """Return the findings of one structure of a case."""
    name, key = _name(m), (m.model, m.label)
    if m.voxels == 0:
        if key in cohort.usual:
            return [Finding("empty", name, _WEIGHT["empty"], "not found, though it usually is")]
        if key in cohort.known:
            return []
        return [Finding("empty", name, UNKNOWN_FACTOR * _WEIGHT["empty"], "not found")]
    values = values_of(m)
    outliers = [_outlier(m, each, values[each], cohort) for each in QUANTITIES if each in values]
    findings = [finding for finding in outliers if finding is not None]
    if Flag.TOUCHES_BORDER in m.flags and key not in cohort.usually_cut:
        text = "reaches the border of the scan"
        findings.append(Finding("border", name, _WEIGHT["border"], text, subjects=(m,)))
    return findings


def _outlier(m: Measurement, quantity: Quantity, value: float, cohort: Cohort) -> Finding | None:
    """Return the finding of a value that is unusual in the cohort, or for the model."""
    key: Key = m.model, m.label, quantity
    z, reference = cohort.z_score(key, value), cohort.reference(key)
    if reference is not None and not reference.holds(value):
        factor = REFERENCE_FACTOR
    # fewer parts than usual are no error
    elif z >= OUTLIER_Z or (z <= -OUTLIER_Z and quantity != "parts"):
        # capped: one absurd value must not push all other cases down
        factor = min(abs(z) / OUTLIER_Z, 3.0)
    else:
        return None
    usual = cohort.distributions[key]
    text = f"{_described(m, quantity, value > usual.usual[1])} ({_expected(usual)})"
    return Finding(quantity, _name(m), _WEIGHT[quantity] * factor, text, (key, value), (m,))


def _described(m: Measurement, quantity: Quantity, is_high: bool) -> str:
    match quantity:
        case "volume":
            return f"{plain_number(m.volume_ml, 3)} ml is {'large' if is_high else 'small'}"
        case "intensity":
            return (
                f"mean {plain_number(m.mean or 0.0, 3)} {m.unit} is {'high' if is_high else 'low'}"
            )
        case "parts":
            return f"{m.components} separate parts"


def _expected(usual: Distribution) -> str:
    low, high = (plain_number(value, 3) for value in usual.usual)
    if usual.quantity == "parts":
        return f"usually up to {math.floor(usual.usual[1])}"
    origin = "reference range" if usual.source else "usually"
    return f"{origin} {low} to {high} {usual.unit}"


def _of_pairs(measurements: Sequence[Measurement], axes: str) -> list[Finding]:
    """Return findings of pairs of a left and a right structure: unequal volume, swapped sides."""
    findings = []
    by_name = {(m.model, m.label): m for m in measurements}
    for (model, label), m in by_name.items():
        right = by_name.get((model, label.replace("left", "right")))
        if "left" not in label or right is None or m.box is None or right.box is None:
            continue
        small, large = sorted((m.volume_ml, right.volume_ml))
        pair = _name(m).replace("left", "left/right")
        if small >= MIN_PAIR_ML and large / small >= IMBALANCE_RATIO:
            text = (
                f"{plain_number(m.volume_ml, 3)} ml left, "
                f"{plain_number(right.volume_ml, 3)} ml right"
            )
            weight = _WEIGHT["imbalance"]
            findings.append(Finding("imbalance", pair, weight, text, subjects=(m, right)))
        if _is_swapped(m.box, right.box, axes):
            text = "the structure named left is on the patient's right"
            findings.append(Finding("side", pair, _WEIGHT["side"], text, subjects=(m, right)))
    return findings


def _is_swapped(left_box: Box, right_box: Box, axes: str) -> bool:
    """Whether the left box is to the right of the other by half the width of the wider one."""
    for axis, code in enumerate(axes):
        if code in "LR":
            middles = [(first[axis] + last[axis]) / 2 for first, last in (left_box, right_box)]
            width = max(last[axis] - first[axis] + 1 for first, last in (left_box, right_box))
            to_left = (middles[0] - middles[1]) * (1 if code == "L" else -1)
            return to_left <= -width / 2
    return False


def _name(m: Measurement) -> str:
    return m.label.replace("_", " ")
