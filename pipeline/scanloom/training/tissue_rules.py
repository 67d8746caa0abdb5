"""Tissues of a CT by rule: the labels that `ct_tissue` is trained on.

Intensities alone do not tell bowel gas from the air of the room, or a table from a patient; the
rules look at what surrounds what. They are slow and need the whole scan at full resolution, which
is why a network learns them.
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
"""Half way between lung (-860) and soft tissue (50): where a blurred border of both lies."""
SKIN_HU = -480.0
"""Half way between air and skin."""
OPEN_AIR_HU = -950.0
"""Below it, averaged over some mm, is air and no lung (emphysema apart)."""
FAT_HU = -28.0
"""Half way between fat (-104) and muscle (50)."""
SKIN_MM = 2.0
"""Skin is 1 to 3 mm thick on the trunk."""

HARD_HU = 320.0
"""No bone border lies higher: next to hard bone may be thin bone."""

Mask = NDArray[np.bool_]
Image = NDArray[np.float32]
Spacing = tuple[float, float, float]


@dataclass(frozen=True)
class Hints:
    """What a person saw in a scan and the rules can't.

    Parameters
    ----------
    cut : bool
        The field of view lies within the chest: air that touches its border may be lung.
    lung : bool
        There is lung in it.
    bone : float
        HU above which there is bone: more where organs take up contrast agent.
    blood : float or None
        HU above which what is broad is blood with contrast agent; None where there is none.
    """

    cut: bool = False
    lung: bool = True
    bone: float = 170.0
    blood: float | None = None


def tissues(hu: Image, spacing: Spacing, hints: Hints) -> NDArray[np.uint8]:
    """Label each voxel of a CT by rule.

    Parameters
    ----------
    hu : (I, J, K) array
        HU, k along the body's axis.
    spacing : (x, y, z)
        mm.
    hints : Hints
        What a person saw.

    Returns
    -------
    (I, J, K) uint8 array
        The number of the tissue in `NAMES`.
    """
    hu = np.clip(hu, -1024, 2000).astype(np.float32)
    calm = ndimage.gaussian_filter(hu, [0.6 / s for s in spacing])
    body = body_mask(calm, spacing, hints)
    lung, gas = air_inside(calm, body, spacing, hints)
    bone = bone_mask(calm, body & ~lung & ~gas, lung, spacing, hints)
    labels = np.full(hu.shape, OUTSIDE, np.uint8)
    labels[body] = SOFT_TISSUE
    labels[fat_mask(calm, body, lung | gas, spacing)] = FAT
    labels[bone] = BONE
    labels[lung] = LUNG
    labels[gas] = GAS
    return labels


def distance(mask: Mask, spacing: Spacing, reach: float) -> Image:
    """Return how far each voxel lies from `mask` in mm, at most about `reach`."""
    if not mask.any():
        return np.full(mask.shape, reach, np.float32)
    far = ndimage.distance_transform_edt(~mask, sampling=spacing)
    return np.asarray(np.minimum(far, reach), np.float32)


def opened(mask: Mask, spacing: Spacing, radius: float) -> Mask:
    """Return what a ball of `radius` mm reaches within `mask`; beyond the border it goes on."""
    pad = [min(int(np.ceil(radius / s)) + 1, 40) for s in spacing]
    wide = np.pad(mask, [(p, p) for p in pad], mode="edge")
    core = ndimage.distance_transform_edt(wide, sampling=spacing) > radius
    back = ndimage.distance_transform_edt(~core, sampling=spacing) <= radius
    cut = tuple(slice(p, n - p) for p, n in zip(pad, wide.shape, strict=True))
    return np.asarray(back[cut] & mask)


def large(mask: Mask, spacing: Spacing, ml: float) -> Mask:
    """Keep connected parts (26 neighbours) of at least `ml`."""
    voxels = int(ml * 1000 / float(np.prod(spacing)))
    return np.asarray(cc3d.dust(mask, threshold=max(voxels, 1), connectivity=26))


def filled(mask: Mask) -> Mask:
    """Fill what is enclosed in any axial slice."""
    return np.stack([ndimage.binary_fill_holes(mask[..., k]) for k in range(mask.shape[2])], -1)


def body_mask(calm: Image, spacing: Spacing, hints: Hints) -> Mask:
    """Return the patient with all that is inside; no table, no clothes."""
    tissue = calm > SKIN_HU
    core = large(opened(tissue, spacing, 5.0), spacing, 60.0)
    body = tissue & (distance(core, spacing, 9.0) < 6.0)
    body = large(body, spacing, 60.0)
    if hints.cut:
        room = open_air(calm, spacing)
        body |= opened((calm <= SKIN_HU) & ~touching_border(room, spacing), spacing, 6.0)
    return filled(body)


def open_air(calm: Image, spacing: Spacing) -> Mask:
    """Return air that is no lung."""
    broad = ndimage.gaussian_filter(calm, [2.0 / s for s in spacing])
    return np.asarray(
        (broad < OPEN_AIR_HU)
        | ((calm < AIR_HU) & (distance(broad < OPEN_AIR_HU, spacing, 6.0) < 4.5))
    )


def touching_border(mask: Mask, spacing: Spacing) -> Mask:
    """Keep large parts of `mask` that reach a side of the field of view (not its ends)."""
    parts = cc3d.connected_components(mask, connectivity=6)
    sides = (parts[0], parts[-1], parts[:, 0], parts[:, -1])
    numbers = np.unique(np.concatenate([s.ravel() for s in sides]))
    return large(np.isin(parts, numbers[numbers > 0]), spacing, 20.0)


def air_inside(calm: Image, body: Mask, spacing: Spacing, hints: Hints) -> tuple[Mask, Mask]:
    """Return lung, and gas that is not in the lung."""
    air = body & (calm < AIR_HU)
    if not hints.lung:
        return np.zeros_like(air), air
    gas = large(air & open_air(calm, spacing), spacing, 0.5)
    lung = like_lung(opened(air & ~gas, spacing, 3.0), calm, spacing)
    near = distance(lung, spacing, 6.0) < 4.0
    lung |= air & ~gas & near
    return lung, air & ~lung


def like_lung(mask: Mask, calm: Image, spacing: Spacing) -> Mask:
    """Keep parts of `mask` above 200 ml, and those above 15 ml that are nowhere as dark as gas.

    The rest is the blurred rim of gas in the bowel, which holds all values from gas to wall.
    """
    parts = cc3d.connected_components(mask, connectivity=6)
    voxels = np.bincount(parts.ravel())
    dark = np.bincount(parts[calm < OPEN_AIR_HU + 20], minlength=voxels.size)
    ml = voxels * float(np.prod(spacing)) / 1000
    kept = (ml > 200) | ((ml > 15) & (dark < 0.04 * voxels))
    kept[0] = False
    return np.asarray(kept[parts])


def bone_mask(calm: Image, inside: Mask, lung: Mask, spacing: Spacing, hints: Hints) -> Mask:
    """Return bone with its marrow, without vessels and organs that hold contrast agent.

    The border of bone lies half way between its hardest part nearby and soft tissue, as in
    morphometry: a fixed threshold makes thin bone too thick.
    """
    size = [2 * round(4.0 / s) + 1 for s in spacing]
    peak = ndimage.maximum_filter(np.where(inside, calm, 0), size)
    half = np.clip(50 + (peak - 50) / 2, hints.bone, max(HARD_HU, hints.bone))
    hard = inside & (calm > half)
    if hints.blood is not None:
        hard &= ~blood(calm, lung, spacing, hints.blood)
    hard = large(hard, spacing, 0.5)
    return np.asarray(hard | marrow(hard, calm, inside, spacing))


def blood(calm: Image, lung: Mask, spacing: Spacing, level: float) -> Mask:
    """Return what is as bright as bone but broad, and what is bright within the lung."""
    broad = large(opened(calm > level, spacing, 3.0), spacing, 3.0)
    chest = ndimage.distance_transform_edt(~lung, sampling=spacing) < 9
    chest = ndimage.distance_transform_edt(chest, sampling=spacing) > 9
    return np.asarray((distance(broad, spacing, 8.0) < 5.0) | chest)


def marrow(hard: Mask, calm: Image, inside: Mask, spacing: Spacing) -> Mask:
    """Return what hard bone encloses in axial slices, but for the canal of the spinal cord.

    The canal is smaller than a vertebral body, and holds neither fat nor spongy bone. Where the
    hard rim has wide gaps, only what is brighter than organs counts.
    """
    broad = ndimage.gaussian_filter(calm, [1.5 / s for s in spacing])
    narrow, wide = closed(hard, spacing, 5.5), closed(hard, spacing, 9.0)
    found = narrow & (broad > 80)
    pixel = spacing[0] * spacing[1]
    for k in range(hard.shape[2]):
        for ring, large_hole in ((narrow[..., k], 500.0), (wide[..., k], np.inf)):
            holes, n = ndimage.label(ndimage.binary_fill_holes(ring) & ~ring)
            area = np.bincount(holes.ravel()) * pixel
            mean = ndimage.mean(broad[..., k], holes, np.arange(n + 1))
            keep = (area < 2500) & ((area > large_hole) | (np.abs(mean - 30) > 55))
            keep[0] = False
            found[..., k] |= keep[holes]
    return np.asarray(found & inside & ~hard)


def closed(mask: Mask, spacing: Spacing, radius: float) -> Mask:
    """Return `mask` with gaps below 2 `radius` mm closed."""
    near = ndimage.distance_transform_edt(~mask, sampling=spacing) < radius
    back = ndimage.distance_transform_edt(near, sampling=spacing) >= radius
    return np.asarray(back | mask)


def fat_mask(calm: Image, body: Mask, air: Mask, spacing: Spacing) -> Mask:
    """Return fat, without the rim of each border to air, which has its intensity by blur only."""
    fat = body & ~air & (calm < FAT_HU)
    half = min(spacing) / 2  # a border lies half a voxel from the next voxel's centre
    edge = distance(~body, spacing, 8.0) - half
    slope = ndimage.gaussian_gradient_magnitude(calm, [1.0 / s for s in spacing]) / min(spacing)
    sure = fat & (edge > SKIN_MM) & (distance(air, spacing, 8.0) > 3.0) & (slope < 40)
    fat &= (edge > SKIN_MM) & (distance(sure, spacing, 6.0) < 3.0)
    return np.asarray(fat & (distance(air, spacing, 3.0) > 1.6))


def fine_grid(hu: Image, spacing: Spacing, step: float, parts: int) -> Image:
    """Resample a scan so that `parts` points along each axis fill each voxel of a grid of `step`.

    The grid is that of MONAI's Spacing: voxel 0 stays where it was.
    """
    fine = step / parts
    shape = [
        (round((n - 1) * s / step) + 1) * parts for n, s in zip(hu.shape, spacing, strict=True)
    ]
    first = -(parts - 1) / 2 * fine
    scale = [fine / s for s in spacing]
    return np.asarray(
        ndimage.affine_transform(
            hu, scale, [first / s for s in spacing], tuple(shape), order=1, mode="nearest"
        )
    )


def majority(labels: NDArray[np.uint8], parts: int) -> NDArray[np.uint8]:
    """Return the label that fills most of each block of `parts` voxels along each axis."""
    i, j, k = (n // parts for n in labels.shape)
    blocks = labels.reshape(i, parts, j, parts, k, parts)
    shares = [(blocks == n).sum(axis=(1, 3, 5)) for n in range(len(NAMES))]
    return np.asarray(np.argmax(shares, axis=0), np.uint8)
