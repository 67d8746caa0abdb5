"""Lists of series name the files that look like label maps of a scan beside them."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from scanloom.io.index.label_maps import looks_like_labels
from scanloom.io.index.listing import LABELS, LABELS_NOTE, list_candidates
from scanloom.io.index.series import find_series
from support.commands import scanloom
from support.write_dicom import Geometry, noise, write_series

SHAPE = (24, 20, 6)


def labels() -> NDArray[np.uint8]:
    """Return a label map of three structures, one of them a voxel thin."""
    array = np.zeros(SHAPE, np.uint8)
    array[2:9, 3:15, 1:5], array[9:20, 3:15, 1:5], array[20, 3:15, 1:5] = 1, 117, 3
    return array


def save(path: Path, array: NDArray[np.uint8]) -> None:
    """Write a NIfTI file with the spacing of `write_series`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    geometry = Geometry()
    image = nibabel.Nifti1Image(
        array, np.diag([geometry.spacing[1], geometry.spacing[0], geometry.step, 1.0])
    )
    image.set_sform(image.affine, 1)
    image.to_filename(path)


def smooth() -> NDArray[np.uint8]:
    """Return an image of whole numbers with a background of zeros, as after skull stripping."""
    values = ndimage.gaussian_filter(noise(SHAPE).astype(np.float32), 1.0)
    return np.where(labels() > 0, values / values.max() * 255, 0).astype(np.uint8)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (labels(), True),
        ((labels() > 1).astype(np.int16) * 255, True),
        (np.zeros(SHAPE, np.uint8), True),
        (smooth(), False),
        (noise(SHAPE), False),
        (labels().astype(np.float32), True),
        (smooth().astype(np.float32) / 2, False),
        (labels().astype(np.int16) - 1, False),
    ],
)
def test_labels_are_whole_numbers_that_mostly_equal_their_neighbours(
    array: NDArray[np.generic], expected: bool
) -> None:
    assert looks_like_labels(array) is expected


def test_a_list_names_label_maps_beside_their_scan_and_nothing_else(tmp_path: Path) -> None:
    """Beside a NIfTI scan of 8 bits, and in a folder next to that of a DICOM series."""
    save(tmp_path / "heads" / "t1.nii.gz", smooth())
    save(tmp_path / "heads" / "t1_labels.nii.gz", labels())
    save(tmp_path / "alone" / "atlas.nii.gz", labels()[:, :, 1:])
    write_series(tmp_path / "ct" / "dicom", noise(SHAPE))
    save(tmp_path / "ct" / "seg" / "mask.nii.gz", np.flip(labels(), 0))

    listed = list_candidates(find_series(tmp_path))
    shown = scanloom("index", tmp_path)

    for text in (listed, shown.out):
        rows = {row.split()[1]: row for row in text.splitlines() if row.strip()[:1].isdigit()}
        marked = {name for name, row in rows.items() if LABELS in row}
        assert marked == {"t1_labels.nii.gz", "mask.nii.gz"}
        assert text.count(LABELS_NOTE) == 1
