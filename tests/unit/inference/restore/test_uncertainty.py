"""Maps of uncertainty are those that MONAI's and SciPy's own steps give."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from monai.inferers import sliding_window_inference
from monai.networks.nets.unet import UNet
from safetensors.torch import load_file, save_file
from scipy import stats
from scipy.ndimage import map_coordinates

from scanloom.cards.card import (
    Argmax,
    ModelCard,
    NetworkGrid,
    Paint,
    ScaleRange,
    Threshold,
    Weights,
)
from scanloom.core import Volume
from scanloom.inference.ensemble import Ensemble
from scanloom.inference.geometry import plan_grid
from scanloom.inference.predictor import TorchPredictor
from scanloom.inference.resampling.resample import to_network
from scanloom.inference.restore.restorers import entropy
from support import model_cards

SHAPE = (40, 36, 28)
STEP = 0.5 / 255 + 1e-4


@pytest.fixture
def card(tmp_path: Path) -> ModelCard:
    """A model of three folds on a grid of 2 mm."""
    weights = []
    for seed in range(3):
        (folder := tmp_path / str(seed)).mkdir()
        file = model_cards.small_weights(folder, seed=seed)
        state = load_file(file)
        bias = [name for name, value in state.items() if value.shape == (3,)][-1]
        for name in (bias, bias.replace("bias", "weight")):
            state[name] *= 40  # probabilities that range from 0 to 1
        file = folder / "scaled.safetensors"  # not the file that is mapped into memory
        save_file(state, file)
        weights.append(Weights(file, hashlib.sha256(file.read_bytes()).hexdigest()))
    return replace(model_cards.card(weights[0].file), folds=tuple(weights[1:]))


def scan(spacing: float = 1.6) -> Volume:
    grid = model_cards.grid(SHAPE, (spacing,) * 3)
    return Volume(model_cards.smooth_scan(SHAPE), grid, "HU", "CT")


def scores_of_folds(card: ModelCard, volume: Volume) -> np.ndarray:
    """Return the scores of each network on the network grid, from MONAI's runner."""
    [step] = card.after
    assert isinstance(step, ScaleRange)
    plan = plan_grid(volume.grid, card.grid)
    image = to_network(volume.array, plan, torch.device("cpu"), ())
    image = ((image - step.a_min) / (step.a_max - step.a_min)).clip(0.0, 1.0)
    fold_scores = []
    for weights in (card.weights, *card.folds):
        network = UNet(**model_cards.SMALL_UNET).eval()
        network.load_state_dict(load_file(weights.file))
        window = card.window
        with torch.inference_mode():
            scores = sliding_window_inference(
                image[None, None], window.size, 1, network, window.overlap
            )
        fold_scores.append(torch.as_tensor(scores)[0].numpy())
    return np.stack(fold_scores)


def on_source(values: np.ndarray, card: ModelCard, volume: Volume) -> np.ndarray:
    """Return values of each class at the scan's voxels, interpolated by SciPy."""
    network = plan_grid(volume.grid, card.grid).network
    index = np.indices(SHAPE).reshape(3, -1)
    world = volume.grid.affine @ np.vstack((index, np.ones(index.shape[1])))
    at = (np.linalg.inv(network.affine) @ world)[:3]
    return np.stack(
        [map_coordinates(each, at, order=1, mode="nearest").reshape(SHAPE) for each in values]
    )


def softmax(scores: np.ndarray) -> np.ndarray:
    return np.asarray(torch.softmax(torch.from_numpy(scores), dim=0))


@pytest.mark.parametrize("activation", ["softmax", None])
def test_entropy_and_disagreement_of_folds(card: ModelCard, activation: str | None) -> None:
    card = replace(card, activation=activation)
    volume, predictor = scan(), TorchPredictor(card, device="cpu")
    segmentation = predictor.predict(volume, uncertainty=True)
    logits = scores_of_folds(card, volume)

    def interpolated(scores: np.ndarray) -> np.ndarray:
        return on_source(softmax(scores) if activation else scores, card, volume)

    probabilities = interpolated(logits.mean(axis=0))
    probabilities = probabilities if activation else softmax(probabilities)
    expected = stats.entropy(probabilities, axis=0) / np.log(3)
    assert segmentation.uncertainty is not None
    assert segmentation.uncertainty.disagreement is not None
    np.testing.assert_allclose(segmentation.uncertainty.entropy / 255, expected, atol=STEP)
    assert expected.max() > 0.9 > 0.5 > expected.min()

    labels = segmentation.layers[0].labels
    share = np.mean([interpolated(each).argmax(axis=0) != labels for each in logits], axis=0)
    equal = np.abs(segmentation.uncertainty.disagreement / 255 - share) < STEP
    assert equal.mean() > 0.9995  # the last bit decides between classes of equal scores
    assert {0.0, 1 / 3, 2 / 3} <= set(np.unique(share))

    without = predictor.predict(volume)
    assert without.uncertainty is None
    np.testing.assert_array_equal(without.layers[0].labels, labels)


def test_labels_of_the_network_grid_have_its_uncertainty(card: ModelCard) -> None:
    card = replace(card, restore="labels", grid=NetworkGrid("RAS"))
    volume = scan(2.0)
    uncertainty = TorchPredictor(card, device="cpu").predict(volume, uncertainty=True).uncertainty
    logits = scores_of_folds(card, volume)
    mean = softmax(logits.mean(axis=0))
    assert uncertainty is not None
    assert uncertainty.disagreement is not None
    np.testing.assert_allclose(
        uncertainty.entropy / 255, stats.entropy(mean) / np.log(3), atol=STEP
    )
    share = np.mean([each.argmax(axis=0) != mean.argmax(axis=0) for each in logits], axis=0)
    assert (np.abs(uncertainty.disagreement / 255 - share) < STEP).mean() > 0.9995


def test_the_models_of_an_ensemble_are_compared(card: ModelCard) -> None:
    volume = scan(2.0)
    cards = [
        replace(card, weights=weights, folds=(), name=f"model-{n}")
        for n, weights in enumerate((card.weights, *card.folds))
    ]
    members = [TorchPredictor(each, device="cpu") for each in cards]
    segmentation = Ensemble("mean", members).predict(volume, uncertainty=True)
    alone = [member.predict(volume, uncertainty=True) for member in members]
    share = np.mean([s.layers[0].labels != segmentation.layers[0].labels for s in alone], axis=0)
    assert segmentation.uncertainty is not None
    assert segmentation.uncertainty.disagreement is not None
    np.testing.assert_allclose(segmentation.uncertainty.disagreement / 255, share, atol=STEP)
    assert share.max() > 0
    assert all(s.uncertainty is not None and s.uncertainty.disagreement is None for s in alone)


@pytest.mark.parametrize("decision", [Threshold(0.5), Paint(((0, 1), (1, 2)))])
def test_overlapping_structures_have_the_largest_binary_entropy(
    card: ModelCard, decision: Threshold | Paint
) -> None:
    card = replace(card, decision=decision, activation="sigmoid")
    p = torch.rand(2, 5, 6, generator=torch.manual_seed(0))
    expected = stats.entropy(np.stack((p, 1 - p)), base=2).max(axis=0)
    np.testing.assert_allclose(entropy(p, card), expected, rtol=1e-5)
    logits = replace(card, activation=None)
    np.testing.assert_allclose(entropy(torch.logit(p), logits), expected, rtol=1e-4)


def test_entropy_has_its_bounds(card: ModelCard) -> None:
    for activation, scores in (("softmax", torch.eye(3)), (None, 1e4 * torch.eye(3))):
        each = replace(card, activation=activation, decision=Argmax())
        np.testing.assert_allclose(entropy(scores, each), 0.0, atol=1e-6)
        np.testing.assert_allclose(entropy(torch.full((3, 4), 1 / 3), each), 1.0, rtol=1e-6)


def test_air_that_no_window_saw_is_certain(card: ModelCard) -> None:
    grid = model_cards.grid((64, 24, 24), (2.0, 2.0, 2.0))
    array = np.full(grid.shape, -1000.0, np.float32)
    array[:12] = model_cards.smooth_scan((12, 24, 24))
    card = replace(card, air_below=-500.0, folds=())
    segmentation = TorchPredictor(card, device="cpu").predict(
        Volume(array, grid, "HU", "CT"), uncertainty=True
    )
    assert segmentation.uncertainty is not None
    assert not segmentation.uncertainty.entropy[40:].any()
    assert segmentation.uncertainty.entropy[:12].any()
