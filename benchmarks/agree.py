"""Agreement of two label maps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Agreement:
    """Shares from 0 to 1: of all voxels, and Dice over structures above 1 ml in the first map."""

    voxels: float
    dice_mean: float
    dice_least: float

    def __str__(self) -> str:
        return f"{100 * self.voxels:.3f} % / {self.dice_mean:.4f} / {self.dice_least:.4f}"


def load_labels(path: Path) -> tuple[Any, float]:
    """Return labels (I, J, K), along the patient's axes, and the ml of a voxel."""
    import nibabel as nib

    image = nib.as_closest_canonical(nib.load(path))
    return np.asanyarray(image.dataobj), float(np.prod(image.header.get_zooms())) / 1000


def agreement(first: Any, second: Any, voxel_ml: float) -> Agreement:
    """Compare two label maps (I, J, K); those of different shape don't agree at all."""
    if first.shape != second.shape:
        return Agreement(0.0, 0.0, 0.0)
    size = 1 + max(int(first.max()), int(second.max()))
    same = first == second
    both = np.bincount(first[same].ravel(), minlength=size)
    mine, theirs = (
        np.bincount(labels.ravel(order="K"), minlength=size) for labels in (first, second)
    )
    counts = mine * voxel_ml > 1
    counts[0] = False
    dice = 2 * both[counts] / (mine + theirs)[counts]
    return Agreement(float(same.mean()), float(dice.mean()), float(dice.min()))
