from __future__ import annotations

import itertools
import pickle

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from scanloom.core import Grid, ScanError

ANGLES = st.tuples(*(st.floats(-180, 180) for _ in range(3)))
SPACINGS = st.tuples(*(st.floats(0.1, 20) for _ in range(3)))
ORIGINS = st.tuples(*(st.floats(-500, 500) for _ in range(3)))
SHAPES = st.tuples(*(st.integers(1, 600) for _ in range(3)))
POINTS = st.lists(st.tuples(*(st.floats(-10, 600) for _ in range(3))), min_size=1, max_size=5)
FLIPS = st.tuples(*(st.sampled_from([-1, 1]) for _ in range(3)))


def affine_of(angles, spacing, origin=(0, 0, 0), flips=(1, 1, 1)) -> np.ndarray:
    affine = np.eye(4)
    turn = Rotation.from_euler("xyz", angles, degrees=True).as_matrix()
    affine[:3, :3] = turn * spacing * np.array(flips)
    affine[:3, 3] = origin
    return affine


GRIDS = st.builds(
    lambda shape, *rest: Grid(shape, affine_of(*rest)), SHAPES, ANGLES, SPACINGS, ORIGINS, FLIPS
)


@given(GRIDS, POINTS)
def test_there_and_back(grid, points):
    """Indices become millimetres and the same indices again."""
    np.testing.assert_allclose(grid.index(grid.world(points)), points, atol=1e-6)
    assert grid.world(points).shape == grid.index(points).shape == (len(points), 3)


@given(GRIDS, POINTS)
def test_voxels_lie_where_nibabel_and_itk_put_them(grid, points):
    """World positions are those of two independent libraries; ITK's are LPS."""
    image = sitk.Image(1, 1, 1, sitk.sitkUInt8)
    lps = np.diag([-1.0, -1.0, 1.0])
    image.SetSpacing(grid.spacing)
    image.SetOrigin(lps @ grid.affine[:3, 3])
    image.SetDirection((lps @ grid.affine[:3, :3] / grid.spacing).ravel())

    world = grid.world(points)

    np.testing.assert_allclose(world, nib.affines.apply_affine(grid.affine, points), atol=1e-6)
    itk = [image.TransformContinuousIndexToPhysicalPoint(p) for p in points]
    np.testing.assert_allclose(world @ lps, itk, atol=1e-5)


@given(GRIDS)
def test_axis_codes_are_nibabels(grid):
    """The direction in which each index grows, wherever one of them is nearest for sure."""
    weights = np.sort(np.abs(grid.affine[:3, :3] / grid.spacing), axis=0)
    assume((weights[2] - weights[1]).min() > 0.05)
    assume(len({int(n) for n in np.abs(grid.affine[:3, :3] / grid.spacing).argmax(0)}) == 3)

    assert tuple(grid.axis_codes) == nib.aff2axcodes(grid.affine)


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("signs", list(itertools.product([-1, 1], repeat=3)))
def test_all_48_orders_have_their_codes(axes, signs):
    """Each axis follows a patient axis of its own."""
    affine = np.eye(4)
    affine[:3, :3] = np.eye(3)[:, axes] * signs * (1, 2, 3)

    grid = Grid((3, 4, 5), affine)

    assert grid.axes == axes
    assert tuple(grid.axis_codes) == nib.aff2axcodes(affine)
    assert grid.spacing == (1, 2, 3)


def test_two_axes_never_share_a_patient_axis():
    """Also where two of them lean equally far, every code names an axis once."""
    grid = Grid((3, 3, 3), affine_of((45, 35.26, 45), (1, 1, 1)))

    assert sorted(grid.axes) == [0, 1, 2]


@given(GRIDS)
def test_sizes_in_millimetres(grid):
    """Spacing, extent and volume of a voxel are those that nibabel and geometry give."""
    np.testing.assert_allclose(grid.spacing, nib.affines.voxel_sizes(grid.affine))
    np.testing.assert_allclose(grid.extent, np.multiply(grid.spacing, grid.shape))
    assert grid.voxel_volume == pytest.approx(np.prod(grid.spacing), rel=1e-9)
    assert not grid.sheared


@given(ANGLES, SPACINGS, st.sampled_from([0, 1, 2]), st.floats(0.01, 0.8), FLIPS)
def test_the_axis_that_leans_is_found(angles, spacing, axis, lean, flips):
    """Of a stack that leans both ways, the stacking direction is the sheared axis."""
    affine = affine_of(angles, spacing, flips=flips)
    in_plane = [n for n in range(3) if n != axis]
    for n in in_plane:
        affine[:3, axis] += lean * affine[:3, n] / spacing[n] * spacing[axis]

    grid = Grid((4, 4, 4), affine)

    assert grid.shear_axis == axis
    assert grid.sheared


@pytest.mark.parametrize(("pair", "axis"), [((0, 1), 1), ((0, 2), 2), ((1, 2), 2)])
def test_of_two_axes_that_lean_on_each_other_the_later_counts(pair, axis):
    """A gantry tilt leaves one pair oblique; slices are stacked along the later axis."""
    affine = np.diag([1.0, 1.0, 3.0, 1.0])
    affine[pair[0], pair[1]] = 0.5

    assert Grid((4, 4, 4), affine).shear_axis == axis


def test_the_volume_of_a_sheared_voxel_is_its_base_times_its_height():
    """A lean makes the step longer, not the voxel larger."""
    affine = np.diag([1.0, 2.0, 3.0, 1.0])
    affine[1, 2] = 1.5

    grid = Grid((4, 4, 4), affine)

    assert grid.voxel_volume == pytest.approx(6)
    assert grid.spacing[2] == pytest.approx(np.hypot(1.5, 3))


def test_header_rounding_is_no_shear():
    """Directions with five decimals are still at right angles."""
    affine = affine_of((10, 20, 30), (1, 1, 1))
    affine[:3, :3] = affine[:3, :3].round(5)

    assert Grid((4, 4, 4), affine).shear_axis is None


NOT_A_SCAN = {
    "two axes alike": [[1, 1, 0], [0, 0, 0], [0, 0, 1]],
    "an axis of no length": [[1, 0, 0], [0, 0, 0], [0, 0, 1]],
    "not a number": [[1, 0, 0], [0, np.nan, 0], [0, 0, 1]],
    "endless": [[1, 0, 0], [0, np.inf, 0], [0, 0, 1]],
    "no right angle": [[1, 0.5, 0.5], [0, 1, 0.5], [0, 0, 1]],
}


@pytest.mark.parametrize("name", NOT_A_SCAN)
def test_what_is_no_stack_of_slices_is_refused(name):
    """A grid that no scanner makes has a reason code, not a number."""
    affine = np.eye(4)
    affine[:3, :3] = NOT_A_SCAN[name]

    with pytest.raises(ScanError) as caught:
        Grid((4, 4, 4), affine)

    assert caught.value.code == "BAD_GEOMETRY"


@pytest.mark.parametrize(
    ("shape", "affine"),
    [
        ((4, 4), np.eye(4)),
        ((4, 0, 4), np.eye(4)),
        ((4, 4, 4), np.eye(3)),
        ((4, 4, 4), np.diag([1.0, 1, 1, 2])),
    ],
)
def test_what_is_no_grid_is_a_fault_of_the_caller(shape, affine):
    """Wrong shapes are our own bugs."""
    with pytest.raises(ValueError, match="must be"):
        Grid(shape, affine)


def test_a_grid_keeps_a_copy_of_its_own():
    """Neither the caller's array nor anyone else can change it."""
    affine = np.eye(4)
    grid = Grid((4, 4, 4), affine)

    affine[0, 3] = 99

    assert grid.affine[0, 3] == 0
    with pytest.raises(ValueError, match="read-only"):
        grid.affine[0, 3] = 1
    copied = pickle.loads(pickle.dumps(grid))
    np.testing.assert_array_equal(copied.affine, grid.affine)
    with pytest.raises(ValueError, match="read-only"):
        copied.affine[0, 3] = 1


def test_grids_match_when_every_voxel_does():
    """A turn that moves the far corner by more than the tolerance is another grid."""
    grid = Grid((500, 500, 300), np.diag([0.8, 0.8, 1.0, 1.0]))
    turned = affine_of((0, 0, 1e-3), (0.8, 0.8, 1.0))
    moved = np.array(grid.affine)
    moved[2, 3] += 5e-4

    assert grid.matches(Grid(grid.shape, moved))
    assert not grid.matches(Grid(grid.shape, turned))
    assert grid.matches(Grid(grid.shape, turned), tolerance=0.1)
    assert not grid.matches(Grid((500, 500, 299), grid.affine))
