"""Plan a run: its cases and their memory from headers, its duration and bytes from measured cases.

If the cases that this machine has segmented (`scanloom.engine.costs`) say too little of an archive,
a few of its cases are segmented for a plan, in a folder that is then removed.
"""

from __future__ import annotations

import itertools
import logging
import math
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from threading import Timer
from typing import Literal

import numpy as np

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
)
from scanloom.engine.case.models import check_networks
from scanloom.engine.costs import (
    PLAN_FILE,
    CaseCost,
    CaseTiming,
    Costs,
    costs_key,
    states_something,
)
from scanloom.engine.machine.devices import local_devices
from scanloom.engine.plan import ExecutionSite, PlannedCase, Range, RunPlan, SamplePlan, Totals
from scanloom.engine.prepare import (
    Outline,
    OutputTarget,
    Prepared,
    Request,
    model_loader,
    prepare,
)
from scanloom.engine.results.run_cases import RunCases
from scanloom.engine.worker.memory_admission import MEMORY_SHARE
from scanloom.engine.worker.messages import ChildSetup
from scanloom.engine.worker.supervisor import WorkerSupervisor
from scanloom.engine.workflow.schema import Workflow
from scanloom.engine.workflow.selection import Scope, check_channels
from scanloom.io.identity import case_id, key_fingerprint
from scanloom.io.index.build import Index, build_index
from scanloom.io.index.sample import Estimate, FolderSample
from scanloom.io.index.storage import IndexedSeries
from scanloom.io.index.walk import check_paths
from scanloom.io.output.engines import ENGINES
from scanloom.io.output.json_file import write_document
from scanloom.io.output.layout import case_folder
from scanloom.io.output.private import check_key, load_key_of, private_folder
from scanloom.io.session import read_session
from scanloom.io.system.atomic_write import atomic_write
from scanloom.io.system.disk_errors import output_error
from scanloom.io.system.scratch_folders import locked_temporary_folder

logger = logging.getLogger(__name__)

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
    cases = RunCases(index, request, key, out, scope)
    cases.compare()
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

    units = _units_of(sample, index, cases, key)
    left_out = [(code, detail, next(units[name])) for name, code, detail in plan.left]
    of_case = {case.case: next(units[case.case]) for case in plan.cases}
    before = [next(units[record.id]) for record in cases.records if record.reason is None]
    states = [("refused" if case.reason else "todo", of_case[case.case]) for case in plan.cases]
    states += [("before", unit) for unit in before]
    files = ((file.outcome[0], sample.unit_of(file.entry.path)) for file in index.files())
    outcomes = _counts(
        sample, (row for name, unit in files for row in (("found", unit), (name, unit)))
    )
    none = Estimate(0.0, 0.0, 0.0, 0.0)
    seconds, written, unknown = _extrapolated(sample, plan, of_case, costs, site)
    return SamplePlan(
        plan,
        sampled=len(sample.units),
        found=sample.found,
        listed=sample.listed,
        opened=index.opened,
        files=dict.fromkeys(plan.files, none) | outcomes,
        cases=dict.fromkeys(("todo", "before", "refused"), none) | _counts(sample, states),
        left_out=_counts(sample, ((code, unit) for code, _, unit in left_out)),
        not_selected=_counts(
            sample,
            ((detail, unit) for code, detail, unit in left_out if code == Reason.NOT_SELECTED.code),
        ),
        refused=_counts(
            sample, ((case.reason, of_case[case.case]) for case in plan.cases if case.reason)
        ),
        seconds=seconds,
        written=written,
        unknown=unknown,
        unseen=sample.found * (1 - 0.05 ** (1 / len(sample.units))),
        notes=tuple(_sample_notes(sample, written or (0.0, 0.0), out)),
    )


def _extrapolated(
    sample: FolderSample,
    plan: RunPlan,
    of_case: Mapping[str, int],
    costs: Costs,
    site: ExecutionSite,
) -> tuple[Range | None, Range | None, str]:
    """Return the time and bytes of all folders' cases, and why the time is unknown.

    `plan` is that of the sample, `of_case` the unit of the sample that holds a case.
    """
    seconds, written, unknown = plan.totals.seconds, plan.totals.written, plan.totals.unknown
    if seconds is not None:
        ends = _ends(sample, [(of_case[c.case], c.seconds) for c in plan.todo if c.seconds])
        times = ends[0].low / ends[0].sampled, ends[1].high / ends[1].sampled
        low, high = (costs.run_time(plan.todo, site, factor) for factor in times)
        seconds = low[0], high[1]
        if not states_something(seconds):
            unknown = f"{format_range(seconds)}: a larger sample would tell more"
            seconds = None
    if written is not None:
        ends = _ends(sample, [(of_case[c.case], c.written) for c in plan.todo if c.written])
        written = ends[0].low, ends[1].high
    return seconds, written, unknown


def _total(sample: FolderSample, amounts: Iterable[tuple[int, float]]) -> Estimate:
    """Return the total of an archive, by amounts in units of its sample."""
    sums = np.zeros(len(sample.units))
    for unit, amount in amounts:
        sums[unit] += amount
    return sample.total(sums)


def _ends(sample: FolderSample, ranges: Sequence[tuple[int, Range]]) -> tuple[Estimate, Estimate]:
    """Return the totals of the lower and of the upper ends of ranges in units of a sample."""
    lower, upper = (_total(sample, ((unit, each[n]) for unit, each in ranges)) for n in (0, 1))
    return lower, upper


def _counts(sample: FolderSample, rows: Iterable[tuple[str, int]]) -> dict[str, Estimate]:
    """Return how many rows of each name an archive has, by the units of the sample's rows.

    The name that is most frequent in the sample is first.
    """
    counts = defaultdict[str, Counter[int]](Counter)
    for name, unit in rows:
        counts[name][unit] += 1
    names = sorted(counts, key=lambda name: -counts[name].total())
    return {name: _total(sample, counts[name].items()) for name in names}


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
    total, workers = machine_memory(), len(local_devices(execution))
    return ExecutionSite(
        Placement(str(chosen), precision),
        workers=workers,
        in_flight=execution.in_flight,
        host=execution.memory_limit or (int(MEMORY_SHARE * total / workers) if total else None),
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
    from scanloom.inference.engines.cache import trials_of

    count = sum(case_folder(out, case.folder_name).is_dir() for case in pending)
    if count:
        yield (
            f"{counted(count, 'case')} with a result: replaced if the content of the scan has "
            "changed, or with --replace"
        )
    trials = itertools.chain.from_iterable(map(trials_of, request.requested))
    yield from dict.fromkeys(f"{trial.model} with {trial}" for trial in trials)
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
    """Segment a few cases alone, and add them to the costs; return why none were added, or "".

    Results go to a folder in the output folder's `private/`, which is removed; if this process is
    killed, by the next plan. Models or a machine that can process no case raise ScanError.
    """
    execution = request.workflow.execution
    with ExitStack() as stack:
        with private_folder(out, key_fingerprint(key)) as private:
            scratch = stack.enter_context(locked_temporary_folder(private, "trial-")) / "out"
        with suppress(FileNotFoundError):  # what a run would find; what is decided here is not kept
            shutil.copytree(out / ENGINES, scratch / ENGINES, symlinks=True)
        setup = ChildSetup(
            OutputTarget(scratch, key),
            model_loader(request, len(cases), scratch),
            memory_limit=execution.memory_limit,
        )
        worker = WorkerSupervisor(setup, execution.time_limit)
        # The limit of a case in a run is an hour: nobody waits so long for a plan
        limit = Timer(_LONGEST_TRIAL_S, worker.stop)
        limit.daemon = True
        limit.start()
        try:
            measured, start, why = _measured(worker, chosen, cases)
        finally:
            limit.cancel()
            worker.stop(5.0)
    if not measured:
        return why
    costs.learn(measured[1:] or measured, start)
    return ""


def _measured(
    worker: WorkerSupervisor, chosen: Sequence[PlannedCase], cases: Mapping[str, Case]
) -> tuple[list[CaseCost], float, str]:
    """Return the costs of the cases for which there is time, the first one's twice.

    Also returned are the seconds that the worker took to start, and why no case was measured.
    """
    measured: list[CaseCost] = []
    start, end, why = 0.0, 0.0, "no case could be tried"
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
    return measured, start, why


def _segmented(worker: WorkerSupervisor, case: Case) -> tuple[CaseCost | None, str]:
    """Segment a case and remove its result; return its cost, or the reason why it has none."""
    record = worker.run(case).record
    if record is None:
        return None, f"not done after {format_duration(_LONGEST_TRIAL_S)}"
    if record.reason is not None or record.folder is None:
        return None, record.reason.code if record.reason else ""
    measured = CaseTiming.read(record.folder)
    shutil.rmtree(record.folder, ignore_errors=True)  # so that it can be segmented once more
    return None if measured is None else replace(measured.cost, alone=True), ""
