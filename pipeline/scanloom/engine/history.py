"""What a run took: for the rates of this machine, and beside what was planned."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scanloom.cards.card import ModelCard
from scanloom.core import ScanError
from scanloom.engine.engine import Outcome
from scanloom.engine.gpus import local_devices
from scanloom.engine.plan import PLAN, rates_name
from scanloom.engine.rates import Measured, Rates, folder_bytes
from scanloom.engine.workflow import Workflow
from scanloom.io.json_file import read_json
from scanloom.io.names import CASE, TIMING

SAMPLE = 2000
"""Cases of a run that are looked at; of more, so many evenly chosen ones."""


@dataclass
class Course:
    """When the cases of a run began and ended, seconds of CLOCK_MONOTONIC.

    Parameters
    ----------
    began : float
        When its workers were asked for.
    first, last : float or None
        When the first case held the device, and when the last one ended.
    ended : int
        How many cases ended, well or not.
    done : list of str
        The folders of cases that were published, without those whose result was there already.
    """

    began: float
    first: float | None = None
    last: float | None = None
    ended: int = 0
    done: list[str] = field(default_factory=list)

    def note(self, outcome: Outcome) -> None:
        """Take in how a case ended."""
        self.last = time.monotonic()
        self.ended += 1
        if outcome.device is not None and (self.first is None or outcome.device[0] < self.first):
            self.first = outcome.device[0]
        record = outcome.record
        if record is not None and record.reason is None and not record.recalled:
            self.done.append(record.folder.name if record.folder else record.id)


@dataclass(frozen=True)
class Taken:
    """What one published case took, and the peak of its process until then, bytes."""

    case: str
    what: Measured
    peak: int


def look_back(out: Path, done: Sequence[str]) -> list[Taken]:
    """Return what published cases took; of many, of some that are evenly chosen."""
    step = max(1, math.ceil(len(done) / SAMPLE))
    return [taken for name in done[::step] if (taken := _taken(out / "cases" / name, name))]


def learn(rates: Rates, out: Path, course: Course, workers: int) -> None:
    """Count a run into the rates.

    Parameters
    ----------
    rates : Rates
    out : Path
        Where its cases were published.
    course : Course
        When they were worked on.
    workers : int
        How many really worked beside one another.
    """
    taken = look_back(out, course.done)
    if not taken or course.first is None or course.last is None:
        return
    seconds = (course.last - course.first) * workers * len(taken) / len(course.done)
    rates.learn([one.what for one in taken], seconds, max(0.0, course.first - course.began))


def conclude(
    out: Path, course: Course, workflow: Workflow, cards: Sequence[ModelCard], recipe: str
) -> dict[str, Any] | None:
    """Learn from a run on this machine, and return how it went beside its plan.

    Parameters
    ----------
    out : Path
        The output folder.
    course : Course
        When its cases were worked on.
    workflow, cards, recipe
        What was done.

    Returns
    -------
    dict or None
        "planned", "happened" and their "ratio" for the cases that were published; None where the
        newest plan in the folder is of something else.
    """
    if not course.done:
        return None
    name, workers = _where(out / "cases" / course.done[0], workflow, cards)
    if name is not None:
        rates = Rates.load(name)
        learn(rates, out, course, workers)
        rates.save(name)
    plan = _newest_plan(out, recipe)
    try:
        return None if plan is None else compare(plan, out, course)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None  # no plan of ours


def compare(plan: Mapping[str, Any], out: Path, course: Course) -> dict[str, Any] | None:
    """Return what was planned of the cases of a run, what they took, and the ratio of the two."""
    expected = {one["case"]: one for one in plan["cases"]}
    mine = [expected[name] for name in course.done if name in expected]
    taken = look_back(out, course.done)
    if not taken or course.last is None or len(mine) < len(course.done):
        return None
    share = len(course.done) / len(taken)
    totals = plan["totals"]
    planned = {
        "seconds": totals["seconds"],
        "written": sum(one["written"] or 0.0 for one in mine) or None,
        "host": totals["host"],
    }
    if totals["seconds"] is not None and len(mine) < len(plan["cases"]):
        all_of_them = sum(one["seconds"] or 0.0 for one in plan["cases"]) or 1.0
        planned["seconds"] *= sum(one["seconds"] or 0.0 for one in mine) / all_of_them
    happened = {
        "seconds": course.last - course.began,
        "written": sum(one.what.written for one in taken) * share,
        "host": max(one.peak for one in taken),
    }
    ratio = {part: planned[part] / happened[part] if planned[part] else None for part in planned}
    return {"cases": len(mine), "planned": planned, "happened": happened, "ratio": ratio}


def _where(folder: Path, workflow: Workflow, cards: Sequence[ModelCard]) -> tuple[str | None, int]:
    """Return the name of the rates by where a case ran, and how many worked side by side."""
    try:
        timing = json.loads((folder / TIMING).read_text(encoding="utf-8"))
        device, precision = str(timing["device"][0]), str(timing["precision"][0])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None, 1
    workers = 1 if device == "cpu" else max(1, len(local_devices(workflow.execution)))
    return rates_name(cards, device, precision, workflow), workers


def _newest_plan(out: Path, recipe: str) -> dict[str, Any] | None:
    try:
        plan = read_json(out / "runs" / PLAN)
        return plan if plan["recipe"] == recipe and plan["cases"] else None
    except (OSError, ValueError, KeyError, TypeError, ScanError):
        return None


def _taken(folder: Path, name: str) -> Taken | None:
    try:
        timing = json.loads((folder / TIMING).read_text(encoding="utf-8"))
        shape = json.loads((folder / CASE).read_text(encoding="utf-8"))["grid"]["shape"]
        steps: Mapping[str, Any] = timing["steps"]
        spent = {step: float(told["wall_s"]) for step, told in steps.items()}
        network = spent.pop("network", 0.0)
        what = Measured(
            values=float(timing["window_values"]),
            voxels=float(math.prod(shape)),
            network=network,
            rest=sum(spent.values()),
            written=float(folder_bytes(folder)),
        )
        return Taken(name, what, int(timing["peak_memory_bytes"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # of another version, or gone meanwhile
