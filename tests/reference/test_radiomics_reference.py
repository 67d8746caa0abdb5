"""Features of structures in real scans, as mirp computes them from files of the whole scan."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from scipy.ndimage import gaussian_filter, label

from scanloom.core import Layer, Segmentation
from scanloom.io.index.series import find_series
from scanloom.io.read import read_scan
from scanloom.ops.radiomics import compute_features
from scanloom.options import Radiomics
from support import case_folders
from support.real_scans import scans

pytestmark = pytest.mark.reference
mirp = pytest.importorskip("mirp")

BINS: dict[str, dict[str, Any]] = {
    "CT": {"base_discretisation_method": "fixed_bin_size", "base_discretisation_bin_width": 25.0},
    "MR": {
        "base_discretisation_method": "fixed_bin_number",
        "base_discretisation_n_bins": 32,
        "intensity_normalisation": "standardisation",
    },
}


def bright(array: np.ndarray) -> np.ndarray:
    """Return the second largest of the bright parts of a smoothed scan, as a mask.

    Its outermost slices are left out: a last bit decides whether mirp counts their centres.
    """
    smooth = gaussian_filter(array.astype(np.float32), (2, 2, 0))
    smooth[:, :, [0, -1]] = smooth.min()
    parts, _ = label(smooth > np.quantile(smooth, 0.97))
    sizes = np.bincount(parts.ravel())[1:]
    return parts == 1 + np.argsort(sizes)[-2]


@pytest.mark.parametrize(
    ("relative", "spacing"),
    [
        ("ct/crlm1004_abdomen_dicom", 1.0),
        ("ct/crlm1004_abdomen_dicom", None),
        ("mr/sts002_thigh_t1", 2.0),
    ],
)
def test_mirp_computes_the_same(relative: str, spacing: float | None, tmp_path: Path) -> None:
    (series,) = (s for s in find_series(scans(relative)) if s.modality in ("CT", "MR"))
    scan = read_scan(series).volume
    modality = relative[:2].upper()
    mask = bright(scan.array)
    layer = Layer(np.asfortranarray(mask, np.uint8), case_folders.STRUCTURES[:1])
    segmentation = Segmentation("bright", (layer,), scan.grid)
    settings = Radiomics(spacing=spacing, max_voxels=10**8)

    [found] = compute_features([segmentation], scan, settings)

    for name, voxels in (("image", scan.array.astype(np.float64)), ("mask", mask.astype(np.uint8))):
        nib.save(nib.Nifti1Image(voxels, scan.grid.affine), tmp_path / f"{name}.nii.gz")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        [table] = mirp.extract_features(
            image=str(tmp_path / "image.nii.gz"),
            mask=str(tmp_path / "mask.nii.gz"),
            image_modality=modality,
            new_spacing=spacing,
            base_feature_families=list(settings.families),
            **BINS[modality],
        )
    assert found.reason == ""
    assert len(found.values) == 126
    expected = {name: float(table.iloc[0][name]) for name in found.values}
    # mirp reads files as float32; bins of an MR depend on the last bit of its mean
    assert found.values == pytest.approx(expected, rel=1e-6 if modality == "CT" else 1e-3)
