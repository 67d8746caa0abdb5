"""Plan a run: its cases and their memory from headers, its duration and bytes from what was tried.

Durations and bytes are ranges, from cases that this machine has processed with the same models
(`scanloom.engine.planning.costs`). If these say too little of the archive, a few of its cases are
segmented first (`scanloom.engine.planning.trial`).
"""

from __future__ import annotations

import errno
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scanloom.cards.requested import describe_changes, networks
from scanloom.core import (
    DICOM,
    Case,
    Grid,
    Reason,
    ScanError,
    counted,
    format_bytes,
    format_duration,
)
from scanloom.engine.case.models import check_networks
from scanloom.engine.planning.costs import (
    PLAN_FILE,
    Costs,
    Range,
    costs_key,
    states_something,
)
from scanloom.engine.planning.trial import try_cases
from scanloom.engine.prepare import (
    Outline,
    Prepared,
    Request,
    id_conflicts,
    make_cases,
    prepare,
    unique_cases,
)
from scanloom.engine.results.run_cases import EarlierOutcomes
from scanloom.engine.worker.memory_admission import MEMORY_SHARE
from scanloom.engine.workflow.schema import Workflow
from scanloom.engine.workflow.selection import Scope, select
from scanloom.io.index.build import build_index
from scanloom.io.index.storage import IndexedSeries
from scanloom.io.index.walk import check_paths
from scanloom.io.output.crosswalk import case_folders
from scanloom.io.output.json_file import write_document
from scanloom.io.output.private import load_key_of
from scanloom.io.session import read_session
from scanloom.io.system.atomic_write import atomic_write

if TYPE_CHECKING:
    from scanloom.inference.memory import Placement

_LEAST_KNOWN_SHARE = 0.5
"""If less of a run's voxels are in scans of sizes that were tried, a few cases are tried first."""
_AXES = {"axial": (0, 1, 2), "coronal": (0, 2, 1), "sagittal": (1, 2, 0)}
"""Patient axes of a scan's columns, rows and slices, by the plane of its slices."""


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
class Plan:
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
    notes: tuple[str, ...] = field(default=())

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


@read_session()
def make_plan(
    workflow: Workflow,
    paths: Sequence[Path],
    out: Path,
    key_file: Path | None = None,
    scope: Scope | None = None,
    *,
    archives: bool = False,
) -> Plan:
    """Plan a run over an archive; only the index and the cost model are written to disk.

    Parameters
    ----------
    workflow : Workflow
        The workflow to plan.
    paths : sequence of Path
        Folders and files with the scans.
    out : Path
        The output folder, which may already hold results.
    key_file : Path or None
        The file with the key of the ids.
    scope : Scope, optional
        The cases that the run would take.
    archives : bool
        Whether archives inside folders are opened too.

    Raises
    ------
    ScanError
        If no case can run: because of the models, paths, key or output folder.
    """
    request, scope = Request.of(workflow), scope or Scope()
    check_networks(request.requested)
    check_paths(paths, out)
    key = load_key_of(out, key_file)
    index = build_index(paths, key, out, archives=archives)
    site = find_site(request)
    chosen, left_out = select(index.series, workflow, request.cards)
    in_index = list(make_cases(index, chosen, request, key, left_out))
    selected, folders = len({case.id for _, case in in_index}), case_folders(out)
    pairs = [
        (inputs[0], replace(case, folder=folders.get(case.id, "")))
        for inputs, case in in_index
        if scope.holds(case.id)
    ]
    unique, ambiguous = unique_cases((case for _, case in pairs), key)
    left_out += id_conflicts(ambiguous, index.series)
    earlier = EarlierOutcomes.read(out, unique, scope, request.cards)
    series = {case.id: entry for entry, case in pairs}
    prepared = [
        prepare(
            case,
            request.cards,
            None,  # earlier results were compared for all cases of the index
            memory_limit=workflow.execution.memory_limit,
            placement=site.placement,
            outline=_indexed_outline(series[case.id], case),
        )
        for case in earlier.pending
    ]
    costs, why = _costs(request, site, prepared, out, key)
    planned = _with_costs([_planned_case(each) for each in prepared], costs)
    runnable = [case for case in planned if not case.reason]
    totals = summarize(runnable, costs, site, selected, why)
    planned += [
        PlannedCase(record.id, reason=record.reason.code, detail=record.detail)
        for record in earlier.records
        if record.reason
    ]
    return Plan(
        workflow=workflow.name,
        recipe=request.recipe if earlier.pending else "",
        device=site.placement.device,
        precision=site.placement.precision,
        workers=site.workers,
        in_flight=site.in_flight,
        files=index.counts(),
        before=sum(record.reason is None for record in earlier.records),
        selected=selected,
        left_out=dict(sorted(Counter(entry.reason.code for entry in left_out).items())),
        left=tuple((entry.series.id, entry.reason.code, entry.detail) for entry in left_out),
        cases=tuple(planned),
        totals=totals,
        notes=(
            *_notes(runnable, totals, site, out),
            *_request_notes(request, earlier.pending, out),
            gpu_advice(runnable, request, site, costs),
        ),
    )


def _costs(
    request: Request, site: ExecutionSite, prepared: Sequence[Prepared], out: Path, key: bytes
) -> tuple[Costs, str]:
    """Return the costs of a request here, and why they are unknown; try cases if they are."""
    name = costs_key(request, site.placement.device, site.placement.precision)
    costs = Costs.load(name)
    candidates = [each for each in prepared if each.refusal is None]
    before = summarize([_planned_case(each) for each in candidates], costs, site, len(candidates))
    known = before.seconds is not None and before.known_share >= _LEAST_KNOWN_SHARE
    if known or not candidates:
        return costs, ""
    tried, why = try_cases(candidates, request, out, key)
    if tried.cases:
        costs.learn(tried.cases, tried.starts[0])
        costs.save(name)
    return costs, why


def save_plan(plan: Plan, out: Path) -> None:
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
        reason = Reason.DISK_FULL if exc.errno == errno.ENOSPC else Reason.OUTPUT_UNWRITABLE
        raise ScanError(reason, f"the plan can't be saved ({type(exc).__name__})") from exc


def find_site(request: Request, device: str | None = None) -> ExecutionSite:
    """Return the device, workers and memory that the networks of a request have on this machine.

    Parameters
    ----------
    request : Request
        The workflow with its models.
    device : str or None
        Another device than the workflow's.

    Raises
    ------
    ScanError
        If the requested device or precision is not available.
    """
    from scanloom.engine.machine.devices import local_devices
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
    voxels = [case.voxels for case in runnable]
    ranges = zip(
        costs.network([case.values for case in runnable]),
        costs.rest(voxels),
        costs.written(voxels),
        strict=True,
    )
    with_costs = {
        case.case: replace(
            case, seconds=(network[0] + rest[0], network[1] + rest[1]), written=written
        )
        for case, (network, rest, written) in zip(runnable, ranges, strict=True)
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
    voxels, values = [case.voxels for case in cases], [case.values for case in cases]
    workers = concurrent_workers(site)
    seconds = costs.run_time(values, voxels, workers, site.in_flight)
    written = [sum(ends) for ends in zip(*costs.written(voxels), strict=True)]
    totals = replace(totals, tried=len(costs.cases), known_share=costs.share_of_known_sizes(voxels))
    if states_something((written[0], written[1])):
        totals = replace(totals, written=(written[0], written[1]))
    if not states_something(seconds):
        tried = f"the {counted(len(costs.cases), 'case')} that were tried"
        known = max(case.voxels for case in costs.cases)
        detail = (
            f"{tried} have up to {known:,.0f} voxels, the scans of this run up to {max(voxels):,}"
            if totals.known_share < _LEAST_KNOWN_SHARE
            else f"{tried} took too different times: {format_range(seconds)} in all"
        )
        return replace(totals, unknown=f"{detail}; {why}" if why else detail)
    archive = costs.run_time(values, voxels, workers, site.in_flight, total / len(cases))
    return replace(totals, seconds=seconds, archive_seconds=archive)


def concurrent_workers(site: ExecutionSite) -> int:
    """Return the number of workers that speed a run up: a single one fills all cores of a CPU."""
    return 1 if site.placement.device == "cpu" else site.workers


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
    folder = next(p for p in (out, *out.absolute().parents) if p.exists())
    free, written = shutil.disk_usage(folder).free, totals.written or (0.0, 0.0)
    if written[1] > free:
        verb = "need" if written[0] > free else "may need"
        yield (
            f"the disk has {format_bytes(free)} free; the results {verb} {format_bytes(written[1])}"
        )


def _request_notes(request: Request, pending: Sequence[Case], out: Path) -> Iterator[str]:
    """Yield lines on results that may be replaced, measured engines, and changed models."""
    from scanloom.inference.engines.cache import all_trials

    count = sum((out / "cases" / case.folder_name).is_dir() for case in pending)
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
    other = Costs.load(costs_key(request, placement.device, placement.precision)), other_site
    return compare_devices(cases, other, here) if is_cpu else compare_devices(cases, here, other)


def compare_devices(
    cases: Sequence[PlannedCase],
    gpu: tuple[Costs, ExecutionSite],
    cpu: tuple[Costs, ExecutionSite],
) -> str:
    """Return a sentence on how much a GPU gains, in all and for single cases.

    Parameters
    ----------
    cases : sequence of PlannedCase
        The cases that would run.
    gpu, cpu : (Costs, ExecutionSite)
        Measurements of both devices.
    """
    unknown = "whether a GPU pays is not known"
    if not cases:
        return unknown
    for name, (costs, _) in (("GPU", gpu), ("CPU", cpu)):
        if not costs.cases:
            return f"{unknown}: such cases have not run on the {name}"
    values, voxels = [case.values for case in cases], [case.voxels for case in cases]
    on_gpu, on_cpu = (
        costs.run_time(values, voxels, concurrent_workers(site), site.in_flight)
        for costs, site in (gpu, cpu)
    )
    if not (states_something(on_gpu) and states_something(on_cpu)):
        return f"{unknown}: such cases have not run on both devices"
    both = f"{format_range(on_gpu)} on it, {format_range(on_cpu)} on the CPU"
    verb = "may pay"
    if on_gpu[1] < on_cpu[0]:
        verb = "pays"
    elif on_cpu[1] < on_gpu[0]:
        verb = "does not pay"
    seconds = [
        [
            sum(network) + sum(rest)
            for network, rest in zip(costs.network(values), costs.rest(voxels), strict=True)
        ]
        for costs, _ in (gpu, cpu)
    ]
    small = sum(cpu_s <= gpu_s for gpu_s, cpu_s in zip(*seconds, strict=True))
    less = f"; {counted(small, 'small case')} sooner on the CPU" if 0 < small < len(cases) else ""
    return f"a GPU {verb}: {both}{less}"


def format_range(seconds: Sequence[float]) -> str:
    """Return a range of durations as text, such as "2 min to 4 min"."""
    low, high = (format_duration(end) for end in seconds)
    return low if low == high else f"{low} to {high}"
