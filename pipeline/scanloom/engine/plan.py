"""What a run would do, from headers alone: which cases, how long, how much memory, how many bytes.

Seconds and bytes come from what was measured on this machine (`scanloom.engine.rates`); where
nothing was, a few cases of the archive are worked on for it, in a folder that is thrown away.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scanloom.cards.card import ModelCard
from scanloom.cards.store import find_model
from scanloom.core import DICOM, Case, Grid, Reason, ScanError
from scanloom.engine.cases import first_of_each, leave_out, make_cases
from scanloom.engine.estimate import Placement, check_memory, estimate_case
from scanloom.engine.models import check_networks, check_structures, unique_cards
from scanloom.engine.pays import elsewhere, verdict
from scanloom.engine.rates import Rates
from scanloom.engine.record import card_digest
from scanloom.engine.room import SHARE
from scanloom.engine.scope import OF_RESULTS, Scope
from scanloom.engine.select import select
from scanloom.engine.workflow import Workflow
from scanloom.io.crosswalk import case_folders
from scanloom.io.identity import load_key
from scanloom.io.index import build_index
from scanloom.io.index_file import IndexedSeries
from scanloom.io.limits import VOXEL_LIMIT
from scanloom.io.outline import read_outline
from scanloom.io.session import read_session
from scanloom.io.tables import write_json
from scanloom.io.walk import check_paths
from scanloom.io.whole import write_whole

PLAN = "plan.json"
"""Of the newest plan in `OUT/runs/`, and in a run's folder of the one that it was run by."""
_AXES = {"axial": (0, 1, 2), "coronal": (0, 2, 1), "sagittal": (1, 2, 0)}
"""To which patient axis columns, rows and slices run."""


@dataclass(frozen=True)
class PlannedCase:
    """What is expected of a case.

    Parameters
    ----------
    case : str
        Its id.
    voxels, values : int
        Of the scan, and of all windows that go through the networks; 0 where headers don't say.
    host, device : int
        Bytes of memory that it takes alone, on the host and on a device of its own memory.
    most : int
        Bytes of host memory while it does not hold the device.
    seconds, written : float or None
        Seconds of a worker, and bytes of results; None where nothing was measured yet.
    reason, detail : str
        Why it would be refused; empty where it would not.
    """

    case: str
    voxels: int = 0
    values: int = 0
    host: int = 0
    device: int = 0
    most: int = 0
    seconds: float | None = None
    written: float | None = None
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Totals:
    """What is expected of a run as a whole; None where nothing was measured yet.

    Parameters
    ----------
    seconds : float or None
        From its first case to its last, with the start of its workers.
    written : float or None
        Bytes of all case folders.
    host, device : int
        Most bytes that one worker's process, and its device, hold.
    """

    seconds: float | None
    written: float | None
    host: int
    device: int


@dataclass(frozen=True)
class Plan:
    """A run as it is expected.

    Parameters
    ----------
    workflow, recipe : str
        Name, and the hash of all that can change a result.
    device, precision : str
        Where the networks would run, and how.
    workers, in_flight : int
    files : mapping
        Files found, used, skipped and failed by the index alone.
    before : int
        Cases that are done.
    left_out : mapping
        How many series are left out, by reason.
    left : tuple of (case id, reason, detail)
        Each of them.
    cases : tuple of PlannedCase
        Those to be done, and those that would be refused.
    totals : Totals
    notes : tuple of str
        What does not fit and what will be done about it; whether a GPU pays.
    """

    workflow: str
    recipe: str
    device: str
    precision: str
    workers: int
    in_flight: int
    files: Mapping[str, int]
    before: int
    left_out: Mapping[str, int]
    left: tuple[tuple[str, str, str], ...]
    cases: tuple[PlannedCase, ...]
    totals: Totals
    notes: tuple[str, ...] = field(default=())

    @property
    def todo(self) -> list[PlannedCase]:
        """The cases that would be worked on."""
        return [one for one in self.cases if not one.reason]


@dataclass(frozen=True)
class Site:
    """Where a plan's networks would run, and what is there."""

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
    """Plan a run over an archive; the index is kept, nothing else is written but rates.

    Parameters
    ----------
    workflow : Workflow
        What would be done.
    paths : sequence of Path
        Where the scans are.
    out : Path
        The output folder, which may have results already.
    key_file : Path or None
        The file with the key of the ids.
    scope : Scope, optional
        Which cases.
    archives : bool
        Whether archives in folders are looked into.

    Raises
    ------
    ScanError
        For what concerns all: models, paths, key, output folder.
    """
    scope = scope or Scope()
    cards = unique_cards([find_model(name) for name in workflow.models])
    check_structures(cards, workflow.outputs.outputs())
    check_networks(cards)
    check_paths(paths, out)
    key = load_key(key_file)
    index = build_index(paths, key, out, archives=archives)
    chosen, left = select(index.series, workflow, cards)
    site = find_site(workflow, cards)
    folders = case_folders(out)
    pairs = [
        (inputs[0], replace(case, folder=folders.get(case.id, "")))
        for inputs, case in make_cases(index, chosen, workflow, cards, key, left)
        if scope.holds(case.id)
    ]
    series = {case.id: one for one, case in pairs}
    cases, taken = first_of_each((case for _, case in pairs), key)
    left += leave_out(taken, index.series)
    ends = [scope.before(out, case) for case in cases]
    todo = [case for case, end in zip(cases, ends, strict=True) if end is None]
    planned = [_planned(series[case.id], case, workflow, cards, site) for case in todo]
    stale = [end for end in ends if end and end.reason in OF_RESULTS]
    small = [(p.voxels, c) for p, c in zip(planned, todo, strict=True) if not p.reason]
    known = partial(_known_rates, cards=cards, todo=small, out=out, key=key)
    rates = known(workflow, site)
    planned = [_with_rates(one, rates) for one in planned]
    pays = _pays([p for p in planned if not p.reason], workflow, site, cards, known)
    planned += [PlannedCase(e.id, reason=e.reason.code, detail=e.detail) for e in stale if e.reason]
    return Plan(
        workflow=workflow.name,
        recipe=todo[0].recipe if todo else "",
        device=site.placement.device,
        precision=site.placement.precision,
        workers=site.workers,
        in_flight=site.in_flight,
        files=index.counts(),
        before=len(cases) - len(todo) - len(stale),
        left_out=dict(sorted(Counter(one.reason.code for one in left).items())),
        left=tuple((one.series.id, one.reason.code, one.detail) for one in left),
        cases=tuple(planned),
        totals=sum_up([p for p in planned if not p.reason], rates, site),
        notes=(*_notes(planned, site, out), *_made_before(todo, out), pays),
    )


def _known_rates(
    workflow: Workflow,
    site: Site,
    *,
    cards: Sequence[ModelCard],
    todo: Sequence[tuple[int, Case]],
    out: Path,
    key: bytes,
) -> Rates:
    """Return what is known of a workflow at a place; where nothing is, a few cases are tried."""
    name = rates_name(cards, site.placement.device, site.placement.precision, workflow)
    rates = Rates.load(name)
    if not rates.known:
        from scanloom.engine.calibrate import calibrate

        rates = calibrate(todo, workflow, out, key)
        rates.save(name)
    return rates


def _pays(
    cases: Sequence[PlannedCase],
    workflow: Workflow,
    site: Site,
    cards: Sequence[ModelCard],
    known: Callable[[Workflow, Site], Rates],
) -> str:
    """Say whether a GPU pays for itself, by what cases take on both devices."""
    other = elsewhere(workflow, site.placement.device)
    if other is None:
        return "there is no GPU here"
    try:
        there = find_site(other, cards)
    except ScanError as error:  # such as half precision on a CPU that has none
        return f"whether a GPU pays is not known: {error.detail}"
    here, beyond = known(workflow, site), known(other, there)
    if site.placement.device == "cpu":
        return verdict(cases, beyond, here, there.workers)
    return verdict(cases, here, beyond, site.workers)


def keep_plan(plan: Plan, out: Path) -> None:
    """Keep a plan in the output folder: the next run of its workflow is compared with it.

    Raises
    ------
    ScanError
        DISK_FULL or OUTPUT_UNWRITABLE if it can't be written.
    """
    folder = out / "runs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / PLAN, lambda draft: write_json(draft, {"schema": 1, **asdict(plan)}))
    except OSError as exc:
        reason = Reason.DISK_FULL if exc.errno == errno.ENOSPC else Reason.OUTPUT_UNWRITABLE
        raise ScanError(reason, f"the plan can't be kept ({type(exc).__name__})") from exc


def find_site(workflow: Workflow, cards: Sequence[ModelCard]) -> Site:
    """Return where a workflow's networks would run on this machine."""
    from scanloom.engine.gpus import local_devices
    from scanloom.inference.device import choose_device, choose_precision
    from scanloom.inference.ladder import machine_memory, room

    execution = workflow.execution
    device = choose_device(execution.device).device
    validated = set.intersection(*(set(card.precisions) for card in cards))
    precision = choose_precision(execution.precision, device, validated).name
    total = machine_memory()
    return Site(
        Placement(str(device), precision),
        workers=max(1, len(local_devices(execution))),
        in_flight=execution.in_flight,
        host=execution.memory_limit or (int(SHARE * total) if total else None),
        device=room(device).device,
    )


def rates_name(cards: Sequence[ModelCard], device: str, precision: str, workflow: Workflow) -> str:
    """Return under which name the rates of a workflow on a device are kept."""
    execution = workflow.execution
    told = {
        "models": [card_digest(card) for card in cards],
        "device": device.partition(":")[0],
        "precision": precision,
        "outputs": workflow.outputs.model_dump(mode="json"),
        "threads": execution.threads,
        "body_box": execution.body_box,
        "fused": execution.fused_restore,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


def _planned(
    one: IndexedSeries, case: Case, workflow: Workflow, cards: Sequence[ModelCard], site: Site
) -> PlannedCase:
    from scanloom.inference.cost import window_values

    try:
        grid, dtype = _outline(one, case)
        voxels = int(np.prod(grid.shape))
        _check_size(voxels * dtype.itemsize, case.max_bytes)
        least = estimate_case(grid, dtype, cards, case.outputs)
        check_memory(least, workflow.execution.memory_limit)
        need = estimate_case(grid, dtype, cards, case.outputs, site.placement)
        values = sum(window_values(card, grid) for card in cards)
    except ScanError as error:
        return PlannedCase(case.id, reason=error.code, detail=error.detail)
    outside = need.beside("resample", "network", "restore", "clean")
    device = max(need.device.values(), default=0)
    return PlannedCase(case.id, voxels, values, need.peak, device, outside)


def _check_size(count: int, limit: int | None) -> None:
    if count > (VOXEL_LIMIT if limit is None else limit):
        raise ScanError(Reason.TOO_LARGE, f"{count >> 20} MiB of voxels")


def _outline(one: IndexedSeries, case: Case) -> tuple[Grid, np.dtype[Any]]:
    """Return grid and type of a scan; of a DICOM series from the index alone, where it has them.

    The planes stand for its orientation: what a scan takes depends on spacing, not on angles.
    """
    what = one.what
    if one.kind != DICOM or not what.shape or case.phase is not None:
        return read_outline(case.series, case.phase, case.orientation, case.gaps)
    affine = np.eye(4)
    affine[:3, :3] = 0.0
    axes = _AXES.get(what.plane, _AXES["axial"])
    affine[axes, range(3)] = what.spacing
    whole = what.modality in ("CT", "MR")
    i, j, k = what.shape
    return Grid((i, j, k), affine), np.dtype(np.int16 if whole else np.float32)


def _with_rates(one: PlannedCase, rates: Rates) -> PlannedCase:
    if one.reason:
        return one
    told = asdict(one) | {
        "seconds": rates.seconds(one.values, one.voxels),
        "written": rates.written.at(one.voxels),
    }
    return PlannedCase(**told)


def sum_up(cases: Sequence[PlannedCase], rates: Rates, site: Site) -> Totals:
    """Return what cases take together.

    In a worker one case holds the device, and others are read and written beside it.
    """
    seconds = written = None
    if rates.known:
        longest = max((one.seconds or 0.0 for one in cases), default=0.0)
        spent = sum(one.seconds or 0.0 for one in cases) / parallel(site)
        seconds = (rates.start or 0.0) + max(spent, longest) if cases else 0.0
        written = sum(one.written or 0.0 for one in cases)
    host = max((one.host for one in cases), default=0)
    beside = sorted((one.most for one in cases), reverse=True)[1 : site.in_flight]
    most = host + sum(beside)
    return Totals(
        seconds,
        written,
        min(most, max(host, site.host)) if site.host else most,
        max((one.device for one in cases), default=0),
    )


def parallel(site: Site) -> int:
    """Return how many workers really work beside one another: on the CPU one fills all cores."""
    return 1 if site.placement.device == "cpu" else site.workers


def _made_before(todo: Sequence[Case], out: Path) -> Iterator[str]:
    count = sum((out / "cases" / case.folder_name).is_dir() for case in todo)
    if count:
        yield (
            f"{count} cases have a result already; where the scan's content has changed, or with "
            "--replace, it is made anew"
        )


def _notes(planned: Sequence[PlannedCase], site: Site, out: Path) -> Iterator[str]:
    refused = sum(bool(one.reason) for one in planned)
    if refused:
        yield f"{refused} cases would be refused: see their reasons"
    todo = [one for one in planned if not one.reason]
    if site.host:
        crowded = sum(one.host * site.in_flight > site.host for one in todo)
        if crowded:
            yield f"{crowded} cases are so large that fewer than {site.in_flight} run at once"
        alone = sum(one.host > site.host for one in todo)
        if alone:
            yield f"{alone} cases may not fit at all: each runs alone, in smaller pieces"
    if site.device:
        large = sum(one.device > site.device for one in todo)
        if large:
            yield f"{large} cases do not fit on the device: fewer windows, scores on the host"
    written = sum(one.written or 0.0 for one in todo)
    folder = next(p for p in (out, *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if written > free:
        yield f"the disk has {free / 1e9:.1f} GB free, results take {written / 1e9:.1f} GB"
