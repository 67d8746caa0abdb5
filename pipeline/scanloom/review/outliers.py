"""Find outliers among results: each structure is compared with the same structure in the cohort.

The findings of a case add up to a score. It is not a probability: it only orders the cases for
review, and the report lists the findings behind it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scanloom.core import Flag, Measurement
from scanloom.core.grid import Box
from scanloom.review.cohort import OUTLIER_Z, Cohort, Distribution, Quantity, values_of

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
    Flag.NOT_HOUNSFIELD: 1.0,
    Flag.SPACING_IMPLAUSIBLE: 1.0,
    Flag.ATTRIBUTES_CONTRADICT: 1.0,
    Flag.FORMS_DISAGREE: 1.0,
    Flag.GAPS_INTERPOLATED: 1.0,
    Flag.FOV_IMPLAUSIBLE: 0.5,
}
"""Flags of a scan that call for review regardless of the result, with their weights."""


@dataclass(frozen=True)
class Place:
    """A value of a structure, to be shown in its distribution."""

    model: str
    label: str
    quantity: Quantity
    value: float


@dataclass(frozen=True)
class Finding:
    """A property of one structure that calls for review.

    Parameters
    ----------
    kind : str
    structure : str
        Display name of the structure, or "scan".
    weight : float
        Share in the score of the case.
    text : str
        Description for the reviewer.
    place : Place or None
        The value that is unusual, if it is a value.
    subjects : tuple of Measurement
        Measurements of the structures that it concerns, where they were found.
    """

    kind: Kind
    structure: str
    weight: float
    text: str
    place: Place | None = None
    subjects: tuple[Measurement, ...] = ()


def find_outliers(
    cases: Mapping[str, Sequence[Measurement]],
    cohort: Cohort,
    axes: Mapping[str, str] | None = None,
) -> dict[str, list[Finding]]:
    """Find the outliers of every case.

    Parameters
    ----------
    cases : mapping
        Measurements of each case, by case id.
    cohort : Cohort
        The cases with which they are compared.
    axes : mapping, optional
        Axis codes of each case's grid, such as "LPS", by case id; needed to compare sides.

    Returns
    -------
    dict
        Findings of every case, by case id, those of the highest weight first.
    """
    findings: dict[str, list[Finding]] = {case: [] for case in cases}
    for case, measurements in cases.items():
        for measurement in measurements:
            findings[case] += _compare(measurement, cohort)
        findings[case] += _of_scan(measurements)
        findings[case] += _of_pairs(measurements, (axes or {}).get(case, ""))
        findings[case].sort(key=lambda entry: (-entry.weight, entry.structure, entry.kind))
    return findings


def risk_score(findings: Sequence[Finding]) -> float:
    """Return the review priority of a case: the n-th finding counts 1 / n of its weight.

    Structures at the border count as a single finding: the scan ends there for all of them.
    """
    borders = [finding for finding in findings if finding.kind == "border"]
    counted = [finding for finding in findings if finding.kind != "border"] + borders[:1]
    return sum(finding.weight / (n + 1) for n, finding in enumerate(counted))


def _compare(m: Measurement, cohort: Cohort) -> list[Finding]:
    """Return the findings of one structure of a case."""
    name = _name(m)
    if m.voxels == 0:
        if cohort.is_usual(m):
            return [Finding("empty", name, _WEIGHT["empty"], "not found, though it usually is")]
        if cohort.is_known(m):
            return []
        return [Finding("empty", name, UNKNOWN_FACTOR * _WEIGHT["empty"], "not found")]
    outliers = [_outlier(m, quantity, cohort) for quantity in QUANTITIES]
    findings = [finding for finding in outliers if finding is not None]
    if Flag.TOUCHES_BORDER in m.flags and not cohort.is_usually_cut(m):
        text = "reaches the border of the scan"
        findings.append(Finding("border", name, _WEIGHT["border"], text, subjects=(m,)))
    return findings


def _outlier(m: Measurement, quantity: Quantity, cohort: Cohort) -> Finding | None:
    """Return the finding of a value that is unusual in the cohort, or for the model."""
    z, reference = cohort.z_score(m, quantity), cohort.reference(m, quantity)
    value = values_of(m).get(quantity)
    if value is None:
        return None
    if reference is not None and not reference.holds(value):
        factor = REFERENCE_FACTOR
    elif z >= OUTLIER_Z or (z <= -OUTLIER_Z and quantity != "parts"):
        factor = min(abs(z) / OUTLIER_Z, 3.0)
    else:
        return None
    usual = cohort.distributions[m.model, m.label, quantity]
    text = f"{_described(m, quantity, value > usual.usual[1])} ({_expected(usual)})"
    position = Place(m.model, m.label, quantity, value)
    return Finding(quantity, _name(m), _WEIGHT[quantity] * factor, text, position, (m,))


def _described(m: Measurement, quantity: Quantity, is_high: bool) -> str:
    match quantity:
        case "volume":
            return f"{_three_digits(m.volume_ml)} ml is {'large' if is_high else 'small'}"
        case "intensity":
            return f"mean {_three_digits(m.mean or 0.0)} {m.unit} is {'high' if is_high else 'low'}"
        case "parts":
            return f"{m.components} separate parts"


def _expected(usual: Distribution) -> str:
    """Return the range of usual values as text."""
    low, high = (_three_digits(value) for value in usual.usual)
    if usual.quantity == "parts":
        return f"usually up to {math.floor(usual.usual[1])}"
    origin = "reference range" if usual.source else "usually"
    return f"{origin} {low} to {high} {usual.unit}"


def _of_scan(measurements: Sequence[Measurement]) -> list[Finding]:
    """Return findings of the scan itself, from the flags that its measurements repeat."""
    flags = dict.fromkeys(flag for m in measurements for flag in m.flags)
    return [Finding("scan", "scan", _SCAN_WEIGHT[f], f.text) for f in flags if f in _SCAN_WEIGHT]


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
                f"{_three_digits(m.volume_ml)} ml left, {_three_digits(right.volume_ml)} ml right"
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


def _three_digits(value: float) -> str:
    """Return a number with three significant digits, without an exponent."""
    return f"{float(f'{value:.3g}'):.12g}"
