"""The change of labels by each default that departs from the models' home runners.

`pytest -rA` shows the differences. The reference is float32, with all windows and restored by plain
torch, as compared with MONAI's own runner in `test_parity_monai.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scanloom.cards.card import ModelCard
from scanloom.convert.store import find_model
from scanloom.core import ComputeOptions, Layer, StepTimer, Volume
from scanloom.inference.device import bfloat16_units
from scanloom.inference.predictor import TorchPredictor
from scanloom.io.read import load_volume

HOME = ComputeOptions("float32", skip_air=False, compiled_restore=False)
"""What the command line calls --precision float32 --no-skip-air --no-compiled-restore."""
SAMPLE = Path(__file__).parents[2] / "data" / "torso_ct"
AIR = -900.0  # HU, tried for a card that names none


@pytest.fixture(scope="module")
def volume() -> Volume:
    return load_volume(SAMPLE)


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return find_model("ct_tissue")


@pytest.fixture(scope="module")
def home(card: ModelCard, volume: Volume) -> Layer:
    return TorchPredictor(card, HOME, device="cpu").predict(volume).layers[0]


def difference(change: str, layer: Layer, home: Layer) -> tuple[float, float]:
    """Print the voxels that differ and the Dice of each structure; return share and least Dice."""
    unlike = layer.labels != home.labels
    dice = {
        s.label: 2.0
        * np.count_nonzero((layer.labels == s.number) & (home.labels == s.number))
        / (np.count_nonzero(layer.labels == s.number) + np.count_nonzero(home.labels == s.number))
        for s in home.structures
    }
    reported = ", ".join(f"{label} {value:.5f}" for label, value in dice.items())
    print(f"{change}: {np.count_nonzero(unlike)} of {unlike.size} voxels differ; Dice {reported}")
    return float(unlike.mean()), min(dice.values())


@pytest.mark.thorough
def test_compiled_restore_changes_nothing_but_ties(
    card: ModelCard, volume: Volume, home: Layer
) -> None:
    """--no-compiled-restore turns it off."""
    segmentation = TorchPredictor(card, replace(HOME, compiled_restore=True), device="cpu").predict(
        volume
    )

    share, least = difference("compiled restore", segmentation.layers[0], home)

    assert share <= 1e-6
    assert least >= 0.999


@pytest.mark.thorough
def test_skipping_air_changes_next_to_nothing(card: ModelCard, volume: Volume, home: Layer) -> None:
    """--no-skip-air turns it off. The card that ships does not ask for it: here it does."""
    reported, clock = replace(card, air_below=AIR), StepTimer()
    segmentation = TorchPredictor(reported, replace(HOME, skip_air=True), device="cpu").predict(
        volume, clock
    )

    passed = clock.notes.get("skip air", ["no window was air"])[0]
    share, least = difference(f"skip air ({passed})", segmentation.layers[0], home)

    assert share <= 5e-4
    assert least >= 0.999


@pytest.mark.skipif(bfloat16_units() is None, reason="the CPU does not multiply bfloat16")
def test_bfloat16_changes_little(card: ModelCard, volume: Volume, home: Layer) -> None:
    """--precision float32 turns it off. By itself it is taken only where the card lists it."""
    segmentation = TorchPredictor(card, replace(HOME, precision="half"), device="cpu").predict(
        volume
    )

    share, least = difference("bfloat16", segmentation.layers[0], home)

    assert share <= 1e-3
    assert least >= (0.998 if "bfloat16" in card.precisions else 0.99)
