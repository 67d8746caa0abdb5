"""Plan a run from headers alone: its cases, duration, memory and bytes of results.

Durations and bytes come from the cost model of this machine
(`scanloom.engine.planning.cost_model`). Without one, a few cases of the archive are segmented to
measure it, in a folder that is then removed.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scanloom.cards.card import ModelCard
from scanloom.cards.parts import needed_parts
from scanloom.cards.requested import requested_card
from scanloom.cards.store import find_model
from scanloom.core import DICOM, Case, CaseRecord, Grid, Reason, ScanError
from scanloom.engine.case.build import id_conflicts, make_cases, unique_cases
from scanloom.engine.case.memory_estimate import Placement, check_memory, estimate_case
from scanloom.engine.case.models import check_networks, check_structures, unique_cards
from scanloom.engine.planning.calibrate import calibrate
from scanloom.engine.planning.cost_model import CostModel
from scanloom.engine.planning.gpu_break_even import gpu_advice, on_other_device
from scanloom.engine.planning.model import (
    PLAN_FILE,
    ExecutionSite,
    Plan,
    PlannedCase,
    Totals,
    cost_model_key,
)
from scanloom.engine.planning.notes import (
    change_notes,
    engine_notes,
    limit_notes,
    replacement_notes,
)
from scanloom.engine.results.run_cases import EarlierOutcomes
from scanloom.engine.worker.memory_admission import MEMORY_SHARE
from scanloom.engine.workflow.schema import Workflow
from scanloom.engine.workflow.scope import Scope
from scanloom.engine.workflow.selection import LeftOut, select
from scanloom.io.index.build import Index, build_index
from scanloom.io.index.storage import IndexedSeries
from scanloom.io.index.walk import check_paths
from scanloom.io.limits import VOXEL_LIMIT_BYTES
from scanloom.io.output.crosswalk import case_folders
from scanloom.io.output.json_file import write_json
from scanloom.io.output.private import load_key_of
from scanloom.io.probe import probe
from scanloom.io.session import read_session
from scanloom.io.system.atomic_write import atomic_write

_AXES = {"axial": (0, 1, 2), "coronal": (0, 2, 1), "sagittal": (1, 2, 0)}
"""Patient axes of a scan's columns, rows and slices, by the plane of its slices."""


@dataclass(frozen=True)
class _Selection:
    """Cases of an index within the scope of a run, and the series without a case.

    Parameters
    ----------
    cases : EarlierOutcomes
        Pending cases, and the outcomes of all other ones.
    series : mapping
        The series of the first input channel, by case id.
    left_out : sequence of LeftOut
        Series without a case.
    total : int
        Number of cases in the whole index, also of other shards.
    """

    cases: EarlierOutcomes
    series: Mapping[str, IndexedSeries]
    left_out: Sequence[LeftOut]
    total: int


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
    cards = unique_cards([find_model(name) for name in workflow.models])
    check_structures(cards, workflow.output_options, workflow.relations)
    requested = [requested_card(card, workflow.compute_options) for card in cards]
    check_networks(requested)
    check_paths(paths, out)
    key = load_key_of(out, key_file)
    index = build_index(paths, key, out, archives=archives)
    site = find_site(workflow, requested)
    selection = _select_cases(index, workflow, cards, key, out, scope or Scope())
    pending = selection.cases.pending
    planned = [
        _estimated(selection.series[case.id], case, workflow, requested, site) for case in pending
    ]
    samples = [
        (planned_case.voxels, case)
        for planned_case, case in zip(planned, pending, strict=True)
        if not planned_case.reason
    ]
    cost_model = partial(_cost_model, cards=cards, samples=samples, out=out, key=key)
    rates = cost_model(workflow, site)
    planned = [_with_costs(case, rates) for case in planned]
    advice = _gpu_advice(_runnable(planned), workflow, site, rates, cards, cost_model)
    planned += [_without_result(r) for r in selection.cases.records if r.reason]
    notes = (
        *limit_notes(_runnable(planned), site, out),
        *replacement_notes(pending, out),
        *engine_notes(requested),
        *change_notes(cards, requested),
        advice,
    )
    return _assembled(workflow, index, selection, site, rates, planned, notes)


def _assembled(
    workflow: Workflow,
    index: Index,
    selection: _Selection,
    site: ExecutionSite,
    rates: CostModel,
    planned: Sequence[PlannedCase],
    notes: tuple[str, ...],
) -> Plan:
    pending, excluded = selection.cases.pending, selection.left_out
    return Plan(
        workflow=workflow.name,
        recipe=pending[0].recipe if pending else "",
        device=site.placement.device,
        precision=site.placement.precision,
        workers=site.workers,
        in_flight=site.in_flight,
        files=index.counts(),
        before=sum(record.reason is None for record in selection.cases.records),
        selected=selection.total,
        left_out=dict(sorted(Counter(entry.reason.code for entry in excluded).items())),
        left=tuple((entry.series.id, entry.reason.code, entry.detail) for entry in excluded),
        cases=tuple(planned),
        totals=summarize(_runnable(planned), rates, site, selection.total),
        notes=notes,
    )


def _select_cases(
    index: Index,
    workflow: Workflow,
    cards: Sequence[ModelCard],
    key: bytes,
    out: Path,
    scope: Scope,
) -> _Selection:
    """Return the cases of an index within a run's scope, and why series have no case."""
    chosen, left_out = select(index.series, workflow, cards)
    folders = case_folders(out)
    in_index = list(make_cases(index, chosen, workflow, cards, key, left_out))
    pairs = [
        (inputs[0], replace(case, folder=folders.get(case.id, "")))
        for inputs, case in in_index
        if scope.holds(case.id)
    ]
    unique, ambiguous = unique_cases((case for _, case in pairs), key)
    left_out += id_conflicts(ambiguous, index.series)
    return _Selection(
        EarlierOutcomes.read(out, unique, scope),
        series={case.id: series for series, case in pairs},
        left_out=left_out,
        total=len({case.id for _, case in in_index}),
    )


def _cost_model(
    workflow: Workflow,
    site: ExecutionSite,
    *,
    cards: Sequence[ModelCard],
    samples: Sequence[tuple[int, Case]],
    out: Path,
    key: bytes,
) -> CostModel:
    """Return the cached cost model of a workflow on a site, or else measure a few samples."""
    name = cost_model_key(cards, site.placement.device, site.placement.precision, workflow)
    rates = CostModel.load(name)
    if not rates.known:
        rates = calibrate(samples, workflow, out, key)
        rates.save(name)
    return rates


def _gpu_advice(
    cases: Sequence[PlannedCase],
    workflow: Workflow,
    site: ExecutionSite,
    rates: CostModel,
    cards: Sequence[ModelCard],
    cost_model: Callable[[Workflow, ExecutionSite], CostModel],
) -> str:
    """Return whether a GPU pays for these cases, from the cost models of both devices."""
    other_workflow = on_other_device(workflow, site.placement.device)
    if other_workflow is None:
        return "this machine has no GPU"
    try:
        other_site = find_site(other_workflow, cards)
    except ScanError as error:  # such as half precision on a CPU that does not support it
        return f"whether a GPU pays is not known: {error.detail}"
    other_rates = cost_model(other_workflow, other_site)
    if site.placement.device == "cpu":
        return gpu_advice(cases, other_rates, rates, other_site.workers)
    return gpu_advice(cases, rates, other_rates, site.workers)


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
        atomic_write(
            folder / PLAN_FILE, lambda draft: write_json(draft, {"schema": 1, **asdict(plan)})
        )
    except OSError as exc:
        reason = Reason.DISK_FULL if exc.errno == errno.ENOSPC else Reason.OUTPUT_UNWRITABLE
        raise ScanError(reason, f"the plan can't be saved ({type(exc).__name__})") from exc


def find_site(workflow: Workflow, cards: Sequence[ModelCard]) -> ExecutionSite:
    """Return the device, workers and memory that a workflow's networks have on this machine.

    Raises
    ------
    ScanError
        If the requested device or precision is not available.
    """
    from scanloom.engine.machine.gpus import local_devices
    from scanloom.inference.device import choose_device, choose_precision
    from scanloom.inference.memory_fallback import machine_memory, room

    execution = workflow.execution
    device = choose_device(execution.device).device
    validated = set.intersection(*(set(card.precisions) for card in cards))
    precision = choose_precision(execution.precision, device, validated).name
    total = machine_memory()
    return ExecutionSite(
        Placement(str(device), precision),
        workers=max(1, len(local_devices(execution))),
        in_flight=execution.in_flight,
        host=execution.memory_limit or (int(MEMORY_SHARE * total) if total else None),
        device=room(device).device,
    )


def _estimated(
    series: IndexedSeries,
    case: Case,
    workflow: Workflow,
    cards: Sequence[ModelCard],
    site: ExecutionSite,
) -> PlannedCase:
    """Return a case with its sizes and memory, or with the reason why it would be refused."""
    from scanloom.inference.workload import window_values

    try:
        grid, dtype = _grid_and_dtype(series, case)
        voxels = int(np.prod(grid.shape))
        _check_size(voxels * dtype.itemsize, case.read.max_size)
        smallest = estimate_case(grid, dtype, cards, case.outputs, None, case.relations)
        check_memory(smallest, workflow.execution.memory_limit)
        estimate = estimate_case(grid, dtype, cards, case.outputs, site.placement, case.relations)
        labels = case.relations.labels_to_compute(case.outputs.structures)
        values = sum(window_values(needed_parts(card, labels), grid) for card in cards)
    except ScanError as error:
        return PlannedCase(case.id, reason=error.code, detail=error.detail)
    off_device = estimate.largest_stage_without("resample", "network", "restore", "clean")
    device = max(estimate.device.values(), default=0)
    return PlannedCase(case.id, voxels, values, estimate.peak, device, off_device)


def _without_result(record: CaseRecord) -> PlannedCase:
    code = record.reason.code if record.reason else ""
    return PlannedCase(record.id, reason=code, detail=record.detail)


def _check_size(count: int, limit: int | None) -> None:
    if count > (VOXEL_LIMIT_BYTES if limit is None else limit):
        raise ScanError(Reason.TOO_LARGE, f"{count >> 20} MiB of voxels")


def _grid_and_dtype(series: IndexedSeries, case: Case) -> tuple[Grid, np.dtype[Any]]:
    """Return the grid and voxel type of a scan, for a DICOM series from the index if possible.

    An affine of the slices' plane and spacing is enough: cost does not depend on exact angles.
    """
    info = series.info
    if series.kind != DICOM or not info.shape or case.phase is not None:
        return probe(case.series, case.phase, case.read.orientation, case.read.gaps)
    affine = np.eye(4)
    affine[:3, :3] = 0.0
    axes = _AXES.get(info.plane, _AXES["axial"])
    affine[axes, range(3)] = info.spacing
    is_integer = info.modality in ("CT", "MR")
    i, j, k = info.shape
    return Grid((i, j, k), affine), np.dtype(np.int16 if is_integer else np.float32)


def _with_costs(case: PlannedCase, rates: CostModel) -> PlannedCase:
    if case.reason:
        return case
    seconds = rates.seconds(case.values, case.voxels)
    return replace(case, seconds=seconds, written=rates.written.at(case.voxels))


def _runnable(cases: Sequence[PlannedCase]) -> list[PlannedCase]:
    return [case for case in cases if not case.reason]


def summarize(
    cases: Sequence[PlannedCase], rates: CostModel, site: ExecutionSite, total: int
) -> Totals:
    """Return the expected cost of a run over some of all `total` cases of an archive.

    In each worker one case holds the device while others are read and written concurrently. Cases
    that the run leaves out are taken to be like the others.
    """
    seconds = archive = written = None
    if rates.known:
        longest = max((case.seconds or 0.0 for case in cases), default=0.0)
        mean_of_workers = sum(case.seconds or 0.0 for case in cases) / concurrent_workers(site)
        start = rates.start or 0.0
        seconds = start + max(mean_of_workers, longest) if cases else 0.0
        if cases:
            archive = start + max(mean_of_workers * total / len(cases), longest)
        written = sum(case.written or 0.0 for case in cases)
    largest = max((case.host for case in cases), default=0)
    concurrent = sorted((case.most for case in cases), reverse=True)[1 : site.in_flight]
    host = largest + sum(concurrent)
    return Totals(
        seconds,
        written,
        min(host, max(largest, site.host)) if site.host else host,
        max((case.device for case in cases), default=0),
        archive,
    )


def concurrent_workers(site: ExecutionSite) -> int:
    """Return the number of workers that speed a run up: a single one fills all cores of a CPU."""
    return 1 if site.placement.device == "cpu" else site.workers
