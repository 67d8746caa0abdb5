"""Draws kidneys, bowel and other marrow into CT to train `ct_tissue`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy import ndimage

from ct_tissue_training.rules import BONE, FAT, GAS, LUNG, OUTSIDE, SOFT_TISSUE

Image = NDArray[np.float32]
Labels = NDArray[np.uint8]
Mask = NDArray[np.bool_]

_FAT_HU = -104.0
_SOFT_TISSUE_HU = 45.0
_EXCRETED_HU = (250.0, 1200.0)
"""HU of urine with contrast agent in the pelvis of a kidney."""
_MARROW_HU = 320.0
"""HU below which bone is marrow."""
_ADDED_TO_MARROW_HU = (-60.0, 130.0)
_BLUR_VOXELS = 0.45
"""Standard deviation of the blur of drawn borders: as sharp as CT resampled to 3 mm."""
_DEPTH_VOXELS = 6
"""Least distance of an organ's centre from the skin."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """A part of a scan into which organs are drawn.

    Parameters
    ----------
    hu : (I, J, K) array
        HU at 3 mm, axes RAS.
    labels : (I, J, K) uint8 array
        Tissues, as in `tissue_rules.NAMES`.
    free : (I, J, K) bool array
        Voxels that a shape may fill: soft tissue and fat, not beside bone, lung or skin.
    """

    hu: Image
    labels: Labels
    free: Mask

    def filled(self, shape: Mask, hu: Image | float, tissue: int) -> Drawing:
        """Return the drawing with a shape in it, of the given HU and tissue."""
        share = ndimage.gaussian_filter(np.asarray(shape & self.free, np.float32), _BLUR_VOXELS)
        share[~self.free] = 0
        labels = np.where(share > 0.5, np.uint8(tissue), self.labels)
        return Drawing(np.asarray(self.hu + share * (hu - self.hu), np.float32), labels, self.free)


def add_organs(hu: Image, labels: Labels, rng: Generator) -> tuple[Image, Labels]:
    """Return HU and tissues of a part of a scan with kidneys or gas drawn into it.

    Parameters
    ----------
    hu : (I, J, K) array
        HU at 3 mm, axes RAS.
    labels : (I, J, K) uint8 array
        Tissues, as in `tissue_rules.NAMES`.
    rng : Generator
        Source of the random shapes.
    """
    kept = np.isin(labels, (OUTSIDE, LUNG, BONE))
    drawing = Drawing(hu, labels, ~ndimage.binary_dilation(kept, iterations=2))
    deep = drawing.free & ~ndimage.binary_dilation(labels == OUTSIDE, iterations=_DEPTH_VOXELS)
    candidates = np.flatnonzero(deep)
    for _ in range(int(rng.integers(1, 4)) if candidates.size else 0):
        centre = np.array(np.unravel_index(int(rng.choice(candidates)), hu.shape), float)
        drawing = (draw_kidney if rng.random() < 0.5 else draw_bowel)(drawing, centre, rng)
    return drawing.hu, drawing.labels


def vary_marrow(hu: Image, labels: Labels, rng: Generator) -> Image:
    """Return HU with darker or brighter marrow, as people of other ages have."""
    marrow = (labels == BONE) & (hu < _MARROW_HU)
    share = ndimage.gaussian_filter(marrow.astype(np.float32), _BLUR_VOXELS)
    return np.asarray(hu + share * rng.uniform(*_ADDED_TO_MARROW_HU), np.float32)


def draw_kidney(drawing: Drawing, centre: NDArray[np.float64], rng: Generator) -> Drawing:
    """Draw a kidney with contrast agent, in fat; the sinus holds fat, and vessels or urine."""
    radii = np.array((8.0, 9.0, 17.0)) * rng.uniform(0.6, 1.15, 3)
    radius, along = _radius(drawing.hu.shape, centre, radii, rng)
    bumps = _texture(drawing.hu.shape, rng.uniform(1.5, 3), rng)
    radius = radius + bumps * rng.uniform(0, 0.07)
    level = rng.uniform(110, 290)
    medulla = _texture(drawing.hu.shape, rng.uniform(1.2, 2.5), rng) * rng.uniform(0, 0.25)
    parenchyma = level * np.clip(1 + medulla * (radius < 0.8), 0.4, 1.6)
    sinus = np.sqrt(radius**2 + 0.5 * along) if rng.random() < 0.7 else radius
    sinus_mask = (sinus < rng.uniform(0.2, 0.55)) & (radius < 0.75)
    if rng.random() < 0.7:
        shell = 1 + rng.uniform(0, 0.35)
        drawing = drawing.filled(radius < shell, _FAT_HU, FAT)
    drawing = drawing.filled(radius < 1, parenchyma.astype(np.float32), SOFT_TISSUE)
    content = rng.random()
    if content < 0.35:
        urine = _EXCRETED_HU if rng.random() < 0.7 else (0.0, 20.0)
        return drawing.filled(sinus_mask, rng.uniform(*urine), SOFT_TISSUE)
    if content < 0.8:
        drawing = drawing.filled(sinus_mask, _FAT_HU, FAT)
        vessels = sinus_mask & (_texture(drawing.hu.shape, 1.2, rng) > 0.5)
        return drawing.filled(vessels, rng.uniform(0, 1.2) * level, SOFT_TISSUE)
    return drawing


def draw_bowel(drawing: Drawing, centre: NDArray[np.float64], rng: Generator) -> Drawing:
    """Draw bowel or a stomach: gas in front, often fluid behind, within a wall of soft tissue."""
    radii = rng.uniform(2.5, 16) * rng.uniform(0.5, 1.2, 3)
    radius, _ = _radius(drawing.hu.shape, centre, radii, rng)
    radius = radius + _texture(drawing.hu.shape, rng.uniform(2, 4), rng) * rng.uniform(0, 0.15)
    wall = 1 + rng.uniform(0.7, 1.8) / radii.mean()
    drawing = drawing.filled(radius < wall, _SOFT_TISSUE_HU, SOFT_TISSUE)
    inside = radius < 1
    level = centre[1] + radii[1] * (rng.uniform(-0.8, 0.6) if rng.random() < 0.6 else -np.inf)
    front = np.arange(inside.shape[1])[None, :, None] > level
    has_oral_contrast = rng.random() < 0.2
    fluid_hu = rng.uniform(100, 350) if has_oral_contrast else rng.uniform(0, 60)
    drawing = drawing.filled(inside & ~front, fluid_hu, SOFT_TISSUE)
    return drawing.filled(inside & front, rng.uniform(-1010, -900), GAS)


def _radius(
    shape: tuple[int, ...],
    centre: NDArray[np.float64],
    radii: NDArray[np.float64],
    rng: Generator,
) -> tuple[Image, Image]:
    """Return the distance from an ellipsoid's centre in radii, and along its axis, squared."""
    turn, _ = np.linalg.qr(np.eye(3) + rng.normal(scale=0.3, size=(3, 3)))
    axes = [np.arange(n, dtype=np.float32) - c for n, c in zip(shape, centre, strict=True)]
    away = np.stack(np.meshgrid(*axes, indexing="ij"), -1) @ (turn / radii).astype(np.float32)
    return np.sqrt((away**2).sum(-1)), away[..., 2] ** 2


def _texture(shape: tuple[int, ...], sigma: float, rng: Generator) -> Image:
    """Return smooth noise with a mean of 0 and a standard deviation of 1."""
    noise = ndimage.gaussian_filter(rng.standard_normal(shape, np.float32), sigma, truncate=2)
    return np.asarray(noise / noise.std(), np.float32)
