"""Draw an archive of small CTs of synthetic torsos, most with contrast agent, and its truth.

    python data/draw_archive.py FOLDER

writes 24 scans of 20 subjects as NIfTI with names of BIDS into FOLDER, and true label maps of the
same names into FOLDER-truth. No patient's data is in them. `docs/better-model.md` uses them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nibabel as nib
import numpy as np
from draw_torso import MATERIALS, draw_points
from numpy.random import RandomState
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from torso_anatomy import M, torso

SCANS, SUBJECTS = 24, 20
SHAPE = (72, 54, 24)  # columns, rows, slices
SPACING = 5.0  # mm
FINE = (2, 2, 1)  # points along each axis of a voxel: what is drawn is averaged over 4 points
FIRST = (-177.5, -135.0, -105.0)  # LPS mm, centre of the first voxel
TISSUES = ("outside", "lung", "gas", "fat", "soft_tissue", "bone")
"""What a material counts as; the place is the value in a label map, as in ct_tissue."""


def agent(rng: RandomState) -> dict[M, float]:
    """Return the HU of what takes up contrast agent, of a random amount, early and at a low kV."""
    blood = rng.uniform(380, 560)
    return {
        M.BLOOD: blood,
        M.LUNG_VESSEL: blood,
        M.HEART: 0.8 * blood,
        M.KIDNEY: rng.uniform(280, 400),
        M.LIVER: rng.uniform(90, 120),
        M.SPLEEN: rng.uniform(140, 200),
    }


def ticks(axis: int) -> NDArray[np.float64]:
    """Return the coordinates (LPS mm) of the fine points along an axis."""
    step = SPACING / FINE[axis]
    return FIRST[axis] - (SPACING - step) / 2 + step * np.arange(SHAPE[axis] * FINE[axis])


def draw(seed: int) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    """Draw a torso: HU and true labels (I, J, K), i to the left, j to the back, k to the head."""
    rng = RandomState(seed)
    body = torso(seed)
    hu = {m: float(value) for m, (value, _, _) in MATERIALS.items()}
    if seed % 3:  # two of three have contrast agent
        hu.update(agent(rng))
    material = draw_points(body, (ticks(0), ticks(1), ticks(2))).material

    def average(fine: NDArray[np.float64]) -> NDArray[np.float64]:
        i, j, k = SHAPE
        return fine.reshape(i, FINE[0], j, FINE[1], k, FINE[2]).mean(axis=(1, 3, 5))

    image = gaussian_filter(average(np.array([hu[m] for m in M])[material]), (0.4, 0.4, 0))
    image += rng.normal(0, 12, SHAPE)
    tissue = np.array([TISSUES.index(MATERIALS[m][2]) for m in M])[material]
    shares = np.stack([average((tissue == n).astype(float)) for n in range(len(TISSUES))])
    return np.clip(np.round(image), -1024, 3071).astype(np.int16), shares.argmax(0).astype(np.uint8)


def write(array: NDArray[np.generic], path: Path) -> None:
    """Write voxels with the affine in RAS."""
    path.parent.mkdir(parents=True, exist_ok=True)
    affine = np.diag((-SPACING, -SPACING, SPACING, 1.0))
    affine[:3, 3] = (-FIRST[0], -FIRST[1], FIRST[2])
    nib.save(nib.Nifti1Image(array, affine), path)


def main(folder: Path) -> None:
    """Draw all scans; some subjects were scanned twice."""
    for n in range(SCANS):
        subject, session = f"sub-{n % SUBJECTS + 1:02}", f"ses-{n // SUBJECTS + 1}"
        name = f"{subject}_{session}_ct.nii.gz"
        image, truth = draw(n)
        write(image, folder / subject / session / "anat" / name)
        write(truth, folder.with_name(f"{folder.name}-truth") / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
