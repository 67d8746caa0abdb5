"""Figures equal those of three other programs, on drawn pairs and where the truth is known."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import SimpleITK as sitk
import torch
from monai.metrics import compute_surface_dice
from monai.metrics.utils import create_table_neighbour_code_to_surface_area
from scipy import ndimage, stats
from scipy.spatial.distance import cdist

from scanloom.core import Grid
from scanloom.training import metrics
from scanloom.training.metrics import (
    Agreement,
    compare_masks,
    paired_differences,
    statistics_of,
)

PAIRS = 200
Pair = tuple[np.ndarray, np.ndarray, tuple[float, float, float], float]


def drawn_mask(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return nothing, a voxel, noise, everything, or blobs."""
    mask = np.zeros(shape, bool)
    kind = rng.choice(["empty", "voxel", "noise", "all", "blobs"], p=[0.1, 0.15, 0.15, 0.05, 0.55])
    if kind == "voxel":
        mask[tuple(rng.integers(0, n) for n in shape)] = True
    elif kind == "noise":
        mask = rng.random(shape) < 0.2
    elif kind == "all":
        mask[:] = True
    elif kind == "blobs":
        mask = ndimage.gaussian_filter(rng.standard_normal(shape), 2) > rng.normal(0, 0.05)
    return mask


def drawn_pairs() -> Iterator[Pair]:
    """Yield masks of any size with anisotropic spacing, and a tolerance."""
    rng = np.random.default_rng(20_180_912)
    for _ in range(PAIRS):
        shape = tuple(int(n) for n in rng.integers(1, 14, 3))
        spacing = tuple(float(mm) for mm in rng.uniform(0.5, 5, 3))
        # odd, so that no distance equals it but for rounding
        tolerance = float(rng.uniform(0.5, 5)) + 1e-4
        yield drawn_mask(rng, shape), drawn_mask(rng, shape), spacing, tolerance


def figures(pair: Pair) -> Agreement:
    reference, prediction, spacing, tolerance = pair
    grid = Grid(reference.shape, np.diag((*spacing, 1.0)))
    return compare_masks(reference, prediction, grid, tolerance)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SciPy's old names
def test_pairs_with_a_surface_equal_surface_distance_of_deepmind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    surface_distance = pytest.importorskip("surface_distance")
    compared = 0
    for n, pair in enumerate(drawn_pairs()):
        monkeypatch.setattr(metrics, "_SLAB_VOXELS", 300 if n % 2 else 1 << 20)
        reference, prediction, spacing, tolerance = pair
        if not reference.any() or not prediction.any():
            continue
        ours = figures(pair)
        distances = surface_distance.compute_surface_distances(reference, prediction, spacing)
        hd95 = surface_distance.compute_robust_hausdorff(distances, 95)
        nsd = surface_distance.compute_surface_dice_at_tolerance(distances, tolerance)
        assert ours.hd95_mm == pytest.approx(hd95, abs=1e-9)
        assert ours.nsd == pytest.approx(nsd, abs=1e-6)
        compared += 1
    assert compared > PAIRS / 2


@pytest.mark.thorough
def test_nsd_equals_that_of_monai() -> None:
    for pair in drawn_pairs():
        reference, prediction, spacing, tolerance = pair
        if not reference.any() or not prediction.any():
            continue
        # its surfaces need a margin around the image
        masks = [torch.from_numpy(np.pad(m, 1))[None, None] for m in (prediction, reference)]
        [[nsd]] = compute_surface_dice(
            *masks, [tolerance], include_background=True, spacing=spacing, use_subvoxels=True
        ).tolist()
        assert figures(pair).nsd == pytest.approx(nsd, abs=1e-6)


def test_dice_and_volumes_equal_those_of_itk() -> None:
    for pair in drawn_pairs():
        reference, prediction, spacing, _ = pair
        images = []
        for mask in (reference, prediction):
            images.append(sitk.GetImageFromArray(mask.astype(np.uint8).T))
            images[-1].SetSpacing(spacing)
        ours = figures(pair)
        if reference.any() or prediction.any():
            overlap = sitk.LabelOverlapMeasuresImageFilter()
            overlap.Execute(*images)
            assert ours.dice == pytest.approx(overlap.GetDiceCoefficient(), abs=1e-12)
        else:
            assert math.isnan(ours.dice)
            assert math.isnan(ours.nsd)
        for image, volume in zip(images, (ours.reference_ml, ours.prediction_ml), strict=True):
            shape = sitk.LabelShapeStatisticsImageFilter()
            shape.Execute(image)
            size = shape.GetPhysicalSize(1) / 1000 if shape.HasLabel(1) else 0.0
            assert volume == pytest.approx(size, rel=1e-9)


def elements(mask: np.ndarray, spacing: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return position and area of each surface element, one cell of eight voxels at a time."""
    table, _ = create_table_neighbour_code_to_surface_area(spacing)
    padded = np.pad(mask, 1)
    at, areas = [], []
    for cell in np.ndindex(*(n - 1 for n in padded.shape)):
        corners = padded[tuple(slice(c, c + 2) for c in cell)]
        if 0 < corners.sum() < 8:
            code = int("".join("1" if each else "0" for each in corners.ravel()), 2)
            at.append(np.multiply(cell, spacing))
            areas.append(float(table[code]))
    return np.array(at), np.array(areas)


def test_brute_force_over_all_pairs_of_elements_gives_the_same_figures() -> None:
    for n, pair in enumerate(drawn_pairs()):
        reference, prediction, spacing, tolerance = pair
        if n % 4 or not reference.any() or not prediction.any():
            continue
        sides = [elements(mask, spacing) for mask in (reference, prediction)]
        apart = cdist(sides[0][0], sides[1][0])
        within, hd95 = 0.0, 0.0
        for nearest, (_, areas) in zip((apart.min(1), apart.min(0)), sides, strict=True):
            within += areas[nearest <= tolerance].sum()
            shares = [areas[nearest <= d].sum() / areas.sum() for d in np.sort(nearest)]
            hd95 = max(hd95, np.sort(nearest)[np.searchsorted(shares, 0.95 - 1e-12)])
        ours = figures(pair)
        assert ours.nsd == pytest.approx(within / sum(a.sum() for _, a in sides), abs=1e-6)
        assert ours.hd95_mm == pytest.approx(hd95, abs=1e-9)


def slab(first: int, last: int, shape: tuple[int, int, int] = (30, 20, 20)) -> np.ndarray:
    mask = np.zeros(shape, bool)
    mask[first : last + 1] = True
    return mask


def test_two_cubes_at_a_known_distance() -> None:
    """A cube moved by 3 voxels of 2 mm: ends are 6 mm apart, and decide over the percentile."""
    cubes = []
    for at in (5, 8):
        mask = np.zeros((30, 30, 30), bool)
        mask[at : at + 10, 10:20, 10:20] = True
        cubes.append(mask)
    grid = Grid((30, 30, 30), np.diag((2.0, 1.0, 1.0, 1.0)))
    ours = compare_masks(*cubes, grid, 2.0)
    assert ours.dice == pytest.approx(0.7)
    assert ours.hd95_mm == pytest.approx(6.0)
    assert compare_masks(*cubes, grid, 6.0).nsd == 1.0


def test_distances_follow_a_sheared_grid() -> None:
    """Planes 2 slices apart are 4 mm apart; along the step of a slice it would be 5 mm."""
    affine = np.diag((1.0, 1.0, 2.0, 1.0))
    affine[1, 2] = 1.5
    masks = [np.zeros((40, 40, 8), bool) for _ in range(2)]
    masks[0][..., :2] = masks[1][..., :4] = True
    grid = Grid((40, 40, 8), affine)
    assert grid.sheared
    assert grid.spacing[2] == 2.5
    assert compare_masks(*masks, grid).hd95_mm == pytest.approx(4.0)


def test_a_grid_in_any_orientation_gives_the_same_figures() -> None:
    pair = next(p for p in drawn_pairs() if p[0].sum() > 50 and p[1].sum() > 50)
    reference, prediction, spacing, tolerance = pair
    axes = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    affine = np.eye(4)
    affine[:3, :3] = axes * spacing
    turned = compare_masks(reference, prediction, Grid(reference.shape, affine), tolerance)
    straight = figures(pair)
    assert turned.hd95_mm == pytest.approx(straight.hd95_mm, abs=1e-9)
    assert turned.nsd == pytest.approx(straight.nsd, abs=1e-9)


@pytest.mark.parametrize("spacing", [1.0, 1.0 + 5e-8, 1.0 - 5e-8])
def test_a_distance_equal_to_the_tolerance_is_within_it_whatever_the_rounding(
    spacing: float,
) -> None:
    grid = Grid((30, 20, 20), np.diag((spacing, spacing, spacing, 1.0)))
    assert compare_masks(slab(5, 14), slab(5, 16), grid, 2.0).nsd == 1.0


@pytest.mark.parametrize(
    ("reference", "prediction", "outcome", "dice", "nsd"),
    [
        (0, 0, "absent", math.nan, math.nan),
        (1, 0, "missed", 0.0, 0.0),
        (0, 1, "invented", 0.0, 0.0),
        (1, 1, "found", 1.0, 1.0),
    ],
)
def test_empty_and_one_voxel_masks(
    reference: int, prediction: int, outcome: str, dice: float, nsd: float
) -> None:
    masks = [np.full((1, 1, 1), bool(n)) for n in (reference, prediction)]
    ours = compare_masks(*masks, Grid((1, 1, 1), np.diag((2.0, 3.0, 4.0, 1.0))))
    assert ours.outcome == outcome
    np.testing.assert_equal((ours.dice, ours.nsd), (dice, nsd))
    assert ours.volume_error_ml == pytest.approx((prediction - reference) * 0.024)
    assert math.isnan(ours.volume_error_percent) is not bool(reference)
    assert math.isnan(ours.hd95_mm) is (outcome != "found")


def test_intervals_equal_those_of_scipy() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(0.02, 0.05, (40, 2))
    patients = [f"p{n}" for n in range(40)]
    each, _ = paired_differences(values, patients)
    assert paired_differences(values, patients)[0] == each  # the seed is fixed
    for n, ours in enumerate(each):
        theirs = stats.bootstrap(
            (values[:, n],), np.mean, n_resamples=10_000, method="percentile", rng=1
        ).confidence_interval
        width = theirs.high - theirs.low
        assert ours.mean == pytest.approx(values[:, n].mean())
        assert ours.low == pytest.approx(theirs.low, abs=0.05 * width)
        assert ours.high == pytest.approx(theirs.high, abs=0.05 * width)


def test_cases_of_one_patient_are_drawn_together() -> None:
    """Ten copies of each patient's case tell no more than one of them."""
    values = np.random.default_rng(5).normal(0, 1, (12, 1))
    patients = [f"p{n}" for n in range(12)]
    [once], _ = paired_differences(values, patients)
    [often], _ = paired_differences(np.repeat(values, 10, axis=0), np.repeat(patients, 10).tolist())
    assert (often.low, often.high) == pytest.approx((once.low, once.high))
    [apart], _ = paired_differences(np.repeat(values, 10, axis=0), [str(n) for n in range(120)])
    assert apart.high - apart.low < 0.5 * (once.high - once.low)


def test_undefined_differences_do_not_count() -> None:
    values = np.array([[0.1, np.nan], [0.3, np.nan], [np.nan, np.nan]])
    [first, second], mean = paired_differences(values, ["a", "b", "c"])
    assert (first.pairs, second.pairs, mean.pairs) == (2, 0, 2)
    assert first.mean == mean.mean == pytest.approx(0.2)
    assert math.isnan(second.mean)
    assert math.isnan(second.low)


@pytest.mark.parametrize(
    ("patients", "has_interval"), [(1, False), (2, False), (5, False), (6, True)]
)
def test_few_patients_have_no_interval(patients: int, has_interval: bool) -> None:
    """All their differences have one sign by chance: an interval would exclude 0."""
    values = np.linspace(0.1, 0.3, patients).repeat(2)[:, None]  # two scans each
    each, mean = paired_differences(values, [str(n // 2) for n in range(2 * patients)])
    for found in (*each, mean):
        assert (found.pairs, found.mean) == (2 * patients, pytest.approx(values.mean()))
        assert math.isfinite(found.low) == math.isfinite(found.high) == has_interval


def test_statistics_leave_out_what_is_undefined() -> None:
    ours = statistics_of([0.5, math.nan, 1.0, 0.0])
    assert (ours.n, ours.mean, ours.median) == (3, 0.5, 0.5)
    assert statistics_of([math.nan]).n == 0
