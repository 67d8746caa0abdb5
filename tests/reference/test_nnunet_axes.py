"""A DICOM series is given to nnU-Net's models as dcm2niix would store it, by dcm2niix itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from scanloom.cards.card import NetworkGrid
from scanloom.inference.geometry import as_nifti, plan_grid
from scanloom.io.read import load_volume
from support.write_dicom import PLANES, Geometry, Words, noise, write_series

DCM2NIIX = shutil.which("dcm2niix")
pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(DCM2NIIX is None, reason="dcm2niix is not installed"),
]


@pytest.mark.parametrize("acquisition", ["CT", "2D", "3D"])
@pytest.mark.parametrize("step", [2.5, -2.5])
@pytest.mark.parametrize("plane", PLANES)
def test_voxels_are_in_the_order_of_dcm2niix(
    plane: str, step: float, acquisition: str, tmp_path: Path
) -> None:
    def edit(k: int, dataset: Any) -> None:
        dataset.InstanceNumber, dataset.SliceThickness = k + 1, "2.5"
        if acquisition != "CT":
            dataset.MRAcquisitionType, dataset.ScanningSequence = acquisition, "GR"

    across, down = PLANES[plane]
    attributes = Words(modality="CT" if acquisition == "CT" else "MR")
    geometry = Geometry(across=across, down=down, step=step)
    write_series(tmp_path / "dicom", noise((12, 10, 6)), geometry, words=attributes, edit=edit)
    command = [str(DCM2NIIX), "-b", "n", "-f", "scan", "-o", str(tmp_path), str(tmp_path / "dicom")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    stored = nibabel.load(tmp_path / "scan.nii")

    volume = load_volume(tmp_path / "dicom")
    plan = plan_grid(volume.grid, as_nifti(NetworkGrid(as_nifti=True), volume))

    np.testing.assert_allclose(plan.oriented.affine, stored.affine, atol=1e-3)
    flips = tuple(slice(None, None, -1 if flipped else None) for flipped in plan.flipped)
    ours = volume.array.transpose(plan.follows)[flips]
    np.testing.assert_array_equal(ours, np.asarray(stored.dataobj))
