"""The faults of earlier versions of ct_tissue on real CT stay repaired."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ct_tissue_training.rules import BONE
from evaluate import KIDNEYS, STACKS, ml_of_bone
from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions
from scanloom.inference.predictor import TorchPredictor
from scanloom.io.read import load_volume
from support.real_scans import ROOT, scans

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def predictor() -> TorchPredictor:
    card = load_card(ROOT / "models" / "ct_tissue")
    return TorchPredictor(card, device="cpu", compute=ComputeOptions(precision="float32"))


def labelled(path: str, predictor: TorchPredictor) -> tuple[Any, Any]:
    """Return the volume and the labels of a scan."""
    volume = load_volume(scans(path.removeprefix("scans/")), modality="CT")
    return volume, predictor.predict(volume).layers[0].labels


def test_kidneys_with_contrast_agent_are_no_bone(predictor: TorchPredictor) -> None:
    """21.8 ml in version 0.4.0; the vertebrae of these slices stay bone."""
    path, boxes = KIDNEYS
    volume, labels = labelled(path, predictor)
    assert sum(ml_of_bone(volume, labels, box) for box in boxes) < 3
    assert (labels == BONE).sum() * volume.grid.voxel_volume / 1000 > 150


@pytest.mark.parametrize("path", STACKS)
def test_the_first_and_the_last_slice_keep_their_bone(path: str, predictor: TorchPredictor) -> None:
    """In version 0.3.0, 64 to 100 % of it was missing in short scans."""
    volume, labels = labelled(path, predictor)
    axis = int(np.argmax(np.asarray(volume.grid.axes) == 2))
    bone = np.moveaxis(labels == BONE, axis, 0).sum((1, 2))
    assert bone[0] > 0.65 * bone[1]
    assert bone[-1] > 0.65 * bone[-2]
