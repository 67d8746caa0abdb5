"""Labels of brainchop's trained networks equal stored ones, and those that drew an image."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage

import scanloom
from scanloom.cards.card import ANY_MODALITY, Crop, ModelCard, Round
from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions, Volume
from scanloom.inference.device import bfloat16_units
from scanloom.inference.geometry import plan_grid
from scanloom.inference.predictor import TorchPredictor
from scanloom.inference.resampling.image import ModelInput, network_image
from scanloom.options import Precision
from support.brainchop import brainchop
from support.real_scans import scans

pytestmark = [pytest.mark.reference, pytest.mark.slow]

NAMES = (
    "mindgrab",
    "model18cls",
    "model20chan3cls",
    "model21_104class",
    "model30chan18cls",
    "model30chan50cls",
    "model5_gw_ae",
)


def t1() -> Volume:
    """Return brainchop's sample: a T1-weighted head of 1 mm."""
    return scanloom.load_volume(brainchop("reference/t1_crop.nii.gz"))


def stored(name: str) -> NDArray[Any]:
    """Return a stored label map of the sample."""
    image = nib.load(brainchop(f"reference/t1_crop_{name}.nii.gz"))
    return np.asanyarray(image.dataobj)


def predict(card: ModelCard, volume: Volume, precision: Precision = "float32") -> NDArray[Any]:
    """Return the label map of a scan."""
    options = ComputeOptions(precision=precision)
    segmentation = TorchPredictor(card, options, device="cpu").predict(volume)
    return segmentation.layers[0].labels


def dice(first: NDArray[Any], second: NDArray[Any], number: int) -> float:
    """Return the Dice coefficient of a structure."""
    a, b = first == number, second == number
    return float(2 * (a & b).sum() / max(1, a.sum() + b.sum()))


@pytest.mark.parametrize("name", NAMES)
def test_cards_of_all_networks(name: str) -> None:
    card = load_card(brainchop(name))

    assert card.network.name == "MeshNet"
    assert card.license == "MIT"
    assert card.channels[0].modality == (ANY_MODALITY if name == "mindgrab" else "MR")
    assert all(structure.type.meaning != "Tissue" for structure in card.structures)
    sides = [s.laterality.meaning for s in card.structures if s.laterality is not None]
    if name == "model21_104class":
        assert sides.count("Left") == sides.count("Right") == 47


@pytest.mark.parametrize("name", ["model18cls", "model30chan18cls", "model21_104class"])
def test_labels_equal_stored_ones(name: str) -> None:
    labels, expected = predict(load_card(brainchop(name)), t1()), stored(name)

    assert np.mean(labels == expected) >= 0.9995
    assert min(dice(labels, expected, n) for n in range(1, int(expected.max()) + 1)) >= 0.999


@pytest.mark.skipif(bfloat16_units() is None, reason="the CPU has no AVX512-BF16")
def test_brain_mask_equals_the_stored_one() -> None:
    """It was computed in bfloat16, on the box that brainchop's application sees."""
    card = load_card(brainchop("mindgrab"))
    cropped = replace(card.grid, crop=Crop("positive", "network", margin=20, above=0.5))

    labels = predict(replace(card, grid=cropped), t1(), "half")

    expected = stored("mindgrab_bf16_cropped")
    assert np.mean(labels == expected) >= 0.9995
    assert dice(labels, expected, 1) >= 0.999


@pytest.mark.parametrize("turn", ["RAS", "PIR"])
def test_labels_do_not_depend_on_the_order_of_axes(turn: str) -> None:
    """A head whose axes are flipped and permuted gets the same labels at the same places."""
    card, volume = load_card(brainchop("model5_gw_ae")), t1()
    image = nib.Nifti1Image(volume.array, volume.grid.affine)
    codes = nib.orientations.axcodes2ornt(tuple(turn))
    own = nib.orientations.io_orientation(volume.grid.affine)
    reorientation = nib.orientations.ornt_transform(own, codes)
    turned = image.as_reoriented(reorientation)
    array = np.asfortranarray(np.asanyarray(turned.dataobj))
    grid = replace(volume.grid, shape=array.shape, affine=turned.affine)

    labels = predict(card, replace(volume, array=array, grid=grid))

    back = nib.orientations.ornt_transform(codes, own)
    labels = nib.orientations.apply_orientation(labels, back)
    assert np.mean(labels == predict(card, volume)) >= 0.999


@pytest.mark.parametrize("order", ["RAS", "LPS", "LIA", "RPI"])
def test_network_image_equals_niimaths(order: str, tmp_path: Path) -> None:
    """Its place depends, as niimath's, on the direction in which an axis is stored."""
    niimath = pytest.importorskip("niimath", reason="niimath is not installed")
    scan, conformed = scans(f"orientation/nifti_space/{order}.nii.gz"), tmp_path / "conformed.nii"
    options = {"env": {**os.environ, "FSLOUTPUTTYPE": "NIFTI"}, "stdout": subprocess.DEVNULL}
    assert niimath.main([scan, "-conform", conformed, "-odt", "char"], **options) == 0
    expected, volume = nib.load(conformed), scanloom.load_volume(scan)
    card = load_card(brainchop("model5_gw_ae"))
    card = replace(card, grid=replace(card.grid, crop=None), after=(Round(),))
    plan = plan_grid(volume.grid, card.grid)

    image = network_image(ModelInput((volume,)), plan, card, (torch.device("cpu"), 1 << 28)).image

    np.testing.assert_allclose(plan.network.affine, expected.affine, atol=1e-4)
    difference = np.abs(image[0].numpy() - np.asanyarray(expected.dataobj).astype(np.float32))
    assert difference.max() <= 1  # niimath interpolates in float32, which decides at a tie
    assert np.mean(difference > 0) < 1e-4


def test_structures_of_a_drawn_image_are_found() -> None:
    """An image drawn from a label map, with means of T1, noise and bias: mean Dice >= 0.75."""
    card = load_card(brainchop("model30chan18cls"))
    expected = stored("model18cls")
    volume = t1()

    labels = predict(card, replace(volume, array=drawn_image(expected, volume.array)))

    dices = [dice(labels, expected, n) for n in range(1, 18)]
    print(f"mean Dice {np.mean(dices):.3f}, smallest {min(dices):.3f}")
    assert np.mean(dices) >= 0.75


T1_MEANS = (0, 110, 72, 25, 25, 105, 70, 92, 78, 86, 100, 25, 25, 102, 72, 70, 78, 96)
"""Means of the 18 classes in T1-weighted images, white matter as 110 (FreeSurfer)."""


def drawn_image(labels: NDArray[Any], head: NDArray[Any]) -> NDArray[np.int16]:
    """Return an image of the classes' means inside a head of other tissue."""
    random = np.random.default_rng(0)
    around = ndimage.gaussian_filter((head > 40).astype(np.float32), 1.0) * 45
    image = np.where(labels > 0, np.array(T1_MEANS, np.float32)[labels], around)
    near = ndimage.binary_dilation(labels > 0, iterations=3) & (labels == 0)
    image[near] = 20.0  # cerebrospinal fluid
    coarse = random.normal(0.0, 0.15, (4, 4, 4))
    bias = np.exp(ndimage.zoom(coarse, [n / 4 for n in labels.shape], order=1))
    blurred = ndimage.gaussian_filter(image, 0.6) * bias
    return np.asfortranarray((blurred + random.normal(0, 4, labels.shape)).clip(0).astype(np.int16))
