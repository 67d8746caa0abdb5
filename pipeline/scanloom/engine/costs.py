"""Costs of cases: measured in runs on this machine, expected of others by their size.

A case has a network's time, which follows from its windows, and the time of all other steps, which
follows from the scan's voxels. Both are ranges, from cases that this machine has segmented with the
same models: their `timing.json` is read when a run ends, and kept in the user's cache folder by
models and device, without anything of a scan but its size.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from scanloom.core import ScanError, user_cache_folder
from scanloom.engine.machine.devices import local_devices
from scanloom.engine.outcomes import Outcome, Outcomes
from scanloom.engine.plan import ExecutionSite, PlannedCase, Range
from scanloom.engine.prepare import Request
from scanloom.engine.worker.supervisor import CaseOutcome
from scanloom.io.output.file_names import CASE, TIMING
from scanloom.io.output.json_file import read_json
from scanloom.io.output.layout import case_folder
from scanloom.io.output.private import write_private
from scanloom.own_python import make_private_folder

logger = logging.getLogger(__name__)

Ranges = NDArray[np.float64]
"""Lowest and highest expected amounts, (N, 2)."""

PLAN_FILE = "plan.json"
"""File name of the newest plan in `OUT/runs/`, and of a run's comparison with it in its folder."""
_SCHEMA = 2
_MAX_CASES = 2000
"""Measured cases that are kept, and published cases of a run that are read: the newest, and evenly
spaced ones. A mean over more would not follow a changed machine."""
_MAX_STARTS = 10
"""Starts that are kept: an older one tells of other caches and another load of the machine."""
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
class CaseCost:
    """Measured cost of one case.

    Parameters
    ----------
    values, voxels : float
        Voxels of all windows of all models, and of the scan.
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
    cases : list of CaseCost
        The newest ones last.
    starts : list of float
        Seconds from the request for workers until the first case held the device.
    """

    cases: list[CaseCost] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)

    def learn(self, cases: Sequence[CaseCost], start: float) -> None:
        """Add measured cases; those of a run take the place of cases that were tried alone."""
        if cases and not cases[0].alone:
            if self.alone:
                self.starts.clear()
            self.cases = [case for case in self.cases if not case.alone]
        self.cases = [*self.cases, *cases][-_MAX_CASES:]
        self.starts = [*self.starts, start][-_MAX_STARTS:]

    @property
    def alone(self) -> bool:
        """Whether any case was measured without others beside it, as a run has them."""
        return any(case.alone for case in self.cases)

    def network(self, cases: Sequence[PlannedCase]) -> Ranges:
        """Return the seconds of the networks of cases, by the voxels of their windows.

        Windows of a model cost the same, so that beyond the largest scan that was measured the
        lower end grows too. It is half of the proportion: a scan of one window has costs that more
        windows do not repeat.
        """
        measured = [(case.values, case.network) for case in self.cases]
        size, largest, low, _ = _bands(measured)[-1]
        sizes = np.array([case.values for case in cases])
        ranges = _between(measured, sizes)
        grown = np.maximum(ranges[:, 0], 0.5 * low * sizes / size)
        ranges[:, 0] = np.where(sizes > _GROWTH * largest, grown, ranges[:, 0])
        return ranges

    def rest(self, cases: Sequence[PlannedCase]) -> Ranges:
        """Return the seconds of all other steps of cases, by their voxels."""
        sizes = np.array([case.voxels for case in cases])
        return _between([(case.voxels, case.rest) for case in self.cases], sizes)

    def written(self, cases: Sequence[PlannedCase]) -> Ranges:
        """Return the bytes of the results of cases, by their voxels."""
        sizes = np.array([case.voxels for case in cases])
        return _between([(case.voxels, case.written) for case in self.cases], sizes)

    def share_of_known_sizes(self, cases: Sequence[PlannedCase]) -> float:
        """Return the share of some cases' voxels in scans of no more than known size."""
        largest = _GROWTH * max((case.voxels for case in self.cases), default=0.0)
        total = sum(case.voxels for case in cases)
        return sum(c.voxels for c in cases if c.voxels <= largest) / total if total else 0.0

    def run_time(
        self, cases: Sequence[PlannedCase], site: ExecutionSite, times: float = 1.0
    ) -> Range:
        """Return the seconds of a run from the request for workers to the end of its last case.

        The cases are multiplied by `times`, for an archive of which they are a part.
        """
        if not cases:
            return 0.0, 0.0
        network, rest = self.network(cases), self.rest(cases)
        total = network.sum(axis=0) + rest.sum(axis=0)
        if self.alone and site.in_flight > 1:  # other steps may hide behind the network, or not
            total[0] = max(network[:, 0].sum(), rest[:, 0].sum() / site.in_flight)
        # No start was measured yet: the workers may also be there at once
        start = np.array((0.0, _CLUSTER_START_S))
        if self.starts:
            spread = _LEAST_SPREAD if len(self.starts) >= _FEW else _SPREAD_OF_FEW
            late = _CLUSTER_START_S if self.alone else 0.0
            start = np.array((min(self.starts) / spread, max(self.starts) * spread + late))
        # However many workers there are, a run takes as long as its longest case
        longest = (network + rest).max(axis=0)
        low, high = np.maximum(total * times / site.concurrent_workers, longest) + start
        return float(low), float(high)

    @classmethod
    def load(cls, name: str) -> Self:
        """Return the costs that are cached under a key; none if they are missing or damaged."""
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            document = json.loads(costs_file(name).read_text(encoding="utf-8"))
            cases = [CaseCost(**case) for case in document["cases"]]
            starts = [float(start) for start in document["starts"]]
            numbers = [*starts, *(n for case in cases for n in asdict(case).values())]
            if document["schema"] == _SCHEMA and all(math.isfinite(n) and n >= 0 for n in numbers):
                return cls(cases, starts)
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


def states_something(expected: Sequence[float]) -> bool:
    """Return whether a range is narrow enough to be shown."""
    return expected[1] <= _WIDEST_RANGE * expected[0]


def _bands(measured: Sequence[tuple[float, float]]) -> NDArray[np.float64]:
    """Return bands of measured (size, amount), one a power of two, by size.

    (N, 4): mean size, largest size, lowest and highest amount.
    """
    sizes, amounts = np.array(measured).T
    octaves = np.floor(np.log2(np.maximum(sizes, 1.0)))
    bands = []
    for octave in np.unique(octaves):
        size, amount = sizes[octaves == octave], amounts[octaves == octave]
        low, high = amount.min() / _SPREAD_OF_FEW, amount.max() * _SPREAD_OF_FEW
        if len(amount) >= _FEW:  # without outliers: a machine that was busy for one case
            low, high = np.quantile(amount, (0.1, 0.9))
            low = min(low, amount.mean() / _LEAST_SPREAD)
            high = max(high, amount.mean() * _LEAST_SPREAD)
        bands.append((size.mean(), size.max(), low, high))
    return np.array(bands, np.float64)


def _between(measured: Sequence[tuple[float, float]], sizes: NDArray[Any]) -> Ranges:
    """Return the range of an amount for each size, between and beyond measured (size, amount).

    A larger scan costs no less than a smaller one, and at most as much more as it is larger. So
    each measurement bounds all other sizes, the nearest ones most.
    """
    size, _, low, high = _bands(measured).T
    larger = np.searchsorted(size, sizes, side="right")
    nearest = np.clip((larger - 1, larger), 0, len(size) - 1)  # one band twice beyond all
    ratio = sizes / size[nearest]
    lows = (low[nearest] * np.minimum(1.0, ratio)).max(axis=0)
    highs = (high[nearest] * np.maximum(1.0, ratio)).min(axis=0)
    # crossed where measurements scatter
    return np.stack([np.minimum(lows, highs), np.maximum(lows, highs)], axis=1)


def costs_key(request: Request, device: str, precision: str) -> str:
    """Return the key under which the costs of a request on a kind of device are cached.

    Overlap and mirrored passes are left out: they change the number of windows, which is known,
    not the time of one.
    """
    workflow, compute = request.workflow, asdict(request.workflow.compute_options)
    unused = {"radiomics"} - set(workflow.outputs.also)
    document = {
        "models": list(request.digests),
        "device": device.partition(":")[0],
        "precision": precision,
        "outputs": workflow.outputs.model_dump(mode="json", exclude=unused),
        "threads": workflow.execution.threads,
        "compute": {name: compute[name] for name in compute if name not in ("overlap", "mirror")},
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]


def costs_file(name: str) -> Path:
    """Return the path of the costs that are cached under a key."""
    return user_cache_folder() / "rates" / f"{name}.json"


@dataclass(frozen=True)
class CaseTiming:
    """Cost of one published case, as its `timing.json` tells.

    Parameters
    ----------
    cost : CaseCost
        Its steps, as measured.
    engine : float
        Seconds in which an engine was prepared, which no other case repeats.
    peak : int
        Its process's peak memory until then, in bytes.
    site : (str, str) or None
        Device and precision; None if it does not state them.
    """

    cost: CaseCost
    engine: float
    peak: int
    site: tuple[str, str] | None

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read a case; None if it is not there any more, or was written by another version."""
        try:
            timing = json.loads((folder / TIMING).read_text(encoding="utf-8"))
            shape = json.loads((folder / CASE).read_text(encoding="utf-8"))["grid"]["shape"]
            seconds = {step: float(times["wall_s"]) for step, times in timing["steps"].items()}
            network, engine = seconds.pop("network", 0.0), seconds.pop("engine", 0.0)
            cost = CaseCost(
                values=float(timing["window_values"]),
                voxels=float(math.prod(shape)),
                network=network,
                rest=sum(seconds.values()),
                written=float(sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())),
            )
            places = timing.get("device"), timing.get("precision")
            site = (str(places[0][0]), str(places[1][0])) if all(places) else None
            return cls(cost, engine, int(timing["peak_memory_bytes"]), site)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


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
    published : Outcomes
        The cases that this run published, without reused results; the detail is the name of the
        folder if that is not the id.
    """

    began: float
    first_on_device: float | None = None
    last_end: float | None = None
    published: Outcomes = field(default_factory=Outcomes)

    def note_end(self, outcome: CaseOutcome) -> None:
        """Record that a case ended, just now."""
        self.last_end = time.monotonic()
        if outcome.device:
            start, first = outcome.device[0][0], self.first_on_device
            self.first_on_device = start if first is None else min(first, start)

    def note_result(self, outcome: CaseOutcome) -> None:
        """Record the result of a case, if it is one of this run."""
        record = outcome.record
        if record is not None and record.reason is None and not record.reused:
            name = record.folder.name if record.folder else record.id
            self.published.append(Outcome(record.id, "", "" if name == record.id else name))


def compare_with_plan(out: Path, timeline: RunTimeline, request: Request) -> dict[str, Any] | None:
    """Add a run to the costs of this machine, and compare the run with its plan in `out`.

    Returns
    -------
    dict or None
        "planned" ranges, "happened", and for each the "ratio": 1 within the range, else of the
        nearer end to what happened. None if the output folder has no plan of this recipe.
    """
    count = len(timeline.published)
    step = max(1, math.ceil(count / _MAX_CASES))
    published = itertools.islice(timeline.published, 0, None, step)
    folders = (each.detail or each.id for each in published)
    measured = [case for name in folders if (case := CaseTiming.read(case_folder(out, name)))]
    if not measured or timeline.last_end is None:
        return None
    if timeline.first_on_device is not None and measured[0].site is not None:
        device, precision = measured[0].site
        execution = request.workflow.execution
        # As many as speed a run up: see `ExecutionSite.concurrent_workers`
        workers = 1 if device == "cpu" else len(local_devices(execution))
        name = costs_key(request, device, precision)
        costs, start = Costs.load(name), max(0.0, timeline.first_on_device - timeline.began)
        passed = (timeline.last_end - timeline.first_on_device) * workers
        costs.learn(_shared_out(measured, passed * len(measured) / count), start)
        costs.save(name)
    happened = {
        "seconds": timeline.last_end - timeline.began,
        "written": sum(case.cost.written for case in measured) * (count / len(measured)),
        "host": max(case.peak for case in measured),
    }
    try:
        plan = read_json(out / "runs" / PLAN_FILE)
        if plan["recipe"] != request.recipe:
            return None
        planned = _planned_ranges(plan, (each.id for each in timeline.published))
        ratio = {
            name: min(max(happened[name], expected[0]), expected[1]) / happened[name]
            for name, expected in planned.items()
            if expected is not None
        }
    except (OSError, LookupError, TypeError, ValueError, AttributeError, ScanError):
        return None  # no plan, or not one that scanloom wrote
    return {"cases": count, "planned": planned, "happened": happened, "ratio": ratio}


def _shared_out(measured: Sequence[CaseTiming], seconds: float) -> list[CaseCost]:
    """Return the costs of cases that took some seconds in all, so that concurrent work counts once.

    The time of preparing an engine is not that of any case.
    """
    spent = sum(case.cost.network + case.cost.rest for case in measured)
    share = max(0.0, seconds - sum(case.engine for case in measured)) / spent if spent else 0.0
    costs = (case.cost for case in measured)
    return [replace(c, network=share * c.network, rest=share * c.rest) for c in costs]


def _planned_ranges(plan: Mapping[str, Any], published: Iterable[str]) -> dict[str, Range | None]:
    """Return the planned ranges of the cases that a run published; LookupError if one lacks."""
    by_case = {case["case"]: case for case in plan["cases"]}
    matched, totals = [by_case[case] for case in published], plan["totals"]
    planned: dict[str, Range | None] = {"host": (0.0, totals["host"])}
    for name in ("seconds", "written"):
        planned[name] = None
        if totals[name] is not None:
            # A run may publish a part of the planned cases: their share of the planned sum counts
            published_sum, planned_sum = (
                np.sum([case[name] for case in cases if case[name]] or [[0.0, 0.0]], axis=0)
                for cases in (matched, plan["cases"])
            )
            low, high = (
                np.array(totals[name]) * published_sum / np.where(planned_sum, planned_sum, 1.0)
            )
            planned[name] = (float(low), float(high))
    return planned
