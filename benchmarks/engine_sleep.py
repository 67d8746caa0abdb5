"""A sleep in place of a network, and scans for it, which leave the engine's own cost."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

import nibabel as nib
import numpy as np

from scanloom.cards.card import Channel, ModelCard, NetworkGrid, NetworkSpec, Weights, Window
from scanloom.core import (
    Case,
    Code,
    Layer,
    Outputs,
    ReadOptions,
    Segmentation,
    Series,
    StepTimer,
    Structure,
    Volume,
)
from scanloom.inference.engines.selection import torch_choice

TISSUE = Code("85756007", "SCT", "Tissue")
BRIGHT = Structure("bright", 1, "Bright", TISSUE, TISSUE, (200, 100, 50))
UNET = {
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 2,
    "channels": [4, 8],
    "strides": [2],
}
SHAPE = (8, 8, 4)


class Sleeper:
    """Sleeps, then calls everything above 500 bright."""

    device_name = "cpu"
    precision_name, changes = "float32", ""
    engine = torch_choice("a sleep stands for the network")

    def __init__(self, weights: Path, seconds: float) -> None:
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()
        self.card = ModelCard(
            name="sleeper",
            version="1",
            title="Sleeper",
            description="",
            intended_use="",
            license="CC0-1.0",
            attribution="",
            channels=(Channel("ct", "CT"),),
            network=NetworkSpec("UNet", UNET),
            weights=Weights(weights, digest),
            grid=NetworkGrid("RAS", (2.0, 2.0, 2.0)),
            window=Window((16, 16, 16), 0.5),
            structures=(BRIGHT,),
        )
        self._seconds = seconds

    def predict(
        self,
        volume: Volume,
        clock: StepTimer | None = None,
        *,
        further_channels: Sequence[Volume] = (),
        previous: Segmentation | None = None,
        shared: object = None,
        uncertainty: bool = False,
    ) -> Segmentation:
        """Label after a sleep."""
        clock = clock or StepTimer()
        with clock.device_turn(), clock.step("network"):
            time.sleep(self._seconds)
        labels = np.asfortranarray((volume.array > 500).astype(np.uint8))
        return Segmentation("sleeper", (Layer(labels, (BRIGHT,)),), volume.grid, "1")


def sleepers(weights: Path, seconds: float) -> Sequence[Sleeper]:
    """Return the models of a run."""
    return (Sleeper(weights, seconds),)


def draw(folder: Path, count: int) -> list[Case]:
    """Write so many tiny CTs as NIfTI and return their cases."""
    folder.mkdir(parents=True, exist_ok=True)
    array = np.linspace(-1000, 300, math.prod(SHAPE)).astype(np.int16).reshape(SHAPE)
    array[2:6, 2:6, 1:3] = 1000
    image = nib.Nifti1Image(array, np.diag((2.0, 2.0, 2.0, 1.0))).to_bytes()
    cases = []
    for n in range(count):
        path = folder / f"{n:06d}.nii"
        path.write_bytes(image)
        series = Series("nifti", (path,))
        name = f"{n:06d}".ljust(26, "a")
        cases.append(Case(name, series, Outputs(), "source", "recipe", ReadOptions(modality="CT")))
    return cases
