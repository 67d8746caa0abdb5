"""Labels of nnU-Net models equal those of nnU-Net's steps, written out slowly with SciPy.

Arrays have the last axis first, as nnU-Net's. The network is shared; windows are those of
`support.nnunet_windows`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nibabel import orientations
from numpy.typing import NDArray
from scipy import ndimage

from scanloom.cards.card import Clip, ModelCard, Normalize, Paint
from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions, Grid, Volume
from scanloom.inference.combined import make_predictor
from scanloom.inference.ensemble import Ensemble
from scanloom.inference.network.layers import PlaneNetwork
from scanloom.inference.network.loading import load_network
from scanloom.inference.predictor import TorchPredictor
from support.nnunet_folders import (
    CONFIGURATION,
    DATASET,
    PLANS,
    REGIONS,
    checkpoint,
    plans,
    state_dict,
    write_model,
)
from support.nnunet_windows import mean_of, scores_of

Array = NDArray[Any]
ANISOTROPIC = 3.0


def scan(shape: Sequence[int], spacing: Sequence[float], codes: str, seed: int) -> Volume:
    """Return smooth noise in an ellipsoid, 0 outside, with axes of a direction each."""
    rng = np.random.default_rng(seed)
    axes = np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij")
    noise = ndimage.gaussian_filter(rng.standard_normal(shape), 1.5) * 900
    values = np.where(sum(a**2 for a in axes) < 0.9, np.round(noise + 40), 0).astype(np.int16)
    turn = orientations.axcodes2ornt(codes)
    affine = np.zeros((4, 4))
    affine[3, 3] = 1.0
    for axis, (row, sign) in enumerate(turn):
        affine[int(row), axis] = sign * spacing[axis]
    i, j, k = shape
    return Volume(np.asfortranarray(values), Grid((i, j, k), affine), "unknown", "CT")


def resized(values: Array, shape: Sequence[int], order: int) -> Array:
    """Return values on a grid with the same edges, limited to their range (skimage resize)."""
    if values.shape == tuple(shape):
        return values
    zoom = [b / a for a, b in zip(values.shape, shape, strict=True)]
    out = ndimage.zoom(values.astype(float), zoom, order=order, mode="nearest", grid_mode=True)
    return np.clip(out, values.min(), values.max())


def resampled(values: Array, shape: Sequence[int], spacings: Sequence[Array], order: int) -> Array:
    """Return values on another grid; slices of a coarse axis one by one, and by the nearest."""
    coarse = next((s for s in spacings if max(s) / min(s) > ANISOTROPIC), None)
    if coarse is None or values.shape == tuple(shape):
        return resized(values, shape, order)
    axis = int(np.argmax(coarse))
    plane = [n for x, n in enumerate(shape) if x != axis]
    slices = [resized(plane_values, plane, order) for plane_values in np.moveaxis(values, axis, 0)]
    at = np.floor((np.arange(shape[axis]) + 0.5) * (len(slices) / shape[axis])).astype(int)
    return np.moveaxis(np.stack([slices[n] for n in at]), 0, axis)


def resampled_labels(labels: Array, shape: Sequence[int], spacings: Sequence[Array]) -> Array:
    """Return the label with the largest indicator; exact ties have the nearest label."""
    numbers = np.unique(labels)
    scores = [resampled((labels == n).astype(float), shape, spacings, 1) for n in numbers]
    top = np.stack(scores) == np.max(scores, axis=0)
    nearest = np.searchsorted(numbers, resampled(labels, shape, spacings, 0))
    tied = np.take_along_axis(top, nearest[None], 0)[0]
    return np.asarray(numbers[np.where(tied, nearest, top.argmax(0))])


def normalized(image: Array, card: ModelCard, channel: int, inside: Array) -> Array:
    """Return an image after the intensity steps of its channel."""
    for step in card.channels[channel].steps:
        if isinstance(step, Clip):
            image = np.clip(image, step.low, step.high)
        elif isinstance(step, Normalize):
            chosen = inside if step.filled else np.ones_like(inside)
            mean = image[chosen].mean() if step.subtrahend is None else step.subtrahend
            std = image[chosen].std() if step.divisor is None else step.divisor
            image = np.where(chosen, (image - mean) / max(std, 1e-8), image).astype(np.float32)
    return image


def expected(
    card: ModelCard, volumes: Sequence[Volume], transpose: Sequence[int], previous: Array | None
) -> Array:
    """Return the label map (I, J, K) by nnU-Net's steps."""
    back, mask = restored(card, volumes, transpose, previous)
    box = ndimage.find_objects(mask.astype(int))[0]
    whole = np.zeros(mask.shape, np.uint8)
    if isinstance(card.decision, Paint):
        for (channel, number), chance in zip(card.decision.regions, sigmoids(back), strict=True):
            assert card.decision.regions[channel] == (channel, number)
            whole[box][chance > 0.5] = number
    else:
        whole[box] = np.argmax(back, axis=0)
    return whole.transpose(np.argsort(transpose)).T


def sigmoids(logits: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-logits.astype(np.float32))))


def softmax(logits: Array) -> Array:
    powers = np.exp(logits.astype(np.float32) - logits.max(axis=0).astype(np.float32))
    return np.asarray(powers / powers.sum(axis=0))


def restored(
    card: ModelCard, volumes: Sequence[Volume], transpose: Sequence[int], previous: Array | None
) -> tuple[Array, Array]:
    """Return the logits in the box of voxels that are not 0, on the scan's grid, and their mask."""
    arrays = [np.asarray(v.array.T, np.float32).transpose(transpose) for v in volumes]
    stated = np.float32(volumes[0].grid.spacing)  # as the header of a NIfTI file has it
    own = np.array([float(stated[::-1][t]) for t in transpose])
    card_spacing = [
        card.grid.spacing[axis] if card.grid.spacing else None for axis in card.grid.order
    ]
    spacing = np.array([n or o for n, o in zip(card_spacing, own, strict=True)])
    mask = ndimage.binary_fill_holes(np.any([array != 0 for array in arrays], axis=0))
    box = ndimage.find_objects(mask.astype(int))[0]
    shape = [round(o / w * n) for o, w, n in zip(own, spacing, mask[box].shape, strict=True)]
    images = [normalized(a[box], card, n, mask[box]) for n, a in enumerate(arrays)]
    channels = [resampled(image, shape, (own, spacing), 3) for image in images]
    if previous is not None:
        labels = previous.T.transpose(transpose)[box].astype(int)
        labels = np.where((labels == 0) & ~mask[box], -1, labels)
        chosen = resampled_labels(labels, shape, (own, spacing))
        channels += [chosen == s.number for s in card.structures]
    image = torch.from_numpy(np.stack(channels).astype(np.float32))
    size = [n for x, n in enumerate(card.window.size or ()) if x != card.window.plane]
    flat = card.window.plane is not None
    loaded = load_network(card, torch.float32)
    with torch.inference_mode():
        folds = [
            scores_of(
                _inner(each.network), image, size, mirror=[a - flat for a in card.window.mirror]
            )
            for each in (loaded, *loaded.folds)
        ]
    logits = mean_of(folds).numpy()
    back = [resampled(x, mask[box].shape, (spacing, own), 1).astype(np.float16) for x in logits]
    return np.stack(back), mask


def _inner(network: Any) -> Any:
    """Return a two-dimensional network without its adapter to windows of one plane."""
    return network.network if isinstance(network, PlaneNetwork) else network


FLAT = copy.deepcopy(CONFIGURATION)
FLAT.update(spacing=[1.0, 1.0], patch_size=[16, 16])
FLAT["architecture"]["arch_kwargs"].update(
    conv_op="torch.nn.modules.conv.Conv2d",
    norm_op="torch.nn.modules.instancenorm.InstanceNorm2d",
    kernel_sizes=[[3, 3], [3, 3]],
    strides=[[1, 1], [2, 2]],
)
RESIDUAL = copy.deepcopy(CONFIGURATION["architecture"])
RESIDUAL["network_class_name"] = "ResidualEncoderUNet"
RESIDUAL["arch_kwargs"]["n_blocks_per_stage"] = RESIDUAL["arch_kwargs"].pop("n_conv_per_stage")
MODELS: dict[str, dict[str, Any]] = {
    "3d": {},
    "two folds": {"folds": ("0", "1")},
    "residual": {"plans": plans(architecture=RESIDUAL)},
    "2d": {
        "plans": {**PLANS, "configurations": {"3d_fullres": FLAT}},
        "inference_allowed_mirroring_axes": (0, 1),
    },
    "regions": {
        "plans": plans(
            spacing=[5.0, 1.0, 1.0],
            normalization_schemes=["ZScoreNormalization"] * 2,
            use_mask_for_norm=[True, True],
        ),
        "dataset": {**DATASET, **REGIONS, "channel_names": {"0": "CT", "1": "CT late"}},
    },
    "transposed": {
        "plans": {
            **plans(spacing=[1.5, 1.2, 1.2]),
            "transpose_forward": [2, 0, 1],
            "transpose_backward": [1, 2, 0],
        },
    },
}
SCANS = [
    ((17, 20, 13), (1.0, 1.0, 2.0), "RAS"),
    ((21, 18, 12), (0.8, 0.7, 3.6), "LPS"),
    ((16, 19, 20), (1.3, 1.3, 1.3), "PIR"),
]


def agreement(ours: Array, theirs: Array) -> float:
    return float((ours == theirs).mean())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(len(SCANS)))
@pytest.mark.parametrize("name", MODELS)
def test_labels_are_those_of_nnunets_steps(name: str, number: int, tmp_path: Path) -> None:
    changes = dict(MODELS[name])
    transpose = changes.get("plans", PLANS)["transpose_forward"]
    card = load_card(write_model(tmp_path, **changes))
    shape, spacing, codes = SCANS[number]
    volumes = [scan(shape, spacing, codes, seed) for seed in range(len(card.channels))]

    segmentation = TorchPredictor(card, device="cpu").predict(
        volumes[0], further_channels=volumes[1:]
    )

    labels = expected(card, volumes, transpose, None)
    assert len(np.unique(labels)) > 1
    assert agreement(segmentation.layers[0].labels, labels) >= 0.9995


@pytest.mark.thorough
def test_a_cascade_sees_the_labels_of_its_first_stage(tmp_path: Path) -> None:
    configurations = {
        "3d_lowres": {**CONFIGURATION, "spacing": [3.0, 1.7, 1.7]},
        "3d_cascade_fullres": {**CONFIGURATION, "previous_stage": "3d_lowres"},
    }
    changed = {**PLANS, "configurations": configurations}
    first = load_card(write_model(tmp_path, changed, configuration="3d_lowres"))
    card = load_card(write_model(tmp_path, changed, configuration="3d_cascade_fullres"))
    volume = scan(*SCANS[1], seed=5)

    segmentation = make_predictor(card, device="cpu").predict(volume)

    previous = expected(first, [volume], (0, 1, 2), None)
    labels = expected(card, [volume], (0, 1, 2), previous)
    assert agreement(segmentation.layers[0].labels, labels) >= 0.9995


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "spacing"),
    [
        ("3d", (1.0, 1.0, 2.0)),  # that of the network: nothing is resampled
        ("3d", (0.9, 0.8, 1.7)),
        ("regions", (1.1, 0.9, 4.6)),
    ],
)
def test_an_ensemble_averages_probabilities_as_nnunets_does(
    name: str, spacing: tuple[float, float, float], tmp_path: Path
) -> None:
    """Members differ in how sure they are: the mean of their logits has other labels."""
    changes, cards = dict(MODELS[name]), list[ModelCard]()
    channels = 2 if name == "regions" else 1
    volumes = [scan((19, 20, 14), spacing, "RAS", seed) for seed in range(channels)]
    # Of two members, the mean sigmoid decides as the mean logit does; two that are fairly sure
    # outvote a third that is very sure only by their probabilities
    scales = (8.0, 8.0, 60.0) if name == "regions" else (1.0, 1.0, 6.0)
    for n, scale in enumerate(scales):
        folder = write_model(tmp_path / str(n), **changes)
        state = state_dict(folder, "3d_fullres", seed=n + 7)
        last = max(key for key in state if ".seg_layers." in key).rpartition(".")[0]
        for shift in (False, True):  # first to see the scores, then with each class somewhere
            if shift:
                logits, _ = restored(load_card(folder), volumes, (0, 1, 2), None)
                state[f"{last}.bias"] -= torch.from_numpy(np.median(logits, axis=(1, 2, 3))).float()
                state[f"{last}.bias"] *= scale
                state[f"{last}.weight"] *= scale
            torch.save(checkpoint(state), folder / "fold_0" / "checkpoint_final.pth")
        cards.append(replace(load_card(folder), name=f"member-{n}"))

    members = [TorchPredictor(card, ComputeOptions(engine="torch"), device="cpu") for card in cards]
    segmentation = Ensemble("mean", members).predict(volumes[0], further_channels=volumes[1:])

    logits, masks = zip(*(restored(c, volumes, (0, 1, 2), None) for c in cards), strict=True)
    box = ndimage.find_objects(masks[0].astype(int))[0]

    def labels(scores: Array, threshold: float) -> Array:
        whole = np.zeros(masks[0].shape, np.uint8)
        decision = cards[0].decision
        if isinstance(decision, Paint):
            for channel, number in decision.regions:
                whole[box][scores[channel] > threshold] = number
        else:
            whole[box] = scores.argmax(axis=0)
        return whole.T

    chance = softmax if name == "3d" else sigmoids
    theirs = labels(np.mean([chance(each) for each in logits], axis=0), 0.5)
    of_logits = labels(np.mean([each.astype(np.float32) for each in logits], axis=0), 0.0)
    assert agreement(segmentation.layers[0].labels, theirs) >= 0.9995
    assert agreement(of_logits, theirs) < 0.995
    assert len(np.unique(theirs)) > 1
