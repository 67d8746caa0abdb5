"""Scans are resampled as scikit-image and nnU-Net do it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage

from scanloom.cards.card import NetworkGrid
from scanloom.inference.geometry import plan_grid
from scanloom.inference.resampling.resample import to_network
from scanloom.inference.resampling.sampling import cubic_matrix
from support import model_cards as model_cards

CPU = torch.device("cpu")
SHAPE = (21, 30, 13)


def resize(array: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return scikit-image's cubic resize, as nnU-Net calls it."""
    from skimage.transform import resize as skimage_resize

    return np.asarray(skimage_resize(array, shape, 3, mode="edge", anti_aliasing=False))


@pytest.mark.parametrize(("size", "count"), [(13, 31), (31, 13), (40, 40), (2, 9), (1, 4), (90, 7)])
def test_matrix_is_that_of_scipys_zoom(size: int, count: int) -> None:
    at = size / count * (np.arange(count) + 0.5) - 0.5
    samples = np.random.default_rng(0).standard_normal(size)

    resized = cubic_matrix(at, size) @ samples

    expected = ndimage.zoom(samples, count / size, order=3, mode="nearest", grid_mode=True)
    np.testing.assert_allclose(resized, expected, atol=1e-12)


@pytest.mark.parametrize("spacing", [(1.5, 1.5, 1.5), (0.6, 0.7, 2.5), (1.0, 2.0, 2.5)])
@pytest.mark.parametrize("slab_bytes", [1, 64 * 1024**2])
def test_scan_is_resized_as_scikit_image_does(
    spacing: tuple[float, float, float], slab_bytes: int
) -> None:
    """Cubic, with the outer edges aligned, limited to the scan's range; in slabs or whole."""
    grid = model_cards.grid(SHAPE, (1.0, 0.8, 2.5), turn=8)
    array = model_cards.smooth_scan(SHAPE)
    plan = plan_grid(grid, NetworkGrid(None, spacing, "cubic", (2, 1, 0), "edges"))

    image = to_network(array, plan, CPU, slab_bytes=slab_bytes).numpy()

    own = np.array(grid.spacing)
    shape = [round(n) for n in (own / spacing * SHAPE)[::-1]]
    assert image.shape == tuple(shape)
    expected = resize(array.T.astype(np.float64), tuple(shape)).astype(np.float32)
    np.testing.assert_allclose(image, expected, atol=1e-3)
    assert expected.max() == image.max()


@pytest.mark.parametrize("order", list(itertools.permutations((0, 1, 2))))
@pytest.mark.parametrize("codes", ["RAS", "LPS", "SPL"])
def test_slices_far_apart_are_resized_one_by_one(order: tuple[int, int, int], codes: str) -> None:
    """nnU-Net's separate z: slice by slice, each limited to its range; then the nearest slice."""
    grid = model_cards.grid(SHAPE, (0.9, 0.8, 4.0), codes)
    array = model_cards.smooth_scan(SHAPE)
    spacing = (1.2, 1.1, 1.7)
    requested = NetworkGrid(None, spacing, "cubic", order, "edges", separate_above=3.0)

    image = to_network(array, plan_grid(grid, requested), CPU).numpy()

    shape = [round(n) for n in np.array(grid.spacing) / spacing * SHAPE]
    slices = np.stack(
        [resize(array[..., k].astype(np.float64), (shape[0], shape[1])) for k in range(SHAPE[2])]
    )
    at = SHAPE[2] / shape[2] * (np.arange(shape[2]) + 0.5) - 0.5
    places = np.meshgrid(at, np.arange(shape[0]), np.arange(shape[1]), indexing="ij")
    expected = ndimage.map_coordinates(slices, places, order=0, mode="nearest")
    expected = np.moveaxis(expected, 0, 2).transpose(order)
    assert plan_grid(grid, requested).nearest[0] == order.index(2)
    np.testing.assert_allclose(image, expected, atol=1e-3)


def test_nearest_slices_at_exact_ratios_are_scipys() -> None:
    """Each network slice lies in the middle of two slices: the last bit decides."""
    shape = (4, 5, 24)
    array = np.asfortranarray(np.broadcast_to(np.arange(24, dtype=np.int16), shape))
    grid = model_cards.grid(shape, (1.0, 1.0, 4.0))
    requested = NetworkGrid(None, (1.0, 1.0, 8.0), "cubic", alignment="edges", separate_above=3.0)

    image = to_network(array, plan_grid(grid, requested), CPU).numpy()[0, 0]

    at = 24 / 12 * (np.arange(12) + 0.5) - 0.5
    expected = ndimage.map_coordinates(np.arange(24.0), at[None], order=0, mode="nearest")
    np.testing.assert_allclose(image, expected, atol=1e-9)


@pytest.mark.parametrize("codes", ["RAS", "LPI"])
@pytest.mark.parametrize("alignment", ["edges", "ends"])
def test_nearest_neighbours_are_scipys(codes: str, alignment: str) -> None:
    grid = model_cards.grid((20, 12, 9), (1.0, 1.5, 2.0), codes)
    array = model_cards.smooth_scan(grid.shape)
    requested = NetworkGrid("RAS", (2.0, 1.0, 2.0), "nearest", alignment=alignment)
    plan = plan_grid(grid, requested)

    image = to_network(array, plan, CPU).numpy()

    oriented = array[::-1, ::-1, ::-1] if codes == "LPI" else array
    zoom = np.array(plan.network.shape) / grid.shape
    expected = ndimage.zoom(oriented, zoom, order=0, mode="nearest", grid_mode=alignment == "edges")
    np.testing.assert_array_equal(image, expected)
