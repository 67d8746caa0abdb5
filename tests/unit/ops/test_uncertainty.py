"""Means of uncertainty in structures, its files, and maps of several models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from scipy import ndimage

from scanloom.core import ScanError
from scanloom.core.segmentation import Uncertainty
from scanloom.engine.case.writers import read_back, write_files
from scanloom.io.extras.nifti import UNCERTAINTY
from scanloom.io.output.case_folder import CaseContent
from scanloom.ops.measure import measure
from scanloom.ops.uncertainty import add_uncertainty, largest_uncertainty
from support import case_folders


def uncertainty(shape: tuple[int, ...], seed: int = 0, *, single: bool = False) -> Uncertainty:
    maps = np.random.default_rng(seed).integers(0, 256, (2, *shape), np.uint8)
    return Uncertainty(maps[0], None if single else maps[1])


def test_means_are_those_of_scipy() -> None:
    scan = case_folders.dicom_scan()
    plain = case_folders.segmentation_of(scan)
    maps = uncertainty(plain.grid.shape)
    segmentation = replace(plain, uncertainty=maps)
    measured = measure(segmentation, scan.volume)
    assert tuple(add_uncertainty(measured, plain)) == measured
    results = list(add_uncertainty(measured, segmentation))
    assert any(m.voxels for m in results)
    for m in results:
        layer = next(each for each in plain.layers if m.label in {s.label for s in each.structures})
        if not m.voxels:
            assert m.entropy is m.disagreement is None
            continue
        expected = ndimage.mean(maps.entropy, layer.labels, m.number) / 255
        assert m.entropy == pytest.approx(expected)
        expected = ndimage.mean(maps.disagreement, layer.labels, m.number) / 255
        assert m.disagreement == pytest.approx(expected)


def test_files_are_read_by_other_programs_and_checked(tmp_path: Path) -> None:
    scan = case_folders.dicom_scan()
    maps = uncertainty(scan.volume.grid.shape)
    segmentation = replace(case_folders.segmentation_of(scan), uncertainty=maps)
    case = case_folders.case_with(also=("uncertainty",))
    content = CaseContent(case, scan, [segmentation])
    write_files(tmp_path, content, [UNCERTAINTY])
    read_back(tmp_path, content, [UNCERTAINTY])
    for name, values in maps.maps():
        file = tmp_path / f"{name}.nii.gz"
        image = nib.load(file)
        np.testing.assert_allclose(image.get_fdata(), values / 255, atol=1e-6)
        np.testing.assert_allclose(image.affine, scan.volume.grid.affine, atol=1e-3)
        voxels = sitk.GetArrayFromImage(sitk.ReadImage(str(file)))
        np.testing.assert_allclose(voxels.T, values / 255, atol=1e-6)
    changed = replace(segmentation, uncertainty=uncertainty(maps.entropy.shape, 1))
    with pytest.raises(ScanError, match="other voxels"):
        read_back(tmp_path, CaseContent(case, scan, [changed]), [UNCERTAINTY])


def test_of_several_models_the_largest_counts() -> None:
    a, b = uncertainty((3, 4, 5)), uncertainty((3, 4, 5), 1, single=True)
    both = largest_uncertainty([a, b])
    assert both is not None
    np.testing.assert_array_equal(both.entropy, np.maximum(a.entropy, b.entropy))
    np.testing.assert_array_equal(both.disagreement, a.disagreement)
    assert largest_uncertainty([a, None]) is None


def test_maps_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="disagreement must be"):
        Uncertainty(np.zeros((2, 2, 2), np.uint8), np.zeros((2, 2, 2)))
