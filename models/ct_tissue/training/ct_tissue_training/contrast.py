"""Contrast agent, simulated in CT without it, to train `ct_tissue`."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy import ndimage

from ct_tissue_training.rules import BONE, SOFT_TISSUE

Image = NDArray[np.float32]
Mask = NDArray[np.bool_]

_ADDED_HU = (60.0, 270.0)
"""HU that contrast agent adds to random regions."""
_ADDED_TO_ORGANS = {
    "kidney": (80.0, 250.0),
    "vessel": (60.0, 250.0),
    "liver or spleen": (20.0, 80.0),
}
"""HU that contrast agent adds to organs, from the arterial to the excretory phase."""


def add_contrast(
    image: Image, labels: NDArray[np.uint8], rng: Generator, organs: NDArray[np.uint8] | None = None
) -> Image:
    """Return a patch with contrast agent in its organs, or in random regions of its soft tissue.

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
    organs : (P, P, P) uint8 array, optional
        Organs, as numbers of `tissue_data.ORGANS` from 1.
    """
    takes_up = (labels == SOFT_TISSUE) & ~ndimage.binary_dilation(labels == BONE)
    if not takes_up.any():
        return image
    if organs is None:
        added = _in_regions(takes_up, rng)
    else:
        added, takes_up = _in_organs(organs, rng), labels == SOFT_TISSUE
    added = ndimage.gaussian_filter(np.where(takes_up, added, 0), rng.uniform(0.3, 0.6))
    texture = ndimage.gaussian_filter(
        rng.standard_normal(image.shape, np.float32), rng.uniform(0.7, 1.5)
    )
    texture *= np.float32(rng.uniform(0, 0.25)) / texture.std()
    return np.asarray(image + added * (1 + texture), np.float32)


def _in_organs(organs: NDArray[np.uint8], rng: Generator) -> Image:
    """Return the HU that are added to organs; those inside kidneys differ from their cortex."""
    added = np.zeros(organs.shape, np.float32)
    for number, (name, hu) in enumerate(_ADDED_TO_ORGANS.items(), start=1):
        organ = organs == number
        added[organ] = level = rng.uniform(*hu)
        if name == "kidney":
            depth = int(rng.integers(1, 4))
            added[ndimage.binary_erosion(organ, iterations=depth)] = level * rng.uniform(0.4, 1.4)
    return added


def _in_regions(takes_up: Mask, rng: Generator) -> Image:
    """Return the HU that are added to one to four random regions."""
    candidates = np.flatnonzero(takes_up)
    added = np.zeros(takes_up.shape, np.float32)
    for _ in range(int(rng.integers(1, 5))):
        centre = np.array(np.unravel_index(int(rng.choice(candidates)), added.shape), float)
        level = rng.uniform(*_ADDED_HU)
        shape = _tube if rng.random() < 0.4 else _ellipsoid
        np.maximum(added, np.float32(level) * shape(added.shape, centre, rng), out=added)
    return added


def _ellipsoid(shape: tuple[int, ...], centre: NDArray[np.float64], rng: Generator) -> Image:
    """Return a share of contrast agent, 0 to 1: in an ellipsoid, in half of them less inside."""
    radii = rng.uniform(3, 14, 3)
    turn, _ = np.linalg.qr(rng.standard_normal((3, 3)))
    radius = np.sqrt((((_positions(shape) - centre) @ turn / radii) ** 2).sum(-1))
    share = np.asarray(radius < 1, np.float32)
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
