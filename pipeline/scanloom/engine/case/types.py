"""Values that the steps of a case pass on: the loaded and the segmented case."""

from __future__ import annotations

from dataclasses import dataclass

from scanloom.core import Case, Flag, Segmentation, StepTimer, Volume
from scanloom.core.engines import EngineChoice
from scanloom.engine.machine.devices import EnergyMeter
from scanloom.inference.graph import Predictor
from scanloom.io.scan import Scan


@dataclass(frozen=True, eq=False)
class LoadedCase:
    """A case with its scan in memory, and the volumes of further input channels."""

    case: Case
    scan: Scan
    clock: StepTimer
    meter: EnergyMeter
    further_channels: tuple[Volume, ...] = ()


@dataclass(frozen=True, eq=False)
class SegmentedCase:
    """A loaded case with its results, and device, precision and engine of each model."""

    loaded: LoadedCase
    predictors: tuple[Predictor, ...]
    segmentations: tuple[Segmentation, ...]
    flags: tuple[Flag, ...]
    placements: tuple[tuple[str, str, EngineChoice], ...]
