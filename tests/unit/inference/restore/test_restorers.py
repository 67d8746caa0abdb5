"""Labels are those of: bring all scores back linearly, then decide."""

from __future__ import annotations

import itertools
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import ndimage

from scanloom.cards.card import Argmax, Decision, NetworkGrid, Threshold
from scanloom.core import Grid
from scanloom.inference.geometry import NetworkPlan, plan_grid
from scanloom.inference.resampling.resample import to_network
from scanloom.inference.restore.restorers import LabelRestorer, ScoreRestorer
from scanloom.inference.sliding_window import ScorePlanes
from support import model_cards

TIE = 1e-4
"""Scores of about 1 that differ less are one in float32."""

sizes = st.integers(2, 14)
spacings = st.sampled_from([0.7, 1.0, 1.25, 2.0, 3.1])
codes = st.sampled_from(
    [
        "".join(axis[flip] for axis, flip in zip(order, flips, strict=True))
        for order in itertools.permutations(("RL", "AP", "SI"))
        for flips in itertools.product((0, 1), repeat=3)
    ]
)
grids = st.builds(
    model_cards.grid,
    st.tuples(sizes, sizes, sizes),
    st.tuples(spacings, spacings, spacings),
    codes,
    turn=st.sampled_from([0.0, 7.0]),
    tilt=st.sampled_from([0.0, 0.0, 14.0, -25.0]),
)
network_grids = st.builds(
    NetworkGrid,
    st.sampled_from(["RAS", "LPS", "PIR", None]),
    st.one_of(st.none(), st.tuples(spacings, spacings, spacings)),
)


def scores_of(plan: NetworkPlan, classes: int, seed: int) -> NDArray[np.float32]:
    noise = np.random.default_rng(seed).standard_normal((classes, *plan.network.shape))
    return ndimage.gaussian_filter(noise, (0, 1, 1, 1)).astype(np.float32) * 4


def planes(scores: NDArray[np.float32], plan: NetworkPlan, step: int) -> list[ScorePlanes]:
    """Return (C, X, Y, Z) scores as planes across the axis that leads, `step` at a time."""
    cut = torch.from_numpy(scores).movedim(plan.network_axis(plan.lead) + 1, 0)
    return [ScorePlanes(n, cut[n : n + step]) for n in range(0, len(cut), step)]


def brought_back(scores: NDArray[np.float32], source: Grid, network: Grid) -> NDArray[np.float64]:
    """Return all scores at the source's voxels, by world positions and SciPy: (C, I, J, K)."""
    index = np.stack(np.meshgrid(*(np.arange(n) for n in source.shape), indexing="ij"), axis=-1)
    at = np.moveaxis(network.index(source.world(index)), -1, 0)
    return np.stack(
        [ndimage.map_coordinates(s.astype(np.float64), at, order=1, mode="nearest") for s in scores]
    )


def restored(
    scores: NDArray[np.float32], plan: NetworkPlan, decision: Decision, step: int = 3
) -> list[NDArray[np.uint8]]:
    restorer = ScoreRestorer(plan, decision, len(scores))
    for block in planes(scores, plan, step):
        restorer.add(block)
    return restorer.labels


@settings(max_examples=150)
@given(grids, network_grids, st.integers(1, 5), st.integers(1, 5), st.integers(0, 99))
def test_labels_are_the_argmax_of_scores_brought_back(
    source: Grid, network: NetworkGrid, classes: int, step: int, seed: int
) -> None:
    """Labels are equal but for ties, for any shapes, spacings, orders of axes and tilts."""
    plan = plan_grid(source, network)
    scores = scores_of(plan, classes, seed)

    (labels,) = restored(scores, plan, Argmax(), step)

    truth = brought_back(scores, source, plan.network)
    lost = truth.max(axis=0) - np.take_along_axis(truth, labels[None].astype(int), axis=0)[0]
    assert lost.max() < TIE
    assert labels.flags.f_contiguous
    assert labels.shape == source.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_scores_are_mixed_in_float32(dtype: torch.dtype) -> None:
    source = model_cards.grid((12, 13, 14), (0.7, 0.7, 1.0), "LPS", tilt=9)
    plan = plan_grid(source, NetworkGrid("RAS", (1.5, 1.5, 1.5)))
    scores = torch.from_numpy(scores_of(plan, 4, 0)).to(dtype)
    restorer = ScoreRestorer(plan, Argmax(), 4)
    for first in range(0, plan.network.shape[2], 3):
        restorer.add(ScorePlanes(first, scores.movedim(3, 0)[first : first + 3]))

    expected = restored(scores.float().numpy(), plan, Argmax())[0]

    np.testing.assert_array_equal(restorer.labels[0], expected)


@settings(max_examples=50)
@given(grids, network_grids, st.integers(0, 99))
def test_thresholds_are_applied_to_scores_brought_back(
    source: Grid, network: NetworkGrid, seed: int
) -> None:
    plan = plan_grid(source, network)
    scores = scores_of(plan, 3, seed)

    maps = restored(scores, plan, Threshold(0.5))

    truth = brought_back(scores, source, plan.network)
    for number, (labels, values) in enumerate(zip(maps, truth, strict=True), start=1):
        sure = np.abs(values - 0.5) > TIE
        np.testing.assert_array_equal(labels[sure], (values[sure] >= 0.5) * number)


def test_the_first_of_equal_scores_wins() -> None:
    """The first class wins as in argmax, also between voxels."""
    plan = plan_grid(model_cards.grid((5, 6, 7)), NetworkGrid("LPS", (2.0, 2.0, 2.0)))
    scores = np.ones((4, *plan.network.shape), np.float32)
    scores[0] = 0

    (labels,) = restored(scores, plan, Argmax())

    assert (labels == 1).all()


def test_label_maps_leave_memory_with_their_restorer() -> None:
    """At once: in a cycle of references they would stay until Python searches for such."""
    plan = plan_grid(model_cards.grid((5, 6, 7)), NetworkGrid("LPS", (2.0, 2.0, 2.0)))
    restorer = ScoreRestorer(plan, Argmax(), 2)
    for block in planes(scores_of(plan, 2, 0), plan, 2):
        restorer.add(block)
    kept = weakref.ref(restorer)

    del restorer

    assert kept() is None


def test_more_classes_than_a_byte_holds() -> None:
    plan = plan_grid(model_cards.grid((5, 6, 7)), NetworkGrid("LPS", (2.0, 2.0, 2.0)))
    scores = np.zeros((301, *plan.network.shape), np.float32)
    scores[300] = 1

    (labels,) = restored(scores, plan, Argmax())

    assert labels.dtype == np.uint16
    assert (labels == 300).all()


@settings(max_examples=60)
@given(grids, network_grids, st.integers(0, 99))
def test_a_scan_is_shown_linearly(source: Grid, network: NetworkGrid, seed: int) -> None:
    """The network's input is the scan at its voxels' positions, for sheared scans too."""
    plan = plan_grid(source, network)
    noise = np.random.default_rng(seed).integers(-1000, 1000, source.shape)
    array = np.asfortranarray(noise.astype(np.int16))

    seen = to_network(array, plan, torch.device("cpu"))

    truth = brought_back(array[None].astype(np.float32), plan.network, source)[0]
    np.testing.assert_allclose(seen.numpy(), truth, atol=2e-3)


@settings(max_examples=60)
@given(grids, network_grids)
def test_the_networks_grid_covers_the_scan(source: Grid, network: NetworkGrid) -> None:
    """Every voxel lies on it, but for MONAI's rounding of shape and of the middle of a shear."""
    plan = plan_grid(source, network)
    corners = np.array(list(itertools.product(*((0, n - 1) for n in source.shape))))

    seen = plan.network.index(source.world(corners))

    room = 0.5 + 0.5 * (np.abs(np.abs(plan.scale) - 1) + np.abs(plan.lean))
    assert (seen >= -room - 1e-6).all()
    assert (seen <= np.array(plan.network.shape) - 1 + room + 1e-6).all()


@pytest.mark.parametrize("axes", ["RAS", "LPI", "PIR", "SLA"])
def test_labels_on_the_scans_own_voxels_come_back_unchanged(axes: str) -> None:
    """Without resampling, labels restored by nearest neighbour are those of the scores."""
    plan = plan_grid(model_cards.grid((7, 5, 6), codes=axes), NetworkGrid("RAS", None))
    scores = scores_of(plan, 3, 0)
    restorer = LabelRestorer(plan, Argmax(), 3)
    for block in planes(scores, plan, 2):
        restorer.add(block)

    (labels,) = restorer.finish(lambda labels: labels)

    np.testing.assert_array_equal(labels, restored(scores, plan, Argmax())[0])
