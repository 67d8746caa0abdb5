"""Values that the steps of a case pass on: models, the loaded and the segmented case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from scanloom.cards.card import ModelCard
from scanloom.core import Case, Flag, Segmentation, StepTimer, Volume
from scanloom.core.engines import EngineChoice
from scanloom.engine.machine.devices import EnergyMeter
from scanloom.io.scan import Scan

if TYPE_CHECKING:
    from scanloom.inference.resampling.image import SharedScan


class Predictor(Protocol):
    """Protocol of a model that labels a volume on the volume's own grid."""

    @property
    def card(self) -> ModelCard:
        """Card of the model."""

    @property
    def device_name(self) -> str:
        """Device: "cpu", "cuda:0"."""

    @property
    def precision_name(self) -> str:
        """Floating-point type of the network: "float32", "float16"."""

    @property
    def engine(self) -> EngineChoice:
        """Library that runs the network, and the reason for its choice."""

    @property
    def changes(self) -> str:
        """Changes to the way a model says its network is run; else ""."""

    def predict(
        self,
        volume: Volume,
        clock: StepTimer | None = None,
        *,
        further_channels: Sequence[Volume] = (),
        shared: SharedScan | None = None,
        uncertainty: bool = False,
    ) -> Segmentation:
        """Return the structures of a scan, which models of equal network grids may share."""


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
