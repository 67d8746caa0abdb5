"""hippocampus_mr on the cases that its training and validation never saw."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from scanloom import load_volume
from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions
from scanloom.inference.predictor import TorchPredictor
from scanloom.training.cases import find_cases
from scanloom.training.recipe import read_recipe
from support.real_scans import ROOT, scans

pytestmark = pytest.mark.reference

MODEL = ROOT / "models" / "hippocampus_mr"


@pytest.fixture(scope="module")
def predictor() -> TorchPredictor:
    exact = ComputeOptions(precision="float32")
    return TorchPredictor(load_card(MODEL), device="cpu", compute=exact)


def test_cases_held_out_have_the_accuracy_of_the_readme(predictor: TorchPredictor) -> None:
    named = os.environ.get("SCANLOOM_TRAIN")
    folder = (Path(named) if named else ROOT.parent / "shared" / "data") / "train"
    if not (folder / "msd_task04_hippocampus").is_dir():
        pytest.skip("msd_task04_hippocampus is not here (SCANLOOM_TRAIN)")
    recipe = read_recipe(MODEL / "training" / "recipe.yaml")
    pairs = find_cases(recipe.data, folder)["testing"]
    assert len(pairs) == 40
    dice = []
    for pair in pairs:
        image, label = (
            load_volume(path, modality="MR") for path in (pair.files["image"], pair.label)
        )
        ours = predictor.predict(image).layers[0].labels
        for number in (1, 2):
            both = ((ours == number) & (label.array == number)).sum()
            dice.append(2 * both / ((ours == number).sum() + (label.array == number).sum()))
    anterior, posterior = np.reshape(dice, (-1, 2)).mean(axis=0)
    assert anterior > 0.88
    assert posterior > 0.87


def test_a_crop_as_dicom_has_the_volume_of_a_hippocampus(predictor: TorchPredictor) -> None:
    """1.5 to 5.5 ml: adults, by manual protocols that differ in what they include."""
    volume = load_volume(scans("mr/hippo_crop_dicom"))
    labels = predictor.predict(volume).layers[0].labels
    ml = [(labels == number).sum() * volume.grid.voxel_volume / 1000 for number in (1, 2)]
    assert 1.5 < sum(ml) < 5.5
    assert min(ml) > 0.3 * sum(ml)
