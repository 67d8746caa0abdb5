"""A sheared stack on a rectangular grid, for tools that know no shear."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid


def rectangular(grid: Grid) -> Grid:
    """Return the grid at right angles that holds a sheared one.

    The two upright axes keep their directions and spacing; the leaning axis becomes their normal.
    Slices stay in their planes, so only shifts within a slice lie between the two grids. It is
    enlarged along the upright axes until every slice fits.

    Parameters
    ----------
    grid : Grid
        Any; one that is not sheared is returned as it is.

    Returns
    -------
    Grid
        With as many slices as `grid`.
    """
    axis = grid.shear_axis
    if axis is None:
        return grid
    shifts = _shifts(grid, axis)
    low, high = np.floor(shifts.min(axis=0)).astype(int), np.ceil(shifts.max(axis=0)).astype(int)
    affine = np.array(grid.affine)
    affine[:3, axis] = _step(grid, axis)
    affine[:3, 3] += grid.affine[:3, :3] @ low
    shape = np.array(grid.shape) + high - low
    return Grid((int(shape[0]), int(shape[1]), int(shape[2])), affine)


def rectangular_labels(labels: NDArray[Any], grid: Grid) -> NDArray[Any]:
    """Return the labels of a sheared `grid` on `rectangular(grid)`, by nearest neighbour.

    Parameters
    ----------
    labels : (I, J, K) array
        On `grid`.
    grid : Grid
        Where they lie.

    Returns
    -------
    array of the same type
        On `rectangular(grid)`; 0 where no slice reaches. I fastest in memory.
    """
    axis = grid.shear_axis
    if axis is None:
        return labels
    shifts = _shifts(grid, axis)
    # Each slice moves by whole voxels (half a voxel goes up): nearest neighbour is a copy.
    moves = np.floor(shifts - np.floor(shifts.min(axis=0)) + 0.5).astype(int)
    out = np.zeros(rectangular(grid).shape, labels.dtype, order="F")
    upright = [n for n in range(3) if n != axis]
    slices, targets = np.moveaxis(labels, axis, 0), np.moveaxis(out, axis, 0)
    for source, target, move in zip(slices, targets, moves[:, upright], strict=True):
        rows, columns = (slice(m, m + n) for m, n in zip(move, source.shape, strict=True))
        target[rows, columns] = source
    return out


def _step(grid: Grid, axis: int) -> NDArray[np.float64]:
    """Return the part of the leaning axis that is normal to the two others, mm."""
    upright = np.delete(grid.affine[:3, :3], axis, axis=1)
    normal = np.cross(upright[:, 0], upright[:, 1])
    normal /= np.linalg.norm(normal)
    return np.asarray(normal * (normal @ grid.affine[:3, axis]))


def _shifts(grid: Grid, axis: int) -> NDArray[np.float64]:
    """Return by how many voxels each slice has slid along each axis: (slices, 3), 0 at slice 0."""
    lean = grid.affine[:3, axis] - _step(grid, axis)
    voxels = np.linalg.solve(grid.affine[:3, :3], lean)
    voxels[axis] = 0.0
    return np.arange(grid.shape[axis])[:, None] * voxels
