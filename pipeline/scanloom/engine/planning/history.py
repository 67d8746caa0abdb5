"""Measure a finished run: update the cost model of this machine, and compare it with the plan."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scanloom.cards.card import ModelCard
from scanloom.core import ScanError
from scanloom.engine.machine.gpus import local_devices
from scanloom.engine.planning.cost_model import CostModel, MeasuredCost, folder_bytes
from scanloom.engine.planning.model import PLAN_FILE, cost_model_key
from scanloom.engine.worker.supervisor import CaseOutcome
from scanloom.engine.workflow.schema import Workflow
from scanloom.io.output.file_names import CASE, TIMING
from scanloom.io.output.json_file import read_json
from scanloom.io.output.layout import CASES

_MAX_SAMPLES = 2000
"""Published cases of a run that are read; of more cases, this many evenly spaced ones."""


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
    ended : int
        Number of cases that ended, successful or not.
    published : dict of str to str
        Names of the case folders that this run published, by case id; without reused results.
    """

    began: float
    first_on_device: float | None = None
    last_end: float | None = None
    ended: int = 0
    published: dict[str, str] = field(default_factory=dict)

    def note(self, outcome: CaseOutcome) -> None:
        """Record that a case ended."""
        self.last_end = time.monotonic()
        self.ended += 1
        if outcome.device is not None:
            start, first = outcome.device[0], self.first_on_device
            self.first_on_device = start if first is None else min(first, start)
        record = outcome.record
        if record is not None and record.reason is None and not record.reused:
            self.published[record.id] = record.folder.name if record.folder else record.id


@dataclass(frozen=True)
class _PublishedCase:
    """Measured cost of one published case, and its process's peak memory until then, in bytes."""

    cost: MeasuredCost
    peak: int


def update_cost_model(rates: CostModel, out: Path, course: RunTimeline, workers: int) -> None:
    """Add the measurements of a run to a cost model.

    Parameters
    ----------
    rates : CostModel
        The cost model, which is updated in place.
    out : Path
        The output folder with the published cases.
    course : RunTimeline
        The timeline of the run.
    workers : int
        Number of workers that sped the run up.
    """
    cases = _read_published(out, course.published)
    if not cases or course.first_on_device is None or course.last_end is None:
        return
    sampled_share = len(cases) / len(course.published)
    seconds = (course.last_end - course.first_on_device) * workers * sampled_share
    start = max(0.0, course.first_on_device - course.began)
    rates.learn([case.cost for case in cases], seconds, start)


def compare_with_plan(
    out: Path, course: RunTimeline, workflow: Workflow, cards: Sequence[ModelCard], recipe: str
) -> dict[str, Any] | None:
    """Update this machine's cost model from a run, and compare the run with its plan.

    Parameters
    ----------
    out : Path
        The output folder.
    course : RunTimeline
        The timeline of the run.
    workflow, cards, recipe
        The workflow of the run, the cards of its models, and the hash of both.

    Returns
    -------
    dict or None
        "planned", "happened" and their "ratio" for the published cases; None if the output folder
        has no plan of this recipe.
    """
    if not course.published:
        return None
    first = next(iter(course.published.values()))
    name, workers = _model_and_workers(out / CASES / first, workflow, cards)
    if name is not None:
        rates = CostModel.load(name)
        update_cost_model(rates, out, course, workers)
        rates.save(name)
    plan = _newest_plan(out, recipe)
    try:
        return None if plan is None else _compare(plan, out, course)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None  # not a plan that scanloom wrote


def _compare(plan: Mapping[str, Any], out: Path, course: RunTimeline) -> dict[str, Any] | None:
    """Return planned and measured cost of a run, and their ratio; None if the plan lacks a case."""
    by_case = {case["case"]: case for case in plan["cases"]}
    matched = [by_case[case] for case in course.published if case in by_case]
    if len(matched) < len(course.published):
        return None
    planned, happened = _planned(plan, matched), _happened(out, course)
    if happened is None:
        return None
    ratio = {name: planned[name] / happened[name] if planned[name] else None for name in planned}
    return {"cases": len(matched), "planned": planned, "happened": happened, "ratio": ratio}


def _planned(plan: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the planned cost of some cases of a plan."""
    totals = plan["totals"]
    seconds = totals["seconds"]
    if seconds is not None and len(cases) < len(plan["cases"]):
        all_cases = sum(case["seconds"] or 0.0 for case in plan["cases"]) or 1.0
        seconds *= sum(case["seconds"] or 0.0 for case in cases) / all_cases
    return {
        "seconds": seconds,
        "written": sum(case["written"] or 0.0 for case in cases) or None,
        "host": totals["host"],
    }


def _happened(out: Path, course: RunTimeline) -> dict[str, Any] | None:
    """Return the measured cost of a run; None without a readable published case."""
    cases = _read_published(out, course.published)
    if not cases or course.last_end is None:
        return None
    return {
        "seconds": course.last_end - course.began,
        "written": sum(case.cost.written for case in cases) * len(course.published) / len(cases),
        "host": max(case.peak for case in cases),
    }


def _model_and_workers(
    folder: Path, workflow: Workflow, cards: Sequence[ModelCard]
) -> tuple[str | None, int]:
    """Return the key of the cost model for the device of a case, and the concurrent workers."""
    try:
        timing = json.loads((folder / TIMING).read_text(encoding="utf-8"))
        device, precision = str(timing["device"][0]), str(timing["precision"][0])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None, 1
    workers = 1 if device == "cpu" else max(1, len(local_devices(workflow.execution)))
    return cost_model_key(cards, device, precision, workflow), workers


def _newest_plan(out: Path, recipe: str) -> dict[str, Any] | None:
    try:
        plan = read_json(out / "runs" / PLAN_FILE)
        return plan if plan["recipe"] == recipe and plan["cases"] else None
    except (OSError, ValueError, KeyError, TypeError, ScanError):
        return None


def _read_published(out: Path, published: Mapping[str, str]) -> list[_PublishedCase]:
    """Return the measured cost of published cases, of many only of evenly spaced ones."""
    step = max(1, math.ceil(len(published) / _MAX_SAMPLES))
    folders = itertools.islice(published.values(), 0, None, step)
    cases = (_read_case(out / CASES / folder) for folder in folders)
    return [case for case in cases if case is not None]


def _read_case(folder: Path) -> _PublishedCase | None:
    try:
        timing = json.loads((folder / TIMING).read_text(encoding="utf-8"))
        shape = json.loads((folder / CASE).read_text(encoding="utf-8"))["grid"]["shape"]
        steps: Mapping[str, Any] = timing["steps"]
        seconds = {step: float(times["wall_s"]) for step, times in steps.items()}
        network = seconds.pop("network", 0.0)
        cost = MeasuredCost(
            values=float(timing["window_values"]),
            voxels=float(math.prod(shape)),
            network=network,
            rest=sum(seconds.values()),
            written=float(folder_bytes(folder)),
        )
        return _PublishedCase(cost, int(timing["peak_memory_bytes"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # written by another version, or removed meanwhile
