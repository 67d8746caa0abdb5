"""Label the tissues of a CT by rules, to train `ct_tissue`.

Intensities alone cannot distinguish bowel gas from room air, or the table from the patient; the
rules use the surroundings. They are slow and need the whole scan at full resolution, which is why
a network learns them.
"""

from __future__ import annotations

from dataclasses import dataclass

import cc3d
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

OUTSIDE, LUNG, GAS, FAT, SOFT_TISSUE, BONE = range(6)
NAMES = ("outside", "lung", "gas", "fat", "soft_tissue", "bone")

AIR_HU = -400.0
"""Midpoint of lung (-860) and soft tissue (50): the position of their blurred border."""
SKIN_HU = -480.0
"""Midpoint of air and skin."""
OPEN_AIR_HU = -950.0
"""Mean over a few mm below which a voxel is air, not lung (except in emphysema)."""
FAT_HU = -28.0
"""Midpoint of fat (-104) and muscle (50)."""
SKIN_MM = 2.0
"""Skin is 1 to 3 mm thick on the trunk."""

HARD_HU = 320.0
"""Highest threshold for the border of bone, as thin bone may adjoin hard bone."""

Mask = NDArray[np.bool_]
Image = NDArray[np.float32]
Spacing = tuple[float, float, float]


@dataclass(frozen=True)
class ScanHints:
    """Observations of a person in a scan that the rules cannot make.

    Parameters
    ----------
    cut : bool
        Whether the field of view lies within the chest, so that air at its border may be lung.
    lung : bool
        Whether the scan shows lung.
    bone : float
        Lowest HU of bone; higher if organs take up contrast agent.
    blood : float or None
        HU above which a broad region is blood with contrast agent; None without contrast agent.
    """

    cut: bool = False
    lung: bool = True
    bone: float = 170.0
    blood: float | None = None


def label_tissues(hu: Image, spacing: Spacing, hints: ScanHints) -> NDArray[np.uint8]:
    """Label each voxel of a CT by rules.

    Parameters
    ----------
    hu : (I, J, K) array
        HU, k along the body's axis.
    spacing : (x, y, z)
        Voxel spacing in mm.
    hints : ScanHints
        Observations of a person.

    Returns
    -------
    (I, J, K) uint8 array
        Index of the tissue in `NAMES`.
    """
    hu = np.clip(hu, -1024, 2000).astype(np.float32)
    smooth = ndimage.gaussian_filter(hu, [0.6 / s for s in spacing])
    body = body_mask(smooth, spacing, hints)
    lung, gas = air_inside(smooth, body, spacing, hints)
    bone = bone_mask(smooth, body & ~lung & ~gas, lung, spacing, hints)
    labels = np.full(hu.shape, OUTSIDE, np.uint8)
    labels[body] = SOFT_TISSUE
    labels[fat_mask(smooth, body, lung | gas, spacing)] = FAT
    labels[bone] = BONE
    labels[lung] = LUNG
    labels[gas] = GAS
    return labels


def distance_mm(mask: Mask, spacing: Spacing, reach: float) -> Image:
    """Return the distance of each voxel from `mask` in mm, clipped to `reach`."""
    if not mask.any():
        return np.full(mask.shape, reach, np.float32)
    far = ndimage.distance_transform_edt(~mask, sampling=spacing)
    return np.asarray(np.minimum(far, reach), np.float32)


def opened(mask: Mask, spacing: Spacing, radius: float) -> Mask:
    """Return the opening of `mask` by a ball of `radius` mm; the mask is extended at borders."""
    pad = [min(int(np.ceil(radius / s)) + 1, 40) for s in spacing]
    padded = np.pad(mask, [(p, p) for p in pad], mode="edge")
    core = ndimage.distance_transform_edt(padded, sampling=spacing) > radius
    restored = ndimage.distance_transform_edt(~core, sampling=spacing) <= radius
    crop = tuple(slice(p, n - p) for p, n in zip(pad, padded.shape, strict=True))
    return np.asarray(restored[crop] & mask)


def large(mask: Mask, spacing: Spacing, ml: float) -> Mask:
    """Keep connected components (26 neighbours) of at least `ml`."""
    voxels = int(ml * 1000 / float(np.prod(spacing)))
    return np.asarray(cc3d.dust(mask, threshold=max(voxels, 1), connectivity=26))


def filled(mask: Mask) -> Mask:
    """Fill the holes in each axial slice."""
    return np.stack([ndimage.binary_fill_holes(mask[..., k]) for k in range(mask.shape[2])], -1)


def body_mask(smooth: Image, spacing: Spacing, hints: ScanHints) -> Mask:
    """Return the body with its interior, without table and clothes."""
    tissue = smooth > SKIN_HU
    core = large(opened(tissue, spacing, 5.0), spacing, 60.0)
    body = tissue & (distance_mm(core, spacing, 9.0) < 6.0)
    body = large(body, spacing, 60.0)
    if hints.cut:
        room = open_air(smooth, spacing)
        body |= opened((smooth <= SKIN_HU) & ~touching_border(room, spacing), spacing, 6.0)
    return filled(body)


def open_air(smooth: Image, spacing: Spacing) -> Mask:
    """Return air that is not lung."""
    broad = ndimage.gaussian_filter(smooth, [2.0 / s for s in spacing])
    return np.asarray(
        (broad < OPEN_AIR_HU)
        | ((smooth < AIR_HU) & (distance_mm(broad < OPEN_AIR_HU, spacing, 6.0) < 4.5))
    )


def touching_border(mask: Mask, spacing: Spacing) -> Mask:
    """Keep large components of `mask` that touch a side of the field of view (not its ends)."""
    components = cc3d.connected_components(mask, connectivity=6)
    sides = (components[0], components[-1], components[:, 0], components[:, -1])
    numbers = np.unique(np.concatenate([s.ravel() for s in sides]))
    return large(np.isin(components, numbers[numbers > 0]), spacing, 20.0)


def air_inside(smooth: Image, body: Mask, spacing: Spacing, hints: ScanHints) -> tuple[Mask, Mask]:
    """Return masks of lung, and of gas outside the lung."""
    air = body & (smooth < AIR_HU)
    if not hints.lung:
        return np.zeros_like(air), air
    gas = large(air & open_air(smooth, spacing), spacing, 0.5)
    lung = like_lung(opened(air & ~gas, spacing, 3.0), smooth, spacing)
    near_lung = distance_mm(lung, spacing, 6.0) < 4.0
    lung |= air & ~gas & near_lung
    return lung, air & ~lung


def like_lung(mask: Mask, smooth: Image, spacing: Spacing) -> Mask:
    """Keep components above 200 ml, and components above 15 ml with almost no voxel dark as gas.

    The rest is the blurred rim of bowel gas, with all values from gas to bowel wall.
    """
    components = cc3d.connected_components(mask, connectivity=6)
    voxels = np.bincount(components.ravel())
    dark = np.bincount(components[smooth < OPEN_AIR_HU + 20], minlength=voxels.size)
    ml = voxels * float(np.prod(spacing)) / 1000
    keep = (ml > 200) | ((ml > 15) & (dark < 0.04 * voxels))
    keep[0] = False
    return np.asarray(keep[components])


def bone_mask(smooth: Image, inside: Mask, lung: Mask, spacing: Spacing, hints: ScanHints) -> Mask:
    """Return bone with its marrow, without vessels and organs that take up contrast agent.

    As in morphometry, the threshold is halfway between soft tissue and the hardest bone nearby: a
    fixed threshold makes thin bone too thick.
    """
    size = [2 * round(4.0 / s) + 1 for s in spacing]
    peak = ndimage.maximum_filter(np.where(inside, smooth, 0), size)
    threshold = np.clip(50 + (peak - 50) / 2, hints.bone, max(HARD_HU, hints.bone))
    hard = inside & (smooth > threshold)
    if hints.blood is not None:
        hard &= ~blood(smooth, lung, spacing, hints.blood)
    hard = large(hard, spacing, 0.5)
    return np.asarray(hard | marrow(hard, smooth, inside, spacing))


def blood(smooth: Image, lung: Mask, spacing: Spacing, level: float) -> Mask:
    """Return broad regions as bright as bone, and all regions surrounded by lung."""
    broad = large(opened(smooth > level, spacing, 3.0), spacing, 3.0)
    near_lung = ndimage.distance_transform_edt(~lung, sampling=spacing) < 9
    near_lung = ndimage.distance_transform_edt(near_lung, sampling=spacing) > 9
    return np.asarray((distance_mm(broad, spacing, 8.0) < 5.0) | near_lung)


def marrow(hard: Mask, smooth: Image, inside: Mask, spacing: Spacing) -> Mask:
    """Return regions that hard bone encloses in axial slices, except the spinal canal.

    The canal is smaller than a vertebral body, and holds neither fat nor spongy bone. If the hard
    rim has wide gaps, only regions that differ from organs in brightness count.
    """
    broad = ndimage.gaussian_filter(smooth, [1.5 / s for s in spacing])
    narrow, wide = closed(hard, spacing, 5.5), closed(hard, spacing, 9.0)
    marrow_mask = narrow & (broad > 80)
    pixel = spacing[0] * spacing[1]
    for k in range(hard.shape[2]):
        for ring, large_hole in ((narrow[..., k], 500.0), (wide[..., k], np.inf)):
            holes, hole_count = ndimage.label(ndimage.binary_fill_holes(ring) & ~ring)
            area = np.bincount(holes.ravel()) * pixel
            mean = ndimage.mean(broad[..., k], holes, np.arange(hole_count + 1))
            keep = (area < 2500) & ((area > large_hole) | (np.abs(mean - 30) > 55))
            keep[0] = False
            marrow_mask[..., k] |= keep[holes]
    return np.asarray(marrow_mask & inside & ~hard)


def closed(mask: Mask, spacing: Spacing, radius: float) -> Mask:
    """Return `mask` with gaps below 2 `radius` mm closed."""
    dilated = ndimage.distance_transform_edt(~mask, sampling=spacing) < radius
    closing = ndimage.distance_transform_edt(dilated, sampling=spacing) >= radius
    return np.asarray(closing | mask)


def fat_mask(smooth: Image, body: Mask, air: Mask, spacing: Spacing) -> Mask:
    """Return fat, without the rim next to air, which has the HU of fat only by blurring."""
    fat = body & ~air & (smooth < FAT_HU)
    half_voxel = min(spacing) / 2  # from a border to the next voxel's centre
    edge = distance_mm(~body, spacing, 8.0) - half_voxel
    slope = ndimage.gaussian_gradient_magnitude(smooth, [1.0 / s for s in spacing]) / min(spacing)
    certain = fat & (edge > SKIN_MM) & (distance_mm(air, spacing, 8.0) > 3.0) & (slope < 40)
    fat &= (edge > SKIN_MM) & (distance_mm(certain, spacing, 6.0) < 3.0)
    return np.asarray(fat & (distance_mm(air, spacing, 3.0) > 1.6))


def resample_fine(hu: Image, spacing: Spacing, step: float, factor: int) -> Image:
    """Resample a scan with `factor` points along each axis per voxel of a grid of `step` mm.

    The coarse grid is the one of MONAI's Spacing, which keeps the position of voxel 0.
    """
    fine_step = step / factor
    shape = [
        (round((n - 1) * s / step) + 1) * factor for n, s in zip(hu.shape, spacing, strict=True)
    ]
    origin = -(factor - 1) / 2 * fine_step
    scale = [fine_step / s for s in spacing]
    return np.asarray(
        ndimage.affine_transform(
            hu, scale, [origin / s for s in spacing], tuple(shape), order=1, mode="nearest"
        )
    )


def majority_label(labels: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """Return the most frequent label in each block of `factor` voxels along each axis."""
    i, j, k = (n // factor for n in labels.shape)
    blocks = labels.reshape(i, factor, j, factor, k, factor)
    shares = [(blocks == n).sum(axis=(1, 3, 5)) for n in range(len(NAMES))]
    return np.asarray(np.argmax(shares, axis=0), np.uint8)
