"""RTSTRUCT as plastimatch and dcmrtstruct2nii fill it: no voxel differs from the label map."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from scanloom.convert.store import shipped
from scanloom.core import Layer, Segmentation
from scanloom.io.index.series import find_series
from scanloom.io.read import read_scan
from scanloom.io.scan import Scan
from support import case_folders
from support.real_scans import scans
from support.rt_witnesses import (
    assert_same_masks,
    difficult,
    filled_by_dcmrtstruct2nii,
    filled_by_plastimatch,
    masks_of,
    rtstruct_of,
)
from support.write_dicom import PLANES, Geometry, write_series

pytestmark = pytest.mark.reference
REAL = ["ct/crlm1004_abdomen_dicom", "ct/sts002_thigh", "mr/sts002_thigh_t1"]


def read(folder: Path) -> Scan:
    (series,) = (s for s in find_series(folder) if s.modality in ("CT", "MR"))
    return read_scan(series)


def written(folder: Path, plane: str) -> Scan:
    """Return a written series with pixels that are not square."""
    stored = np.random.default_rng(0).integers(0, 200, (33, 29, 8))
    across, down = PLANES[plane]
    write_series(folder, stored, Geometry(across, down))
    return read(folder)


def tissues(scan: Scan) -> Segmentation:
    """Return bands of smoothed intensity as structures, with holes in islands."""
    array = gaussian_filter(scan.volume.array.astype(np.float32), (2, 2, 0))
    bounds = np.quantile(array[array > array.min()], (0.5, 0.8, 0.95))
    labels = np.asfortranarray(np.digitize(array, bounds).astype(np.uint8))
    layer = Layer(labels, case_folders.STRUCTURES)
    return Segmentation("bands", (layer,), scan.volume.grid, "1.0")


@pytest.mark.parametrize("plane", PLANES)
def test_plastimatch_fills_every_orientation_alike(plane: str, tmp_path: Path) -> None:
    scan = written(tmp_path / "scan", plane)
    segmentation = difficult(scan)
    path = rtstruct_of(tmp_path, scan, segmentation)
    assert_same_masks(filled_by_plastimatch(path, scan, tmp_path / "p"), masks_of(segmentation))


@pytest.mark.parametrize("plane", PLANES)
def test_dcmrtstruct2nii_fills_every_orientation_alike(plane: str, tmp_path: Path) -> None:
    source = tmp_path / "scan"
    scan = written(source, plane)
    segmentation = difficult(scan)
    path = rtstruct_of(tmp_path, scan, segmentation)
    found = filled_by_dcmrtstruct2nii(path, scan, source, tmp_path / "d")
    assert_same_masks(found, masks_of(segmentation))


@pytest.mark.parametrize("relative", ["sample", *REAL])
def test_plastimatch_fills_real_scans_alike(relative: str, tmp_path: Path) -> None:
    scan = read(shipped("data") / "torso_ct" if relative == "sample" else scans(relative))
    segmentation = tissues(scan)
    path = rtstruct_of(tmp_path, scan, segmentation)
    assert_same_masks(filled_by_plastimatch(path, scan, tmp_path / "p"), masks_of(segmentation))
