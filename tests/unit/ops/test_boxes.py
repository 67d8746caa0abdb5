"""Boxes around structures agree with SciPy, and crops keep the position of every voxel."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage

from scanloom.core import Layer, Segmentation, Volume
from scanloom.core.grid import Box
from scanloom.ops.label_maps import (
    box_of_labels,
    crop_volume,
    enlarge_box,
    margin_voxels,
    paste_segmentation,
    union_of_boxes,
)
from support import model_cards


def some_labels(shape: tuple[int, int, int], dtype: type = np.uint8) -> np.ndarray:
    labels = np.zeros(shape, dtype, order="F")
    labels[2:5, 3:9, 1:4] = 1
    labels[6, 1, 7] = 2
    return labels


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_box_is_that_of_scipy(dtype: type) -> None:
    labels = some_labels((9, 10, 11), dtype)
    for numbers in [(1,), (2,), (1, 2), ()]:
        mask = np.isin(labels, numbers) if numbers else labels > 0
        box = box_of_labels(labels, numbers)
        assert box is not None
        assert box.slices == ndimage.find_objects(mask.astype(int))[0]
    assert box_of_labels(labels, (3,)) is None


def test_union_is_the_box_of_both() -> None:
    labels = some_labels((9, 10, 11))
    boxes = [box_of_labels(labels, (n,)) for n in (1, 2, 3)]
    assert union_of_boxes(boxes) == box_of_labels(labels)
    assert union_of_boxes([None]) is None


def test_margin_ends_at_the_border() -> None:
    box = Box((2, 3, 1), (4, 8, 3))
    assert box.shape == (3, 6, 3)
    grid = model_cards.grid((9, 10, 11), (1.0, 1.5, 4.0))
    assert margin_voxels(grid, 3.0) == (3, 2, 1)
    assert enlarge_box(box, (3, 2, 1), grid.shape) == ((0, 1, 0), (7, 9, 4))


@pytest.mark.parametrize("codes", ["RAS", "LPI", "PSR"])
def test_crop_keeps_positions_and_comes_back(codes: str) -> None:
    grid = model_cards.grid((9, 10, 11), (1.0, 1.5, 4.0), codes, turn=7.0, tilt=10.0)
    labels, scan = some_labels(grid.shape), model_cards.smooth_scan(grid.shape)
    box = box_of_labels(labels)
    assert box is not None

    cropped = crop_volume(Volume(scan, grid, "HU", "CT", padding=-2000.0), box)

    first = np.array(box[0])
    offset = np.array((1, 2, 3))
    np.testing.assert_allclose(cropped.grid.world(offset), grid.world(first + offset))
    np.testing.assert_array_equal(cropped.array, scan[box.slices])
    assert (cropped.unit, cropped.padding) == ("HU", -2000.0)
    assert cropped.array.flags.f_contiguous
    structures = model_cards.structures(2)
    small = Segmentation("m", (Layer(labels[box.slices], structures),), cropped.grid)
    whole = paste_segmentation(small, box, grid)
    np.testing.assert_array_equal(whole.layers[0].labels, labels)
