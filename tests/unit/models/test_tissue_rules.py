"""The rules distinguish tissues that intensity alone cannot."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from rules import (
    BONE,
    FAT,
    GAS,
    LUNG,
    OUTSIDE,
    SOFT_TISSUE,
    ScanHints,
    label_tissues,
    majority_label,
    resample_fine,
)

STEP = 1.5


@pytest.fixture(scope="module")
def labelled() -> np.ndarray:
    """Return labels of a trunk 150 mm wide, on a table: i to the left, j to the front."""
    x, y, _ = np.meshgrid(*(STEP * (np.arange(n) - n / 2) for n in (120, 110, 40)), indexing="ij")
    hu = np.full(x.shape, -1000.0)
    hu[(np.abs(y + 77) < 3.1) & (np.abs(x) < 88)] = 150  # table
    r = np.hypot(x, y)
    hu[r < 72] = -60  # skin, as thick slices show it
    hu[r < 70] = -100
    hu[r < 55] = 50
    hu[np.hypot(x + 25, y) < 20] = -860  # lung
    hu[np.hypot(x - 25, y - 5) < 14] = -995  # bowel
    hu[np.hypot(x, y + 38) < 12] = 700  # vertebra with marrow no brighter than muscle
    hu[np.hypot(x, y + 38) < 10] = 60
    rng = np.random.default_rng(0)
    blurred = gaussian_filter(hu, 0.7) + rng.normal(scale=12, size=hu.shape)
    return label_tissues(blurred.astype(np.float32), (STEP,) * 3, ScanHints(bone=170))


def at(labels: np.ndarray, x: float, y: float) -> int:
    """Return the most frequent label at a point of the middle slices."""
    i, j = round(x / STEP) + 60, round(y / STEP) + 55
    return int(np.bincount(labels[i - 1 : i + 2, j - 1 : j + 2, 15:25].ravel()).argmax())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("x", "y", "tissue"),
    [
        (0, -76, OUTSIDE),  # the table
        (80, 70, OUTSIDE),
        (-25, 0, LUNG),
        (25, 5, GAS),
        (0, 62, FAT),
        (0, 40, SOFT_TISSUE),
        (11, -38, BONE),
        (-45, 0, SOFT_TISSUE),  # the wall between lung and fat
    ],
)
def test_each_position_has_its_tissue(labelled, x, y, tissue):
    assert at(labelled, x, y) == tissue


def test_blur_around_the_lung_is_not_fat(labelled):
    i, j = np.indices(labelled.shape[:2])
    r = np.hypot(STEP * (i - 60) + 25, STEP * (j - 55))
    rim = labelled[(r > 18) & (r < 24)]
    assert (rim == FAT).mean() < 0.01


def test_the_outermost_two_millimetres_are_skin(labelled):
    """Skin counts as soft tissue though blur gives it the intensity of fat."""
    column = labelled[60, :, 20]
    inside = np.flatnonzero(column != OUTSIDE)
    assert column[inside.max()] == SOFT_TISSUE
    assert column[inside.max() - 4] == FAT


def test_the_fine_grid_fills_the_coarse_one():
    """Blocks of the fine grid lie about the points of MONAI's Spacing: a ramp stays a ramp."""
    ramp = np.broadcast_to(np.arange(20.0)[:, None, None], (20, 8, 8)).astype(np.float32)
    coarse = resample_fine(ramp, (2.0, 3.0, 3.0), 3.0, 1)
    fine = resample_fine(ramp, (2.0, 3.0, 3.0), 3.0, 2)
    blocks = fine.reshape(coarse.shape[0], 2, *(m for n in coarse.shape[1:] for m in (n, 2)))
    np.testing.assert_allclose(coarse[1:-1, 0, 0], 1.5 * np.arange(1, coarse.shape[0] - 1))
    np.testing.assert_allclose(blocks.mean((1, 3, 5))[1:-1], coarse[1:-1], rtol=1e-6)


def test_majority_is_the_most_frequent_label():
    labels = np.zeros((2, 2, 4), np.uint8)
    labels[..., 2:] = FAT
    labels[0, 0, :2] = BONE
    assert majority_label(labels, 2).ravel().tolist() == [OUTSIDE, FAT]
