"""The model that ships runs in MONAI's own runner, with the same labels."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from support.real_scans import ROOT

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("ignite", "fire"))), reason="MONAI's runner needs ignite and fire"
)

BUNDLE = ROOT / "models" / "ct_tissue"


@pytest.fixture
def crop(tmp_path: Path) -> Path:
    """Return a part of the sample torso, around the diaphragm, as a file."""
    image = nib.load(ROOT / "data" / "torso_ct.nii.gz")
    path = tmp_path / "part.nii.gz"
    nib.save(image.slicer[:, :, 18:40], path)
    return path


def test_monai_runs_it_and_labels_are_ours(crop, tmp_path):
    import scanloom
    from scanloom.convert.conversion import load_card
    from scanloom.core import ComputeOptions
    from scanloom.inference.predictor import TorchPredictor

    command = [
        *(sys.executable, "-W", "ignore", "-m", "monai.bundle", "run"),
        *("--config_file", str(BUNDLE / "configs" / "inference.json")),
        *("--meta_file", str(BUNDLE / "configs" / "metadata.json")),
        *("--bundle_root", str(BUNDLE), "--output_dir", str(tmp_path / "out")),
        *("--datalist", f"['{crop}']"),
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = np.asarray(nib.load(tmp_path / "out" / "part_tissue.nii.gz").dataobj)

    predictor = TorchPredictor(
        load_card(BUNDLE), device="cpu", compute=ComputeOptions(precision="float32")
    )
    ours = predictor.predict(scanloom.load_volume(crop, modality="CT")).layers[0].labels

    assert set(np.unique(ours)) == {0, 1, 2, 3, 4, 5}
    assert (ours == theirs).mean() >= 0.9995
    for number in range(1, 6):
        both = ((ours == number) & (theirs == number)).sum()
        assert 2 * both / ((ours == number).sum() + (theirs == number).sum()) >= 0.999


def test_weights_are_numbers_only_and_small():
    weights = BUNDLE / "models" / "model.pt"
    state = torch.load(weights, map_location="cpu", weights_only=True)
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in state.values())
    assert weights.stat().st_size < 3_000_000
