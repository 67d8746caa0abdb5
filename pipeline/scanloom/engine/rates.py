"""How long cases take on this machine, and how much they leave: learnt from what runs took.

Three tables a recipe and device: seconds of the network by the values that go through it, seconds
of all else and bytes written by the scan's voxels. A run's seconds are shared out among its cases
by the seconds of their steps, so that what cases do beside one another counts once. They are kept
in the user's cache folder; nothing of a scan is in them.
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

from scanloom.core import home
from scanloom.io.private import write_private
from scanloom.own_python import make_private_folder

logger = logging.getLogger(__name__)

FORM = 1
MOST = 50.0
"""Cases of a size that count: the machine may change, and later ones say how it is now."""


@dataclass(frozen=True)
class Point:
    """The mean of what was measured around one size.

    Parameters
    ----------
    size, amount : float
        Such as voxels and seconds.
    count : float
        How many were measured; `MOST` at most.
    """

    size: float
    amount: float
    count: float


@dataclass
class Curve:
    """What sizes cost: a point for each power of two, straight lines between them."""

    points: dict[int, Point] = field(default_factory=dict)

    def add(self, size: float, amount: float) -> None:
        """Count in one measurement."""
        place = math.floor(math.log2(max(size, 1.0)))
        old = self.points.get(place, Point(0.0, 0.0, 0.0))
        weight = 1 / (old.count + 1)
        self.points[place] = Point(
            old.size + weight * (size - old.size),
            old.amount + weight * (amount - old.amount),
            min(old.count + 1, MOST - 1),
        )

    def at(self, size: float) -> float | None:
        """Return what to expect of a size; None where nothing was measured.

        Beyond the largest it goes on as steep as the outermost points lie, never less than flat;
        below the smallest likewise, never less than in proportion.
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
class Measured:
    """What one case took.

    Parameters
    ----------
    values : float
        Voxels of all windows of all models.
    voxels : float
        Of the scan.
    network, rest : float
        Seconds of its steps.
    written : float
        Bytes of its folder.
    """

    values: float
    voxels: float
    network: float
    rest: float
    written: float


@dataclass
class Rates:
    """What is known of one recipe on one kind of device.

    Parameters
    ----------
    network, rest, written : Curve
        Seconds by values, seconds by voxels, bytes by voxels.
    start : float or None
        Seconds until the first case begins.
    """

    network: Curve = field(default_factory=Curve)
    rest: Curve = field(default_factory=Curve)
    written: Curve = field(default_factory=Curve)
    start: float | None = None

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self.rest.points)

    def learn(self, cases: Sequence[Measured], seconds: float, start: float) -> None:
        """Count in a run.

        Parameters
        ----------
        cases : sequence of Measured
            All that it published.
        seconds : float
            That its workers took for them, each counted.
        start : float
            Seconds before the first one began.
        """
        spent = sum(one.network + one.rest for one in cases)
        if not spent:
            return
        share = seconds / spent
        for one in cases:
            self.network.add(one.values, share * one.network)
            self.rest.add(one.voxels, share * one.rest)
            self.written.add(one.voxels, one.written)
        self.start = start if self.start is None else (self.start + start) / 2

    def seconds(self, values: float, voxels: float) -> float | None:
        """Return what to expect of a case, in seconds of a worker; None where nothing is known."""
        network, rest = self.network.at(values), self.rest.at(voxels)
        return None if network is None or rest is None else network + rest

    @classmethod
    def load(cls, name: str) -> Self:
        """Return what is kept under a name; nothing known where there is nothing to be read."""
        try:
            told = json.loads(rates_file(name).read_text(encoding="utf-8"))
            if told.pop("form") != FORM:
                return cls()
            curves = {part: _curve(told[part]) for part in ("network", "rest", "written")}
            return cls(**curves, start=told["start"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return cls()

    def save(self, name: str) -> None:
        """Keep it; who has no cache folder does without."""
        path = rates_file(name)
        told = json.dumps({"form": FORM, **asdict(self)})
        try:
            make_private_folder(path.parent)
            write_private(path, lambda draft: draft.write_text(told, encoding="utf-8"))
        except OSError:
            logger.debug("rates can't be kept", exc_info=True)


def _curve(told: dict[str, Any]) -> Curve:
    points = {int(place): Point(**point) for place, point in told["points"].items()}
    if not all(math.isfinite(v) for p in points.values() for v in asdict(p).values()):
        raise ValueError("rates are finite")
    return Curve(points)


def rates_file(name: str) -> Path:
    """Return where rates of a name are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else home() / ".cache") / "scanloom" / "rates" / f"{name}.json"


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(_sizes(folder))


def _sizes(folder: Path) -> Iterable[int]:
    for base, _, files in os.walk(folder):
        for name in files:
            yield (Path(base) / name).stat().st_size
