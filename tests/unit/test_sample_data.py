"""The sample study: its headers are true, in both formats, and it can be drawn again."""

from __future__ import annotations

import gzip
import importlib
import json
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pydicom
import pytest

from support.real_scans import ROOT

DATA = ROOT / "data"


@pytest.fixture(scope="module")
def slices() -> list[pydicom.Dataset]:
    """Return all slices, from the feet to the head."""
    datasets = [pydicom.dcmread(path) for path in sorted((DATA / "torso_ct").iterdir())]
    return sorted(datasets, key=lambda ds: ds.ImagePositionPatient[2])


@pytest.fixture(scope="module")
def scan() -> np.ndarray:
    """Return HU (I, J, K) of the NIfTI."""
    return np.asarray(nib.load(DATA / "torso_ct.nii.gz").dataobj)


def test_both_formats_hold_the_same_voxels_at_the_same_places(slices, scan):
    affine = nib.load(DATA / "torso_ct.nii.gz").affine
    for k, ds in enumerate(slices):
        hu = ds.pixel_array.T.astype(int) + int(ds.RescaleIntercept)
        np.testing.assert_array_equal(hu, scan[:, :, k])
        first = affine @ (0, 0, k, 1)
        np.testing.assert_allclose(
            np.array(ds.ImagePositionPatient, float) * (-1, -1, 1), first[:3], atol=1e-3
        )
    np.testing.assert_allclose(np.abs(np.diag(affine)[:2]), slices[0].PixelSpacing[::-1])


def test_the_study_is_synthetic_and_small(slices):
    assert {str(ds.PatientName) for ds in slices} == {"Phantom^Torso"}
    assert len({ds.SOPInstanceUID for ds in slices}) == len(slices) == 60
    assert all(ds.SOPInstanceUID.startswith("2.25.") for ds in slices)
    files = [p for p in DATA.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert sum(p.stat().st_size for p in files) < 6_700_000


def test_anatomy_lies_on_the_right_sides(scan):
    """Gas of the stomach on the left and in front, the spine behind, lungs above."""
    affine = nib.load(DATA / "torso_ct.nii.gz").affine
    inner = scan[30:-30, 25:-45]

    def middle(mask: np.ndarray) -> np.ndarray:
        i, j, k = np.argwhere(mask).mean(0)
        return affine[:3] @ (i + 30, j + 25, k, 1)

    lungs = (inner > -920) & (inner < -780)
    gas = (inner < -970) & (np.indices(inner.shape)[2] < 26)
    bone = inner > 300
    assert middle(bone)[1] < middle(lungs)[1]  # RAS: to the back is less
    assert middle(lungs)[2] > middle(gas)[2]
    assert middle(gas)[1] > middle(bone)[1]


def test_volumes_are_those_of_the_voxels(scan):
    """Plain thresholds, blind to position, come near the volumes that were drawn."""
    truth = json.loads((DATA / "torso_truth.json").read_text())["tissues_ml"]
    ml = 2.2 * 2.2 * 5 / 1000
    fat = ((scan > -150) & (scan < -60)).sum() * ml
    before_table = scan[:, :102]
    lung = ((before_table > -920) & (before_table < -500)).sum() * ml
    assert fat == pytest.approx(truth["fat"], rel=0.15)
    assert lung == pytest.approx(truth["lung"], rel=0.15)


@pytest.mark.slow
def test_the_study_is_drawn_again_byte_for_byte(tmp_path: Path):
    subprocess.run([sys.executable, DATA / "draw_torso.py", tmp_path], check=True)
    for path in sorted(tmp_path.rglob("*")):
        if path.is_dir():
            continue
        ours = DATA / path.relative_to(tmp_path)
        if path.suffix == ".gz":  # another zlib may pack otherwise
            assert gzip.decompress(path.read_bytes()) == gzip.decompress(ours.read_bytes())
        else:
            assert path.read_bytes() == ours.read_bytes(), path.name
    assert len(list(tmp_path.rglob("*.dcm"))) == 60


def test_a_slice_drawn_again_is_the_slice_that_ships(scan, monkeypatch):
    """Quick stand-in for the whole: without noise it differs from the file by noise and blur."""
    monkeypatch.syspath_prepend(DATA)
    drawing = importlib.import_module("draw_torso")
    hu = np.array([drawing.MATERIALS[m][0] for m in drawing.M], float)
    clean = drawing.average(hu[drawing.draw_slab(drawing.torso(drawing.SEED), 30).material])
    difference = np.abs(scan[:, :, 30] - clean)
    assert np.median(difference) < 8
    assert np.percentile(difference, 97) < 130


def test_the_head_is_seen_whole_and_oblique():
    """Its brain is inside the field of view, and the scan's axes are not those of the body."""
    image = nib.load(DATA / "head_mr.nii.gz")
    voxels = np.asarray(image.dataobj)
    truth = json.loads((DATA / "head_truth.json").read_text())["structures_ml"]
    assert len(truth) == 32
    assert 900 < sum(ml for label, ml in truth.items() if label != "csf") < 1600
    assert nib.aff2axcodes(image.affine) == ("R", "A", "S")
    assert not np.allclose(image.affine[:3, :3], np.diag(np.diag(image.affine[:3, :3])), atol=0.05)
    ml = float(np.prod(image.header.get_zooms())) / 1000
    # white matter is brighter than all of the head but fat
    assert (voxels > 130).sum() * ml > sum(
        truth[f"cerebral_white_matter_{s}"] for s in ("left", "right")
    )


def test_a_head_is_drawn_where_its_labels_are(monkeypatch):
    """A bright block in a dark head: the scan is turned, and the labels on its grid with it."""
    monkeypatch.syspath_prepend(DATA)
    drawing = importlib.import_module("draw_head")
    numbers = np.zeros((60, 70, 50), np.int64)
    numbers[5:55, 5:65, 5:45] = 24
    numbers[10:25, 30:60, 12:30] = 2
    affine = np.diag([2.0, 2.0, 2.0, 1.0])
    affine[:3, 3] = -50, 10, 30

    scan = drawing.draw(numbers, affine)
    labels = drawing.on_grid_of(scan, numbers, affine)

    voxels = np.asarray(scan.dataobj)
    assert voxels[labels == 2].mean() > 3 * voxels[labels == 24].mean()
    bright = scan.affine @ (*np.argwhere(voxels > 100).mean(0), 1)
    np.testing.assert_allclose(
        bright[:3], affine[:3, :3] @ (17, 44.5, 20.5) + affine[:3, 3], atol=1
    )
    assert not np.allclose(scan.affine[:3, :3], np.diag(np.diag(scan.affine[:3, :3])))
