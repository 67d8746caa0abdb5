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

Kind = Literal["volume", "empty", "parts", "imbalance", "side", "border", "intensity"]
_WEIGHT: Mapping[Kind, float] = {
    "side": 5.0,
    "volume": 3.0,
    "empty": 3.0,
    "intensity": 2.0,
    "imbalance": 2.0,
    "parts": 1.5,
    "border": 0.5,
}


@dataclass(frozen=True)
class Doubt:
    """One thing about one structure that a reviewer should look at; `text` is for people."""

    kind: Kind
    structure: str
    weight: float
    text: str


def judge(cohort: Mapping[str, Sequence[Measurement]]) -> dict[str, list[Doubt]]:
    """Judge every structure of every case.

    Parameters
    ----------
    cohort : mapping
        Case id to its measurements.

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
        found[case] += _sides(measurements)
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


def _sides(measurements: Sequence[Measurement]) -> list[Doubt]:
    """Compare what there is on the left with its like on the right.

    A patient's left has the larger L coordinate; boxes are of voxel indices, whose direction the
    table does not tell. So sides are compared with each other over all pairs of a case: where one
    pair lies the other way round than most, one of its two has the wrong name.
    """
    doubts = []
    order: list[tuple[str, float]] = []
    by_name = {(m.model, m.label): m for m in measurements}
    for (model, label), left in by_name.items():
        if "left" not in label:
            continue
        right = by_name.get((model, label.replace("left", "right")))
        if right is None or left.box is None or right.box is None:
            continue
        small, large = sorted((left.volume_ml, right.volume_ml))
        pair = _name(left).replace("left", "left/right")
        if small >= SMALL_ML and large / small >= IMBALANCE:
            text = f"{_plain(left.volume_ml)} ml left, {_plain(right.volume_ml)} ml right"
            doubts.append(Doubt("imbalance", pair, _WEIGHT["imbalance"], text))
        for axis in range(3):
            middle = [(b[0][axis] + b[1][axis]) / 2 for b in (left.box, right.box)]
            widths = [b[1][axis] - b[0][axis] + 1 for b in (left.box, right.box)]
            if abs(middle[0] - middle[1]) >= max(widths) / 2:
                order.append((f"{pair}|{axis}", middle[0] - middle[1]))
    for axis in range(3):
        on_axis = [(pair, gap) for pair, gap in order if pair.endswith(f"|{axis}")]
        up = sum(gap > 0 for _, gap in on_axis)
        if len(on_axis) < 3 or up in (0, len(on_axis)) or 2 * up == len(on_axis):
            continue
        most_up = 2 * up > len(on_axis)
        for pair, gap in on_axis:
            if (gap > 0) != most_up:
                text = "left and right lie the other way round than other pairs"
                doubts.append(Doubt("side", pair.split("|")[0], _WEIGHT["side"], text))
    return doubts


def _name(m: Measurement) -> str:
    return m.label.replace("_", " ")


def _plain(value: float) -> str:
    """Return three significant digits, without an exponent."""
    return f"{float(f'{value:.3g}'):.12g}"
