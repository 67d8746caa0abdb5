"""Maps of uncertainty on other grids, of several models, and their means in structures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Measurement, Segmentation
from scanloom.core.segmentation import UNCERTAINTY_STEPS, Uncertainty
from scanloom.ops.run_length import iter_slabs

Map = NDArray[Any]


def change_maps(
    uncertainty: Uncertainty | None, change: Callable[[Map], Map]
) -> Uncertainty | None:
    """Return all maps after a change, such as of their grid."""
    if uncertainty is None:
        return None
    return Uncertainty(**{name: change(values) for name, values in uncertainty.maps()})


def largest_uncertainty(several: Sequence[Uncertainty | None]) -> Uncertainty | None:
    """Return the largest value of each voxel in several maps; None if one is missing.

    A map of disagreement is left out where a model has none.
    """
    present = [each for each in several if each is not None]
    if not present or len(present) < len(several):
        return None
    disagreements = [u.disagreement for u in present if u.disagreement is not None]
    return Uncertainty(
        reduce(np.maximum, (each.entropy for each in present)),
        reduce(np.maximum, disagreements) if disagreements else None,
    )


def add_uncertainty(
    measurements: Sequence[Measurement], segmentation: Segmentation
) -> Iterator[Measurement]:
    """Yield the measurements of a segmentation with the mean uncertainty of each structure."""
    if segmentation.uncertainty is None:
        yield from measurements
        return
    means = {name: _means(segmentation, values) for name, values in segmentation.uncertainty.maps()}
    for measurement in measurements:
        yield replace(
            measurement,
            entropy=means["entropy"][measurement.number],
            disagreement=means.get("disagreement", {}).get(measurement.number),
        )


def _means(segmentation: Segmentation, values: Map) -> dict[int, float | None]:
    """Return the mean of a map in each structure, by number; None for an empty structure."""
    means: dict[int, float | None] = {}
    for layer in segmentation.layers:
        size = 1 + max(structure.number for structure in layer.structures)
        voxels, total = np.zeros(size, np.int64), np.zeros(size)
        for slab in iter_slabs(values.shape):
            labels = layer.labels[:, :, slab].ravel(order="F")
            weights = values[:, :, slab].ravel(order="F")
            voxels += np.bincount(labels, minlength=size)[:size]
            total += np.bincount(labels, weights, minlength=size)[:size]
        for structure in layer.structures:
            n = structure.number
            means[n] = float(total[n] / voxels[n] / UNCERTAINTY_STEPS) if voxels[n] else None
    return means
