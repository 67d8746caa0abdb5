"""A sheared stack on a rectangular grid, compared with SciPy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage

from scanloom.core import Grid
from scanloom.ops.rectify import rectangular_grid, rectangular_labels
from support import case_folders

SHEARS = [
    ("LPS", 0.0, 18.5, 2),
    ("LPS", 0.0, -30.0, 2),
    ("PSL", 25.0, 12.0, 2),
    ("RAI", 10.0, 0.5, 2),
]


def sheared_along(axis: int) -> Grid:
    """Return a grid with one axis sheared against both others."""
    affine = np.diag((1.2, 1.7, 2.3, 1.0))
    affine[:3, axis] += np.array((0.5, -0.8, 0.6)) * (np.arange(3) != axis)
    return Grid((8, 9, 7), affine)


@pytest.mark.parametrize(("codes", "oblique", "tilt", "axis"), SHEARS)
def test_the_grid_is_rectangular_and_holds_every_voxel(
    codes: str, oblique: float, tilt: float, axis: int
) -> None:
    grid = case_folders.grid_of(case_folders.turned(case_folders.directions(codes), oblique), tilt)
    upright = rectangular_grid(grid)
    assert grid.shear_axis == axis
    assert not upright.sheared
    assert upright.shape[axis] == grid.shape[axis]
    corners = np.indices((2, 2, 2)).reshape(3, -1).T * (np.array(grid.shape) - 1)
    places = upright.index(grid.world(corners))
    assert (places > -1e-6).all()
    assert (places < np.array(upright.shape) - 1 + 1e-6).all()
    np.testing.assert_allclose(upright.spacing[:2], grid.spacing[:2])


@pytest.mark.parametrize(
    "grid",
    [
        case_folders.grid_of(case_folders.turned(case_folders.directions(c), o), t)
        for c, o, t, _ in SHEARS
    ]
    + [sheared_along(n) for n in range(3)],
)
def test_labels_are_those_of_the_nearest_voxel(grid: Grid) -> None:
    """Each voxel of the copy has the label that SciPy finds nearest to its position."""
    labels = case_folders.labels_on(grid.shape)
    upright = rectangular_grid(grid)
    copy = rectangular_labels(labels, grid)
    assert copy.shape == upright.shape
    assert copy.flags.f_contiguous
    places = grid.index(upright.world(np.indices(upright.shape).reshape(3, -1).T)).T
    clear = (np.abs(places - np.floor(places) - 0.5) > 1e-6).all(axis=0)  # no tie
    expected = ndimage.map_coordinates(labels, places, order=0, mode="grid-constant", cval=0)
    np.testing.assert_array_equal(copy.ravel()[clear], expected[clear])
    assert np.bincount(copy.ravel()).tolist()[1:] == np.bincount(labels.ravel()).tolist()[1:]


def test_a_grid_without_shear_is_returned_unchanged() -> None:
    grid = case_folders.grid_of(case_folders.directions("LPS"))
    labels = case_folders.labels_on(grid.shape)
    assert rectangular_grid(grid) is grid
    assert rectangular_labels(labels, grid) is labels
