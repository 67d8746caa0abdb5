"""Random patches of scans, to train `ct_tissue`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter, gaussian_filter1d
from torch import Tensor, nn

from ct_tissue_training.contrast import add_contrast
from ct_tissue_training.data import Example
from ct_tissue_training.organs import add_organs, vary_marrow
from ct_tissue_training.phases import Phase

HU_RANGE = (-1050.0, 550.0)
_CLOTH_HU = -930.0
"""HU above which voxels outside the body are cloth or table, not air."""
_NETWORK_RANGE = (-4.0, 4.0)
"""Range that HU_RANGE is mapped to, as in the bundle's inference config; air: -4."""


def scale(hu: NDArray[np.float32]) -> NDArray[np.float32]:
    """Map HU_RANGE to the network's range, as the bundle does."""
    (in_low, in_high), (out_low, out_high) = HU_RANGE, _NETWORK_RANGE
    fraction = np.clip((hu - in_low) / (in_high - in_low), 0, 1)
    return np.asarray(out_low + fraction * (out_high - out_low), np.float32)


def draw_batch(examples: Sequence[Example], phase: Phase, rng: Generator) -> tuple[Tensor, Tensor]:
    """Draw random patches: scaled images (B, 1, P, P, P) and labels (B, P, P, P)."""
    weights = np.array([e.weight for e in examples])
    pairs = []
    for _ in range(phase.batch):
        example = examples[int(rng.choice(len(examples), p=weights / weights.sum()))]
        pairs.append(draw_patch(example, phase, rng))
    image = torch.from_numpy(np.stack([p[0] for p in pairs])[:, None])
    labels = torch.from_numpy(np.stack([p[1] for p in pairs]))
    return image, labels.long()


def draw_patch(
    example: Example, phase: Phase, rng: Generator
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Sample a rotated and scaled patch from a scan; outside, its border is repeated.

    The bundle pads scans that are smaller than its window in the same way. Contrast agent and
    organs are added before, so that they are repeated too.
    """
    size = phase.patch
    rotation = _random_rotation(rng)
    centre = _random_centre(example, size, rng)
    offsets = np.arange(size) - (size - 1) / 2
    grid = np.stack(np.meshgrid(offsets, offsets, offsets, indexing="ij"), -1) @ rotation.T + centre
    box = cut_box(example.hu.shape, centre, rng) if rng.random() < phase.cut else None
    low, high = (np.array(edge) for edge in box or ((0, 0, 0), example.hu.shape))
    low = np.clip(np.floor(grid.min((0, 1, 2))).astype(int), low, high - 1)
    high = np.clip(np.ceil(grid.max((0, 1, 2))).astype(int) + 1, low + 1, high)
    part = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
    points = ((2 * (grid - low) + 1) / (high - low) - 1)[None, ..., ::-1].copy()
    sample_points = torch.from_numpy(points).float()
    hu, tissues = example.hu[part], example.labels[part]
    if rng.random() < phase.contrast:
        organs = None if example.organs is None else example.organs[part]
        hu = add_contrast(hu, tissues, rng, organs)
    if rng.random() < phase.marrow:
        hu = vary_marrow(hu, tissues, rng)
    if rng.random() < phase.organs:
        hu, tissues = add_organs(hu, tissues, rng)
    image = _sample(hu, sample_points, "bilinear")
    labels = _sample(tissues, sample_points, "nearest").astype(np.uint8)
    return _augment(image, rng), labels


def cut_box(
    shape: tuple[int, ...], centre: NDArray[np.float64], rng: Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return first and last + 1 voxels of a part of a scan: few slices, or a smaller field of view.

    The part contains the patch's centre, if the scan does.
    """
    low, high = np.zeros(3, int), np.array(shape)
    axes = (2,) if rng.random() < 0.7 else (0, 1, 2)
    for axis in axes:
        extent = int(rng.integers(*((10, 64) if axis == 2 else (40, 120))))
        if extent < shape[axis]:
            middle = np.clip(centre[axis], 0, shape[axis] - 1)
            first = int(np.floor(middle - rng.uniform(0, 1) * extent))
            low[axis] = np.clip(first, 0, shape[axis] - extent)
            high[axis] = low[axis] + extent
    return low, high


def _sample(array: NDArray[np.generic], points: Tensor, mode: str) -> NDArray[np.float32]:
    source = torch.from_numpy(np.ascontiguousarray(array, np.float32))[None, None]
    sampled = nn.functional.grid_sample(
        source, points, mode=mode, padding_mode="border", align_corners=False
    )
    return np.asarray(sampled[0, 0].numpy())


def _random_rotation(rng: Generator) -> NDArray[np.float64]:
    """Return a random (3, 3) rotation (SD 6 degrees per axis) with scale and random mirroring."""
    matrix = np.eye(3)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        angle = rng.normal(scale=0.1)
        rotation = np.eye(3)
        rotation[a, a] = rotation[b, b] = np.cos(angle)
        rotation[a, b], rotation[b, a] = -np.sin(angle), np.sin(angle)
        matrix = matrix @ rotation
    mirror = np.where(rng.random(3) < (0.5, 0.1, 0.3), -1.0, 1.0)
    return np.asarray(matrix * mirror * rng.uniform(0.85, 1.2))


def _random_centre(example: Example, size: int, rng: Generator) -> NDArray[np.float64]:
    """Return a patch centre: random, or in half of the cases near a rare or difficult tissue."""
    shape = np.array(example.hu.shape)
    if rng.random() < 0.5:
        tissue = rng.choice((0, 1, 2, 5))
        candidates = example.labels == tissue
        if tissue == 0:
            candidates &= example.hu > _CLOTH_HU
        indices = np.flatnonzero(candidates)
        if indices.size:
            centre = np.array(np.unravel_index(int(rng.choice(indices)), tuple(shape)), float)
            return np.asarray(centre + rng.uniform(-size / 3, size / 3, 3))
    margin = np.maximum(shape - size, 0)
    return np.asarray((shape - 1) / 2 + rng.uniform(-0.5, 0.5, 3) * (margin + size * 0.4))


def _augment(image: NDArray[np.float32], rng: Generator) -> NDArray[np.float32]:
    """Blur along an axis, add noise and shift HU, as scanners differ; scale for the network."""
    if rng.random() < 0.35:
        axis = int(rng.choice((0, 1, 2, 2)))
        image = gaussian_filter1d(image, rng.uniform(0.3, 1.0), axis=axis)
    if rng.random() < 0.7:
        noise = rng.standard_normal(image.shape, np.float32)
        if rng.random() < 0.5:
            noise = gaussian_filter(noise, 0.6, truncate=2.0)
            noise /= noise.std()
        image = image + noise * np.float32(rng.uniform(0, 28))
    return scale(image + np.float32(rng.normal(scale=6)))
