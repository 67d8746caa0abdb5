"""The plan of a run: expected cost of its cases, and of all of them, on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scanloom.io.index.sample import Estimate

if TYPE_CHECKING:
    from scanloom.inference.memory import Placement

Range = tuple[float, float]
"""Lowest and highest expected amount."""


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
class RunPlan:
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
    notes: tuple[str, ...] = ()

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

    @property
    def concurrent_workers(self) -> int:
        """Workers that speed a run up: a single one fills all cores of a CPU."""
        return 1 if self.placement.device == "cpu" else self.workers


@dataclass(frozen=True)
class SamplePlan:
    """Expected course of a run over an archive, estimated from a random share of its folders.

    Parameters
    ----------
    plan : RunPlan
        Of the sample alone; its memory is that of the largest scans in it.
    sampled, found, listed, opened : int
        Folders of the sample and of the archive as they were divided, folders that were listed to
        find them, and files of the sample that were opened this time.
    files : mapping
        Files found and of each outcome.
    cases : mapping
        Cases "todo", with a result from "before", and "refused".
    left_out, not_selected, refused : mapping
        Series left out by reason code, those of NOT_SELECTED by the condition that they fail, and
        refused cases by reason code.
    seconds, written : range or None
        As of `Totals`, with the uncertainty of the sample; None if they are unknown.
    unknown : str
        Why the time is unknown; empty if it is known.
    unseen : float
        What lies in fewer folders than this may have none in the sample (95 %).
    notes : tuple of str
    """

    plan: RunPlan
    sampled: int
    found: int
    listed: int
    opened: int
    files: Mapping[str, Estimate]
    cases: Mapping[str, Estimate]
    left_out: Mapping[str, Estimate]
    not_selected: Mapping[str, Estimate]
    refused: Mapping[str, Estimate]
    seconds: Range | None
    written: Range | None
    unknown: str
    unseen: float
    notes: tuple[str, ...] = ()
