"""Scans with known things at known places."""

from __future__ import annotations

import nibabel as nib
import numpy as np

from scanloom.core import Code, Grid, Layer, Segmentation, Structure, Volume
from scanloom.ops.measure import measure

CODE = Code("85756007", "SCT", "Tissue")
BODY, LEFT, FRONT, HEAD = (150, 150, 80), (255, 0, 0), (0, 255, 0), (0, 0, 255)


def structure(number: int, name: str, color=BODY, **more) -> Structure:
    return Structure(f"s{number}", number, name, CODE, CODE, color, **more)


MARKERS = (
    structure(1, "Body", BODY),
    structure(2, "Left", LEFT),
    structure(3, "Front", FRONT),
    structure(4, "Head", HEAD),
)


def torso() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return intensities, labels and a RAS affine: a box with markers left, in front, at the head.

    All three markers lie in all three planes through the middle.
    """
    shape, affine = (60, 50, 40), np.diag([4.0, 5.0, 6.0, 1.0])
    affine[:3, 3] = -110, -120, 30
    labels = np.zeros(shape, np.uint8)
    labels[5:55, 5:45, 5:35] = 1
    labels[8:11, 22:28, 17:23] = 2  # low R: the patient's left
    labels[27:33, 41:44, 17:23] = 3  # high A: in front
    labels[27:33, 22:28, 30:32] = 4  # high S: at the head
    array = (np.random.default_rng(0).normal(0, 20, shape) + labels * 40).astype(np.int16)
    return array, labels, affine


def stored(array: np.ndarray, affine: np.ndarray, codes: str) -> tuple[np.ndarray, np.ndarray]:
    """Store an array with other axes, by nibabel: the same voxels at the same places."""
    image = nib.Nifti1Image(array, affine)
    change = nib.orientations.ornt_transform(
        nib.io_orientation(affine), nib.orientations.axcodes2ornt(codes)
    )
    turned = image.as_reoriented(change)
    return np.asanyarray(turned.dataobj), turned.affine


def case(array, labels, affine, structures=MARKERS, **more):
    """Return volume, segmentations and measurements for a preview."""
    grid = Grid(array.shape, affine)
    known = {"unit": "HU", "modality": "CT", **more}
    volume = Volume(array, grid, **known)
    segmentation = Segmentation("model", (Layer(labels, structures),), grid)
    return volume, (segmentation,), measure(segmentation, volume)


def trunk(skull: bool = False, heart: int = 40) -> Volume:
    """Return a trunk with a heart and two ribs of bone, or a skull around a brain."""
    array = np.full((80, 80, 40), -1000, np.int16)
    x, y = np.indices((80, 80)) - 39.5
    radius = np.hypot(x, y)
    array[radius < 32] = 40
    array[radius < 12] = heart
    bone = (radius > 26) & (radius < 30)
    array[bone if skull else bone & (np.abs(y) < 12)] = 1000
    noise = np.random.default_rng(0).normal(0, 10, array.shape).astype(np.int16)
    return Volume(array + noise, Grid(array.shape, np.diag([-3.0, -3.0, -3.0, 1.0])), "HU", "CT")
