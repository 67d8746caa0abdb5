"""Which results a reviewer should look at first: each structure judged against its cohort.

A score is no probability. It only puts cases in an order: what stands out comes first, and the
page says why it stands out.
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

COHORT = 8
"""Fewer cases than this are no cohort: nothing is said of what is usual."""
OUTLIER = 3.5
"""Modified z-score from which a value is an outlier (Iglewicz and Hoaglin, 1993)."""
IMBALANCE = 1.8
"""Ratio of volumes from which a left and a right structure are no longer alike."""
SMALL_ML = 1.0
"""Volumes below this are not compared: one voxel more or less would matter."""
DOUBTFUL = 1.0
"""Score from which a case is called doubtful: more than a border that is reached."""
USUAL = 0.5
"""Share of a cohort from which it is usual that a structure is there, or reaches the border."""
UNSURE = 0.3
"""Part of a doubt's weight that counts where no cohort says what is usual."""

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
_OF_SCAN: Mapping[Flag, float] = {
    Flag.HU_IMPLAUSIBLE: 2.0,
    Flag.NOT_HOUNSFIELD: 1.0,
    Flag.SPACING_IMPLAUSIBLE: 1.0,
    Flag.ATTRIBUTES_CONTRADICT: 1.0,
    Flag.FORMS_DISAGREE: 1.0,
    Flag.GAPS_INTERPOLATED: 1.0,
    Flag.FOV_IMPLAUSIBLE: 0.5,
}
"""Flags of a case that make its results doubtful, whatever they look like, and their weight."""


@dataclass(frozen=True)
class Doubt:
    """One thing about one structure that a reviewer should look at; `text` is for people."""

    kind: Kind
    structure: str
    weight: float
    text: str


def judge(
    cohort: Mapping[str, Sequence[Measurement]], axes: Mapping[str, str] | None = None
) -> dict[str, list[Doubt]]:
    """Judge every structure of every case.

    Parameters
    ----------
    cohort : mapping
        Case id to its measurements.
    axes : mapping, optional
        Case id to the axis codes of its grid, such as "LPS": they tell left from right.

    Returns
    -------
    dict
        Case id to its doubts, the weightiest first; each case of the cohort is there.
    """
    found: dict[str, list[Doubt]] = {case: [] for case in cohort}
    usual = _Usual(m for measurements in cohort.values() for m in measurements)
    for case, measurements in cohort.items():
        for measurement in measurements:
            found[case] += usual.judge(measurement)
        found[case] += _scan(measurements)
        found[case] += _sides(measurements, (axes or {}).get(case, ""))
        found[case].sort(key=lambda doubt: (-doubt.weight, doubt.structure, doubt.kind))
    return found


def score(doubts: Sequence[Doubt]) -> float:
    """Return how far up a case belongs: its doubts together, each further one counting less.

    However many structures reach the border, that is one doubt: the scan ends there.
    """
    borders = [doubt for doubt in doubts if doubt.kind == "border"]
    counted = [doubt for doubt in doubts if doubt.kind != "border"] + borders[:1]
    return sum(doubt.weight / (n + 1) for n, doubt in enumerate(counted))


class _Usual:
    """What is usual of each structure, over a cohort."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        borders: dict[tuple[str, str], list[bool]] = defaultdict(list)
        found: dict[tuple[str, str], list[bool]] = defaultdict(list)
        for m in measurements:
            found[m.model, m.label].append(m.voxels > 0)
            if m.voxels:
                borders[m.model, m.label].append(Flag.TOUCHES_BORDER in m.flags)
            for name, value in _values(m).items():
                values[m.model, m.label, name].append(value)
        self._centre = {key: _centre(v) for key, v in values.items() if len(v) >= COHORT}
        self._at_border, self._there = _usual(borders), _usual(found)
        self._known = {key for key, v in found.items() if len(v) >= COHORT}

    def judge(self, m: Measurement) -> list[Doubt]:
        name = _name(m)
        if m.voxels == 0:
            key = m.model, m.label
            if key in self._there:
                return [Doubt("empty", name, _WEIGHT["empty"], "not found, though it usually is")]
            if key in self._known:
                return []
            return [Doubt("empty", name, UNSURE * _WEIGHT["empty"], "not found")]
        doubts = []
        z = {n: self._z(m, n, value) for n, value in _values(m).items()}
        if abs(z.get("volume", 0.0)) >= OUTLIER:
            word = "large" if z["volume"] > 0 else "small"
            doubts.append(_by_z("volume", name, z["volume"], f"{_plain(m.volume_ml)} ml is {word}"))
        if abs(z.get("intensity", 0.0)) >= OUTLIER:
            said = f"mean {m.mean:.4g} {m.unit} is unusual"
            doubts.append(_by_z("intensity", name, z["intensity"], said))
        if z.get("parts", 0.0) >= OUTLIER and m.components > 1:
            doubts.append(_by_z("parts", name, z["parts"], f"{m.components} separate parts"))
        if Flag.TOUCHES_BORDER in m.flags and (m.model, m.label) not in self._at_border:
            text = "reaches the border of the scan"
            doubts.append(Doubt("border", name, _WEIGHT["border"], text))
        return doubts

    def _z(self, m: Measurement, name: str, value: float) -> float:
        known = self._centre.get((m.model, m.label, name))
        return 0.0 if known is None else (value - known[0]) / known[1]


def _usual(seen: Mapping[tuple[str, str], Sequence[bool]]) -> set[tuple[str, str]]:
    """Return of which structures something is so in most of a cohort."""
    return {key for key, v in seen.items() if len(v) >= COHORT and sum(v) >= USUAL * len(v)}


def _values(m: Measurement) -> dict[str, float]:
    """Return what is compared; volumes and counts by their logarithm, as they spread."""
    values = {}
    if m.voxels and m.volume_ml > 0:
        values["volume"] = math.log(m.volume_ml)
        values["parts"] = math.log(max(m.components, 1))
    if m.mean is not None:
        values["intensity"] = m.mean
    return values


def _centre(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the spread: 1.4826 times the median deviation, never nothing."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(v - middle) for v in values)
    return middle, max(spread, 0.05 * abs(middle), 0.05)


def _by_z(kind: Kind, name: str, z: float, text: str) -> Doubt:
    more = min(abs(z) / OUTLIER, 3.0)
    return Doubt(kind, name, _WEIGHT[kind] * more, f"{text} (z {z:+.1f})")


def _scan(measurements: Sequence[Measurement]) -> list[Doubt]:
    """Return what was said of the scan itself: measurements hold the flags of their case."""
    flags = dict.fromkeys(flag for m in measurements for flag in m.flags)
    return [Doubt("scan", "scan", _OF_SCAN[f], f.text) for f in flags if f in _OF_SCAN]


def _sides(measurements: Sequence[Measurement], axes: str) -> list[Doubt]:
    """Compare what there is on the left with its like on the right."""
    doubts = []
    by_name = {(m.model, m.label): m for m in measurements}
    for (model, label), left in by_name.items():
        right = by_name.get((model, label.replace("left", "right")))
        if "left" not in label or right is None or left.box is None or right.box is None:
            continue
        small, large = sorted((left.volume_ml, right.volume_ml))
        pair = _name(left).replace("left", "left/right")
        if small >= SMALL_ML and large / small >= IMBALANCE:
            text = f"{_plain(left.volume_ml)} ml left, {_plain(right.volume_ml)} ml right"
            doubts.append(Doubt("imbalance", pair, _WEIGHT["imbalance"], text))
        if _swapped(left.box, right.box, axes):
            text = "what is called left lies on the patient's right"
            doubts.append(Doubt("side", pair, _WEIGHT["side"], text))
    return doubts


def _swapped(left: Box, right: Box, axes: str) -> bool:
    """Whether the left one lies further right, by at least half of the wider of the two."""
    for axis, code in enumerate(axes):
        if code in "LR":
            middles = [(first[axis] + last[axis]) / 2 for first, last in (left, right)]
            width = max(last[axis] - first[axis] + 1 for first, last in (left, right))
            to_left = (middles[0] - middles[1]) * (1 if code == "L" else -1)
            return to_left <= -width / 2
    return False


def _name(m: Measurement) -> str:
    return m.label.replace("_", " ")


def _plain(value: float) -> str:
    """Return three significant digits, without an exponent."""
    return f"{float(f'{value:.3g}'):.12g}"
