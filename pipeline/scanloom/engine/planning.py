"""Plan a run: its cases and their memory from headers, its duration and bytes from measured cases.

A case has a network's time, which follows from its windows, and the time of all other steps, which
follows from the scan's voxels. Both are ranges, from cases that this machine has segmented with the
same models: their `timing.json` is read when a run ends, and kept in the user's cache folder by
models and device, without anything of a scan but its size. If these cases say too little of an
archive, a few of its cases are segmented for a plan, in a folder that is then removed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.graph import networks
from scanloom.cards.requested import describe_changes
from scanloom.core import (
    DICOM,
    Case,
    Grid,
    Reason,
    ScanError,
    counted,
    format_bytes,
    format_duration,
    user_cache_folder,
)
from scanloom.engine.case.models import check_networks, load_models
from scanloom.engine.machine.devices import local_devices
from scanloom.engine.prepare import Outline, OutputTarget, Prepared, Request, prepare
from scanloom.engine.results.run_cases import RunCases
from scanloom.engine.worker.memory_admission import MEMORY_SHARE
from scanloom.engine.worker.messages import WorkerSetup
from scanloom.engine.worker.supervisor import CaseOutcome, WorkerSupervisor
from scanloom.engine.workflow.schema import Workflow
from scanloom.engine.workflow.selection import Scope, check_channels
from scanloom.io.identity import case_id, key_fingerprint
from scanloom.io.index.build import Index, build_index
from scanloom.io.index.sample import Estimate, FolderSample
from scanloom.io.index.storage import IndexedSeries
from scanloom.io.index.walk import check_paths
from scanloom.io.output.engines import ENGINES
from scanloom.io.output.file_names import CASE, TIMING
from scanloom.io.output.json_file import read_json, write_document
from scanloom.io.output.layout import case_folder
from scanloom.io.output.private import check_key, load_key_of, private_folder, write_private
from scanloom.io.session import read_session
from scanloom.io.system.atomic_write import atomic_write
from scanloom.io.system.disk_errors import output_error
from scanloom.own_python import make_private_folder

if TYPE_CHECKING:
    from scanloom.inference.memory import Placement

logger = logging.getLogger(__name__)

Range = tuple[float, float]
"""Lowest and highest expected amount."""
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
_LEAST_KNOWN_SHARE = 0.5
"""If less of a run's voxels are in scans of sizes that were tried, a few cases are tried first."""
_TRIAL_S = 30.0
"""A further case is tried only if all cases are expected to end within this time."""
_LONGEST_TRIAL_S = 120.0
"""The smallest case is tried without knowing what it costs: all is given up after this time."""
_REST_S_PER_VOXEL = 3e-7
"""Time around the network that is expected of a scan before any was tried: twice that of a CT of
the thorax on two slow cores."""
_SHARES = (0.5, 0.9, 0.25, 0.75)
"""The cases below and at which these shares of all voxels lie, in the order in which they are
tried: half the cost of an archive is in scans larger than the first of them."""
_AXES = {"axial": (0, 1, 2), "coronal": (0, 2, 1), "sagittal": (1, 2, 0)}
"""Patient axes of a scan's columns, rows and slices, by the plane of its slices."""


@dataclass(frozen=True)
class MeasuredCase:
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
    cases : list of MeasuredCase
        The newest ones last.
    starts : list of float
        Seconds from the request for workers until the first case held the device.
    """

    cases: list[MeasuredCase] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)

    def learn(self, cases: Sequence[MeasuredCase], start: float) -> None:
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
            cases = [MeasuredCase(**case) for case in document["cases"]]
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
    site : (str, str) or None
        Device and precision; None if it does not state them.
    """

    cost: MeasuredCase
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
            cost = MeasuredCase(
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
    published : dict of str to str
        Names of the case folders that this run published, by case id; without reused results.
    """

    began: float
    first_on_device: float | None = None
    last_end: float | None = None
    published: dict[str, str] = field(default_factory=dict)

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
            self.published[record.id] = record.folder.name if record.folder else record.id


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
    folders = itertools.islice(timeline.published.values(), 0, None, step)
    measured = [case for name in folders if (case := _PublishedCase.read(case_folder(out, name)))]
    if not measured or timeline.last_end is None:
        return None
    if timeline.first_on_device is not None and measured[0].site is not None:
        device, precision = measured[0].site
        execution = request.workflow.execution
        # As many as speed a run up: see `ExecutionSite.concurrent_workers`
        workers = 1 if device == "cpu" else max(1, len(local_devices(execution)))
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
        planned = _planned_ranges(plan, timeline.published)
        ratio = {
            name: min(max(happened[name], expected[0]), expected[1]) / happened[name]
            for name, expected in planned.items()
            if expected is not None
        }
    except (OSError, LookupError, TypeError, ValueError, AttributeError, ScanError):
        return None  # no plan, or not one that scanloom wrote
    return {"cases": count, "planned": planned, "happened": happened, "ratio": ratio}


def _shared_out(measured: Sequence[_PublishedCase], seconds: float) -> list[MeasuredCase]:
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


@dataclass(frozen=True)
class PlannedCase:
    """Expected cost of one case, or the reason why it would be refused.

    Parameters
    ----------
    case : str
        The case id.
    voxels, values : int
        Voxels of the scan, and voxels of all windows that pass through the networks; 0 if the
        headers do not determine them.
    host, device : int
        Peak memory in bytes if the case runs alone: of the host, and of a device with its own
        memory.
    most : int
        Peak host memory in bytes while the case does not hold the device.
    seconds, written : range or None
        Seconds of a worker, and bytes of results; None without measurements.
    reason, detail : str
        The reason code and message of a refusal; empty if the case can run.
    """

    case: str
    voxels: int = 0
    values: int = 0
    host: int = 0
    device: int = 0
    most: int = 0
    seconds: Range | None = None
    written: Range | None = None
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Totals:
    """Expected cost of a whole run; a range is (lowest, highest).

    Parameters
    ----------
    seconds : range or None
        From the start of the workers to the end of the last case; None if it is unknown.
    written : range or None
        Bytes of all case folders; None if they are unknown.
    host, device : int
        Peak memory in bytes of one worker process, and of its device.
    archive_seconds : range or None
        As `seconds`, of a run over all cases of the archive: also over those with a result, those
        that failed before, and those of other shards. None if no case is planned.
    tried : int
        Cases on this machine from which times and bytes were estimated.
    known_share : float
        Share of the run's voxels in scans that are not larger than those that were tried.
    unknown : str
        Why the time is unknown; empty if it is known.
    """

    seconds: Range | None
    written: Range | None
    host: int
    device: int
    archive_seconds: Range | None = None
    tried: int = 0
    known_share: float = 0.0
    unknown: str = ""


@dataclass(frozen=True)
class RunPlan:
    """Expected course of a run.

    Parameters
    ----------
    workflow, recipe : str
        The workflow's name, and the hash of everything that can change a result.
    device, precision : str
        Device and numeric precision of the networks.
    workers, in_flight : int
        Worker processes, and cases that each of them holds at once.
    files : mapping
        Counts of files found, used, skipped and failed, from the index alone.
    before : int
        Cases that have their result.
    selected : int
        Cases of the whole archive, also of other shards.
    left_out : mapping
        Count of excluded series by reason code.
    left : tuple of (series id, reason code, detail)
        The excluded series.
    cases : tuple of PlannedCase
        Cases that would run, and with a reason cases that would not: refused ones, and those that
        an earlier run left without a current result.
    totals : Totals
    notes : tuple of str
        Cases that exceed a limit and the consequence; whether a GPU pays.
    """

    workflow: str
    recipe: str
    device: str
    precision: str
    workers: int
    in_flight: int
    files: Mapping[str, int]
    before: int
    selected: int
    left_out: Mapping[str, int]
    left: tuple[tuple[str, str, str], ...]
    cases: tuple[PlannedCase, ...]
    totals: Totals
    notes: tuple[str, ...] = ()

    @property
    def todo(self) -> list[PlannedCase]:
        """The cases that would run."""
        return [case for case in self.cases if not case.reason]


@dataclass(frozen=True)
class ExecutionSite:
    """Device, workers and memory that a plan's networks would have on this machine.

    Parameters
    ----------
    placement : Placement
        Device and precision of the networks.
    workers, in_flight : int
        Worker processes, and cases that each of them holds at once.
    host, device : int or None
        Limit of a worker's host memory, and of its device memory, in bytes; None if unknown.
    """

    placement: Placement
    workers: int
    in_flight: int
    host: int | None
    device: int | None

    @property
    def concurrent_workers(self) -> int:
        """Workers that speed a run up: a single one fills all cores of a CPU."""
        return 1 if self.placement.device == "cpu" else self.workers


@read_session()
def make_plan(
    workflow: Workflow,
    paths: Sequence[Path],
    out: Path,
    key_file: Path | None = None,
    scope: Scope | None = None,
    *,
    archives: bool = False,
) -> RunPlan:
    """Plan a run over an archive; only the index and the measured costs are written to disk.

    Parameters are those of a run; `out` may already hold results.

    Raises
    ------
    ScanError
        If no case can run: because of the models, paths, key or output folder.
    """
    request, key = _checked(workflow, paths, out, key_file)
    index = build_index(paths, key, out, archives=archives)
    return _plan(index, request, key, out, scope or Scope())[0]


def _checked(
    workflow: Workflow, paths: Sequence[Path], out: Path, key_file: Path | None
) -> tuple[Request, bytes]:
    """Return the request of a plan and the key of its ids; refuse what no case can run with."""
    request = Request.of(workflow)
    check_channels(workflow, request.cards)
    check_networks(request.requested)
    check_paths(paths, out)
    return request, load_key_of(out, key_file)


def _plan(
    index: Index, request: Request, key: bytes, out: Path, scope: Scope
) -> tuple[RunPlan, RunCases, Costs, ExecutionSite]:
    """Plan a run over an index; also return its cases, what cases cost, and where they run."""
    workflow, site = request.workflow, find_site(request)
    cases = RunCases.of_index(index, request, key, out, scope)
    prepared = [
        prepare(
            case,
            request.cards,
            None,  # earlier results were compared for all cases of the index
            memory_limit=workflow.execution.memory_limit,
            placement=site.placement,
            outline=_indexed_outline(cases.entries[case.id], case),
        )
        for case in cases.pending
    ]
    planned = [_planned_case(each) for each in prepared]
    runnable = [case for case in planned if not case.reason]
    name = costs_key(request, site.placement.device, site.placement.precision)
    costs = Costs.load(name)
    before, why = summarize(runnable, costs, site, len(runnable)), ""
    known = before.seconds is not None and before.known_share >= _LEAST_KNOWN_SHARE
    if runnable and not known:
        by_id = {each.case.id: each.case for each in prepared}
        why = _try_cases(costs, choose_cases(runnable), by_id, request, out, key)
        if not why:
            costs.save(name)
    planned = _with_costs(planned, costs)
    runnable = [case for case in planned if not case.reason]
    totals = summarize(runnable, costs, site, cases.total, why)
    planned += [
        PlannedCase(record.id, reason=record.reason.code, detail=record.detail)
        for record in cases.records
        if record.reason
    ]
    plan = RunPlan(
        workflow=workflow.name,
        recipe=request.recipe if len(cases.pending) else "",
        device=site.placement.device,
        precision=site.placement.precision,
        workers=site.workers,
        in_flight=site.in_flight,
        files=index.counts(),
        before=sum(record.reason is None for record in cases.records),
        selected=cases.total,
        left_out=dict(sorted(Counter(entry.code for entry in cases.left_out).items())),
        left=tuple((entry.id, entry.code, entry.detail) for entry in cases.left_out),
        cases=tuple(planned),
        totals=totals,
        notes=(
            *_notes(runnable, totals, site, out),
            *_request_notes(request, list(cases.pending), out),
            gpu_advice(runnable, request, site, costs),
        ),
    )
    return plan, cases, costs, site


@dataclass(frozen=True)
class SamplePlan:
    """Expected course of a run over an archive, estimated from a random share of its folders.

    Parameters
    ----------
    plan : RunPlan
        Of the sample alone; its memory is that of the largest scans in it.
    sampled, found, listed, opened : int
        Folders of the sample and of the archive as they were divided, folders that were listed to
        find them, and files of the sample that were opened this time.
    files : mapping
        Files found and of each outcome.
    cases : mapping
        Cases "todo", with a result from "before", and "refused".
    left_out, not_selected, refused : mapping
        Series left out by reason code, those of NOT_SELECTED by the condition that they fail, and
        refused cases by reason code.
    seconds, written : range or None
        As of `Totals`, with the uncertainty of the sample; None if they are unknown.
    unknown : str
        Why the time is unknown; empty if it is known.
    unseen : float
        What lies in fewer folders than this may have none in the sample (95 %).
    notes : tuple of str
    """

    plan: RunPlan
    sampled: int
    found: int
    listed: int
    opened: int
    files: Mapping[str, Estimate]
    cases: Mapping[str, Estimate]
    left_out: Mapping[str, Estimate]
    not_selected: Mapping[str, Estimate]
    refused: Mapping[str, Estimate]
    seconds: Range | None
    written: Range | None
    unknown: str
    unseen: float
    notes: tuple[str, ...] = ()


@read_session()
def plan_sample(
    workflow: Workflow,
    paths: Sequence[Path],
    out: Path,
    size: float,
    key_file: Path | None = None,
    scope: Scope | None = None,
    *,
    archives: bool = False,
    seed: int | None = None,
) -> SamplePlan:
    """Plan a run over an archive from a sample of its folders.

    `size` and `seed` are those of `FolderSample`, all else as for `make_plan`. The index of the
    sample is kept in the user's cache folder; the output folder has nothing of it.

    Raises
    ------
    ScanError
        If no case can run; SAMPLE if too few folders can be sampled.
    """
    request, key = _checked(workflow, paths, out, key_file)
    check_key(out, key_fingerprint(key))
    chooses = bool(workflow.channels) or workflow.select.choose != "all"
    whole: Literal["study", "series"] = "study" if chooses else "series"
    sample = FolderSample(paths, size, key, out, archives=archives, whole=whole, seed=seed)
    index = sample.index()
    plan, cases, costs, site = _plan(index, request, key, out, scope or Scope())

    def estimate(amounts: Iterable[tuple[int, float]]) -> Estimate:
        sums = np.zeros(len(sample.units))
        for unit, amount in amounts:
            sums[unit] += amount
        return sample.total(sums)

    def by_name(rows: Iterable[tuple[str, int]]) -> dict[str, Estimate]:
        counts = defaultdict[str, Counter[int]](Counter)
        for name, unit in rows:
            counts[name][unit] += 1
        names = sorted(counts, key=lambda name: -counts[name].total())
        return {name: estimate(counts[name].items()) for name in names}

    units = _units_of(sample, index, cases, key)
    left = [(code, detail, next(units[name])) for name, code, detail in plan.left]
    of_case = {case.case: next(units[case.case]) for case in plan.cases}
    before = [next(units[record.id]) for record in cases.records if record.reason is None]
    states = [("refused" if case.reason else "todo", of_case[case.case]) for case in plan.cases]
    states += [("before", unit) for unit in before]
    files = ((file.outcome[0], sample.unit_of(file.entry.path)) for file in index.files())
    outcomes = by_name(row for name, unit in files for row in (("found", unit), (name, unit)))
    none = Estimate(0.0, 0.0, 0.0, 0.0)
    seconds, written, unknown = plan.totals.seconds, plan.totals.written, plan.totals.unknown
    if seconds is not None:
        ends = [
            estimate((of_case[c.case], c.seconds[n]) for c in plan.todo if c.seconds)
            for n in (0, 1)
        ]
        times = ends[0].low / ends[0].sampled, ends[1].high / ends[1].sampled
        low, high = (costs.run_time(plan.todo, site, factor) for factor in times)
        seconds = low[0], high[1]
        if not states_something(seconds):
            unknown = f"{format_range(seconds)}: a larger sample would tell more"
            seconds = None
    if written is not None:
        ends = [
            estimate((of_case[c.case], c.written[n]) for c in plan.todo if c.written)
            for n in (0, 1)
        ]
        written = ends[0].low, ends[1].high
    return SamplePlan(
        plan,
        sampled=len(sample.units),
        found=sample.found,
        listed=sample.listed,
        opened=index.opened,
        files=dict.fromkeys(plan.files, none) | outcomes,
        cases=dict.fromkeys(("todo", "before", "refused"), none) | by_name(states),
        left_out=by_name((code, unit) for code, _, unit in left),
        not_selected=by_name(
            (detail, unit) for code, detail, unit in left if code == Reason.NOT_SELECTED.code
        ),
        refused=by_name((case.reason, of_case[case.case]) for case in plan.cases if case.reason),
        seconds=seconds,
        written=written,
        unknown=unknown,
        unseen=sample.found * (1 - 0.05 ** (1 / len(sample.units))),
        notes=tuple(_sample_notes(sample, written or (0.0, 0.0), out)),
    )


_LARGE_SHARE = 0.1
"""Share of the entries, or bytes, of an archive from which one folder decides on its totals."""


def _sample_notes(sample: FolderSample, written: Range, out: Path) -> Iterator[str]:
    """Yield a sentence if a large folder is not in a sample, or if the disk may be too small."""
    if sample.missed > _LARGE_SHARE:
        yield (
            f"a folder outside the sample is large, {sample.missed:.0%} of all by its entries: the "
            "ranges suppose that these are like those of the sample"
        )
    yield from _disk_notes(written, out)


def _units_of(
    sample: FolderSample, index: Index, cases: RunCases, key: bytes
) -> dict[str, Iterator[int]]:
    """Return the units of each series and case by its id, one after the other.

    Series whose files can't be read have the same id: an empty one.
    """
    units = defaultdict[str, list[int]](list)
    for series in index.series:
        units[series.id].append(sample.unit_of(series.first))
    for case, series in cases.entries.items():
        if case not in units:
            units[case].append(sample.unit_of(series.first))
    # Volumes of a series that have ended in an earlier run
    ended = {record.id for record in cases.records if record.id not in units}
    for series in index.series if ended else ():
        if series.reason in (Reason.PHASES, Reason.FOUR_D):
            source = index.as_series(series)
            ids = (case_id(source, key, phase) for phase in itertools.count())
            for case in itertools.takewhile(lambda each: each in ended or each in units, ids):
                units.setdefault(case, [sample.unit_of(series.first)])
    return {name: itertools.cycle(numbers) for name, numbers in units.items()}


def save_plan(plan: RunPlan, out: Path) -> None:
    """Save a plan in the output folder; the next run of its workflow is compared with it.

    Raises
    ------
    ScanError
        DISK_FULL or OUTPUT_UNWRITABLE if it can't be written.
    """
    folder = out / "runs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / PLAN_FILE, lambda draft: write_document(draft, asdict(plan)))
    except OSError as exc:
        raise output_error(exc, "the plan") from exc


def find_site(request: Request, device: str | None = None) -> ExecutionSite:
    """Return the device, workers and memory that the networks of a request have on this machine.

    With `device`, on another device than the workflow's.

    Raises
    ------
    ScanError
        If the requested device or precision is not available.
    """
    from scanloom.inference.device import choose_device, choose_precision
    from scanloom.inference.memory import Placement, machine_memory, room

    execution = request.workflow.execution
    if device is not None:
        execution = execution.model_copy(update={"device": device})
    chosen = choose_device(execution.device).device
    validated = set.intersection(*(set(card.precisions) for card in request.requested))
    precision = choose_precision(execution.precision, chosen, validated).name
    total = machine_memory()
    return ExecutionSite(
        Placement(str(chosen), precision),
        workers=max(1, len(local_devices(execution))),
        in_flight=execution.in_flight,
        host=execution.memory_limit or (int(MEMORY_SHARE * total) if total else None),
        device=room(chosen).device,
    )


def _planned_case(prepared: Prepared) -> PlannedCase:
    """Return a case with its sizes and memory, or with the reason why it would be refused."""
    case, outline, estimate = prepared.case.id, prepared.outline, prepared.estimate
    if prepared.refusal is not None:
        return PlannedCase(case, reason=prepared.refusal.code, detail=prepared.refusal.detail)
    if outline is None or estimate is None:
        raise ValueError("a prepared case has an outline and an estimate")
    # Other steps run while another case has the device: their memory adds to that of its peak
    on_device = ("resample", "network", "restore", "clean")
    return PlannedCase(
        case,
        voxels=math.prod(outline[0].shape),
        values=estimate.values,
        host=estimate.peak,
        device=max(estimate.device.values(), default=0),
        most=max(count for step, count in estimate.host.items() if step not in on_device),
    )


def _indexed_outline(series: IndexedSeries, case: Case) -> Outline | None:
    """Return the grid and voxel type of a DICOM series by its index; None if it lacks them.

    An affine of the slices' plane and spacing is enough: cost does not depend on exact angles.
    """
    info = series.info
    if series.kind != DICOM or not info.shape or case.phase is not None:
        return None
    affine = np.eye(4)
    affine[:3, :3] = 0.0
    axes = _AXES.get(info.plane, _AXES["axial"])
    affine[axes, range(3)] = info.spacing
    is_integer = info.modality in ("CT", "MR")
    i, j, k = info.shape
    return Grid((i, j, k), affine), np.dtype(np.int16 if is_integer else np.float32)


def _with_costs(planned: Sequence[PlannedCase], costs: Costs) -> list[PlannedCase]:
    """Return cases with their seconds and bytes, if anything was measured."""
    runnable = [case for case in planned if not case.reason]
    if not costs.cases or not runnable:
        return list(planned)
    seconds = costs.network(runnable) + costs.rest(runnable)
    ranges = zip(seconds.tolist(), costs.written(runnable).tolist(), strict=True)
    with_costs = {
        case.case: replace(case, seconds=tuple(seconds), written=tuple(written))
        for case, (seconds, written) in zip(runnable, ranges, strict=True)
    }
    return [with_costs.get(case.case, case) for case in planned]


def summarize(
    cases: Sequence[PlannedCase], costs: Costs, site: ExecutionSite, total: int, why: str = ""
) -> Totals:
    """Return the expected cost of a run over some of all `total` cases of an archive.

    In each worker one case holds the device while others are read and written concurrently. Cases
    that the run leaves out are taken to be like the others. `why` nothing could be tried is stated
    if the time is unknown.
    """
    # The largest case counts with its peak on the device; the next ones, as many as are in flight
    # beside it, with that of reading and writing
    largest = max((case.host for case in cases), default=0)
    concurrent = sorted((case.most for case in cases), reverse=True)[1 : site.in_flight]
    host = largest + sum(concurrent)
    totals = Totals(
        seconds=None,
        written=None,
        host=min(host, max(largest, site.host)) if site.host else host,
        device=max((case.device for case in cases), default=0),
    )
    if not cases:
        return totals
    if not costs.cases:
        return replace(totals, unknown=why or "this machine has not processed such cases yet")
    seconds = costs.run_time(cases, site)
    low, high = costs.written(cases).sum(axis=0).tolist()
    totals = replace(totals, tried=len(costs.cases), known_share=costs.share_of_known_sizes(cases))
    if states_something((low, high)):
        totals = replace(totals, written=(low, high))
    if not states_something(seconds):
        tried = f"the {counted(len(costs.cases), 'case')} that were tried"
        known = max(case.voxels for case in costs.cases)
        largest_scan = max(case.voxels for case in cases)
        detail = (
            f"{tried} have up to {known:,.0f} voxels, the scans of this run up to {largest_scan:,}"
            if totals.known_share < _LEAST_KNOWN_SHARE
            else f"{tried} took too different times: {format_range(seconds)} in all"
        )
        return replace(totals, unknown=f"{detail}; {why}" if why else detail)
    archive = costs.run_time(cases, site, total / len(cases))
    return replace(totals, seconds=seconds, archive_seconds=archive)


def _notes(
    cases: Sequence[PlannedCase], totals: Totals, site: ExecutionSite, out: Path
) -> Iterator[str]:
    """Yield a sentence for each limit that cases of a run exceed."""
    if site.host:
        if crowded := sum(case.host * site.in_flight > site.host for case in cases):
            yield f"{counted(crowded, 'case')}: fewer than {site.in_flight} of them run at once"
        if oversized := sum(case.host > site.host for case in cases):
            alone = "may exceed the memory: run alone, in smaller pieces"
            yield f"{counted(oversized, 'case')} {alone}"
    if site.device and (large := sum(case.device > site.device for case in cases)):
        slow = "too large for the device: fewer windows, scores on the host"
        yield f"{counted(large, 'case')} {slow}"
    yield from _disk_notes(totals.written or (0.0, 0.0), out)


def _disk_notes(written: Range, out: Path) -> Iterator[str]:
    """Yield a sentence if the results may exceed the disk of the output folder."""
    # The output folder need not exist: then its disk is that of the nearest folder above it
    folder = next(p for p in (out, *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if written[1] > free:
        verb = "need" if written[0] > free else "may need"
        yield (
            f"the disk has {format_bytes(free)} free; the results {verb} {format_bytes(written[1])}"
        )


def _request_notes(request: Request, pending: Sequence[Case], out: Path) -> Iterator[str]:
    """Yield lines on results that may be replaced, measured engines, and changed models."""
    from scanloom.inference.engines.cache import all_trials

    count = sum(case_folder(out, case.folder_name).is_dir() for case in pending)
    if count:
        yield (
            f"{counted(count, 'case')} with a result: replaced if the content of the scan has "
            "changed, or with --replace"
        )
    names = {network.name for card in request.requested for network in networks(card)}
    for trial in all_trials():
        if trial.model in names:
            yield f"{trial.model} with {trial}"
    for card, requested in zip(request.cards, request.requested, strict=True):
        if changes := describe_changes(card, requested):
            yield f"{card.name}: {changes}"


def gpu_advice(
    cases: Sequence[PlannedCase], request: Request, site: ExecutionSite, costs: Costs
) -> str:
    """Return whether a GPU pays for some cases, if they have run on it and on the CPU."""
    from scanloom.inference.device import choose_device

    try:
        choose_device("cuda")
    except ScanError:
        return "this machine has no GPU"
    is_cpu = site.placement.device == "cpu"
    try:
        other_site = find_site(request, "cuda" if is_cpu else "cpu")
    except ScanError as error:  # such as half precision on a CPU that does not support it
        return f"whether a GPU pays is not known: {error.detail}"
    placement = other_site.placement
    here = costs, site
    elsewhere = Costs.load(costs_key(request, placement.device, placement.precision)), other_site
    gpu, cpu = (elsewhere, here) if is_cpu else (here, elsewhere)
    return compare_devices(cases, gpu, cpu)


def compare_devices(
    cases: Sequence[PlannedCase],
    gpu: tuple[Costs, ExecutionSite],
    cpu: tuple[Costs, ExecutionSite],
) -> str:
    """Return a sentence on how much a GPU gains, in all and for single cases."""
    unknown = "whether a GPU pays is not known"
    if not cases:
        return unknown
    for name, (costs, _) in (("GPU", gpu), ("CPU", cpu)):
        if not costs.cases:
            return f"{unknown}: such cases have not run on the {name}"
    on_gpu, on_cpu = (costs.run_time(cases, site) for costs, site in (gpu, cpu))
    if not (states_something(on_gpu) and states_something(on_cpu)):
        return f"{unknown}: such cases have not run on both devices"
    both = f"{format_range(on_gpu)} on it, {format_range(on_cpu)} on the CPU"
    verb = "may pay"
    if on_gpu[1] < on_cpu[0]:
        verb = "pays"
    elif on_cpu[1] < on_gpu[0]:
        verb = "does not pay"
    gpu_s, cpu_s = (
        (costs.network(cases) + costs.rest(cases)).sum(axis=1) for costs, _ in (gpu, cpu)
    )
    small = int((cpu_s <= gpu_s).sum())
    less = f"; {counted(small, 'small case')} sooner on the CPU" if 0 < small < len(cases) else ""
    return f"a GPU {verb}: {both}{less}"


def format_range(seconds: Sequence[float]) -> str:
    """Return a range of durations as text, such as "2 min to 4 min"."""
    low, high = (format_duration(end) for end in seconds)
    return low if low == high else f"{low} to {high}"


def choose_cases(runnable: Sequence[PlannedCase]) -> list[PlannedCase]:
    """Return cases of an archive to be tried, in their order: see `_SHARES`."""
    by_size = sorted(runnable, key=lambda each: (each.values + each.voxels, each.case))
    reached = list(itertools.accumulate(each.voxels for each in by_size))
    # The smallest first: its cost tells whether there is time for the others
    chosen = by_size[:1]
    for share in _SHARES if reached else ():
        limit = share * reached[-1]
        chosen.append(next(c for c, sum_ in zip(by_size, reached, strict=True) if sum_ >= limit))
    return list({each.case: each for each in chosen}.values())


def _try_cases(
    costs: Costs,
    chosen: Sequence[PlannedCase],
    cases: Mapping[str, Case],
    request: Request,
    out: Path,
    key: bytes,
) -> str:
    """Segment a few cases alone, and add them to the costs; return why there are none, or "".

    Results go to a folder in the output folder's `private/`, which is removed. Models or a machine
    that can process no case raise ScanError.
    """
    fingerprint, workflow = key_fingerprint(key), request.workflow
    execution = workflow.execution
    measured: list[MeasuredCase] = []
    start, end, why = 0.0, 0.0, "no case could be tried"
    with private_folder(out, fingerprint) as private:
        scratch_folder = TemporaryDirectory(
            prefix="trial-", dir=private, ignore_cleanup_errors=True
        )
    with scratch_folder as name:
        scratch = Path(name)
        with suppress(FileNotFoundError):  # what a run would find; what is decided here is not kept
            shutil.copytree(out / ENGINES, scratch / ENGINES, symlinks=True)
        setup = WorkerSetup(
            OutputTarget(scratch, fingerprint, key=key),
            partial(
                load_models,
                workflow.models,
                request.digests,
                execution,
                workflow.computed_labels,
                len(cases),
                scratch,
            ),
            memory_limit=execution.memory_limit,
        )
        worker = WorkerSupervisor(setup, execution.time_limit)
        # The limit of a case in a run is an hour: nobody waits so long for a plan
        limit = Timer(_LONGEST_TRIAL_S, worker.stop)
        limit.daemon = True
        limit.start()
        try:
            began = time.monotonic()
            for planned in [*chosen[:1], *chosen]:  # the first case of a process takes longer
                if measured:
                    largest = max(measured, key=lambda case: case.values)
                    network = largest.network * planned.values / max(largest.values, 1.0)
                    rest = max(largest.rest, _REST_S_PER_VOXEL * planned.voxels)
                    if time.monotonic() + network + rest > end:
                        continue
                cost, reason = _segmented(worker, cases[planned.case])
                if cost is None:
                    why = f"cases were tried without a result: {reason}"
                    continue
                if not measured:
                    start = max(0.0, time.monotonic() - began - cost.network - cost.rest)
                    end = time.monotonic() + _TRIAL_S
                measured.append(cost)
        finally:
            limit.cancel()
            worker.stop(5.0)
    if not measured:
        return why
    costs.learn(measured[1:] or measured, start)
    return ""


def _segmented(worker: WorkerSupervisor, case: Case) -> tuple[MeasuredCase | None, str]:
    """Segment a case and remove its result; return its cost, or the reason why it has none."""
    record = worker.run(case).record
    if record is None:
        return None, f"not done after {format_duration(_LONGEST_TRIAL_S)}"
    if record.reason is not None or record.folder is None:
        return None, record.reason.code if record.reason else ""
    measured = _PublishedCase.read(record.folder)
    shutil.rmtree(record.folder, ignore_errors=True)  # so that it can be segmented once more
    return None if measured is None else replace(measured.cost, alone=True), ""
