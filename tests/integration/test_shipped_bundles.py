"""The models that ship run in MONAI's own runner, with the same labels, and know a head's axes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

import scanloom
from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions, Flag
from scanloom.inference.predictor import TorchPredictor
from support.model_cards import smooth_scan
from support.real_scans import ROOT

needs_runner = pytest.mark.skipif(
    not all(map(find_spec, ("ignite", "fire"))), reason="MONAI's runner needs ignite and fire"
)

MODELS = ROOT / "models"
SUFFIXES = {"ct_tissue": "tissue", "brain_anatomy": "seg", "hippocampus_mr": "seg"}
"""Suffix of the file that a bundle writes, by its name; that of the slowest is in the middle,
where `sampled` leaves it to `make test-thorough`."""


def image_for(name: str, folder: Path) -> Path:
    """Return a scan that has all structures by the model's labels, as a file."""
    path = folder / "part.nii.gz"
    if name == "ct_tissue":  # the sample torso around the diaphragm
        image = nib.load(ROOT / "data" / "torso_ct.nii.gz").slicer[:, :, 18:40]
    elif name == "brain_anatomy":
        image = nib.load(ROOT / "data" / "head_mr.nii.gz")
    else:  # larger than a window; blobs, some of which are labelled
        # LPS, and a spacing that is resampled
        affine = np.diag([-0.9, -1.1, 1.0, 1.0])
        image = nib.Nifti1Image(smooth_scan((48, 64, 40)).astype(np.float32), affine)
    nib.save(image, path)
    return path


@pytest.mark.sampled(2)
@needs_runner
@pytest.mark.parametrize("name", SUFFIXES)
def test_monai_runs_it_and_labels_are_ours(name: str, tmp_path: Path) -> None:
    bundle, image = MODELS / name, image_for(name, tmp_path)
    command = [
        *(sys.executable, "-W", "ignore", "-m", "monai.bundle", "run"),
        *("--config_file", str(bundle / "configs" / "inference.json")),
        *("--meta_file", str(bundle / "configs" / "metadata.json")),
        *("--bundle_root", str(bundle), "--output_dir", str(tmp_path / "out")),
        *("--datalist", f"['{image}']"),
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = np.asarray(nib.load(tmp_path / "out" / f"part_{SUFFIXES[name]}.nii.gz").dataobj)

    card = load_card(bundle)
    predictor = TorchPredictor(card, device="cpu", compute=ComputeOptions(precision="float32"))
    volume = scanloom.load_volume(image, modality=card.channels[0].modality)
    ours = predictor.predict(volume).layers[0].labels

    numbers = [structure.number for structure in card.structures]
    assert set(np.unique(ours)) == {0, *numbers}  # also what results have on request only
    assert (ours == theirs).mean() >= 0.9995
    for number in numbers:
        both = ((ours == number) & (theirs == number)).sum()
        assert 2 * both / ((ours == number).sum() + (theirs == number).sum()) >= 0.999


@pytest.mark.thorough
def test_a_header_with_wrong_axes_is_flagged(tmp_path: Path) -> None:
    """Volumes may all be as usual: the places of the structures tell it."""
    head = nib.load(ROOT / "data" / "head_mr.nii.gz").slicer[::2, ::2, ::2]
    compute = ComputeOptions(overlap=0.0, mirror="no")  # an eighth of the windows, nearly the same
    model = TorchPredictor(load_card(MODELS / "brain_anatomy"), device="cpu", compute=compute)
    for front, flagged in ((1, False), (-1, True)):
        path, affine = tmp_path / "head.nii.gz", head.affine @ np.diag([1, front, 1, 1])
        nib.save(nib.Nifti1Image(np.asarray(head.dataobj), affine), path)
        found = model.predict(scanloom.load_volume(path, modality="MR"))
        assert (Flag.DIRECTION_IMPLAUSIBLE in found.flags) is flagged


def state_of(name: str) -> dict[str, Any]:
    weights = MODELS / name / "models" / "model.pt"
    assert weights.stat().st_size < 8_000_000
    state: dict[str, Any] = torch.load(weights, map_location="cpu", weights_only=True)
    assert all(value.isfinite().all() for value in state.values())
    return state


def test_weights_are_numbers_only_and_small() -> None:
    assert {value.dtype for value in state_of("ct_tissue").values()} == {torch.float32}
    for name in ("brain_anatomy", "hippocampus_mr"):
        assert {value.dtype for value in state_of(name).values()} == {torch.float16}


def test_all_weights_together_are_small() -> None:
    files = [*MODELS.glob("*/models/*"), *MODELS.glob("*/weights/*")]
    assert len(files) >= 5
    assert sum(file.stat().st_size for file in files) <= 20_000_000
