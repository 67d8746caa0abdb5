"""Print how good the model `ct_tissue` is on real scans.

    python models/ct_tissue/training/evaluate.py [BUNDLE]

Needs scanloom installed and the data that `ct_tissue_training.data` names: in SCANLOOM_TRAIN,
or in ../shared/data beside the checkout. BUNDLE is the folder of another version of the model.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import affine_transform

from ct_tissue_training.data import (
    GRID_SPACING_MM,
    HELD_OUT_SCANS,
    TrainingScan,
    data_folder,
    make_example,
    to_ras,
)
from ct_tissue_training.rules import BONE, NAMES
from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions, Volume
from scanloom.inference.predictor import TorchPredictor
from scanloom.io.read import load_volume

ROOT = Path(__file__).resolve().parents[3]
STACKS = (
    "scans/ct/crlm1004_abdomen_dicom/dicom",
    "scans/ct/totalseg_example_dicom/dicom",
    "scans/ct/sts002_thigh/dicom_ct",
    "scans/compressed_series/sts002_jpegls",
    "scans/ct/totalseg_pulmonary/ct_cropped.nii.gz",
    "scans/ct/totalseg_example/example_ct.nii.gz",
)
"""Scans whose end slices are examined."""
HARD_HU = 300.0
"""HU that little but bone exceeds: shows how much bone the anatomy has in a slice."""
KIDNEYS = (
    "scans/ct/crlm1004_abdomen_dicom/dicom",
    (((29, 87), (-53, 27), (-313, -267)), ((-105, -33), (-62, 9), (-313, -262))),
)
"""A scan with contrast agent, and boxes (RAS mm) around its kidneys that contain no bone."""

Labels = NDArray[np.integer]


def main(bundle: Path) -> None:
    """Print three tables."""
    data = data_folder(ROOT)
    predictor = TorchPredictor(
        load_card(bundle), device="cpu", compute=ComputeOptions(precision="float32")
    )
    scans = {}
    for path in STACKS:
        volume = load_volume(data / path, modality="CT")
        scans[path] = volume, predictor.predict(volume).layers[0].labels
    print("Bone in the end slices, voxels, beside voxels above 300 HU")
    print(f"{'scan':48} end    slice / neighbour   change    above 300 HU   change")
    for path, (volume, labels) in scans.items():
        print_ends(path, volume, labels)
    path, boxes = KIDNEYS
    volume, labels = scans[path]
    in_boxes = " + ".join(f"{ml_of_bone(volume, labels, box):.1f}" for box in boxes)
    bone_ml = (labels == BONE).sum() * volume.grid.voxel_volume / 1000
    print(f"\nBone in the kidneys of {path}: {in_boxes} ml of {bone_ml:.1f} ml")
    for source in HELD_OUT_SCANS:
        print_agreement(source, *scans[source.path], data)


def print_agreement(source: TrainingScan, volume: Volume, labels: Labels, data: Path) -> None:
    """Print Dice of each tissue, and its volumes, on the network's grid against the rules."""
    truth = make_example(source, data).labels
    array, spacing = to_ras(replace(volume, array=labels))
    at = [GRID_SPACING_MM / s for s in spacing]
    coarse = affine_transform(array, at, output_shape=truth.shape, order=0, mode="nearest")
    voxel_ml = GRID_SPACING_MM**3 / 1000
    print(f"\n{source.path}, against the rules")
    print("tissue         Dice   rules ml   model ml   difference")
    for n, name in enumerate(NAMES[1:], start=1):
        ours, theirs = int((coarse == n).sum()), int((truth == n).sum())
        both = int(((coarse == n) & (truth == n)).sum())
        dice, change = 2 * both / max(ours + theirs, 1), ours / max(theirs, 1) - 1
        volumes = f"{theirs * voxel_ml:10.1f} {ours * voxel_ml:10.1f} {change:+9.1%}"
        print(f"{name:12} {dice:6.3f} {volumes}")


def print_ends(path: str, volume: Volume, labels: Labels) -> None:
    """Print how much bone the first and the last slice have, and their neighbours."""
    axis = int(np.argmax(np.asarray(volume.grid.axes) == 2))
    bone, hard = (
        np.moveaxis(mask, axis, 0).sum((1, 2)) for mask in (labels == BONE, volume.array > HARD_HU)
    )
    for end, slice_, neighbour in (("first", 0, 1), ("last", -1, -2)):
        counts = "".join(
            f"{f'{n[slice_]} / {n[neighbour]}':>19} {n[slice_] / max(n[neighbour], 1) - 1:+8.1%}"
            for n in (bone, hard)
        )
        print(f"{path:48} {end:5}{counts}")


def ml_of_bone(volume: Volume, labels: Labels, box: tuple[tuple[float, float], ...]) -> float:
    """Return the volume of bone in a box (RAS mm), in ml."""
    positions = np.argwhere(labels == BONE) @ volume.grid.affine[:3, :3].T
    positions += volume.grid.affine[:3, 3]
    low, high = np.array(box).T
    inside = ((positions >= low) & (positions <= high)).all(1)
    return float(inside.sum() * volume.grid.voxel_volume / 1000)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "models" / "ct_tissue")
