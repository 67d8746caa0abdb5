from __future__ import annotations

import numpy as np
import pytest
from scipy.ndimage import binary_fill_holes

from scanloom.core import Grid, Volume
from scanloom.review.preview.slicing import View, filled, find_body
from support.review_phantoms import trunk


def scan(air=-1000, tissue=40) -> np.ndarray:
    """Return air with two thighs and, below them, a thin table."""
    array = np.full((100, 80, 30), air, np.int16)
    array[20:40, 20:50] = tissue
    array[60:80, 20:50] = tissue
    array[5:95, 70:72] = tissue
    return array


@pytest.mark.parametrize(("air", "tissue", "unit"), [(-1000, 40, "HU"), (0, 700, "a.u.")])
def test_the_body_is_found_without_the_table(air, tissue, unit):
    """The box holds both thighs; intensities and volume are theirs."""
    array = scan(air, tissue)
    view = View(Grid(array.shape, np.diag([-2.0, -2.0, -2.0, 1.0])))
    volume = Volume(array, view.source, unit, "CT" if unit == "HU" else "MR")

    body = find_body(volume, view, unit == "HU")

    assert body.found
    np.testing.assert_allclose(body.low, (19.5, 19.5, 0), atol=1)
    np.testing.assert_allclose(body.high, (79.5, 49.5, 29), atol=1)
    assert body.volume_ml == pytest.approx(2 * 20 * 30 * 30 * 8 / 1000, rel=0.05)
    assert np.unique(body.values).tolist() == [tissue]


@pytest.mark.parametrize("fill", [np.nan, -1000.0, -2000.0])
def test_a_scan_without_body_is_shown_whole(fill):
    """Air, or nothing but NaN."""
    volume = Volume(np.full((6, 5, 4), fill, np.float32), Grid((6, 5, 4), np.eye(4)), "HU", "CT")

    body = find_body(volume, View(volume.grid), hounsfield=True)

    assert not body.found
    np.testing.assert_array_equal(body.high, (5, 4, 3))


def test_a_head_is_told_by_the_skull() -> None:
    """Bone around a slice; ribs and the vertebra of a trunk do not close."""
    heads = [
        find_body(volume, View(volume.grid), hounsfield=True).head
        for volume in (trunk(), trunk(skull=True), trunk(heart=500))
    ]
    assert heads == [False, True, False]


def test_contrast_agent_is_told_by_even_bright_tissue() -> None:
    """Bone is brighter, but uneven or thin."""
    enhanced = [
        find_body(volume, View(volume.grid), hounsfield=True).enhanced
        for volume in (trunk(), trunk(heart=200), trunk(heart=450))
    ]
    assert enhanced == [False, False, True]


def test_a_body_that_reaches_the_border_ends_there():
    """Also if the scan is subsampled: its first and last slices are not lost."""
    array = np.full((211, 203, 207), 40, np.int16)
    volume = Volume(array, Grid(array.shape, np.eye(4)), "HU", "CT")

    body = find_body(volume, View(volume.grid), hounsfield=True)

    np.testing.assert_array_equal(body.low, 0)
    np.testing.assert_array_equal(body.high, np.array(array.shape) - 1)


@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 1, 5), (3, 12, 15)])
@pytest.mark.parametrize("share", [0.0, 0.6, 0.8, 1.0])
def test_holes_are_filled_plane_by_plane(shape, share):
    """As by SciPy: what an edge of its own plane encloses, by 4 neighbours."""
    planes = np.random.default_rng(0).random(shape) < share

    expected = np.stack([binary_fill_holes(plane) for plane in planes])

    np.testing.assert_array_equal(filled(planes), expected)
