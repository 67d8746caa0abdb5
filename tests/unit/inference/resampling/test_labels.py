"""Labels of a previous stage are resampled as batchgenerators 0.25.5 does, ties included."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from scanloom.inference.resampling.image import resample_labels

Shape = tuple[int, ...]


def reference(labels: NDArray[np.int32], shape: Shape) -> NDArray[np.int32]:
    """Interpolate the indicator of each label; exact ties to the nearest neighbour."""
    zoom = [b / a for a, b in zip(labels.shape, shape, strict=True)]

    def resized(values: NDArray[np.float64], order: int) -> NDArray[np.float64]:
        return ndimage.zoom(values, zoom, order=order, mode="nearest", grid_mode=True)

    numbers = np.unique(labels)
    scores = np.stack([resized((labels == n).astype(float), 1) for n in numbers])
    near = resized(labels.astype(float), 0).astype(np.int32)
    top = scores == scores.max(0)
    winner = numbers[top.argmax(0)]
    is_top = np.take_along_axis(top, np.searchsorted(numbers, near)[None], 0)[0]
    return np.where(is_top, near, winner).astype(np.int32)


SIZES = [((9, 8, 7), (18, 16, 14)), ((9, 8, 7), (13, 24, 5)), ((20, 6, 9), (10, 3, 9))]


@pytest.mark.parametrize(("size", "shape"), SIZES)
@pytest.mark.parametrize("classes", [2, 6])
def test_the_largest_indicator_decides_and_the_nearest_voxel_settles_ties(
    size: Shape, shape: tuple[int, int, int], classes: int
) -> None:
    rng = np.random.default_rng(classes)
    labels = rng.integers(-1, classes, size).astype(np.int32)

    resampled = resample_labels(labels, shape)

    np.testing.assert_array_equal(resampled, reference(labels, shape))


def test_slices_of_a_coarse_axis_are_resampled_one_by_one() -> None:
    labels = np.random.default_rng(0).integers(0, 4, (5, 9, 8)).astype(np.int32)

    resampled = resample_labels(labels, (8, 13, 16), coarse=0)

    slices = np.stack([reference(plane, (13, 16)) for plane in labels])
    at = np.floor((np.arange(8) + 0.5) * (5 / 8) - 0.5 + 0.5).astype(int)
    np.testing.assert_array_equal(resampled, slices[at])


def test_equal_grids_change_nothing() -> None:
    labels = np.random.default_rng(0).integers(0, 4, (5, 9, 8)).astype(np.int32)

    np.testing.assert_array_equal(resample_labels(labels, labels.shape), labels)
