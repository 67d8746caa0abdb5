"""The sample study with the model that ships: CUDA labels it as the CPU does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import scanloom
from scanloom.cards.card import ModelCard
from scanloom.convert.store import find_model
from scanloom.core import ComputeOptions, ScanError, Volume
from scanloom.inference.predictor import TorchPredictor
from support.real_scans import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]

SAMPLE = ROOT / "data" / "torso_ct.nii.gz"


@pytest.fixture(scope="module")
def volume() -> Volume:
    if not SAMPLE.is_file():
        pytest.skip("the sample study is not here")
    return scanloom.load_volume(SAMPLE, modality="CT")


@pytest.fixture(scope="module")
def card() -> ModelCard:
    try:
        return find_model("ct_tissue")
    except ScanError:
        pytest.skip("the model ct_tissue is not here")


def labels(card: ModelCard, volume: Volume, device: str, precision: str) -> NDArray[np.integer]:
    predictor = TorchPredictor(card, device=device, compute=ComputeOptions(precision=precision))
    return predictor.predict(volume).layers[0].labels


@pytest.fixture(scope="module")
def expected(card: ModelCard, volume: Volume) -> NDArray[np.integer]:
    return labels(card, volume, "cpu", "float32")


@pytest.mark.parametrize("precision", ["float32", "half"])
def test_cuda_labels_the_study_as_the_cpu_does(
    card: ModelCard, volume: Volume, expected: NDArray[np.integer], precision: str
) -> None:
    """At least 99.9 % of voxels; Dice at least 0.998 for every structure above 1 ml."""
    actual = labels(card, volume, "cuda", precision)

    equal = float(np.mean(actual == expected))
    print(f"{precision}: {equal:.4%} of voxels equal")
    assert equal >= 0.999
    millilitre = 1000 / np.prod(volume.grid.spacing)
    for structure in card.structures:
        ours, theirs = actual == structure.number, expected == structure.number
        if theirs.sum() >= millilitre:
            dice = 2 * (ours & theirs).sum() / (ours.sum() + theirs.sum())
            print(f"  {structure.label}: Dice {dice:.5f}")
            assert dice >= 0.998


@pytest.mark.parametrize("precision", ["float32", "half"])
def test_the_study_twice_gives_equal_bytes(card: ModelCard, volume: Volume, precision: str) -> None:
    first, second = (labels(card, volume, "cuda", precision) for _ in range(2))

    assert first.tobytes() == second.tobytes()
