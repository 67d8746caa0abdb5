from __future__ import annotations

import itertools

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from scipy.spatial.transform import Rotation

from scanloom.core import Grid
from scanloom.review.preview.slicing import (
    AXIAL,
    CORONAL,
    SAGITTAL,
    Cut,
    Raster,
    Rectangle,
    View,
    label_pixels,
    scan_pixels,
)

ORDERS = [
    "".join(codes)
    for axes in itertools.permutations(["RL", "AP", "SI"])
    for codes in itertools.product(*axes)
]


def grid_of(codes: str, shape=(7, 6, 5), spacing=(1, 2, 3), tilt=(0, 0, 0)) -> Grid:
    """Return a grid with the given axis codes, turned by `tilt` degrees about R, A and S."""
    turn = nib.orientations.inv_ornt_aff(nib.orientations.axcodes2ornt(codes), shape)
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", tilt, degrees=True).as_matrix()
    affine = affine @ np.linalg.inv(turn)
    affine[:3, :3] *= spacing
    affine[:3, 3] = 11, -7, 5
    return Grid(shape, affine)


def sheared_grid() -> Grid:
    affine = np.diag([1.5, 1.5, 4.0, 1.0])
    affine[1, 2] = 1.3
    affine[:3, 3] = 4, -8, 15
    return Grid((30, 26, 12), affine)


@pytest.mark.parametrize("codes", ORDERS)
def test_a_view_is_the_array_that_nibabel_turns_to_lpi(codes):
    """Turned arrays and their place are those of nibabel, for all 48 orders."""
    grid = grid_of(codes)
    array = np.arange(210).reshape(grid.shape)
    image = nib.Nifti1Image(array, grid.affine, dtype=np.int64)
    theirs = image.as_reoriented(
        nib.orientations.ornt_transform(
            nib.io_orientation(grid.affine), nib.orientations.axcodes2ornt("LPI")
        )
    )

    view = View(grid)

    assert nib.aff2axcodes(grid.affine) == tuple(codes)
    np.testing.assert_array_equal(view.of(array), np.asanyarray(theirs.dataobj))
    np.testing.assert_allclose(view.to_lpi, np.diag([-1, -1, -1, 1]) @ theirs.affine, atol=1e-12)
    assert np.shares_memory(view.of(array), array)
    assert view.of(array)[view.index_of((2, 1, 3))] == array[2, 1, 3]


@pytest.mark.parametrize("direction", [AXIAL, CORONAL, SAGITTAL])
@pytest.mark.parametrize(
    "grid",
    [
        grid_of("RAS", (40, 36, 20), (1.5, 1.5, 3), (20, -15, 30)),
        grid_of("SPL", (20, 36, 40), (3, 1.5, 1.5), (10, 0, 25)),
        sheared_grid(),
    ],
    ids=["oblique", "oblique, other axes", "sheared"],
)
def test_an_oblique_cut_is_what_simpleitk_resamples(direction, grid):
    """Values in a patient plane are those that ITK interpolates at the same world positions."""
    array = np.random.default_rng(0).normal(size=grid.shape).astype(np.float32)
    view = View(grid)
    position = float(view.corners[:, direction.normal].mean()) + 0.7

    cut = view.cut(array, direction, position, -99.0)

    rows, columns = np.indices(cut.values.shape)
    lpi = np.empty((*cut.values.shape, 3))
    lpi[..., direction.normal] = position
    lpi[..., direction.across] = cut.low[0] + cut.step[0] * (columns + 0.5)
    lpi[..., direction.down] = cut.low[1] + cut.step[1] * (rows + 0.5)
    theirs = itk_values(array, grid, -lpi)
    inside = np.isfinite(theirs)
    assert not view.upright
    assert inside.mean() > 0.2
    np.testing.assert_allclose(cut.values[inside], theirs[inside], atol=1e-4)


def itk_values(array, grid: Grid, ras) -> np.ndarray:
    """Return the values that ITK interpolates at RAS positions; NaN outside of its buffer.

    A sheared grid, which ITK can't hold, is given to it in index space.
    """
    image = sitk.GetImageFromArray(np.ascontiguousarray(array.T))
    index = grid.index(ras)
    if not grid.sheared:
        lps = np.diag([-1.0, -1.0, 1.0])
        image.SetSpacing(grid.spacing)
        image.SetDirection((lps @ grid.affine[:3, :3] / grid.spacing).ravel())
        image.SetOrigin(lps @ grid.affine[:3, 3])
        index = ras @ lps
    values = np.full(ras.shape[:-1], np.nan)
    for pixel in np.ndindex(*values.shape):
        point = tuple(float(x) for x in index[pixel])
        ends = image.TransformPhysicalPointToContinuousIndex(point)
        if all(0 <= e <= n - 1 for e, n in zip(ends, array.shape, strict=True)):
            values[pixel] = image.EvaluateAtPhysicalPoint(point, sitk.sitkLinear)
    return values


@pytest.mark.parametrize("direction", [AXIAL, CORONAL, SAGITTAL])
def test_labels_of_an_oblique_cut_are_the_nearest_voxels(direction):
    """No label is invented between two others, and outside there is none."""
    grid = grid_of("LPS", (20, 18, 16), (1.5, 1.5, 2), (20, -15, 30))
    labels = np.random.default_rng(0).choice([0, 1, 200], grid.shape).astype(np.uint8)
    view = View(grid)
    position = float(view.corners[:, direction.normal].mean())

    cut = view.cut(labels, direction, position, None)

    assert cut.values.dtype == labels.dtype
    for row, column in itertools.product(*(range(0, n, 3) for n in cut.values.shape)):
        lpi = np.empty(3)
        lpi[direction.normal] = position
        lpi[direction.across] = cut.low[0] + cut.step[0] * (column + 0.5)
        lpi[direction.down] = cut.low[1] + cut.step[1] * (row + 0.5)
        index = grid.index(-lpi)
        if np.abs(index % 1 - 0.5).min() < 1e-6:
            continue  # between two voxels: either may be nearest
        nearest = np.rint(index).astype(int)
        inside = ((nearest >= 0) & (nearest < grid.shape)).all()
        assert cut.values[row, column] == (labels[tuple(nearest)] if inside else 0)


def test_an_upright_cut_holds_the_voxels_themselves():
    """A scan that follows the patient's axes is sliced, not resampled."""
    grid = grid_of("RAS")
    array = np.random.default_rng(0).normal(size=grid.shape)

    cut = View(grid).cut(array, AXIAL, -float(grid.world((0, 0, 3))[2]), -1.0)

    np.testing.assert_array_equal(cut.values, array[::-1, ::-1, 3].T)
    assert cut.low == (-(11 + 6.5 * 1), -(-7 + 5.5 * 2))


def test_a_slight_tilt_is_still_upright():
    """A header's rounding makes no scan oblique; a degree over a long scan does."""
    assert View(grid_of("RAS", (100, 100, 50), tilt=(0, 0, 0.01))).upright
    assert not View(grid_of("RAS", (100, 100, 50), tilt=(0, 0, 2))).upright


@pytest.mark.parametrize("size", [(8, 6), (16, 12), (3, 5)])
def test_pixels_of_scan_and_labels_lie_on_each_other(size):
    """A bright square and its label cover the same pixels, at any size and in any area."""
    values = np.zeros((12, 16), np.uint8)
    values[4:8, 6:12] = 1
    cut = Cut(values, (-8.0, 5.0), (2.0, 3.0))
    raster = Raster(Rectangle((-4.0, 8.0), (20.0, 35.0)), size)

    scan, labels = scan_pixels(cut, raster), label_pixels(cut, raster)

    assert scan.shape == labels.shape == (size[1], size[0])
    centers = [
        np.array([(image * axis).sum() for axis in np.indices(image.shape)]) / image.sum()
        for image in (scan, labels.astype(np.float32))
    ]
    np.testing.assert_allclose(*centers, atol=0.51)
    assert (labels > 0)[(scan > 0.95)].all()
    assert not (labels > 0)[(scan < 0.05)].any()
