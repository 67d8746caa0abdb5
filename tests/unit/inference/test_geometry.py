"""The network's grid and input image are MONAI's."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage

from scanloom.cards.card import NetworkGrid
from scanloom.core import Grid
from scanloom.inference.geometry import plan_grid
from scanloom.inference.resampling.resample import to_network
from support import model_cards

CPU = torch.device("cpu")
CODES = [
    "".join(axis[flip] for axis, flip in zip(order, flips, strict=True))
    for order in itertools.permutations(("RL", "AP", "SI"))
    for flips in itertools.product((0, 1), repeat=3)
]


def monai_sees(array: Any, grid: Grid, network_grid: NetworkGrid) -> Any:
    """Return MONAI's MetaTensor after Orientation and Spacing."""
    from monai.data import MetaTensor
    from monai.transforms import Orientation, Spacing

    image = MetaTensor(torch.from_numpy(array.astype(np.float32))[None], torch.tensor(grid.affine))
    image = Orientation(network_grid.orientation, labels=(("L", "R"), ("P", "A"), ("I", "S")))(
        image
    )
    return Spacing(network_grid.spacing)(image) if network_grid.spacing else image


@pytest.mark.parametrize("codes", CODES)
def test_network_sees_what_monai_shows_it(codes: str) -> None:
    """Shape, affine and values, for all 48 ways in which axes can lie."""
    grid = model_cards.grid((19, 23, 14), (1.1, 0.9, 2.5), codes, turn=8)
    array = model_cards.smooth_scan(grid.shape)
    network_grid = NetworkGrid("RAS", (1.5, 1.5, 2.0))

    plan = plan_grid(grid, network_grid)
    theirs = monai_sees(array, grid, network_grid)

    assert plan.network.shape == theirs.shape[1:]
    np.testing.assert_allclose(plan.network.affine, theirs.affine.numpy(), atol=1e-9)
    ours = to_network(array, plan, CPU)
    np.testing.assert_allclose(ours.numpy(), theirs[0].numpy(), atol=1e-3)


@pytest.mark.parametrize("codes", ["RAS", "LPS", "RPI", "ALS"])
@pytest.mark.parametrize("tilt", [12.0, -20.0])
def test_a_tilted_stack_of_axial_slices_is_seen_as_monai_sees_it(codes: str, tilt: float) -> None:
    grid = model_cards.grid((19, 23, 14), (1.1, 0.9, 2.5), codes, turn=8, tilt=tilt)
    array = model_cards.smooth_scan(grid.shape)
    network_grid = NetworkGrid("RAS", (1.5, 1.5, 2.0))

    plan = plan_grid(grid, network_grid)
    theirs = monai_sees(array, grid, network_grid)

    assert grid.shear_axis == 2
    assert not plan.network.sheared
    np.testing.assert_allclose(plan.network.affine, theirs.affine.numpy(), atol=1e-9)
    ours = to_network(array, plan, CPU)
    np.testing.assert_allclose(ours.numpy(), theirs[0].numpy(), atol=1e-3)


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 2, 1), (2, 1, 0)])
def test_a_tilted_stack_may_be_stored_slice_axis_first(order: tuple[int, int, int]) -> None:
    grid = model_cards.grid((19, 23, 14), (1.1, 0.9, 2.5), "LPS", turn=8, tilt=12.0)
    turn = np.eye(4)[:, [*order, 3]]
    i, j, k = (grid.shape[axis] for axis in order)
    stored = Grid((i, j, k), grid.affine @ turn)
    array = model_cards.smooth_scan(grid.shape).transpose(order)
    network_grid = NetworkGrid("RAS", (1.5, 1.5, 2.0))

    ours = to_network(array, plan_grid(stored, network_grid), CPU)

    theirs = monai_sees(np.ascontiguousarray(array), stored, network_grid)[0].numpy()
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-3)


@pytest.mark.parametrize("codes", ["RAS", "LPS", "ALS"])
def test_without_spacing_a_tilted_stack_is_seen_as_it_is_stored(codes: str) -> None:
    grid = model_cards.grid((19, 23, 14), (1.1, 0.9, 2.5), codes, turn=8, tilt=12.0)
    array = model_cards.smooth_scan(grid.shape)
    network_grid = NetworkGrid("RAS", None)

    ours = to_network(array, plan_grid(grid, network_grid), CPU)

    assert grid.sheared
    np.testing.assert_array_equal(ours.numpy(), monai_sees(array, grid, network_grid)[0].numpy())


@pytest.mark.parametrize(
    ("spacing", "target", "slices", "resampled"),
    [
        (3.1, 2.0, 10, 15),  # float32(3.1) is smaller: 15.4999995
        (5.0, 2.0, 21, 52),  # 52.5 is a tie: the even number
        (0.9765625, 1.5, 96, 62),  # a 250 mm field of view with 256 voxels: 62.5
        (3.0, 2.0, 9, 14),
    ],
)
@pytest.mark.parametrize("turn", [0, 4, 6, 11, 30])
def test_half_voxels_are_rounded_by_the_spacing_in_the_header(
    spacing: float, target: float, slices: int, resampled: int, turn: float
) -> None:
    grid = model_cards.grid((20, 22, slices), (1.5, 1.5, spacing), "LPS", turn=turn)
    stored = Grid(grid.shape, grid.affine.astype(np.float32))

    for alignment in ("edges", "ends"):
        plan = plan_grid(stored, NetworkGrid("RAS", (2.0, 2.0, target), alignment=alignment))

        assert plan.network.shape[2] == resampled


@pytest.mark.parametrize("shape", [(40, 44, 20), (41, 43, 21)])
@pytest.mark.parametrize("spacing", [(0.75, 0.75, 5.0), (1.4995, 1.5005, 2.0), (1.5, 1.5, 2.0)])
@pytest.mark.parametrize("turn", [0.0, 5.0])
def test_rounded_affines_and_spacings_are_judged_as_monai_judges_them(
    shape: tuple[int, int, int], spacing: tuple[float, float, float], turn: float
) -> None:
    """Directions rounded to float32, as NIfTI has them; spacings all but the wanted ones."""
    exact = model_cards.grid(shape, spacing, "LPS", turn=turn)
    grid = Grid(shape, exact.affine.astype(np.float32).astype(np.float64))
    array = model_cards.smooth_scan(shape)
    network_grid = NetworkGrid("RAS", (1.5, 1.5, 2.0))

    plan = plan_grid(grid, network_grid)
    theirs = monai_sees(array, grid, network_grid)

    assert plan.network.shape == theirs.shape[1:]
    np.testing.assert_allclose(plan.network.affine, theirs.affine.numpy(), atol=1e-9)
    ours = to_network(array, plan, CPU)
    np.testing.assert_allclose(ours.numpy(), theirs[0].numpy(), atol=2e-2)


@pytest.mark.parametrize("codes", ["RAS", "LPI", "SPL", "PIR"])
@pytest.mark.parametrize("alignment", ["edges", "ends", "centre", "first"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_maps_of_all_alignments_agree_with_positions(
    codes: str, alignment: Any, order: tuple[int, int, int]
) -> None:
    """Coordinates along axes are those of voxels' positions in the world, both ways."""
    source = model_cards.grid((19, 23, 14), (1.1, 0.9, 2.5), codes, turn=8)
    requested = NetworkGrid("RAS", (1.5, 1.4, 2.0), order=order, alignment=alignment)
    plan = plan_grid(source, requested)
    corner = (3, 5, 7)

    to_network = plan.network.index(source.world(corner))
    to_source = source.index(plan.network.world(corner))

    for axis in range(3):
        x = plan.network_axis(axis)
        np.testing.assert_allclose(plan.to_network(axis)[corner[axis]], to_network[x], atol=1e-9)
        np.testing.assert_allclose(plan.to_source(axis)[corner[x]], to_source[axis], atol=1e-9)
    mapped = [plan.scale[x] * corner[plan.follows[x]] + plan.shift[x] for x in range(3)]
    np.testing.assert_allclose(mapped, to_network, atol=1e-9)
    natural = plan_grid(source, NetworkGrid("RAS", (1.5, 1.4, 2.0), alignment=alignment))
    assert plan.network.shape == tuple(natural.network.shape[axis] for axis in order)


def test_edges_of_grids_coincide() -> None:
    """nnU-Net: half a voxel beyond the outermost centres, and a rounded number of voxels."""
    source = model_cards.grid((19, 23, 14), (1.1, 0.9, 2.5))
    plan = plan_grid(source, NetworkGrid(None, (1.5, None, 1.0), alignment="edges"))

    assert plan.network.shape == (round(1.1 / 1.5 * 19), 23, round(2.5 / 1.0 * 14))
    for end in (0, 1):
        theirs, ours = (end * np.array(g.shape) - 0.5 for g in (source, plan.network))
        np.testing.assert_allclose(source.world(theirs), plan.network.world(ours), atol=1e-9)


def test_ends_of_grids_coincide() -> None:
    """TotalSegmentator: the centres of the outermost voxels."""
    source = model_cards.grid((19, 23, 14), (1.1, 0.9, 2.5))
    plan = plan_grid(source, NetworkGrid(None, (1.5, 1.5, 1.5), alignment="ends"))

    for end in (0, 1):
        theirs, ours = (end * (np.array(g.shape) - 1) for g in (source, plan.network))
        np.testing.assert_allclose(source.world(theirs), plan.network.world(ours), atol=1e-9)


def test_centred_grid_has_the_requested_shape_and_is_empty_outside_the_scan() -> None:
    """FreeSurfer's conform: index n / 2 of both grids coincide; SciPy gives the values."""
    source = model_cards.grid((19, 23, 14), (1.1, 0.9, 2.5), "LPS")
    array = model_cards.smooth_scan(source.shape)
    requested = NetworkGrid("RAS", (1.0, 1.0, 1.0), alignment="centre", shape=(40, 40, 40))

    plan = plan_grid(source, requested)

    assert plan.network.shape == (40, 40, 40)
    middle = np.array(source.shape) / 2
    np.testing.assert_allclose(plan.network.world((20, 20, 20)), source.world(middle))
    ours = to_network(array, plan, CPU).numpy()
    step = np.linalg.solve(plan.oriented.affine, plan.network.affine)
    oriented = array[::-1, ::-1].astype(np.float64)
    expected = ndimage.affine_transform(oriented, step, output_shape=(40, 40, 40), order=1)
    expected[:, :, 35] = 0  # exactly at the last voxel: niimath interpolates between two
    np.testing.assert_allclose(ours, expected, atol=1e-3)
    assert (ours[0] == 0).all()


@pytest.mark.parametrize(
    ("own", "spacing", "expected"),
    [
        ((0.8, 0.8, 5.0), (1.0, 1.0, 1.0), (2, 2)),
        ((1.0, 1.0, 1.0), (4.0, 1.0, 1.0), (0, 0)),
        ((0.8, 0.8, 5.0), (4.0, 1.0, 1.0), (2, 0)),
        ((0.8, 5.0, 5.0), (4.0, 1.0, 1.0), (None, 0)),
        ((1.0, 1.0, 3.0), (1.0, 1.0, 1.0), (None, None)),
    ],
)
def test_coarse_axis_is_nnunets(
    own: tuple[float, float, float], spacing: tuple[float, float, float], expected: Any
) -> None:
    """The grid that is resampled decides, else the other one; equal largest spacings exclude."""
    source = model_cards.grid((19, 23, 14), own)
    requested = NetworkGrid(None, spacing, alignment="edges", separate_above=3.0)

    assert plan_grid(source, requested).nearest == expected
