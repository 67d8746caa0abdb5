"""Contrast agent, simulated in CT without it, to train `ct_tissue`."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy import ndimage

from scanloom.training.tissue_rules import BONE, SOFT_TISSUE

Image = NDArray[np.float32]
Mask = NDArray[np.bool_]

_ADDED_HU = (60.0, 270.0)
"""HU that contrast agent adds: little in liver and spleen, most in kidneys and arteries."""


def add_contrast(image: Image, labels: NDArray[np.uint8], rng: Generator) -> Image:
    """Return a patch with contrast agent in one to four regions of its soft tissue.

    Regions are ellipsoids such as kidneys, some with a darker centre, and tubes such as vessels;
    only their soft tissue takes up contrast agent, not the rim of bone, whose HU are partly bone's.

    Parameters
    ----------
    image : (P, P, P) array
        HU at 3 mm.
    labels : (P, P, P) uint8 array
        Tissues, as in `tissue_rules.NAMES`; they stay right.
    rng : Generator
        Source of the random shapes.
    """
    takes_up = (labels == SOFT_TISSUE) & ~ndimage.binary_dilation(labels == BONE)
    candidates = np.flatnonzero(takes_up)
    if not candidates.size:
        return image
    added = np.zeros_like(image)
    for _ in range(int(rng.integers(1, 5))):
        centre = np.array(np.unravel_index(int(rng.choice(candidates)), image.shape), float)
        level = rng.uniform(*_ADDED_HU)
        shape = _tube if rng.random() < 0.4 else _ellipsoid
        np.maximum(added, np.float32(level) * shape(image.shape, centre, rng), out=added)
    added = ndimage.gaussian_filter(np.where(takes_up, added, 0), rng.uniform(0.3, 0.6))
    texture = ndimage.gaussian_filter(rng.standard_normal(image.shape, np.float32), 1.5)
    texture *= np.float32(rng.uniform(0, 0.12)) / texture.std()
    return np.asarray(image + added * (1 + texture), np.float32)


def _ellipsoid(shape: tuple[int, ...], centre: NDArray[np.float64], rng: Generator) -> Image:
    """Return a share of contrast agent, 0 to 1: in an ellipsoid, in half of them less inside."""
    radii = rng.uniform(3, 14, 3)
    turn, _ = np.linalg.qr(rng.standard_normal((3, 3)))
    radius = np.sqrt((((_positions(shape) - centre) @ turn / radii) ** 2).sum(-1))
    share = (radius < 1).astype(np.float32)
    if rng.random() < 0.5:
        share[radius < rng.uniform(0.3, 0.75)] = rng.uniform(0.2, 0.9)
    return share


def _tube(shape: tuple[int, ...], centre: NDArray[np.float64], rng: Generator) -> Image:
    """Return a share of contrast agent, 0 or 1: in a tube, mostly along the body's axis."""
    direction = rng.standard_normal(3) * (1, 1, 3)
    direction /= np.linalg.norm(direction)
    away = _positions(shape) - centre
    along = away @ direction
    distance = np.sqrt(np.maximum((away**2).sum(-1) - along**2, 0))
    return np.asarray(distance < rng.uniform(1, 5), np.float32)


def _positions(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the indices of each voxel, (..., 3)."""
    return np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), -1).astype(float)
