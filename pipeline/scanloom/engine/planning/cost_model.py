"""Cost model of cases on this machine, learned from earlier runs: seconds and bytes by size.

For each recipe and kind of device there are three curves: seconds of the network by the voxels of
its windows, and seconds of all other steps and bytes written by the scan's voxels. The wall time
of a run is divided among its cases in proportion to their step times, so that concurrent work
counts once. The models are kept in the user's cache folder and contain nothing of a scan.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from scanloom.core import user_cache_folder
from scanloom.io.output.private import write_private
from scanloom.own_python import make_private_folder

logger = logging.getLogger(__name__)

_SCHEMA = 1
_MAX_COUNT = 50.0
"""Weight of a point's past: a mean over more cases would not follow a changed machine."""


@dataclass(frozen=True)
class Point:
    """Mean of the measurements around one size.

    Parameters
    ----------
    size, amount : float
        Mean size and mean cost, such as voxels and seconds.
    count : float
        Number of measurements, capped so that recent ones keep their weight.
    """

    size: float
    amount: float
    count: float


@dataclass
class CostCurve:
    """Cost as a function of size: one point per power of two, linear in between."""

    points: dict[int, Point] = field(default_factory=dict)

    def add(self, size: float, amount: float) -> None:
        """Add one measurement."""
        octave = math.floor(math.log2(max(size, 1.0)))
        old = self.points.get(octave, Point(0.0, 0.0, 0.0))
        weight = 1 / (old.count + 1)
        self.points[octave] = Point(
            old.size + weight * (size - old.size),
            old.amount + weight * (amount - old.amount),
            min(old.count + 1, _MAX_COUNT - 1),
        )

    def at(self, size: float) -> float | None:
        """Return the expected cost of a size; None without measurements.

        Above the largest point the cost grows with the slope between the outermost points, never
        below zero slope. Below the smallest it falls linearly, but never below proportion.
        """
        points = sorted(self.points.values(), key=lambda p: p.size)
        if not points:
            return None
        first, last = points[0], points[-1]
        if first is last:
            return first.amount * max(1.0, size / first.size)
        if size <= first.size:
            line = first.amount - _slope(first, points[1]) * (first.size - size)
            return max(line, first.amount * size / first.size)
        if size >= last.size:
            return last.amount + _slope(first, last) * (size - last.size)
        low, high = next(pair for pair in pairwise(points) if pair[1].size >= size)
        share = (size - low.size) / (high.size - low.size)
        return low.amount + share * (high.amount - low.amount)


def _slope(low: Point, high: Point) -> float:
    return max(0.0, (high.amount - low.amount) / (high.size - low.size))


@dataclass(frozen=True)
class MeasuredCost:
    """Measured cost of one case.

    Parameters
    ----------
    values : float
        Voxels of all windows of all models.
    voxels : float
        Voxels of the scan.
    network, rest : float
        Seconds of the network, and of all other steps.
    written : float
        Bytes of the case folder.
    """

    values: float
    voxels: float
    network: float
    rest: float
    written: float


@dataclass
class CostModel:
    """Cost model of one recipe on one kind of device.

    Parameters
    ----------
    network, rest, written : CostCurve
        Seconds of the network by window voxels; seconds of other steps, and bytes, by voxels.
    start : float or None
        Seconds until the first case begins; None without measurements.
    """

    network: CostCurve = field(default_factory=CostCurve)
    rest: CostCurve = field(default_factory=CostCurve)
    written: CostCurve = field(default_factory=CostCurve)
    start: float | None = None

    @property
    def known(self) -> bool:
        """Whether the model has any measurement."""
        return bool(self.rest.points)

    def learn(self, cases: Sequence[MeasuredCost], seconds: float, start: float) -> None:
        """Add the measurements of a run.

        Parameters
        ----------
        cases : sequence of MeasuredCost
            The cases that the run published.
        seconds : float
            Wall time of these cases, summed over the workers.
        start : float
            Seconds before the first case began.
        """
        spent = sum(case.network + case.rest for case in cases)
        if not spent:
            return
        share = seconds / spent
        for case in cases:
            self.network.add(case.values, share * case.network)
            self.rest.add(case.voxels, share * case.rest)
            self.written.add(case.voxels, case.written)
        self.start = start if self.start is None else (self.start + start) / 2

    def seconds(self, values: float, voxels: float) -> float | None:
        """Return the expected seconds of a case on one worker; None without measurements."""
        network, rest = self.network.at(values), self.rest.at(voxels)
        return None if network is None or rest is None else network + rest

    @classmethod
    def load(cls, name: str) -> Self:
        """Return the model that is cached under a key; an empty one if it is missing or damaged."""
        try:
            document = json.loads(cost_model_file(name).read_text(encoding="utf-8"))
            if document.pop("form") != _SCHEMA:
                return cls()
            curves = {curve: _curve(document[curve]) for curve in ("network", "rest", "written")}
            return cls(**curves, start=document["start"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return cls()

    def save(self, name: str) -> None:
        """Cache the model under a key; without a writable cache folder nothing is saved."""
        path = cost_model_file(name)
        document = json.dumps({"form": _SCHEMA, **asdict(self)})
        try:
            make_private_folder(path.parent)
            write_private(path, lambda draft: draft.write_text(document, encoding="utf-8"))
        except OSError:
            logger.debug("the cost model can't be saved", exc_info=True)


def _curve(document: dict[str, Any]) -> CostCurve:
    points = {int(octave): Point(**point) for octave, point in document["points"].items()}
    if not all(math.isfinite(v) for p in points.values() for v in asdict(p).values()):
        raise ValueError("the cost model has values that are not finite")
    return CostCurve(points)


def cost_model_file(name: str) -> Path:
    """Return the path of the cost model that is cached under a key."""
    return user_cache_folder() / "rates" / f"{name}.json"


def folder_bytes(folder: Path) -> int:
    """Return the total size in bytes of all files below a folder."""
    return sum(_file_sizes(folder))


def _file_sizes(folder: Path) -> Iterable[int]:
    for base, _, files in os.walk(folder):
        for name in files:
            yield (Path(base) / name).stat().st_size
