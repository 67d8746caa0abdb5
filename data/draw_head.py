"""Draw a head of a label map of SynthSeg as T1-weighted MR, whose structures are known.

    python data/draw_head.py MAP FOLDER

MAP is one that brain_anatomy is not trained on; the sample is of `training_seg_04.nii.gz`
(Apache-2.0). Writes `head_mr.nii.gz`, `head_truth.json` with the volumes of the structures of
brain_anatomy, and `head_labels.nii.gz`, the map on the scan's grid, into FOLDER. The same voxels
each time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import nibabel as nib
import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.ndimage import affine_transform, gaussian_filter, zoom
from scipy.spatial.transform import Rotation

RECIPE = Path(__file__).parents[1] / "models" / "brain_anatomy" / "training" / "recipe.yaml"
DEFINITION = (
    "ml of the label map that the head was drawn of, before it was turned, blurred and given noise"
)
SEED = 4
SHAPE = (136, 168, 120)
SPACING = (1.4, 1.4, 1.6)  # mm
TURN = (6, -5, 8)  # degrees around the axes to the right, front and head
BRIGHTNESS: Mapping[int, tuple[int, ...]] = {  # T1-weighted, of values of the map; other ones: 0
    40: (14, 15, 24, 72, 4, 5, 43, 44),  # ventricles and fluid outside of the brain
    62: (136, 137, 163, 164),  # choroid plexus
    90: (3, 42, 8, 47, 17, 53, 18, 54, 26, 58),  # cortex, hippocampus, amygdala, accumbens
    98: (11, 50, 30, 62),  # caudate, vessels
    113: (25, 57, 12, 51),  # lesions of white matter, putamen
    128: (10, 49, 16, 28, 60, 512),  # thalamus, brain stem and cord, ventral diencephalon
    140: (13, 52, 7, 46),  # pallidum, white matter of the cerebellum
    155: (2, 41, 85),  # white matter of the brain, optic chiasm
    25: (515, 506),  # hard bone, eyes' fluid
    75: (509, 514, 508),  # tongue, sinuses of the veins
    110: (507, 502, 530),  # muscle, glands
    170: (511, 516),  # fat of skin and marrow
}


def draw(numbers: NDArray[np.int64], affine: NDArray[np.float64]) -> nib.Nifti1Image:
    """Draw the scan of a label map (i, j, k) in RAS, turned in its field of view."""
    rng = np.random.RandomState(SEED)
    table = np.zeros(max(numbers.max(), max(map(max, BRIGHTNESS.values()))) + 1)
    for mean, values in BRIGHTNESS.items():
        table[list(values)] = mean
    tissue = table[numbers]
    texture = gaussian_filter(rng.normal(size=tissue.shape), 0.8)
    tissue += 0.04 * tissue * texture / texture.std()
    turned = np.eye(4)
    turned[:3, :3] = Rotation.from_euler("xyz", TURN, degrees=True).as_matrix() @ np.diag(SPACING)
    head = np.argwhere((numbers > 0) & (numbers < 100)).mean(0)  # the brain's middle
    centre = affine[:3, :3] @ head + affine[:3, 3]
    turned[:3, 3] = centre - turned[:3, :3] @ ((np.array(SHAPE) - 1) / 2)
    to_map = np.linalg.inv(affine) @ turned
    blurred = gaussian_filter(tissue, 0.5)  # of 1 mm, as a scanner's voxels
    scan = affine_transform(blurred, to_map[:3, :3], to_map[:3, 3], SHAPE, order=1)
    coil = zoom(rng.normal(scale=0.08, size=(4, 4, 4)), np.array(SHAPE) / 4, order=3)
    noise = rng.normal(scale=3, size=(2, *SHAPE))
    scan = np.hypot(scan * np.exp(coil) + noise[0], noise[1])  # Rician
    image = nib.Nifti1Image(np.round(scan).astype(np.int16), turned)
    image.header.set_xyzt_units("mm")
    return image


def on_grid_of(
    scan: nib.Nifti1Image, numbers: NDArray[np.int64], affine: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return the numbers of a label map at the voxels of a scan, of the nearest voxel."""
    to_map = np.linalg.inv(affine) @ scan.affine
    return np.asarray(affine_transform(numbers, to_map[:3, :3], to_map[:3, 3], scan.shape, order=0))


def true_volumes(numbers: NDArray[np.int64], affine: NDArray[np.float64]) -> dict[str, float]:
    """Return ml of each structure of brain_anatomy in a label map."""
    page = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    ml = abs(np.linalg.det(affine[:3, :3])) / 1000
    return {
        each["label"]: round(float(np.isin(numbers, each["values"]).sum() * ml), 2)
        for each in page["structures"]
    }


def main(path: Path, folder: Path) -> None:
    """Draw the head and write it with its volumes and labels."""
    image = nib.as_closest_canonical(nib.load(path))
    numbers = np.asarray(image.dataobj).astype(np.int64)
    scan = draw(numbers, image.affine)
    labels = on_grid_of(scan, numbers, image.affine).astype(np.int16)
    nib.save(scan, folder / "head_mr.nii.gz")
    truth = {"definition": DEFINITION, "structures_ml": true_volumes(numbers, image.affine)}
    text = json.dumps(truth, indent=2) + "\n"
    (folder / "head_truth.json").write_text(text, encoding="utf-8")
    nib.save(nib.Nifti1Image(labels, scan.affine), folder / "head_labels.nii.gz")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
