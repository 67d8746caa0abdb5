"""hippocampus_mr on cases that its training never saw, and inside a whole head by the workflow."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from nibabel.orientations import apply_orientation, axcodes2ornt, inv_ornt_aff, ornt_transform

from scanloom import load_volume
from scanloom.cards.graph import graph_of
from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions, Grid, StepTimer
from scanloom.engine.workflow.schema import read_workflow
from scanloom.inference.graph import GraphRun
from scanloom.inference.predictor import TorchPredictor
from scanloom.training.cases import find_cases
from scanloom.training.recipe import read_recipe
from support.brainchop import brainchop
from support.case_folders import RIGHT_HANDED
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


def test_a_head_in_24_axis_orders_has_the_same_hippocampi(predictor: TorchPredictor) -> None:
    """1.5 to 5.5 ml a side, where another network sees them, and alike in right-handed orders."""
    relations = read_workflow(ROOT / "workflows" / "hippocampus-volumetry.yaml").relations
    finder = TorchPredictor(load_card(ROOT / "models" / "brain_anatomy"), device="cpu")
    head = load_volume(brainchop("reference/t1_crop.nii.gz"), modality="MR")
    image = nib.load(brainchop("reference/t1_crop_model21_104class.nii.gz"))
    known = np.asarray(image.dataobj).astype(np.uint8)
    number_of = {s.label: s.number for s in load_card(brainchop("model21_104class")).structures}
    nodes = [
        node
        for node in graph_of([finder.card.name, predictor.card.name], relations)
        if node.name in ("left", "right", finder.card.name)
    ]
    stored = axcodes2ornt(head.grid.axis_codes)
    counts = []
    for order in RIGHT_HANDED:
        change = ornt_transform(stored, axcodes2ornt(order))
        array, labels = (
            np.asfortranarray(apply_orientation(each, change)) for each in (head.array, known)
        )
        affine = head.grid.affine @ inv_ornt_aff(change, head.grid.shape)
        volume = replace(head, array=array, grid=Grid(array.shape, affine))
        results = GraphRun(nodes, [finder, predictor], (volume,), StepTimer()).run()
        for side, sign in (("left", -1), ("right", 1)):
            assert results[side].flags == predictor.card.flags
            ours = results[side].layers[0].labels
            theirs = labels == number_of[f"{side}_hippocampus"]
            assert 2 * ((ours > 0) & theirs).sum() > 0.7 * ((ours > 0).sum() + theirs.sum())
            assert sign * volume.grid.world(np.argwhere(ours > 0).mean(axis=0))[0] > 10
            assert 1500 < np.count_nonzero(ours) < 5500
            counts.append([int((ours == n).sum()) for n in (1, 2)])
    # a box moves by a voxel of the finder's grid, which starts at another corner
    sides = np.reshape(counts, (len(RIGHT_HANDED), 4))
    np.testing.assert_allclose(
        sides, np.median(sides, axis=0)[None].repeat(len(sides), 0), rtol=0.1
    )
