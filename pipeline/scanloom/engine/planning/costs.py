"""Costs of cases on this machine: measured in `timing.json`, kept by models and device, a range.

A case has a network's time, which follows from its windows, and the time of all other steps, which
follows from the scan's voxels. Both are estimated as a range from the cases that were measured.
The measurements are kept in the user's cache folder and contain nothing of a scan but its size.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from scanloom.core import ScanError, user_cache_folder
from scanloom.engine.machine.devices import local_devices
from scanloom.engine.prepare import Request
from scanloom.engine.worker.supervisor import CaseOutcome
from scanloom.io.output.file_names import CASE, TIMING
from scanloom.io.output.json_file import read_json
from scanloom.io.output.layout import CASES
from scanloom.io.output.private import write_private
from scanloom.own_python import make_private_folder

logger = logging.getLogger(__name__)

Range = tuple[float, float]
"""Lowest and highest expected amount."""

PLAN_FILE = "plan.json"
"""File name of the newest plan in `OUT/runs/`, and of a run's comparison with it in its folder."""
_SCHEMA = 2
_MAX_CASES = 2000
"""Measured cases that are kept, and published cases of a run that are read: the newest, and evenly
spaced ones. A mean over more would not follow a changed machine."""
_MAX_STARTS = 10
_FEW = 3
"""Below this many measurements, quantiles say nothing."""
_SPREAD_OF_FEW, _LEAST_SPREAD = 1.5, 1.25
"""Factors to both sides of the measured times: of fewer than `_FEW`, and of any number, since a
machine is not as busy the next time."""
_GROWTH = 2.0
"""Up to this multiple of the largest size that was measured, a scan counts as of a known size."""
_CLUSTER_START_S = 10.0
"""Time that Dask's scheduler and workers add to the start of a process that runs cases alone."""
_WIDEST_RANGE = 10.0
"""A range whose ends differ by a larger factor states nothing: the time is unknown."""


@dataclass(frozen=True)
class MeasuredCase:
    """Measured cost of one case.

    Parameters
    ----------
    values : float
        Voxels of all windows of all models.
    voxels : float
        Voxels of the scan.
    network, rest : float
        Seconds of the network, and of all other steps. If several cases were worked on at once,
        their share of the time that has passed.
    written : float
        Bytes of the case folder.
    alone : bool
        Whether the case was tried for a plan, without others beside it.
    """

    values: float
    voxels: float
    network: float
    rest: float
    written: float
    alone: bool = False


@dataclass
class Costs:
    """Measured cases of one workflow on one kind of device.

    Parameters
    ----------
    cases : list of MeasuredCase
        The newest ones last.
    starts : list of float
        Seconds from the request for workers until the first case held the device.
    """

    cases: list[MeasuredCase] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)

    def learn(self, cases: Iterable[MeasuredCase], start: float) -> None:
        """Add measured cases; those of a run take the place of cases that were tried alone."""
        new = list(cases)
        if new and not new[0].alone:
            if any(case.alone for case in self.cases):
                self.starts.clear()
            self.cases = [case for case in self.cases if not case.alone]
        self.cases = [*self.cases, *new][-_MAX_CASES:]
        self.starts = [*self.starts, start][-_MAX_STARTS:]

    @property
    def alone(self) -> bool:
        """Whether any case was measured without others beside it, as a run has them."""
        return any(case.alone for case in self.cases)

    @property
    def start(self) -> Range:
        """Seconds until the first case begins."""
        if not self.starts:
            return 0.0, _CLUSTER_START_S
        spread = _LEAST_SPREAD if len(self.starts) >= _FEW else _SPREAD_OF_FEW
        late = _CLUSTER_START_S if self.alone else 0.0
        return min(self.starts) / spread, max(self.starts) * spread + late

    def network(self, values: Sequence[float]) -> list[Range]:
        """Return the seconds of the networks of scans, by the voxels of their windows.

        Windows of a model cost the same, so that beyond the largest scan that was measured the
        lower end grows too. It is half of the proportion: a scan of one window has costs that more
        windows do not repeat.
        """
        measured = [(case.values, case.network) for case in self.cases]
        largest = max(_bands(measured), key=lambda band: band.size)
        return [
            (max(low, 0.5 * largest.low * size / largest.size), high)
            if size > _GROWTH * largest.largest
            else (low, high)
            for size, (low, high) in zip(values, _between(measured, values), strict=True)
        ]

    def rest(self, voxels: Sequence[float]) -> list[Range]:
        """Return the seconds of all other steps of scans, by their voxels."""
        return _between([(case.voxels, case.rest) for case in self.cases], voxels)

    def written(self, voxels: Sequence[float]) -> list[Range]:
        """Return the bytes of the results of scans, by their voxels."""
        return _between([(case.voxels, case.written) for case in self.cases], voxels)

    def share_of_known_sizes(self, voxels: Sequence[float]) -> float:
        """Return the share of some scans' voxels in scans of no more than known size."""
        largest = _GROWTH * max((case.voxels for case in self.cases), default=0.0)
        total = sum(voxels)
        return sum(size for size in voxels if size <= largest) / total if total else 0.0

    def run_time(
        self,
        values: Sequence[float],
        voxels: Sequence[float],
        workers: int,
        in_flight: int,
        times: float = 1.0,
    ) -> Range:
        """Return the seconds of a run from the request for workers to the end of its last case.

        Parameters
        ----------
        values, voxels : sequence of float
            Window voxels and voxels of each case.
        workers, in_flight : int
            Workers that speed the run up, and cases that each of them holds at once.
        times : float
            By how much the cases are multiplied: for an archive of which they are a part.
        """
        if not values:
            return 0.0, 0.0
        network, rest = np.array(self.network(values)), np.array(self.rest(voxels))
        total = network.sum(axis=0) + rest.sum(axis=0)
        if self.alone and in_flight > 1:  # reading and writing may hide behind the network, or not
            total[0] = max(network[:, 0].sum(), rest[:, 0].sum() / in_flight)
        longest = (network + rest).max(axis=0)
        low, high = np.maximum(total * times / workers, longest) + self.start
        return float(low), float(high)

    @classmethod
    def load(cls, name: str) -> Self:
        """Return the costs that are cached under a key; none if they are missing or damaged."""
        try:
            document = json.loads(costs_file(name).read_text(encoding="utf-8"))
            if document["schema"] != _SCHEMA:
                return cls()
            cases = [MeasuredCase(**case) for case in document["cases"]]
            numbers = [n for case in cases for n in asdict(case).values()]
            starts = [float(start) for start in document["starts"]]
            if not all(math.isfinite(n) and n >= 0 for n in [*numbers, *starts]):
                return cls()
            return cls(cases, starts)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return cls()

    def save(self, name: str) -> None:
        """Cache the costs under a key; without a writable cache folder nothing is saved."""
        path = costs_file(name)
        document = json.dumps({"schema": _SCHEMA, **asdict(self)})
        try:
            make_private_folder(path.parent)
            write_private(path, lambda draft: draft.write_text(document, encoding="utf-8"))
        except OSError:
            logger.debug("the measured costs can't be saved", exc_info=True)


def states_something(expected: Range) -> bool:
    """Return whether a range is narrow enough to be shown."""
    return expected[1] <= _WIDEST_RANGE * expected[0]


@dataclass(frozen=True)
class _Band:
    """Measured amounts of sizes within one power of two.

    Parameters
    ----------
    size, largest : float
        Mean and largest size.
    low, high : float
        Expected range of the amount.
    """

    size: float
    largest: float
    low: float
    high: float


def _bands(measured: Sequence[tuple[float, float]]) -> list[_Band]:
    """Return the bands of measured (size, amount), by size."""
    by_octave: dict[int, list[tuple[float, float]]] = {}
    for size, amount in measured:
        by_octave.setdefault(math.floor(math.log2(max(size, 1.0))), []).append((size, amount))
    bands = []
    for _, pairs in sorted(by_octave.items()):
        sizes, amounts = np.array(pairs).T
        low, high = amounts.min() / _SPREAD_OF_FEW, amounts.max() * _SPREAD_OF_FEW
        if len(pairs) >= _FEW:
            low, high = np.quantile(amounts, (0.1, 0.9))
            low = min(low, amounts.mean() / _LEAST_SPREAD)
            high = max(high, amounts.mean() * _LEAST_SPREAD)
        bands.append(_Band(float(sizes.mean()), float(sizes.max()), float(low), float(high)))
    return bands


def _between(measured: Sequence[tuple[float, float]], sizes: Sequence[float]) -> list[Range]:
    """Return the ranges of amounts that grow with size, but at most in proportion.

    A larger scan costs no less than a smaller one, and at most as much more as it is larger. So
    each measurement bounds all other sizes, the nearest ones most.
    """
    bands, ranges = _bands(measured), []
    for size in sizes:
        smaller = [band for band in bands if band.size <= size][-1:]
        larger = [band for band in bands if band.size > size][:1]
        bounds = [
            (band.low * min(1.0, size / band.size), band.high * max(1.0, size / band.size))
            for band in smaller + larger
        ]
        low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
        ranges.append((min(low, high), max(low, high)))  # crossed where measurements scatter
    return ranges


def costs_key(request: Request, device: str, precision: str) -> str:
    """Return the key under which the costs of a request on a kind of device are cached.

    Overlap and mirrored passes are left out: they change the number of windows, which is known,
    not the time of one.
    """
    workflow, compute = request.workflow, asdict(request.workflow.compute_options)
    document = {
        "models": list(request.digests),
        "device": device.partition(":")[0],
        "precision": precision,
        "outputs": workflow.outputs.model_dump(mode="json"),
        "threads": workflow.execution.threads,
        "compute": {name: compute[name] for name in compute if name not in ("overlap", "mirror")},
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]


def costs_file(name: str) -> Path:
    """Return the path of the costs that are cached under a key."""
    return user_cache_folder() / "rates" / f"{name}.json"


@dataclass
class RunTimeline:
    """Timeline of a run; moments are seconds of CLOCK_MONOTONIC.

    Parameters
    ----------
    began : float
        When the workers were requested.
    first_on_device : float or None
        When the first case acquired the device.
    last_end : float or None
        When the last case ended.
    published : dict of str to str
        Names of the case folders that this run published, by case id; without reused results.
    """

    began: float
    first_on_device: float | None = None
    last_end: float | None = None
    published: dict[str, str] = field(default_factory=dict)

    def note(self, outcome: CaseOutcome) -> None:
        """Record that a case ended."""
        self.last_end = time.monotonic()
        if outcome.device is not None:
            start, first = outcome.device[0], self.first_on_device
            self.first_on_device = start if first is None else min(first, start)
        record = outcome.record
        if record is not None and record.reason is None and not record.reused:
            self.published[record.id] = record.folder.name if record.folder else record.id


def compare_with_plan(out: Path, timeline: RunTimeline, request: Request) -> dict[str, Any] | None:
    """Add a run to the costs of this machine, and compare the run with its plan.

    Parameters
    ----------
    out : Path
        The output folder.
    timeline : RunTimeline
        The timeline of the run.
    request : Request
        The workflow of the run with its models.

    Returns
    -------
    dict or None
        "planned" ranges, "happened", and for each the "ratio": 1 within the range, else of the
        nearer end to what happened. None if the output folder has no plan of this recipe.
    """
    step = max(1, math.ceil(len(timeline.published) / _MAX_CASES))
    folders = itertools.islice(timeline.published.values(), 0, None, step)
    measured = [case for name in folders if (case := _read_case(out / CASES / name)) is not None]
    if not measured or timeline.last_end is None:
        return None
    if timeline.first_on_device is not None and measured[0].key is not None:
        device, precision = measured[0].key
        workers = 1 if device == "cpu" else max(1, len(local_devices(request.workflow.execution)))
        name = costs_key(request, device, precision)
        costs, start = Costs.load(name), max(0.0, timeline.first_on_device - timeline.began)
        passed = (timeline.last_end - timeline.first_on_device) * workers
        costs.learn(_shared_out(measured, passed * len(measured) / len(timeline.published)), start)
        costs.save(name)
    happened = {
        "seconds": timeline.last_end - timeline.began,
        "written": sum(case.cost.written for case in measured)
        * (len(timeline.published) / len(measured)),
        "host": max(case.peak for case in measured),
    }
    try:
        planned = _planned(read_json(out / "runs" / PLAN_FILE), request.recipe, timeline.published)
        ratio = {
            name: min(max(happened[name], expected[0]), expected[1]) / happened[name]
            for name, expected in planned.items()
            if expected is not None
        }
    except (OSError, LookupError, TypeError, ValueError, AttributeError, ScanError):
        return None  # no plan, or not one that scanloom wrote
    count = len(timeline.published)
    return {"cases": count, "planned": planned, "happened": happened, "ratio": ratio}


def _shared_out(measured: Sequence[_PublishedCase], seconds: float) -> Iterable[MeasuredCase]:
    """Yield the costs of cases that took some seconds in all, so that concurrent work counts once.

    The time of preparing an engine is not that of any case.
    """
    spent = sum(case.cost.network + case.cost.rest for case in measured)
    share = max(0.0, seconds - sum(case.engine for case in measured)) / spent if spent else 0.0
    for case in measured:
        cost = asdict(case.cost)
        cost.update(network=share * cost["network"], rest=share * cost["rest"])
        yield MeasuredCase(**cost)


def _planned(
    plan: Mapping[str, Any], recipe: str, published: Iterable[str]
) -> dict[str, Range | None]:
    """Return the planned ranges of the cases that a run published.

    Raises
    ------
    LookupError
        If it is the plan of another recipe, or lacks a case.
    """
    if plan["recipe"] != recipe:
        raise LookupError("another recipe")
    by_case = {case["case"]: case for case in plan["cases"]}
    matched, totals = [by_case[case] for case in published], plan["totals"]
    planned: dict[str, Range | None] = {"host": (0.0, totals["host"])}
    for name in ("seconds", "written"):
        expected, parts = totals[name], [0.0, 0.0]
        for end in (0, 1) if expected is not None else ():
            every = sum(case[name][end] for case in plan["cases"] if case[name]) or 1.0
            part = sum(case[name][end] for case in matched if case[name])
            parts[end] = expected[end] * part / every
        planned[name] = None if expected is None else (parts[0], parts[1])
    return planned


@dataclass(frozen=True)
class _PublishedCase:
    """Cost of one published case.

    Parameters
    ----------
    cost : MeasuredCase
        Its steps, as measured.
    engine : float
        Seconds in which an engine was prepared, which no other case repeats.
    peak : int
        Its process's peak memory until then, in bytes.
    key : (str, str) or None
        Device and precision; None if it does not state them.
    """

    cost: MeasuredCase
    engine: float
    peak: int
    key: tuple[str, str] | None


def measured_case(folder: Path) -> MeasuredCase | None:
    """Return the cost of a case that ran alone, from its folder; None if it can't be read."""
    case = _read_case(folder)
    return None if case is None else MeasuredCase(**{**asdict(case.cost), "alone": True})


def _read_case(folder: Path) -> _PublishedCase | None:
    try:
        timing = json.loads((folder / TIMING).read_text(encoding="utf-8"))
        shape = json.loads((folder / CASE).read_text(encoding="utf-8"))["grid"]["shape"]
        steps: Mapping[str, Any] = timing["steps"]
        seconds = {step: float(times["wall_s"]) for step, times in steps.items()}
        network, engine = seconds.pop("network", 0.0), seconds.pop("engine", 0.0)
        cost = MeasuredCase(
            values=float(timing["window_values"]),
            voxels=float(math.prod(shape)),
            network=network,
            rest=sum(seconds.values()),
            written=float(_folder_bytes(folder)),
        )
        places = timing.get("device"), timing.get("precision")
        key = (str(places[0][0]), str(places[1][0])) if all(places) else None
        return _PublishedCase(cost, engine, int(timing["peak_memory_bytes"]), key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # written by another version, or removed meanwhile


def _folder_bytes(folder: Path) -> int:
    return sum(
        (Path(base) / name).stat().st_size for base, _, names in os.walk(folder) for name in names
    )
