"""A scan to label, and its labels: values that the steps of a prediction pass on."""

from __future__ import annotations

from dataclasses import dataclass

from scanloom.core import Flag, StepTimer
from scanloom.core.uncertainty import Uncertainty
from scanloom.inference.memory_fallback import MemoryPlan
from scanloom.inference.resampling.image import ModelInput
from scanloom.inference.resampling.shared import SharedScan
from scanloom.inference.restore.decisions import Labels


@dataclass(frozen=True, eq=False)
class Task:
    """A scan to label, its timer, the resampled scan that later models share, and requests."""

    scan: ModelInput
    clock: StepTimer
    shared: SharedScan | None = None
    uncertainty: bool = False


@dataclass(frozen=True, eq=False)
class Prediction:
    """Label maps, the memory plan with which they were made, and properties of the result."""

    maps: list[Labels]
    memory_plan: MemoryPlan
    flags: tuple[Flag, ...] = ()
    uncertainty: Uncertainty | None = None
