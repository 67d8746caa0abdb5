"""Measure the cost of cases by segmenting a few of them alone, in a folder that is then removed."""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Timer

from scanloom.core import Case, format_duration
from scanloom.engine.case.models import load_models
from scanloom.engine.planning.costs import Costs, MeasuredCase, measured_case
from scanloom.engine.prepare import OutputTarget, Prepared, Request
from scanloom.engine.worker.messages import WorkerSetup
from scanloom.engine.worker.supervisor import WorkerSupervisor
from scanloom.io.identity import key_fingerprint
from scanloom.io.output.engines import ENGINES
from scanloom.io.output.private import private_folder

_BUDGET_S = 30.0
"""A further case is tried only if all cases are expected to end within this time."""
_LONGEST_S = 120.0
"""The smallest case is tried without knowing what it costs: all is given up after this time."""
_REST_S_PER_VOXEL = 3e-7
"""Time around the network that is expected of a scan before any was tried: twice that of a CT of
the thorax on two slow cores."""
_SHARES = (0.5, 0.9, 0.25, 0.75)
"""The cases below and at which these shares of all voxels lie, in the order in which they are
tried: half the cost of an archive is in scans larger than the first of them."""


def try_cases(
    candidates: Sequence[Prepared],
    request: Request,
    out: Path,
    key: bytes,
) -> tuple[Costs, str]:
    """Segment a few cases of an archive; return their costs, or why there are none.

    Parameters
    ----------
    candidates : sequence of Prepared
        The cases to choose from, with their estimates.
    request : Request
        The workflow to measure, with its models.
    out : Path
        The output folder: results go to a folder in its `private/`, which is removed.
    key : bytes
        The key of the ids.

    Raises
    ------
    ScanError
        If no case can be processed, because of the models or the machine.
    """
    chosen, fingerprint = choose_cases(candidates), key_fingerprint(key)
    workflow, execution = request.workflow, request.workflow.execution
    measured: list[MeasuredCase] = []
    start, end, why = 0.0, 0.0, "no case could be tried"
    with _scratch_folder(out, fingerprint) as scratch:
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
                len(candidates),
                scratch,
            ),
            memory_limit=execution.memory_limit,
        )
        worker = WorkerSupervisor(setup, execution.time_limit)
        limit = Timer(_LONGEST_S, worker.stop)
        limit.daemon = True
        limit.start()
        try:
            began = time.monotonic()
            for candidate in [*chosen[:1], *chosen]:
                if measured and time.monotonic() + _expected(measured, candidate) > end:
                    continue
                cost, reason = _segmented(worker, candidate.case)
                if cost is None:
                    why = f"cases were tried without a result: {reason}"
                    continue
                if not measured:
                    start = max(0.0, time.monotonic() - began - cost.network - cost.rest)
                    end = time.monotonic() + _BUDGET_S
                measured.append(cost)
        finally:
            limit.cancel()
            worker.stop(5.0)
    costs = Costs()
    if measured:  # the first case of a process takes longer
        costs.learn(measured[1:] or measured, start)
    return costs, "" if measured else why


def choose_cases(candidates: Sequence[Prepared]) -> list[Prepared]:
    """Return cases of an archive to be tried, in their order: see `_SHARES`."""
    by_size = sorted(candidates, key=lambda each: (sum(_work(each)), each.case.id))
    reached = list(itertools.accumulate(_work(each)[0] for each in by_size))
    chosen = by_size[:1]
    for share in _SHARES if reached else ():
        limit = share * reached[-1]
        chosen.append(next(c for c, sum_ in zip(by_size, reached, strict=True) if sum_ >= limit))
    return list({each.case.id: each for each in chosen}.values())


def _work(prepared: Prepared) -> tuple[int, int]:
    """Return the voxels of a case's scan, and of all its windows."""
    if prepared.outline is None or prepared.estimate is None:
        raise ValueError("a case to be tried has an outline and an estimate")
    return math.prod(prepared.outline[0].shape), prepared.estimate.values


def _expected(measured: Sequence[MeasuredCase], candidate: Prepared) -> float:
    """Return the seconds of a case by the window of the largest case that was tried."""
    voxels, values = _work(candidate)
    largest = max(measured, key=lambda case: case.values)
    network = largest.network * values / max(largest.values, 1.0)
    return network + max(largest.rest, _REST_S_PER_VOXEL * voxels)


def _segmented(worker: WorkerSupervisor, case: Case) -> tuple[MeasuredCase | None, str]:
    """Segment a case and remove its result; return its cost, or the reason why it has none."""
    outcome = worker.run(case)
    if outcome.fault is not None:
        raise outcome.fault
    record = outcome.record
    if record is None:
        return None, f"not done after {format_duration(_LONGEST_S)}"
    if record.reason is not None or record.folder is None:
        return None, record.reason.code if record.reason else ""
    cost = measured_case(record.folder)
    shutil.rmtree(record.folder, ignore_errors=True)  # so that it can be segmented once more
    return cost, ""


@contextmanager
def _scratch_folder(out: Path, fingerprint: str) -> Iterator[Path]:
    with private_folder(out, fingerprint) as private:
        folder = Path(tempfile.mkdtemp(prefix="trial-", dir=private))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
