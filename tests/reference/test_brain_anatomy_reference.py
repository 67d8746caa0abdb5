"""brain_anatomy in a head drawn of a label map that its training never saw."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

import scanloom
from scanloom.training.cases import find_cases
from scanloom.training.recipe import read_recipe
from support.real_scans import ROOT

pytestmark = pytest.mark.reference

MODEL = ROOT / "models" / "brain_anatomy"


def test_a_drawn_head_has_the_accuracy_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = os.environ.get("SCANLOOM_TRAIN")
    folder = (Path(named) if named else ROOT.parent / "shared" / "data") / "train"
    if not (folder / "synthseg_label_maps").is_dir():
        pytest.skip("synthseg_label_maps is not here (SCANLOOM_TRAIN)")
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "data")])
    from draw_head import draw, on_grid_of

    recipe = read_recipe(MODEL / "training" / "recipe.yaml")
    label_map = nib.as_closest_canonical(
        nib.load(find_cases(recipe.data, folder)["testing"][0].label)
    )
    numbers = np.asarray(label_map.dataobj).astype(np.int64)
    scan = draw(numbers, label_map.affine)
    nib.save(scan, tmp_path / "head.nii.gz")
    volume = scanloom.load_volume(tmp_path / "head.nii.gz", modality="MR")
    found = scanloom.load_model(MODEL, device="cpu").predict(volume)

    truth = on_grid_of(scan, numbers, label_map.affine)
    dice = {}
    for structure in recipe.structures:
        true, ours = np.isin(truth, structure.values), found[structure.label]
        dice[structure.label] = 2 * (true & ours).sum() / (true.sum() + ours.sum())
    assert np.mean([*dice.values()]) > 0.77
    shown = {s.label: dice[s.label] for s in recipe.structures if not s.on_request}
    assert min(shown.values()) > 0.55, shown
