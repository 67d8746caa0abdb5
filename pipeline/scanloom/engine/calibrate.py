"""Measures what cases take on this machine, with the real models, where nothing is known."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event

from scanloom.cards.store import find_model
from scanloom.core import Case
from scanloom.engine.engine import Engine, Outcome
from scanloom.engine.history import Course, learn
from scanloom.engine.models import load_predictors
from scanloom.engine.pool import LocalPool
from scanloom.engine.pump import pump
from scanloom.engine.rates import Rates
from scanloom.engine.record import card_digest
from scanloom.engine.work import Place
from scanloom.engine.worker_messages import Setup
from scanloom.engine.workflow import Workflow
from scanloom.io.identity import key_fingerprint
from scanloom.io.private import private_folder

MOST_CASES, MOST_SECONDS = 60, 30.0
"""When either is reached, no more cases are begun."""
MOST_VOXELS = 60e6
"""Of all cases that are chosen: some minutes for a large network on a CPU."""
WARM_UP = 4
"""A fourth of the cases, and no more than these, only warm up: first ones take longer."""


def calibrate(todo: Sequence[tuple[int, Case]], workflow: Workflow, out: Path, key: bytes) -> Rates:
    """Work on a few cases, small and large ones, as a run would, and return what they took.

    Their results go to a folder in `OUT/private/`, which is removed.

    Parameters
    ----------
    todo : sequence of (voxels, Case)
        Those that a run would work on.
    workflow : Workflow
    out : Path
        The output folder.
    key : bytes
        Of the ids.

    Returns
    -------
    Rates
        Nothing known if no case came to its end.
    """
    rates = Rates()
    cases = choose(todo)
    if not cases:
        return rates
    execution = workflow.execution
    fingerprint = key_fingerprint(key)
    digests = [card_digest(find_model(name)) for name in workflow.models]
    with _scratch(out, fingerprint) as scratch:
        setup = Setup(
            Place(scratch, fingerprint, key=key),
            partial(load_predictors, workflow.models, digests, execution),
            in_flight=execution.in_flight,
            memory_limit=execution.memory_limit,
        )
        course, stop = Course(time.monotonic()), Event()
        pool = LocalPool([Engine(setup, execution.time_limit)], execution.in_flight)
        warm_up = min(WARM_UP, len(cases) // 4)
        try:
            pump(cases, pool, partial(_note, course, warm_up, stop), stop=stop)
        finally:
            pool.stop(5.0)
        learn(rates, scratch, course, 1)
    return rates


def choose(todo: Sequence[tuple[int, Case]]) -> list[Case]:
    """Return cases from near the smallest and near the largest, by turns, within the bounds."""
    by_size = sorted(todo, key=lambda pair: (pair[0], pair[1].id))
    edge = len(by_size) // 10
    low, high = by_size[edge:], by_size[: len(by_size) - edge][::-1]
    chosen: dict[str, Case] = {}
    left = MOST_VOXELS
    for voxels, case in (pair for both in zip(low, high, strict=True) for pair in both):
        if len(chosen) == MOST_CASES or (len(chosen) >= 2 and voxels > left):
            break
        if case.id not in chosen:
            chosen[case.id] = case
            left -= voxels
    return list(chosen.values())


@contextmanager
def _scratch(out: Path, fingerprint: str) -> Iterator[Path]:
    with private_folder(out, fingerprint) as private:
        folder = Path(tempfile.mkdtemp(prefix="calibration-", dir=private))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _note(course: Course, warm_up: int, stop: Event, case: Case, outcome: Outcome) -> None:
    """Take in how a case ended; begin anew when it is warm, and end when it took long enough."""
    began = course.began
    course.note(outcome)
    if course.ended == warm_up and course.first is not None and course.last is not None:
        course.began, course.first = began + course.last - course.first, course.last
        course.done.clear()
    if course.last is not None and course.last - began > MOST_SECONDS:
        stop.set()
