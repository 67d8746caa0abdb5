"""Labels of MeshNet cards against a chain of SciPy and plain PyTorch, on a generated head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch.nn import functional

from scanloom.cards.card import Crop, ModelCard
from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions, Grid, Volume
from scanloom.inference.geometry import plan_grid
from scanloom.inference.predictor import TorchPredictor
from support.meshnets import (
    DILATIONS,
    Weights,
    random_weights,
    write_layers_model,
    write_safetensors,
)
from support.model_cards import grid

SIZE = 48
FLOAT32 = ComputeOptions(precision="float32")


def head(on: Grid) -> Volume:
    """Return a ball of smooth noise in air."""
    noise = np.random.default_rng(3).standard_normal(on.shape)
    away = np.indices(on.shape).T - (np.array(on.shape) - 1) / 2
    radius = np.linalg.norm(away * on.spacing, axis=-1).T
    smooth = ndimage.gaussian_filter(noise, [2.5 / s for s in on.spacing])
    values = np.where(radius < 17, 500 + 250 * smooth / smooth.std(), 0)
    return Volume(np.asfortranarray(values.clip(0).astype(np.int16)), on, "a.u.", "MR")


def conform(volume: Volume) -> NDArray[np.float64]:
    """Return the scan on the LIA grid of 1 mm, whole numbers, scaled to 0 to 1."""
    values, affine = volume.array.astype(np.float64), volume.grid.affine
    low, width = values.min(), (values.max() - values.min()) / 1000
    voxels = np.bincount(((values - low) / width).astype(int).clip(0, 999).ravel())
    rank = values.size - int(0.02 * np.count_nonzero(values))
    last = int(np.flatnonzero(np.cumsum(voxels)[1:] >= rank)[0])
    scaled = np.clip((values - low) * 255 / (last * width), 0, 255)
    index = np.stack(np.indices((SIZE,) * 3), axis=-1).reshape(-1, 3) @ np.diag([1, 1, 1])
    to_scan = np.linalg.inv(affine) @ network_affine(volume.grid)
    at = index @ to_scan[:3, :3].T + to_scan[:3, 3]
    image = ndimage.map_coordinates(scaled, at.T, order=1, cval=0.0).reshape((SIZE,) * 3)
    image = np.round(image)
    return np.asarray((image - image.min()) / (image.max() - image.min()))


def network_affine(on: Grid) -> NDArray[np.float64]:
    """Return FreeSurfer's affine of a grid of 1 mm around the centre of a scan."""
    affine = np.array([[-1.0, 0, 0, 0], [0, 0, 1, 0], [0, -1, 0, 0], [0, 0, 0, 1]])
    centre = on.affine @ np.append(np.array(on.shape) / 2, 1)
    affine[:3, 3] = centre[:3] - (affine @ np.array([SIZE / 2] * 3 + [0]))[:3]
    return affine


def scores(weights: Weights, image: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the scores of a plain forward pass."""
    tensors = {name: torch.from_numpy(values) for name, values in weights.items()}
    values = torch.from_numpy(image.astype(np.float32))[None, None]
    for n, dilation in enumerate(DILATIONS):
        kernel, bias = tensors[f"layers.{n}.weight"], tensors[f"layers.{n}.bias"]
        values = functional.conv3d(values, kernel, bias, padding=dilation, dilation=dilation)
        values = functional.elu(values)
    last = tensors["classifier.weight"], tensors["classifier.bias"]
    return functional.conv3d(values, *last)[0].numpy()


def labels_of(weights: Weights, volume: Volume, crop: Crop | None) -> NDArray[np.int64]:
    """Return the label map on the scan's grid."""
    image = conform(volume)
    box = (slice(None),) * 3
    if crop is not None:
        box = ndimage.find_objects((image > crop.above).astype(int))[0]
        ends = [slice(max(s.start - crop.margin, 0), s.stop + crop.margin) for s in box]
        box = (ends[0], ends[1], ends[2])
    labels = np.zeros((SIZE,) * 3, np.int64)
    labels[box] = scores(weights, image[box]).argmax(axis=0)
    components, count = ndimage.label(labels > 0, np.ones((3, 3, 3)))
    if count:
        labels[components != 1 + np.bincount(components.ravel())[1:].argmax()] = 0
    index = np.stack(np.indices(volume.grid.shape), axis=-1).reshape(-1, 3)
    to_network = np.linalg.inv(network_affine(volume.grid)) @ volume.grid.affine
    at = index @ to_network[:3, :3].T + to_network[:3, 3]
    nearest = np.floor(at + 0.5 + 1e-9).astype(int)
    inside = ((nearest >= 0) & (nearest < SIZE)).all(axis=1)
    result = np.zeros(len(index), np.int64)
    result[inside] = labels[tuple(nearest[inside].T)]
    return result.reshape(volume.grid.shape)


def small(card: ModelCard, crop: Crop | None) -> ModelCard:
    """Return a card with a small grid."""
    return replace(card, grid=replace(card.grid, shape=(SIZE,) * 3, crop=crop))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", [write_layers_model, write_safetensors])
@pytest.mark.parametrize("crop", [None, Crop("positive", "network", margin=2, above=0.2)])
@pytest.mark.parametrize(
    ("shape", "spacing", "codes"),
    [
        ((40, 42, 44), (1.0, 1.0, 1.0), "LIA"),
        ((30, 44, 31), (1.31, 0.93, 1.43), "RAS"),
        ((44, 12, 61), (0.83, 3.37, 0.91), "PIR"),
    ],
)
def test_labels_equal_a_plain_chain(
    form: object, crop: Crop | None, shape: object, spacing: object, codes: str, tmp_path: Path
) -> None:
    weights = random_weights()
    volume = head(grid(shape, spacing, codes))
    card = small(load_card(form(tmp_path / "net", weights)), crop)

    segmentation = TorchPredictor(card, FLOAT32, device="cpu").predict(volume)

    labels = segmentation.layers[0].labels
    expected = labels_of(weights, volume, crop)
    assert len(np.unique(expected)) == 4
    assert np.mean(labels == expected) > 0.9995


def test_voxels_beyond_the_grid_are_background(tmp_path: Path) -> None:
    """A field of view of 256 mm and more does not repeat the outermost labels."""
    weights = random_weights()
    weights["classifier.bias"][1] += 100.0  # all voxels are of class 1
    card = small(load_card(write_layers_model(tmp_path / "net", weights)), None)
    volume = head(grid((70, 40, 40)))

    labels = TorchPredictor(card, FLOAT32, device="cpu").predict(volume).layers[0].labels

    assert not labels[:12].any()
    assert not labels[60:].any()
    assert labels[12:60].all()


def test_an_oblique_scan_keeps_its_axes(tmp_path: Path) -> None:
    card = small(load_card(write_layers_model(tmp_path / "net", random_weights())), None)
    oblique = grid((40, 42, 44), (1.1, 1.0, 0.9), "LIA", turn=20.0)
    plan = plan_grid(oblique, card.grid)
    straight, turned = (
        TorchPredictor(card, FLOAT32, device="cpu").predict(replace(head(oblique), grid=on))
        for on in (grid((40, 42, 44), (1.1, 1.0, 0.9), "LIA"), oblique)
    )

    assert np.allclose(plan.network.spacing, 1.0)
    assert np.array_equal(straight.layers[0].labels, turned.layers[0].labels)
