"""On CUDA, models of nnU-Net and MeshNets label scans as on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions, Grid, Volume
from scanloom.inference.predictor import TorchPredictor
from support import model_cards
from support.meshnets import random_weights, write_safetensors
from support.nnunet_folders import plans, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]
ROOT = Path(__file__).parents[2]
FLOAT32 = ComputeOptions(precision="float32")
MODELS: dict[str, dict[str, Any]] = {
    "half sums": {},
    "folds": {"folds": ("0", "1")},
    "flips": {"inference_allowed_mirroring_axes": (0, 1, 2)},
    "thick slices": {"plans": plans(spacing=[5.0, 1.0, 1.0])},
}


def scan(modality: str) -> Volume:
    shape = (61, 57, 33)
    grid = model_cards.grid(shape, (1.3, 1.2, 2.6), "LPS")
    array = np.asfortranarray(model_cards.smooth_scan(shape).astype("float32"))
    return Volume(array, grid, "unknown", modality)


def agreement(folder: Path, volume: Volume) -> float:
    """Return the share of voxels that CPU and CUDA label equally."""
    card = load_card(folder)
    devices = ("cpu", "cuda")
    segmentations = [
        TorchPredictor(card, FLOAT32, device=device).predict(volume) for device in devices
    ]
    cpu, cuda = (segmentation.layers[0].labels for segmentation in segmentations)
    assert len(np.unique(cpu)) > 1
    return float((cpu == cuda).mean())


@pytest.mark.parametrize("name", MODELS)
def test_models_of_nnunet_label_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    equal = agreement(write_model(tmp_path, **MODELS[name]), scan("CT"))

    print(f"nnU-Net, {name}: {100 * equal:.4f} % equal")
    assert equal >= 0.995  # the CPU rounds sums of half precision in another order


def test_meshnets_label_as_on_the_cpu(tmp_path: Path) -> None:
    equal = agreement(write_safetensors(tmp_path / "mesh", random_weights(seed=2)), scan("MR"))

    print(f"MeshNet: {100 * equal:.4f} % equal")
    assert equal >= 0.999


def test_uncertainty_is_that_of_the_cpu(tmp_path: Path) -> None:
    card = load_card(write_model(tmp_path, folds=("0", "1")))
    segmentations = [
        TorchPredictor(card, FLOAT32, device=device).predict(scan("CT"), uncertainty=True)
        for device in ("cpu", "cuda")
    ]

    cpu, cuda = (segmentation.uncertainty for segmentation in segmentations)
    assert cpu is not None
    assert cuda is not None
    for ours, theirs in ((cpu.entropy, cuda.entropy), (cpu.disagreement, cuda.disagreement)):
        assert ours is not None
        assert theirs is not None
        assert np.abs(ours.astype(int) - theirs.astype(int)).mean() < 1.0  # of 255


def test_a_head_and_its_flips_label_as_on_the_cpu() -> None:
    """With left and right exchanged in the scores of the mirrored head."""
    head = nib.load(ROOT / "data" / "head_mr.nii.gz").slicer[20:116, 30:126, 30:78]
    volume = Volume(
        np.asfortranarray(head.get_fdata(dtype=np.float32)),
        Grid(head.shape, head.affine),
        "unknown",
        "MR",
    )
    equal = agreement(ROOT / "models" / "brain_anatomy", volume)

    print(f"brain_anatomy: {100 * equal:.4f} % equal")
    assert equal >= 0.999
