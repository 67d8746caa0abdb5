"""Whether slices that were written lie, in the patient, where the labels say."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid, Reason, ScanError

HALF = 0.5 + 1e-3
"""Voxels by which nearest neighbour may move a label, and rounding."""


ROUNDED = 1e-6
"""Share of a step by which float32, and what ITK makes of it, may turn it."""


def mismatch(detail: str) -> ScanError:
    """Return the error for what was written and differs."""
    return ScanError(Reason.WRITE_MISMATCH, detail)


def check_slices(
    written: NDArray[Any], affine: NDArray[Any], labels: NDArray[Any], grid: Grid, name: str
) -> None:
    """Compare a rectangular copy with the sheared labels that it was made of.

    Every slice of the labels must be found again whole, in its own plane, at most half a voxel
    from its place; elsewhere there must be nothing.

    Parameters
    ----------
    written : (I', J', K') array
        The copy, as decoded.
    affine : (4, 4) array
        Its voxel index to RAS mm, as decoded.
    labels : (I, J, K) array
        On `grid`.
    grid : Grid
        Sheared.
    name : str
        Of the file, for the message.

    Raises
    ------
    ScanError
        WRITE_MISMATCH.
    """
    axis = grid.shear_axis
    if axis is None:
        raise ValueError("the grid is not sheared")
    upright = [n for n in range(3) if n != axis]
    turned = np.abs(affine - grid.affine)[:3, upright].max()
    if not turned <= ROUNDED * max(grid.spacing):
        raise mismatch(f"{name} has other directions or spacing")
    starts = np.zeros((grid.shape[axis], 3))
    starts[:, axis] = np.arange(grid.shape[axis])
    places = np.linalg.solve(affine[:3, :3], (grid.world(starts) - affine[:3, 3]).T).T
    if written.shape[axis] != grid.shape[axis] or np.abs(places - starts)[:, axis].max() > 0.01:
        raise mismatch(f"{name} has other slices")
    copy, source = np.moveaxis(written, axis, 0), np.moveaxis(labels, axis, 0)
    for plane, meant, place in zip(copy, source, places[:, upright], strict=True):
        if not holds(plane, meant, place, HALF):
            raise mismatch(f"{name} holds other voxels")


def holds(
    plane: NDArray[Any], meant: NDArray[Any], place: NDArray[np.float64], slack: float
) -> bool:
    """Whether `meant` stands in `plane` at `place`, and nothing else does.

    Parameters
    ----------
    plane : (R', C') array
        As written.
    meant : (R, C) array
        As it should be.
    place : (2,) array
        Where in `plane` the first element of `meant` belongs, pixels, may be a fraction.
    slack : float
        By how many pixels it may stand elsewhere.
    """
    near = [[int(n) for n in (np.floor(p), np.ceil(p)) if abs(n - p) <= slack] for p in place]
    for row, column in itertools.product(*(sorted(set(n)) for n in near)):
        part = plane[max(row, 0) : row + meant.shape[0], max(column, 0) : column + meant.shape[1]]
        if np.array_equal(part, meant):
            outside = plane.size > part.size and np.count_nonzero(plane) - np.count_nonzero(part)
            return not outside
    return False


def histogram(planes: Iterable[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[np.int64]:
    """Count each number by other means than what measured it: slice by slice, voxel by voxel."""
    size = int(np.iinfo(dtype).max) + 1
    total = np.zeros(size, np.int64)
    for plane in planes:
        total += np.bincount(plane.ravel(), minlength=size)
    return total
