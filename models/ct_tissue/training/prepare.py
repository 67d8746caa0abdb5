"""Write the training data of `ct_tissue`: scans on the network's grid, labelled by rules or drawn.

    python models/ct_tissue/training/prepare.py SCANS FOLDER
    scanloom train FOLDER/recipe.yaml -o BUNDLE

SCANS holds the scans that are named below. FOLDER gets `images`, `labels`, `cases.json` and the
recipe. Each scan is there several times: with contrast agent, kidneys, gas and other marrow drawn
into it, and cut. Torsos are drawn as the sample study is, with other seeds. Some minutes; seeded.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import nibabel as nib
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy import ndimage

from rules import (
    BONE,
    FAT,
    GAS,
    LUNG,
    NAMES,
    OUTSIDE,
    SOFT_TISSUE,
    ScanHints,
    distance_mm,
    label_tissues,
    majority_label,
    resample_fine,
)
from scanloom.io.read import load_volume

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "data"))

import draw_torso as drawing
from torso_anatomy import M, torso

Image = NDArray[np.float32]
Labels = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Triple = tuple[float, float, float]

STEP = 3.0
"""Voxel spacing of the network's grid, mm."""
FINER = 2
"""The rules' grid is finer by this factor."""
TRAINING_SEEDS = (101, 102, 103, 104, 107, 108, 109, 110)
VALIDATION_SEEDS = (105, 106)
BLUR = 0.45
"""SD, in voxels, of the blur of drawn borders: as sharp as CT resampled to 3 mm."""


@dataclass(frozen=True)
class Scan:
    """A scan, by its path in the data folder.

    Parameters
    ----------
    path : str
        File or folder.
    copies : int
        How often it is written, the first time unchanged.
    hints : ScanHints
        Observations by a person.
    vessels : tuple of str
        Masks of vessels with contrast agent, which the rules cannot tell from bone.
    organs : str or None
        TotalSegmentator's label map of the scan.
    """

    path: str
    copies: int
    hints: ScanHints = field(default_factory=ScanHints)
    vessels: tuple[str, ...] = ()
    organs: str | None = None


AORTA = "train/labelled_ct/totalseg_aorta"
SCANS = {
    "abdomen_pelvis": Scan("scans/ct/totalseg_example/example_ct.nii.gz", 12),
    "abdomen_pelvis_part": Scan(
        "scans/ct/totalseg_example/example_ct_sm.nii.gz",
        18,
        organs="scans/ct/totalseg_example/Ref_seg/example_ct_sm.total.nii.gz",
    ),
    "upper_abdomen": Scan("scans/ct/totalseg_example_dicom/dicom", 18, ScanHints(bone=250)),
    "chest": Scan(
        f"{AORTA}/image_ct.nii.gz",
        10,
        ScanHints(cut=True, bone=220, blood=330),
        tuple(
            f"{AORTA}/labels/{name}.nii.gz"
            for name in (
                "aorta", "brachiocephalic_trunk", "celiac_trunk", "common_carotid_artery_left",
                "renal_arteries", "subclavian_artery_left", "superior_mesenteric_artery",
            )
        ),
    ),
    "thighs_1": Scan("train/labelled_ct/sts001_thigh/image.nii.gz", 10, ScanHints(lung=False)),
    "thighs_2": Scan("train/labelled_ct/sts002_thigh/image.nii.gz", 10, ScanHints(lung=False)),
}  # fmt: skip
UNSEEN = Scan("scans/ct/crlm1004_abdomen_dicom/dicom", 1, ScanHints(bone=235))
"""Of another hospital, scanner and patient. (scans/ct/totalseg_pulmonary is `chest`, cut.)"""
ENHANCED_ORGANS = {(2, 3): (80, 250), (52, 63, 64): (60, 250), (1, 5): (20, 80)}
"""HU that contrast agent adds to kidneys, vessels, liver, spleen (numbers of TotalSegmentator)."""
ENHANCED_HU = {
    M.KIDNEY: 215, M.BLOOD: 170, M.LUNG_VESSEL: 170, M.HEART: 155, M.LIVER: 112, M.SPLEEN: 125,
    M.PANCREAS: 95, M.BOWEL_WALL: 85, M.MUSCLE: 64,
}  # fmt: skip
"""HU of a drawn torso's materials in the portal venous phase."""


def read_scan(scan: Scan, data: Path) -> tuple[Image, Labels, Labels | None]:
    """Return HU, tissues by the rules, and organs (numbers from 1), (I, J, K) in RAS at 3 mm."""
    volume = load_volume(data / scan.path, modality="CT")
    hu, spacing = to_ras(volume.array, volume.grid.affine)
    hu = np.clip(hu, -1024, 2000)
    smooth = ndimage.gaussian_filter(hu, [0.6 / s for s in spacing])
    fine = resample_fine(smooth, spacing, STEP, FINER)
    tissues = label_tissues(fine, (STEP / FINER,) * 3, scan.hints)
    for name in scan.vessels:
        near = distance_mm(read_map(data / name) > 0, spacing, 9.0)
        vessel = resample_fine(near, spacing, STEP, FINER) < 3.0
        tissues[vessel & (tissues == BONE)] = SOFT_TISSUE
    if not scan.hints.lung:
        tissues[tissues == GAS] = OUTSIDE  # air between the thighs
    if scan.hints.cut:  # a bronchus or bowel at the border; the room is in front
        parts, _ = ndimage.label(tissues == OUTSIDE)
        tissues[(parts > 0) & ~np.isin(parts, parts[:, -1])] = GAS
    organs = None
    if scan.organs is not None:
        numbers = read_map(data / scan.organs)
        masks = [np.isin(numbers, values).astype(np.float32) for values in ENHANCED_ORGANS]
        shares = [resample_fine(mask, spacing, STEP, 1) for mask in masks]
        organs = np.argmax([np.full_like(shares[0], 0.5), *shares], axis=0).astype(np.uint8)
    return resample_fine(hu, spacing, STEP, 1), majority_label(tissues, FINER), organs


def to_ras(array: NDArray[np.generic], affine: NDArray[np.float64]) -> tuple[Image, Triple]:
    """Return an array with its axes in the order and direction of RAS, and its spacing in mm."""
    image = nib.as_closest_canonical(nib.Nifti1Image(np.asarray(array, np.float32), affine))
    i, j, k = (float(s) for s in image.header.get_zooms())
    return np.ascontiguousarray(image.dataobj, np.float32), (i, j, k)


def read_map(path: Path) -> NDArray[np.generic]:
    """Return the label map of a NIfTI file in RAS."""
    return np.asarray(nib.as_closest_canonical(nib.load(path)).dataobj)


def draw(seed: int) -> list[tuple[Image, Labels]]:
    """Return HU and true tissues of a drawn torso, without and with contrast agent."""
    if seed == drawing.SEED:
        raise ValueError("the sample study is in no training set")
    body = torso(seed)
    hu, varies = (np.array([drawing.MATERIALS[m][n] for m in M], float) for n in (0, 1))
    enhanced = np.array([ENHANCED_HU.get(m, drawing.MATERIALS[m][0]) for m in M], float)
    tissue = np.array([NAMES.index(drawing.MATERIALS[m][2]) for m in M])
    plain, bright, spread = (np.zeros(drawing.SHAPE) for _ in range(3))
    shares = np.zeros((len(NAMES), *drawing.SHAPE), np.float32)
    for k in range(drawing.SHAPE[2]):
        material = drawing.draw_slab(body, k).material
        plain[..., k] = drawing.average(hu[material])
        bright[..., k] = drawing.average(enhanced[material])
        spread[..., k] = drawing.average(varies[material])
        for n in range(len(NAMES)):
            shares[n, ..., k] = drawing.average((tissue[material] == n).astype(float))

    def on_grid(array: NDArray[np.generic]) -> Image:
        turned = np.ascontiguousarray(array[::-1, ::-1], np.float32)  # LPS to RAS
        return resample_fine(turned, drawing.SPACING, STEP, 1)

    tissues = np.argmax([on_grid(share) for share in shares], axis=0).astype(np.uint8)
    return [(on_grid(drawing.scanner(i, spread, seed)), tissues) for i in (plain, bright)]


def vary(hu: Image, tissues: Labels, organs: Labels | None, rng: Generator) -> tuple[Image, Labels]:
    """Return a scan with contrast agent, drawn organs, other marrow, or a part of it."""
    if organs is not None and rng.random() < 0.6:
        hu = add_contrast(hu, tissues, organs, rng)
    if rng.random() < 0.5:
        marrow = ndimage.gaussian_filter(((tissues == BONE) & (hu < 320)).astype(np.float32), BLUR)
        hu = hu + marrow * np.float32(rng.uniform(-60, 130))
    if rng.random() < 0.6:
        hu, tissues = draw_organs(hu, tissues, rng)
    if rng.random() < 0.7:
        box = cut(hu.shape, rng)
        hu, tissues = hu[box], tissues[box]
    return hu, tissues


def cut(shape: tuple[int, ...], rng: Generator) -> tuple[slice, ...]:
    """Return a part of a scan: few slices, or a smaller field of view."""
    box = [slice(None)] * 3
    for axis in (2,) if rng.random() < 0.5 else (0, 1, 2):
        extent = int(rng.integers(*((10, 64) if axis == 2 else (50, 120))))
        first = int(rng.integers(max(shape[axis] - extent, 0) + 1))
        box[axis] = slice(first, first + extent)
    return tuple(box)


def add_contrast(hu: Image, tissues: Labels, organs: Labels, rng: Generator) -> Image:
    """Return HU with contrast agent in known organs; inside, kidneys differ from their cortex."""
    added = np.zeros(hu.shape, np.float32)
    for number, (low, high) in enumerate(ENHANCED_ORGANS.values(), start=1):
        organ = organs == number
        added[organ] = level = rng.uniform(low, high)
        if number == 1:
            inside = ndimage.binary_erosion(organ, iterations=int(rng.integers(1, 4)))
            added[inside] = level * rng.uniform(0.4, 1.4)
    added[tissues != SOFT_TISSUE] = 0
    return hu + ndimage.gaussian_filter(added, BLUR) * (1 + 0.1 * noise(hu.shape, 1.0, rng))


def draw_organs(hu: Image, tissues: Labels, rng: Generator) -> tuple[Image, Labels]:
    """Return a scan with kidneys and bowel drawn into its soft tissue and fat, deep in the body."""
    kept = np.isin(tissues, (OUTSIDE, LUNG, BONE))
    free = ~ndimage.binary_dilation(kept, iterations=2)
    candidates = np.flatnonzero(ndimage.distance_transform_edt(tissues != OUTSIDE) * free > 6)
    hu, tissues = hu.copy(), tissues.copy()
    for _ in range(int(rng.integers(2, 7)) if candidates.size else 0):
        centre = np.unravel_index(int(rng.choice(candidates)), hu.shape)
        # a box around the organ
        box = tuple(slice(max(c - 28, 0), c + 28) for c in centre)
        middle = np.array([c - s.start for c, s in zip(centre, box, strict=True)], float)
        part = Part(hu[box], tissues[box], free[box])
        (draw_kidney if rng.random() < 0.5 else draw_bowel)(part, middle, rng)
    return hu, tissues


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a scan into which organs are drawn in place, where it is `free`."""

    hu: Image
    tissues: Labels
    free: Mask

    def fill(self, shape: Mask, hu: Image | float, tissue: int) -> None:
        """Draw a shape of the given HU and tissue."""
        share = ndimage.gaussian_filter((shape & self.free).astype(np.float32), BLUR) * self.free
        self.tissues[share > 0.5] = tissue
        self.hu[...] += share * (hu - self.hu)


def draw_kidney(part: Part, centre: NDArray[np.float64], rng: Generator) -> None:
    """Draw a kidney with contrast agent, in fat; the sinus holds fat, and vessels or urine."""
    shape = part.hu.shape
    radius = radii_from(shape, centre, np.array((8, 9, 17)) * rng.uniform(0.6, 1.15, 3), rng)
    radius = radius + noise(shape, rng.uniform(1.5, 3), rng) * rng.uniform(0, 0.07)
    level = rng.uniform(110, 290)
    medulla = noise(shape, rng.uniform(1.2, 2.5), rng) * rng.uniform(0, 0.25) * (radius < 0.8)
    sinus = radius < rng.uniform(0.2, 0.55)
    if rng.random() < 0.7:
        part.fill(radius < 1 + rng.uniform(0, 0.35), -104.0, FAT)
    part.fill(radius < 1, level * np.clip(1 + medulla, 0.4, 1.6), SOFT_TISSUE)
    content = rng.random()
    if content < 0.35:
        excreted = rng.random() < 0.7
        part.fill(sinus, rng.uniform(250, 1200) if excreted else rng.uniform(0, 20), SOFT_TISSUE)
    elif content < 0.8:
        part.fill(sinus, -104.0, FAT)
        vessels = sinus & (noise(shape, 1.2, rng) > 0.5)
        part.fill(vessels, rng.uniform(0, 1.2) * level, SOFT_TISSUE)


def draw_bowel(part: Part, centre: NDArray[np.float64], rng: Generator) -> None:
    """Draw bowel or a stomach: gas in front, often fluid behind, within a wall of soft tissue."""
    shape = part.hu.shape
    radii = rng.uniform(2.5, 16) * rng.uniform(0.5, 1.2, 3)
    radius = radii_from(shape, centre, radii, rng)
    radius = radius + noise(shape, rng.uniform(2, 4), rng) * rng.uniform(0, 0.15)
    part.fill(radius < 1 + rng.uniform(0.7, 1.8) / radii.mean(), 45.0, SOFT_TISSUE)
    level = centre[1] + radii[1] * (rng.uniform(-0.8, 0.6) if rng.random() < 0.6 else -np.inf)
    front = np.arange(shape[1])[None, :, None] > level
    fluid = rng.uniform(100, 350) if rng.random() < 0.2 else rng.uniform(0, 60)
    part.fill((radius < 1) & ~front, fluid, SOFT_TISSUE)
    part.fill((radius < 1) & front, rng.uniform(-1010, -900), GAS)


def radii_from(
    shape: tuple[int, ...],
    centre: NDArray[np.float64],
    radii: NDArray[np.float64],
    rng: Generator,
) -> Image:
    """Return the distance from the centre of a turned ellipsoid, 1 on its surface."""
    turn, _ = np.linalg.qr(np.eye(3) + rng.normal(scale=0.3, size=(3, 3)))
    axes = [np.arange(n, dtype=np.float32) - c for n, c in zip(shape, centre, strict=True)]
    away = np.stack(np.meshgrid(*axes, indexing="ij"), -1) @ (turn / radii)
    return np.sqrt((away**2).sum(-1)).astype(np.float32)


def noise(shape: tuple[int, ...], sigma: float, rng: Generator) -> Image:
    """Return smooth noise with a mean of 0 and a standard deviation of 1."""
    smooth = ndimage.gaussian_filter(rng.standard_normal(shape, np.float32), sigma, truncate=2)
    return smooth / smooth.std()


def write(folder: Path, name: str, hu: Image, tissues: Labels) -> dict[str, str]:
    """Write a case and return its entry in the list."""
    entry = {}
    for kind, array in (("image", np.round(hu).astype(np.int16)), ("label", tissues)):
        entry[kind] = f"{kind}s/{name}.nii.gz"
        (folder / f"{kind}s").mkdir(parents=True, exist_ok=True)
        nib.save(nib.Nifti1Image(array, np.diag((STEP, STEP, STEP, 1))), folder / entry[kind])
    return entry


def main(data: Path, folder: Path) -> None:
    """Write all cases."""
    training, validation = [], []
    for number, (name, scan) in enumerate(SCANS.items()):
        print(name, flush=True)
        hu, tissues, organs = read_scan(scan, data)
        rng = np.random.default_rng(number)
        training.append(write(folder, f"{name}_0", hu, tissues))
        for n in range(1, scan.copies):
            varied = vary(hu, tissues, organs, rng)
            training.append(write(folder, f"{name}_{n}", *varied))
    for seed in (*TRAINING_SEEDS, *VALIDATION_SEEDS):
        print(f"torso {seed}", flush=True)
        rng, torsos = np.random.default_rng(seed), draw(seed)
        for kind, (hu, tissues) in zip(("plain", "contrast"), torsos, strict=True):
            entry = write(folder, f"torso_{seed}_{kind}", hu, tissues)
            (training if seed in TRAINING_SEEDS else validation).append(entry)
            if seed in TRAINING_SEEDS:
                varied = vary(hu, tissues, None, rng)
                training.append(write(folder, f"torso_{seed}_{kind}_varied", *varied))
    hu, tissues, _ = read_scan(UNSEEN, data)
    testing = [write(folder, "unseen", hu, tissues)]
    cases = {"training": training, "validation": validation, "testing": testing}
    (folder / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
    shutil.copy(Path(__file__).with_name("recipe.yaml"), folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
