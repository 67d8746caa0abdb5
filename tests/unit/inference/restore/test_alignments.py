"""Labels come back as nnU-Net's and TotalSegmentator's do, and painted regions as MONAI's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage

from scanloom.cards.card import Argmax, Decision, NetworkGrid, Paint
from scanloom.inference.geometry import NetworkPlan, plan_grid
from scanloom.inference.restore.restorers import LabelRestorer, ScoreRestorer
from scanloom.inference.sliding_window import ScorePlanes
from support import model_cards as cards_by_hand


def half_scores(plan: NetworkPlan, classes: int) -> torch.Tensor:
    """Return scores (C, X, Y, Z) in half precision; rounding makes many of them equal."""
    noise = np.random.default_rng(0).standard_normal((classes, *plan.network.shape))
    smooth = ndimage.gaussian_filter(noise, (0, 1, 1, 1)) * 4 + 20
    return torch.from_numpy(smooth.astype(np.float16))


def restore(restorer: Any, scores: torch.Tensor, plan: NetworkPlan, step: int = 4) -> None:
    """Pass scores on, `step` planes at a time."""
    cut = scores.movedim(plan.network_axis(plan.lead) + 1, 0)
    for n in range(0, len(cut), step):
        restorer.add(ScorePlanes(n, cut[n : n + step].clone()))


def resized(scores: torch.Tensor, plan: NetworkPlan, coarse: int | None) -> NDArray[np.float16]:
    """Return scores on the source's voxels as nnU-Net makes them: scikit-image, then half.

    With a coarse axis, planes are resized one by one; then the nearest plane is taken.
    """
    from skimage.transform import resize

    options = {"mode": "edge", "anti_aliasing": False}
    shape, values = plan.oriented.shape, scores.double().numpy()
    if coarse is None:
        return np.stack([resize(c, shape, 1, **options) for c in values]).astype(np.float16)
    planes, inner = np.moveaxis(values, coarse + 1, 1), tuple(np.delete(shape, coarse))
    fine = np.array([[resize(plane, inner, 1, **options) for plane in c] for c in planes])
    count, size = shape[coarse], planes.shape[1]
    at = size / count * (np.arange(count) + 0.5) - 0.5
    index = ndimage.map_coordinates(np.arange(size, dtype=float), at[None], order=0, mode="nearest")
    return np.moveaxis(fine[:, index.astype(int)], 1, coarse + 1).astype(np.float16)


def in_source_order(values: NDArray[Any], plan: NetworkPlan) -> NDArray[Any]:
    """Return (X, Y, Z) values of the oriented grid in the source's axes."""
    flipped = np.flip(values, [x for x in range(3) if plan.flipped[x]])
    return flipped.transpose([plan.network_axis(axis) for axis in range(3)])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("order", [(2, 1, 0), (0, 2, 1)])
@pytest.mark.parametrize(
    ("own", "spacing"),
    [
        ((1.1, 0.9, 2.5), (1.5, 1.5, 1.5)),
        ((0.8, 0.9, 5.0), (1.5, 1.2, 2.5)),  # slices far apart, at a ratio of exactly 1/2
        ((1.0, 1.0, 2.0), (1.0, 1.2, 8.0)),
    ],
)
def test_argmax_is_that_of_scores_restored_in_half(
    own: tuple[float, float, float],
    spacing: tuple[float, float, float],
    order: tuple[int, int, int],
    fused: bool,
) -> None:
    """nnU-Net: scores are half on both grids, so that several classes have the largest one."""
    source = cards_by_hand.grid((17, 20, 14), own, "LPS")
    requested = NetworkGrid(None, spacing, "cubic", order, "edges", separate_above=3.0)
    plan = plan_grid(source, requested)
    scores = half_scores(plan, 4)
    restorer = ScoreRestorer(plan, Argmax(), 4, fused=fused, rounded=True)

    restore(restorer, scores, plan)

    expected = resized(scores, plan, plan.nearest[1])
    labels = in_source_order(expected.argmax(axis=0), plan)
    ranked = np.sort(expected, axis=0)
    assert (ranked[-1] == ranked[-2]).mean() > 0.001
    assert (restorer.labels[0] == labels).mean() >= 0.9998  # float64, or float32, becomes half


@pytest.mark.parametrize("codes", ["RAS", "LPS", "SPL"])
@pytest.mark.parametrize("spacing", [(2.0, 1.0, 1.5), (1.7, 1.7, 1.7)])
def test_labels_come_back_as_scipys_zoom_of_order_0(
    codes: str, spacing: tuple[float, float, float]
) -> None:
    """TotalSegmentator: the outermost voxels coincide; halves are rounded up."""
    source = cards_by_hand.grid((21, 13, 16), (1.0, 2.0, 1.5), codes)
    plan = plan_grid(source, NetworkGrid("RAS", spacing, alignment="ends"))
    scores = half_scores(plan, 5)
    restorer = LabelRestorer(plan, Argmax(), 5)

    restore(restorer, scores, plan)
    (labels,) = restorer.finish(lambda labels: labels)

    zoom = np.array(plan.oriented.shape) / plan.network.shape
    expected = ndimage.zoom(scores.numpy().argmax(axis=0), zoom, order=0, mode="nearest")
    np.testing.assert_array_equal(labels, in_source_order(expected, plan))


@pytest.mark.parametrize("restore_by", ["scores", "labels"])
def test_nothing_is_found_outside_a_centred_grid(restore_by: str) -> None:
    source = cards_by_hand.grid((21, 13, 16), (1.0, 2.0, 1.5), "LPS")
    requested = NetworkGrid("RAS", (1.0, 1.0, 1.0), alignment="centre", shape=(11, 11, 11))
    plan = plan_grid(source, requested)
    scores = torch.zeros(2, *plan.network.shape)
    scores[1] = 1

    if restore_by == "scores":
        both = ScoreRestorer(plan, Argmax(), 2)
        restore(both, scores, plan)
        labels = both.labels[0]
    else:
        nearest = LabelRestorer(plan, Argmax(), 2)
        restore(nearest, scores, plan)
        (labels,) = nearest.finish(lambda labels: labels)

    index = np.stack(np.meshgrid(*map(np.arange, source.shape), indexing="ij"), axis=-1)
    at = plan.network.index(source.world(index))
    inside = ((at >= -0.5 - 1e-9) & (at <= 10.5 + 1e-9)).all(axis=-1)
    np.testing.assert_array_equal(labels, inside)


@pytest.mark.parametrize("inclusive", [True, False])
def test_later_regions_are_painted_over_earlier_ones(inclusive: bool) -> None:
    """Scores and labels on the scan's own voxels agree; a score may equal the threshold."""
    plan = plan_grid(cards_by_hand.grid((6, 5, 4)), NetworkGrid(None))
    scores = torch.zeros(3, *plan.network.shape)
    scores[0, :4], scores[1, 2:], scores[2, :, 2:] = 0.9, 0.5, 0.7
    decision: Decision = Paint(((2, 4), (0, 1), (1, 2)), 0.5, inclusive)
    by_scores, by_labels = ScoreRestorer(plan, decision, 3), LabelRestorer(plan, decision, 3)
    restore(by_scores, scores, plan)
    restore(by_labels, scores, plan)

    expected = np.zeros(plan.network.shape, np.uint8)
    expected[:, 2:], expected[:4] = 4, 1
    if inclusive:
        expected[2:] = 2
    np.testing.assert_array_equal(by_scores.labels[0], expected)
    np.testing.assert_array_equal(by_labels.finish(lambda labels: labels)[0], expected)
    assert len(by_scores.labels) == 1
