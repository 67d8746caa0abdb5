"""Label maps as runs: stretches of equal value along the first axis, slab by slab.

Label maps are mostly long stretches of one value; what is counted a run at a time costs a fraction
of what is counted a voxel at a time, and slabs keep the memory small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SLAB_VOXELS = 1 << 21
"""Voxels of a slab: small enough for the processor's cache to help and for memory not to count."""

Labels = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of a slab; none goes past the end of its row.

    Parameters
    ----------
    start : (R,) array
        First voxel of each run, counted through the slab in Fortran order.
    length : (R,) array
        Voxels of each run.
    value : (R,) array
        The value that stands in it.
    """

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    value: Labels


def runs_of(slab: Labels) -> Runs:
    """Return the runs of an (I, J, K) array in Fortran order, background included."""
    flat = slab.reshape(-1, order="F")
    begins = np.empty(flat.size, bool)
    np.not_equal(flat[1:], flat[:-1], out=begins[1:])
    begins[:: slab.shape[0]] = True
    start = np.flatnonzero(begins)
    return Runs(start, np.diff(start, append=flat.size), flat[start])


def slabs_of(shape: tuple[int, ...], voxels: int = SLAB_VOXELS) -> Iterator[slice]:
    """Yield stretches of the last axis that hold about `voxels` voxels, at least one index each."""
    step = max(1, voxels // (shape[0] * shape[1]))
    for start in range(0, shape[2], step):
        yield slice(start, min(start + step, shape[2]))


def counts_by_slice(labels: Labels) -> NDArray[np.int64]:
    """Count each value in each slice of the last axis.

    Parameters
    ----------
    labels : (I, J, K) array of unsigned integers
        A label map; fastest where I runs fastest in memory.

    Returns
    -------
    (K, N) array
        Column n counts value n; N is the highest value and one.
    """
    size = int(labels.max(initial=0)) + 1
    counts = np.zeros((labels.shape[2], size), np.int64)
    area = labels.shape[0] * labels.shape[1]
    for slab in slabs_of(labels.shape):
        runs = runs_of(labels[:, :, slab])
        cell = runs.start // area * size + runs.value
        found = np.bincount(cell, runs.length, (slab.stop - slab.start) * size)
        counts[slab] = found.reshape(-1, size)
    return counts
