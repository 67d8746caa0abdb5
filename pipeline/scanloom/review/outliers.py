"""Find outliers among results: each structure is compared with the same structure in the cohort.

The findings of a case add up to a score. It is not a probability: it only orders the cases for
review, and the report lists the findings behind it.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scanloom.core import Flag, Measurement
from scanloom.core.measurement import Box

MIN_COHORT = 8
"""Minimum number of cases for a comparison; with fewer, the usual values are unknown."""
OUTLIER_Z = 3.5
"""Modified z-score from which a value counts as an outlier (Iglewicz and Hoaglin, 1993)."""
IMBALANCE_RATIO = 1.8
"""Volume ratio from which the left and the right structure of a pair count as different."""
MIN_PAIR_ML = 1.0
"""Volume in ml below which pairs are not compared: a single voxel would matter."""
REVIEW_THRESHOLD = 1.0
"""Score from which a case needs review; a structure at the border alone does not reach it."""
USUAL_SHARE = 0.5
"""Share of a cohort from which the presence of a structure, or at the border, is usual."""
UNKNOWN_FACTOR = 0.3
"""Factor of a finding's weight if the cohort is too small to know the usual values."""

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
class Finding:
    """A property of one structure that calls for review; `text` describes it to the reviewer."""

    kind: Kind
    structure: str
    weight: float
    text: str


def find_outliers(
    cohort: Mapping[str, Sequence[Measurement]], axes: Mapping[str, str] | None = None
) -> dict[str, list[Finding]]:
    """Find the outliers of every case.

    Parameters
    ----------
    cohort : mapping
        Measurements of each case, by case id.
    axes : mapping, optional
        Axis codes of each case's grid, such as "LPS", by case id; needed to compare sides.

    Returns
    -------
    dict
        Findings of every case, by case id, those of the highest weight first.
    """
    findings: dict[str, list[Finding]] = {case: [] for case in cohort}
    usual = _UsualValues(m for measurements in cohort.values() for m in measurements)
    for case, measurements in cohort.items():
        for measurement in measurements:
            findings[case] += usual.compare(measurement)
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


class _UsualValues:
    """Usual values of each structure over a cohort: centre and spread, presence, border."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        borders: dict[tuple[str, str], list[bool]] = defaultdict(list)
        presence: dict[tuple[str, str], list[bool]] = defaultdict(list)
        for m in measurements:
            presence[m.model, m.label].append(m.voxels > 0)
            if m.voxels:
                borders[m.model, m.label].append(Flag.TOUCHES_BORDER in m.flags)
            for name, value in _values(m).items():
                values[m.model, m.label, name].append(value)
        self._centre = {key: _centre(v) for key, v in values.items() if len(v) >= MIN_COHORT}
        self._at_border, self._present = _mostly(borders), _mostly(presence)
        self._known = {key for key, v in presence.items() if len(v) >= MIN_COHORT}

    def compare(self, m: Measurement) -> list[Finding]:
        """Return the findings of one structure of a case."""
        name = _name(m)
        if m.voxels == 0:
            key = m.model, m.label
            if key in self._present:
                return [Finding("empty", name, _WEIGHT["empty"], "not found, though it usually is")]
            if key in self._known:
                return []
            return [Finding("empty", name, UNKNOWN_FACTOR * _WEIGHT["empty"], "not found")]
        findings = []
        z = {n: self._z(m, n, value) for n, value in _values(m).items()}
        if abs(z.get("volume", 0.0)) >= OUTLIER_Z:
            size = "large" if z["volume"] > 0 else "small"
            text = f"{_three_digits(m.volume_ml)} ml is {size}"
            findings.append(_outlier("volume", name, z["volume"], text))
        if abs(z.get("intensity", 0.0)) >= OUTLIER_Z:
            text = f"mean {m.mean:.4g} {m.unit} is unusual"
            findings.append(_outlier("intensity", name, z["intensity"], text))
        if z.get("parts", 0.0) >= OUTLIER_Z and m.components > 1:
            findings.append(_outlier("parts", name, z["parts"], f"{m.components} separate parts"))
        if Flag.TOUCHES_BORDER in m.flags and (m.model, m.label) not in self._at_border:
            text = "reaches the border of the scan"
            findings.append(Finding("border", name, _WEIGHT["border"], text))
        return findings

    def _z(self, m: Measurement, name: str, value: float) -> float:
        """Return the modified z-score of a value; 0 if the usual values are unknown."""
        usual = self._centre.get((m.model, m.label, name))
        return 0.0 if usual is None else (value - usual[0]) / usual[1]


def _mostly(flags: Mapping[tuple[str, str], Sequence[bool]]) -> set[tuple[str, str]]:
    """Return the structures whose flag is true in most cases of a cohort."""
    return {
        key for key, v in flags.items() if len(v) >= MIN_COHORT and sum(v) >= USUAL_SHARE * len(v)
    }


def _values(m: Measurement) -> dict[str, float]:
    """Return the values to compare: volumes and counts as logarithms, which spread evenly."""
    values = {}
    if m.voxels and m.volume_ml > 0:
        values["volume"] = math.log(m.volume_ml)
        values["parts"] = math.log(max(m.components, 1))
    if m.mean is not None:
        values["intensity"] = m.mean
    return values


def _centre(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the spread: 1.4826 times the median deviation, at least 0.05."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(v - middle) for v in values)
    return middle, max(spread, 0.05 * abs(middle), 0.05)


def _outlier(kind: Kind, name: str, z: float, text: str) -> Finding:
    factor = min(abs(z) / OUTLIER_Z, 3.0)
    return Finding(kind, name, _WEIGHT[kind] * factor, f"{text} (z {z:+.1f})")


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
            findings.append(Finding("imbalance", pair, _WEIGHT["imbalance"], text))
        if _is_swapped(m.box, right.box, axes):
            text = "the structure named left is on the patient's right"
            findings.append(Finding("side", pair, _WEIGHT["side"], text))
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
