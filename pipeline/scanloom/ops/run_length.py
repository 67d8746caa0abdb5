"""Run-length view of label maps: runs of equal value along the first axis, slab by slab.

Label maps mostly consist of long runs. Counting runs costs a fraction of counting voxels, and
slabs keep the memory small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SLAB_VOXELS = 1 << 21
"""Target number of voxels in a slab: fits the processor's cache, and memory is negligible."""

Labels = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of equal value in a slab; a run ends at the end of its row at the latest.

    Parameters
    ----------
    start : (R,) array
        Flat index in Fortran order, within the slab, of the first voxel of each run.
    length : (R,) array
        Number of voxels of each run.
    value : (R,) array
        Label of each run.
    """

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    value: Labels


def find_runs(slab: Labels) -> Runs:
    """Return the runs of an (I, J, K) array in Fortran order, background included."""
    flat = slab.reshape(-1, order="F")
    is_start = np.empty(flat.size, bool)
    np.not_equal(flat[1:], flat[:-1], out=is_start[1:])
    is_start[:: slab.shape[0]] = True
    start = np.flatnonzero(is_start)
    return Runs(start, np.diff(start, append=flat.size), flat[start])


def iter_slabs(shape: tuple[int, ...], voxels: int = SLAB_VOXELS) -> Iterator[slice]:
    """Yield ranges of the last axis with about `voxels` voxels each, at least one slice."""
    step = max(1, voxels // (shape[0] * shape[1]))
    for start in range(0, shape[2], step):
        yield slice(start, min(start + step, shape[2]))


def counts_by_slice(labels: Labels) -> NDArray[np.int64]:
    """Count each value in each slice of a label map (I, J, K); Fortran order is fastest.

    Returns
    -------
    (K, N) array
        Column n counts value n; N is the highest value plus one.
    """
    value_count = int(labels.max(initial=0)) + 1
    counts = np.zeros((labels.shape[2], value_count), np.int64)
    area = labels.shape[0] * labels.shape[1]
    for slab in iter_slabs(labels.shape):
        runs = find_runs(labels[:, :, slab])
        bins = runs.start // area * value_count + runs.value
        counts_in_slab = np.bincount(bins, runs.length, (slab.stop - slab.start) * value_count)
        counts[slab] = counts_in_slab.reshape(-1, value_count)
    return counts
