"""Measure the cost of a few cases with the real models, if this machine has no cost model yet."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event

from scanloom.cards.store import find_model
from scanloom.core import Case
from scanloom.engine.case.models import load_models
from scanloom.engine.case.recipe import card_digest
from scanloom.engine.case.run_case import OutputTarget
from scanloom.engine.planning.cost_model import CostModel
from scanloom.engine.planning.history import RunTimeline, update_cost_model
from scanloom.engine.worker.dispatch import dispatch_cases
from scanloom.engine.worker.messages import WorkerSetup
from scanloom.engine.worker.pool import LocalPool
from scanloom.engine.worker.supervisor import CaseOutcome, WorkerSupervisor
from scanloom.engine.workflow.schema import Workflow
from scanloom.io.identity import key_fingerprint
from scanloom.io.output.engines import ENGINES
from scanloom.io.output.private import private_folder

_MAX_CASES, _MAX_SECONDS = 60, 30.0
"""No further case is started once either is reached."""
MAX_TOTAL_VOXELS = 60e6
"""Limit of all selected cases together: some minutes for a large network on a CPU."""
_MAX_WARM_UP = 4
"""The first quarter of the cases, at most this many, is not counted: first cases take longer."""


def calibrate(
    samples: Sequence[tuple[int, Case]], workflow: Workflow, out: Path, key: bytes
) -> CostModel:
    """Segment a few cases, small and large ones, as a run would; return their cost model.

    Results go to a folder in `OUT/private/`, which is removed.

    Parameters
    ----------
    samples : sequence of (voxels, Case)
        The cases to choose from.
    workflow : Workflow
        The workflow to measure.
    out : Path
        The output folder.
    key : bytes
        The key of the ids.

    Returns
    -------
    Rates
        Empty if no case was completed.
    """
    rates = CostModel()
    cases = choose_samples(samples)
    if not cases:
        return rates
    execution = workflow.execution
    fingerprint = key_fingerprint(key)
    digests = [card_digest(find_model(name)) for name in workflow.models]
    with _scratch_folder(out, fingerprint) as scratch:
        with suppress(FileNotFoundError):  # what a run would find; what is decided here is not kept
            shutil.copytree(out / ENGINES, scratch / ENGINES, symlinks=True)
        setup = WorkerSetup(
            OutputTarget(scratch, fingerprint, key=key),
            partial(
                load_models,
                workflow.models,
                digests,
                execution,
                workflow.computed_labels,
                len(samples),
                scratch,
            ),
            in_flight=execution.in_flight,
            memory_limit=execution.memory_limit,
        )
        course, stop = RunTimeline(time.monotonic()), Event()
        pool = LocalPool([WorkerSupervisor(setup, execution.time_limit)], execution.in_flight)
        warm_up = min(_MAX_WARM_UP, len(cases) // 4)
        try:
            dispatch_cases(cases, pool, partial(_record, course, warm_up, stop), stop=stop)
        finally:
            pool.stop(5.0)
        update_cost_model(rates, scratch, course, 1)
    return rates


def choose_samples(samples: Sequence[tuple[int, Case]]) -> list[Case]:
    """Return cases from both ends of the size range, small and large in turn, within the limits.

    The smallest and the largest tenth are left out.
    """
    by_size = sorted(samples, key=lambda pair: (pair[0], pair[1].id))
    tenth = len(by_size) // 10
    ascending, descending = by_size[tenth:], by_size[: len(by_size) - tenth][::-1]
    chosen: dict[str, Case] = {}
    remaining = MAX_TOTAL_VOXELS
    for voxels, case in chain.from_iterable(zip(ascending, descending, strict=True)):
        if len(chosen) == _MAX_CASES or (len(chosen) >= 2 and voxels > remaining):
            break
        if case.id not in chosen:
            chosen[case.id] = case
            remaining -= voxels
    return list(chosen.values())


@contextmanager
def _scratch_folder(out: Path, fingerprint: str) -> Iterator[Path]:
    with private_folder(out, fingerprint) as private:
        folder = Path(tempfile.mkdtemp(prefix="calibration-", dir=private))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _record(
    course: RunTimeline, warm_up: int, stop: Event, case: Case, outcome: CaseOutcome
) -> None:
    """Record the end of a case; restart the timeline after the warm-up, stop at the time limit."""
    began = course.began
    course.note(outcome)
    last_end = course.last_end
    if course.ended == warm_up and course.first_on_device is not None and last_end is not None:
        course.began, course.first_on_device = began + last_end - course.first_on_device, last_end
        course.published.clear()
    if last_end is not None and last_end - began > _MAX_SECONDS:
        stop.set()
