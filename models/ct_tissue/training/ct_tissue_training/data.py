"""Scans for training and evaluating `ct_tissue`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from ct_tissue_training.rules import (
    BONE,
    SOFT_TISSUE,
    ScanHints,
    distance_mm,
    label_tissues,
    majority_label,
    resample_fine,
)
from scanloom.core import Volume

GRID_SPACING_MM = 3.0
"""Voxel size of the network's grid in mm."""
RULE_GRID_FACTOR = 2
"""Factor by which the grid of the labelling rules is finer."""
ORGANS = {"kidney": (2, 3), "vessel": (52, 63, 64), "liver or spleen": (1, 5)}
"""Organs that take up contrast agent, and their numbers in label maps of TotalSegmentator."""


@dataclass(frozen=True)
class TrainingScan:
    """A scan by its path below the data folder.

    Parameters
    ----------
    path : str
        File or folder.
    hints : ScanHints
        Observations by a person.
    vessels : tuple of str
        Masks of vessels with contrast agent, which the rules cannot distinguish from bone.
    weight : float
        Relative sampling frequency.
    organs : str or None
        Label map of TotalSegmentator on the scan's grid, with organs that take up contrast agent.
    """

    path: str
    hints: ScanHints
    vessels: tuple[str, ...] = ()
    weight: float = 1.0
    organs: str | None = None


TRAINING_SCANS = (
    TrainingScan("scans/ct/totalseg_example/example_ct.nii.gz", ScanHints(), weight=3.0),
    TrainingScan(
        "train/labelled_ct/totalseg_aorta/image_ct.nii.gz",
        ScanHints(cut=True, bone=220, blood=330),
        vessels=tuple(
            f"train/labelled_ct/totalseg_aorta/labels/{name}.nii.gz"
            for name in ("aorta", "brachiocephalic_trunk", "celiac_trunk",
                         "common_carotid_artery_left", "renal_arteries", "subclavian_artery_left",
                         "superior_mesenteric_artery")
        ),
        weight=2.0,
    ),
    TrainingScan(
        "scans/ct/totalseg_example/example_ct_sm.nii.gz",
        ScanHints(),
        weight=5.0,
        organs="scans/ct/totalseg_example/Ref_seg/example_ct_sm.total.nii.gz",
    ),
    TrainingScan("scans/ct/totalseg_example_dicom/dicom", ScanHints(bone=250), weight=5.0),
    TrainingScan("train/labelled_ct/sts001_thigh/image.nii.gz", ScanHints(lung=False), weight=2.0),
    TrainingScan("train/labelled_ct/sts002_thigh/image.nii.gz", ScanHints(lung=False), weight=2.0),
)  # fmt: skip
HELD_OUT_SCANS = (TrainingScan("scans/ct/crlm1004_abdomen_dicom/dicom", ScanHints(bone=235)),)
"""Held-out scan of another hospital, scanner and patient. (scans/ct/totalseg_pulmonary is another
crop of train/labelled_ct/totalseg_aorta, so it can't be used for evaluation.)"""


@dataclass(frozen=True, eq=False)
class Example:
    """A scan on the network's grid: HU float32, labels uint8, both (I, J, K), axes RAS.

    `organs` are the organs that take up contrast agent, as numbers of `ORGANS`, if they are known.
    """

    hu: NDArray[np.float32]
    labels: NDArray[np.uint8]
    weight: float
    organs: NDArray[np.uint8] | None = None


def data_folder(root: Path) -> Path:
    """Return the folder of training data: SCANLOOM_TRAIN, or shared/data next to the checkout."""
    configured = os.environ.get("SCANLOOM_TRAIN")
    return Path(configured) if configured else root.parent / "shared" / "data"


def make_example(source: TrainingScan, data: Path) -> Example:
    """Read a scan, label it by rules and resample both to the network's grid."""
    from scanloom.io.read import load_volume

    volume = load_volume(data / source.path, modality="CT")
    hu, spacing = to_ras(volume)
    hu = np.clip(hu, -1024, 2000)
    smooth = ndimage.gaussian_filter(hu, [0.6 / s for s in spacing])
    fine = resample_fine(smooth, spacing, GRID_SPACING_MM, RULE_GRID_FACTOR)
    fine_spacing = (GRID_SPACING_MM / RULE_GRID_FACTOR,) * 3
    labels = label_tissues(fine, fine_spacing, source.hints)
    for name in source.vessels:
        mask = np.asarray(nib.as_closest_canonical(nib.load(data / name)).dataobj) > 0
        near_vessel = (
            resample_fine(
                distance_mm(mask, spacing, 9.0), spacing, GRID_SPACING_MM, RULE_GRID_FACTOR
            )
            < 3.0
        )
        labels[near_vessel & (labels == BONE)] = SOFT_TISSUE
    coarse = resample_fine(hu, spacing, GRID_SPACING_MM, 1)
    organs = None if source.organs is None else _organs(data / source.organs, spacing)
    return Example(coarse, majority_label(labels, RULE_GRID_FACTOR), source.weight, organs)


def _organs(path: Path, spacing: tuple[float, float, float]) -> NDArray[np.uint8]:
    """Return the organs of a label map on the network's grid, as numbers of `ORGANS` from 1."""
    numbers = np.asarray(nib.as_closest_canonical(nib.load(path)).dataobj)
    masks = [np.isin(numbers, values).astype(np.float32) for values in ORGANS.values()]
    shares = [resample_fine(mask, spacing, GRID_SPACING_MM, 1) for mask in masks]
    return np.asarray(np.argmax([np.full_like(shares[0], 0.5), *shares], axis=0), np.uint8)


def to_ras(volume: Volume) -> tuple[NDArray[np.float32], tuple[float, float, float]]:
    """Return a volume's array with axes reordered and flipped to RAS, and its spacing in mm."""
    axes = volume.grid.axes
    order = np.argsort(axes)
    array = np.transpose(volume.array, order).astype(np.float32)
    for n, axis in enumerate(order):
        if volume.grid.affine[n, axis] < 0:
            array = np.flip(array, n)
    i, j, k = (volume.grid.spacing[axis] for axis in order)
    return np.ascontiguousarray(array), (i, j, k)
