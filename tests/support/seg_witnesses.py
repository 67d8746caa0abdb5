"""Foreign programs that read results: positions of structures, and complaints about files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import highdicom as hd
import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from scanloom.core import Segmentation

LABELMAP_ERRORS = [
    "Error - SegmentNumber not monotonically increasing from one by one - have SegmentSequence "
    "item number 1 (from one) with SegmentNumber of 0",
    "Error - Information Object Not found",
]
"""All that dciodvfy says of any Label Map: it does not know the class, nor that background is 0."""

Points = dict[str, np.ndarray]


def program(name: str) -> str:
    """Return a foreign program's path; skip by name where it is absent."""
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def sorted_points(array: np.ndarray, affine: np.ndarray) -> np.ndarray:
    """Return the RAS mm of all voxels that are set, in an order that does not depend on axes."""
    points = np.argwhere(array) @ affine[:3, :3].T + affine[:3, 3]
    keys = np.round(points, 2)
    return points[np.lexsort(keys.T)]


def nifti_points(
    folder: Path, segmentation: Segmentation, model: str = "", rect: str = ""
) -> Points:
    """Return where each structure is by nibabel; SimpleITK must agree where it knows the grid."""
    points = {}
    for n, layer in enumerate(segmentation.layers):
        path = folder / f"{model}segmentation{rect}{f'-{n + 1}' if n else ''}.nii.gz"
        image = nib.load(path)
        labels = np.asarray(image.dataobj)
        if rect or not segmentation.grid.sheared:
            theirs = sitk.ReadImage(path)
            np.testing.assert_array_equal(sitk.GetArrayViewFromImage(theirs).T, labels)
            np.testing.assert_allclose(itk_affine(theirs), image.affine, atol=1e-3)
        for s in layer.structures:
            points[s.label] = sorted_points(labels == s.number, image.affine)
    return points


def itk_affine(image: sitk.Image) -> np.ndarray:
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
    affine[:3, 3] = image.GetOrigin()
    return np.diag((-1, -1, 1, 1)) @ affine


def dcmqi_points(path: Path, folder: Path) -> Points:
    """Return where each structure is by dcmqi."""
    folder.mkdir()
    command = [program("segimage2itkimage"), "--inputDICOM", path, "--outputDirectory", folder]
    subprocess.run([*command, "-t", "nii", "-p", "x"], check=True, capture_output=True)
    meta = json.loads((folder / "x-meta.json").read_text())["segmentAttributes"]
    points = {}
    for n, group in enumerate(meta, 1):
        image = nib.load(folder / f"x-{n}.nii.gz")
        for segment in group:
            mask = np.asarray(image.dataobj) == segment["labelID"]
            points[segment["SegmentLabel"]] = sorted_points(mask, image.affine)
    return points


def highdicom_points(path: Path) -> Points:
    """Return where each structure is by highdicom's reader."""
    seg = hd.seg.segread(path)
    volume = seg.get_volume()  # (K, J, I, segments), to LPS mm
    affine = np.diag((-1, -1, 1, 1)) @ volume.affine
    numbers = [n for n in seg.segment_numbers if n != 0]
    return {
        seg.get_segment_description(number).segment_label: sorted_points(
            volume.array[..., n], affine
        )
        for n, number in enumerate(numbers)
    }


def highdicom_frame_points(path: Path) -> Points:
    """Return where each structure is by highdicom, frame by frame: no regular stack is needed."""
    seg = hd.seg.segread(path)
    shared = seg.SharedFunctionalGroupsSequence[0]
    frames = seg.get_frames(list(range(1, seg.NumberOfFrames + 1)))
    by_label: dict[str, list[np.ndarray]] = {}
    for group, frame in zip(seg.PerFrameFunctionalGroupsSequence, frames, strict=True):
        transform = hd.spatial.PixelToReferenceTransformer(
            image_position=group.PlanePositionSequence[0].ImagePositionPatient,
            image_orientation=shared.PlaneOrientationSequence[0].ImageOrientationPatient,
            pixel_spacing=shared.PixelMeasuresSequence[0].PixelSpacing,
        )
        for number in np.unique(frame[frame > 0]):
            identity = group.get("SegmentIdentificationSequence")
            segment = identity[0].ReferencedSegmentNumber if identity else int(number)
            label = seg.get_segment_description(segment).segment_label
            rows, columns = np.nonzero(frame == number)
            points = transform(np.column_stack([columns, rows]))
            by_label.setdefault(label, []).append(points * (-1, -1, 1))
    stacked = {label: np.concatenate(points) for label, points in by_label.items()}
    return {label: p[np.lexsort(np.round(p, 2).T)] for label, p in stacked.items()}


def assert_same_places(ours: Points, theirs: Points) -> None:
    assert {k: len(v) for k, v in ours.items()} == {k: len(v) for k, v in theirs.items()}
    for label, points in ours.items():
        assert len(points)
        np.testing.assert_allclose(theirs[label], points, atol=2e-3, err_msg=label)


def complaints(path: Path) -> list[str]:
    """Return the errors that dciodvfy finds."""
    done = subprocess.run([program("dciodvfy"), path], capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert bool(done.returncode) == bool(errors), done.stderr
    return errors
