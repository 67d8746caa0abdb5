"""A scan to label, and its labels: values that the steps of a prediction pass on."""

from __future__ import annotations

from dataclasses import dataclass

from scanloom.cards.card import ModelCard, Threshold
from scanloom.core import Flag, Layer, Segmentation, StepTimer, Volume
from scanloom.core.engines import EngineChoice
from scanloom.core.segmentation import Uncertainty
from scanloom.inference.device import PrecisionChoice
from scanloom.inference.geometry import as_nifti
from scanloom.inference.memory_fallback import MemoryPlan
from scanloom.inference.resampling.image import ModelInput
from scanloom.inference.resampling.shared import SharedScan
from scanloom.inference.restore.decisions import Labels, only_numbers


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
    engine: EngineChoice | None = None

    def segmentation(self, card: ModelCard, volume: Volume) -> Segmentation:
        """Return the label maps as layers of a card's structures, on a scan's grid."""
        if not isinstance(card.decision, Threshold):
            numbers = {s.number for s in card.structures}
            layers = [Layer(only_numbers(self.maps[0], numbers), card.structures)]
        else:
            layers = [Layer(self.maps[s.number - 1], (s,)) for s in card.structures]
        reordered = as_nifti(card.grid, volume) is not card.grid
        presented = (Flag.AXES_AS_NIFTI,) if reordered else ()
        return Segmentation(
            card.name,
            tuple(layers),
            volume.grid,
            card.version,
            uncertainty=self.uncertainty,
            device=str(self.memory_plan.device),
            precision=PrecisionChoice(self.memory_plan.dtype, "").name,
            engine=self.engine,
            flags=(*card.flags, *self.flags, *presented),
        )
