"""Windows start and are weighted as MONAI and nnU-Net define it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scanloom.cards.card import Window
from scanloom.inference.sliding_window import (
    even_batch,
    even_starts,
    window_layout,
    window_weights,
)
from support import nnunet_windows

CPU = torch.device("cpu")


@given(st.integers(1, 200), st.integers(1, 90), st.sampled_from([0.3, 0.5, 0.7, 0.8, 0.9, 1.0]))
def test_even_starts_equal_their_definition(more: int, size: int, step: float) -> None:
    length = size + more - 1

    assert even_starts(length, size, 1 - step) == nnunet_windows.starts(length, size, step)


def test_an_example_of_even_starts() -> None:
    """nnU-Net's own example: 110 voxels, windows of 64, steps of a half."""
    assert even_starts(110, 64, 0.5) == [0, 23, 46]


@settings(max_examples=30)
@given(st.tuples(*[st.integers(2, 40)] * 3))
def test_filtered_point_equals_scipys_in_three_dimensions(size: Any) -> None:
    window = Window(size, 0.5, "gaussian_filter", sums="float16")

    assert torch.equal(window_weights(size, window, CPU), nnunet_windows.gaussian(size))


def test_filtered_point_of_a_plane_has_two_dimensions() -> None:
    window = Window((1, 20, 33), 0.5, "gaussian_filter", sums="float16", plane=0)

    weights = window_weights((1, 20, 33), window, CPU)

    assert torch.equal(weights[0], nnunet_windows.gaussian((20, 33)))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(
    "window",
    [
        Window((4, 5, 6), 0.5),
        Window((4, 5, 6), 0.5, starts="even", sums="float16"),
        Window((4, 1, 6), 0.25, plane=1),
        Window((1, 5, 6), 0.5, starts="even", sums="float16", plane=0),
        Window((4, 5, 1), 0.5, sums="float16", plane=2),
    ],
)
def test_rows_hold_each_window_once_before_its_planes_are_final(window: Any, axis: int) -> None:
    layout = window_layout(window, (9, 12, 13), axis, batch=8)
    rows = list(layout.rows())
    corners = [corner for row in rows for corner in row.corners]
    starts = [0, *(row.following for row in rows)]

    assert len(set(corners)) == len(corners) == layout.count
    assert starts[-1] == layout.padded[axis]
    for row, first, following in zip(rows, starts[:-1], starts[1:], strict=True):
        along = [corner[axis] for corner in row.corners]
        assert first == min(along)
        assert max(along) + layout.size[axis] <= first + layout.planes
        assert following > max(along)
    if window.plane is not None:
        assert {corner[window.plane] for corner in corners} == set(
            range(layout.padded[window.plane])
        )


def test_planes_of_a_two_dimensional_network_fill_a_batch() -> None:
    window = Window((8, 8, 1), 0.0, plane=2)

    rows = list(window_layout(window, (16, 8, 10), 2, batch=8).rows())

    assert [len(row.corners) for row in rows] == [8, 8, 4]


@pytest.mark.parametrize(
    ("count", "most", "batch"),
    [
        (9, 16, 9),
        (9, 8, 5),
        (8, 8, 8),
        (4, 8, 4),
        (11, 8, 6),
        (27, 16, 14),
        (5, 1, 1),
        (1, 8, 1),
    ],
)
def test_batches_waste_few_windows(count: int, most: int, batch: int) -> None:
    """An engine fills up the last batch: 9 windows are 10 in batches of 5, 16 in batches of 8."""
    assert even_batch(count, most) == batch


def test_a_scan_of_27_windows_runs_27() -> None:
    """A CT with nnU-Net's 3d_fullres: 3 rows of 9."""
    layout = window_layout(Window((128, 128, 128), 0.5), (239, 239, 200), 2, batch=16)
    rows = [len(row.corners) for row in layout.rows()]

    batch = layout.batch(16)

    assert (rows, batch) == ([9, 9, 9], 9)


@pytest.mark.parametrize("plane", [None, 0, 1, 2])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_half_sums_are_added_in_nnunets_order(plane: Any, axis: int) -> None:
    """At each voxel, windows are added in the order of their first voxels."""
    size: Any = tuple(1 if n == plane else 4 for n in range(3))
    window = Window(size, 0.5, starts="even", sums="float16", plane=plane)
    order: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for row in window_layout(window, (7, 8, 9), axis).rows():
        for corner in row.corners:
            for offset in torch.cartesian_prod(*(torch.arange(n) for n in size)).tolist():
                voxel = tuple(a + b for a, b in zip(corner, offset, strict=True))
                order.setdefault(voxel, []).append(corner)

    assert all(corners == sorted(corners) for corners in order.values())


@pytest.mark.parametrize(("plane", "axis", "planes"), [(None, 0, 4), (None, 1, 8), (2, 2, 1)])
def test_sums_of_all_planes_are_kept_only_where_the_order_requires_it(
    plane: Any, axis: int, planes: int
) -> None:
    size = (4, 4, 4 if plane is None else 1)
    window = Window(size, 0.5, starts="even", sums="float16", plane=plane)

    assert window_layout(window, (7, 8, 9), axis).planes == planes
