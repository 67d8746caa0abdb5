"""The data of a plan: planned cases, totals, the execution site, and the key of a cost model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from scanloom.cards.card import ModelCard
from scanloom.engine.case.memory_estimate import Placement
from scanloom.engine.case.recipe import card_digest
from scanloom.engine.workflow.schema import Workflow

PLAN_FILE = "plan.json"
"""File name of the newest plan in `OUT/runs/`, and of a run's comparison with it in its folder."""


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
    seconds, written : float or None
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
    seconds: float | None = None
    written: float | None = None
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Totals:
    """Expected cost of a whole run.

    Parameters
    ----------
    seconds : float or None
        From the start of the workers to the end of the last case; None without measurements.
    written : float or None
        Bytes of all case folders; None without measurements.
    host, device : int
        Peak memory in bytes of one worker process, and of its device.
    archive_seconds : float or None
        As `seconds`, of a run over all cases of the archive: also over those with a result, those
        that failed before, and those of other shards. None if no case is planned.
    """

    seconds: float | None
    written: float | None
    host: int
    device: int
    archive_seconds: float | None = None


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


def cost_model_key(
    cards: Sequence[ModelCard], device: str, precision: str, workflow: Workflow
) -> str:
    """Return the key under which the cost model of a workflow on a kind of device is cached."""
    execution = workflow.execution
    document = {
        "models": [card_digest(card) for card in cards],
        "device": device.partition(":")[0],
        "precision": precision,
        "outputs": workflow.outputs.model_dump(mode="json"),
        "threads": execution.threads,
        "compute": asdict(workflow.compute_options),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]
