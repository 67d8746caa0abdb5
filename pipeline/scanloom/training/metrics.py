"""Agreement of a predicted mask with its reference, and its statistics over cases.

Surfaces are those of MONAI with `use_subvoxels`, which are those of DeepMind's surface-distance:
elements between the voxels, each with its area. A surface of voxels counts an oblique or
thick-sliced boundary by its steps, so that percentiles depend on spacing and direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid
from scanloom.engine.machine.lean_imports import show_modules, without_optional_imports

Outcome = Literal["found", "missed", "invented", "absent"]
"""Structure in both masks; in the reference only; in the prediction only; in neither."""

PERCENT = 95.0
"""Percentile of the Hausdorff distance: a few stray voxels must not decide."""
TOLERANCE_MM = 2.0
"""Default tolerance of the normalised surface distance; see docs/evaluation.md."""
_ROUNDING = 1e-6
"""Relative excess over the tolerance that is due to rounded headers (float32): distances on a grid
of 1 mm are often equal to the tolerance, and a spacing of 1.0000001 mm must not enlarge them."""
RESAMPLES = 10_000
"""Bootstrap resamples: the ends of an interval then vary by less than a fiftieth of its width."""
FEWEST_PATIENTS = 6
"""Patients below which there is no interval: where nothing differs, all differences of five have
one sign in 6 % of the trials, and no interval of them could then hold 0."""
_SEED = 20_180_912
_SLAB_VOXELS = 4 << 20
"""Voxels whose surfaces are found at a time: MONAI needs some 100 bytes for each."""
_BLOCK = 500
"""Resamples at a time, which bounds memory to 500 numbers per patient."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of a prediction with the reference, for one structure of one case.

    Parameters
    ----------
    reference_ml, prediction_ml : float
        Volumes.
    dice : float
        2 x overlap / (sum of both volumes): NaN if both are empty, 0 if one of them is.
    hd95_mm : float
        The larger of the 95th percentiles of the distances from each surface to the other; NaN
        unless both masks have voxels: a distance to nothing is not a number.
    nsd : float
        Normalised surface distance: the share of both surfaces that lies within the tolerance of
        the other one. NaN if both masks are empty, 0 if one of them is.
    """

    reference_ml: float
    prediction_ml: float
    dice: float
    hd95_mm: float = math.nan
    nsd: float = math.nan

    @property
    def outcome(self) -> Outcome:
        """Whether the structure is in both masks, one of them, or neither."""
        if self.reference_ml > 0:
            return "found" if self.prediction_ml > 0 else "missed"
        return "invented" if self.prediction_ml > 0 else "absent"

    @property
    def volume_error_ml(self) -> float:
        """Predicted volume minus that of the reference."""
        return self.prediction_ml - self.reference_ml

    @property
    def volume_error_percent(self) -> float:
        """Volume error in per cent of the reference; NaN if the reference is empty."""
        return 100 * self.volume_error_ml / self.reference_ml if self.reference_ml else math.nan


def compare_masks(
    reference: NDArray[np.bool_],
    prediction: NDArray[np.bool_],
    grid: Grid,
    tolerance_mm: float = TOLERANCE_MM,
) -> Agreement:
    """Return the agreement of two masks.

    Parameters
    ----------
    reference, prediction : (A, B, C) bool arrays
        Masks on a box of the grid that contains all voxels of both.
    grid : Grid
        Its affine gives the distances, also of a sheared grid.
    tolerance_mm : float
        Distance up to which a surface counts as right.
    """
    sizes = int(np.count_nonzero(reference)), int(np.count_nonzero(prediction))
    reference_ml, prediction_ml = (n * grid.voxel_volume / 1000 for n in sizes)
    if not any(sizes):
        return Agreement(0.0, 0.0, math.nan)
    if not all(sizes):
        return Agreement(reference_ml, prediction_ml, 0.0, nsd=0.0)
    overlap = int(np.count_nonzero(reference & prediction))
    dice = 2 * overlap / sum(sizes)
    if overlap == sizes[0] == sizes[1]:  # saves the surfaces of equal masks
        return Agreement(reference_ml, prediction_ml, dice, 0.0, 1.0)
    distances = surface_distances(reference, prediction, grid)
    total = sum(float(areas.sum()) for _, areas in distances)
    limit = tolerance_mm * (1 + _ROUNDING)
    within = sum(float(areas[mm <= limit].sum()) for mm, areas in distances)
    # 95 % of the area of either surface lie within it
    hd95 = max(
        float(np.percentile(mm, PERCENT, weights=areas, method="inverted_cdf"))
        for mm, areas in distances
    )
    return Agreement(reference_ml, prediction_ml, dice, hd95, within / total)


Distances = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Distance in mm, and area in mm2, of each element of a surface."""


def surface_distances(
    reference: NDArray[np.bool_], prediction: NDArray[np.bool_], grid: Grid
) -> tuple[Distances, Distances]:
    """Return the distances from the surface of each mask to that of the other one.

    Parameters
    ----------
    reference, prediction : (A, B, C) bool arrays
        Masks with at least one voxel. A voxel at the edge of the array has a surface there.
    grid : Grid
        Its affine gives the distances. Areas are those of a grid with right angles, also if it is
        sheared: they only weigh the distances.
    """
    import torch
    from scipy.spatial import KDTree

    show_modules("monai.metrics")
    with without_optional_imports():
        from monai.metrics.utils import get_mask_edges

    # an element lies between eight voxels, so that the outermost ones need a margin
    padded = [np.pad(mask, 1) for mask in (reference, prediction)]
    # plain spacing where axes are at right angles: a product with a rotation is not exact, and
    # many distances are equal to the tolerance
    to_mm = grid.affine[:3, :3].T if grid.sheared else np.diag(grid.spacing)
    points: tuple[list[Any], list[Any]] = [], []
    areas: tuple[list[Any], list[Any]] = [], []
    slices = max(1, _SLAB_VOXELS // padded[0][0].size)
    for start in range(0, len(padded[0]) - 1, slices):
        slab = [torch.from_numpy(mask[start : start + slices + 1]) for mask in padded]
        edges = get_mask_edges(*slab, crop=False, spacing=grid.spacing)
        for n, (is_surface, area) in enumerate(zip(edges[:2], edges[2:], strict=True)):
            at = np.argwhere(is_surface.numpy())
            at[:, 0] += start
            points[n].append(at @ to_mm)
            areas[n].append(area[is_surface].numpy().astype(np.float64))
    first, second = map(np.concatenate, points)
    return (
        (KDTree(second).query(first)[0], np.concatenate(areas[0])),
        (KDTree(first).query(second)[0], np.concatenate(areas[1])),
    )


@dataclass(frozen=True)
class Statistics:
    """Number, mean, median and quartiles of the defined values of a figure; NaN without any."""

    n: int
    mean: float
    median: float
    low_quartile: float
    high_quartile: float


def statistics_of(values: Sequence[float]) -> Statistics:
    """Return the statistics of the values that are numbers."""
    numbers = np.array([v for v in values if not math.isnan(v)], np.float64)
    if not numbers.size:
        return Statistics(0, *(math.nan,) * 4)
    low, middle, high = (float(v) for v in np.quantile(numbers, (0.25, 0.5, 0.75)))
    return Statistics(numbers.size, float(numbers.mean()), middle, low, high)


@dataclass(frozen=True)
class Difference:
    """Mean paired difference, with the 95 % interval of a bootstrap over patients.

    Parameters
    ----------
    pairs : int
        Cases in which the figure is defined for both.
    mean, low, high : float
        Mean difference and the ends of its interval; NaN if there is no pair, the ends also if the
        pairs are of fewer than `FEWEST_PATIENTS`.
    """

    pairs: int
    mean: float
    low: float
    high: float


def paired_differences(
    differences: NDArray[np.float64], patients: Sequence[Any]
) -> tuple[list[Difference], Difference]:
    """Return the mean difference of each structure, and the mean of these over structures.

    Patients are drawn with replacement, each with all its cases and structures: cases of one
    patient, and structures of one case, are not independent.

    Parameters
    ----------
    differences : (cases, structures) array
        NaN where a figure is undefined for one of the two.
    patients : sequence
        Patient of each case.
    """
    groups, index = np.unique(np.asarray(patients, dtype=str), return_inverse=True)
    defined = ~np.isnan(differences)
    sums, counts = (np.zeros((groups.size, differences.shape[1])) for _ in range(2))
    np.add.at(sums, index, np.where(defined, differences, 0.0))
    np.add.at(counts, index, defined)
    drawn = [np.empty((0, differences.shape[1] + 1))]
    random = np.random.default_rng(_SEED)
    share = np.full(groups.size, 1 / max(groups.size, 1))
    for _ in range(RESAMPLES // _BLOCK if groups.size >= FEWEST_PATIENTS else 0):
        weights = random.multinomial(groups.size, share, _BLOCK).astype(np.float64)
        drawn.append(_means(weights @ sums, weights @ counts))
    means = _means(sums.sum(axis=0)[None], counts.sum(axis=0)[None])[0]
    pairs = [*counts.sum(axis=0), defined.any(axis=1).sum()]
    resampled = np.concatenate(drawn)
    each = []
    for n, mean in enumerate(means):
        column = resampled[:, n]
        column = column[~np.isnan(column)]
        known = np.count_nonzero(counts[:, n] if n < counts.shape[1] else counts.any(1))
        ends = (math.nan, math.nan)
        if known >= FEWEST_PATIENTS:
            ends = (float(np.quantile(column, 0.025)), float(np.quantile(column, 0.975)))
        each.append(Difference(int(pairs[n]), float(mean), *ends))
    return each[:-1], each[-1]


def _means(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return means (N, structures) with a last column, their mean over structures."""
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(counts > 0, sums / counts, np.nan)
        known = ~np.isnan(means)
        over = np.where(known, means, 0.0).sum(axis=1) / known.sum(axis=1)
    return np.column_stack([means, over])
