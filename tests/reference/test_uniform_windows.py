"""Real scans have the same labels if windows of air share their scores; weights are random."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scanloom import load_volume
from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions, StepTimer
from scanloom.inference.predictor import TorchPredictor
from support.nnunet_folders import plans, write_model
from support.real_scans import scans

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("scan", ["ct/crlm1004_abdomen_dicom", "ct/totalseg_example_dicom/dicom"])
def test_labels_are_those_of_all_windows(scan: str, tmp_path: Path) -> None:
    """By nnU-Net's windows and normalisation, with windows of 80 mm."""
    volume = load_volume(scans(scan))
    card = load_card(write_model(tmp_path, plans(spacing=[5.0, 5.0, 5.0])))
    labels, clock = [], StepTimer()
    for skip in (True, False):
        compute = ComputeOptions(precision="float32", skip_air=skip, engine="torch")
        result = TorchPredictor(card, compute, device="cpu").predict(volume, clock)
        labels.append(result.layers[0].labels)

    print(f"{scan}: {clock.notes['skip air'][0]}")
    assert len(np.unique(labels[0])) > 1
    np.testing.assert_array_equal(labels[0], labels[1])
