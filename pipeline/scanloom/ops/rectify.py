"""Move a sheared stack to a rectangular grid, for formats and tools without shear."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid


def rectangular_grid(grid: Grid) -> Grid:
    """Return the rectangular grid that encloses a sheared one; another grid is returned unchanged.

    The two in-plane axes keep their directions and spacing; the sheared axis becomes their
    normal. Slices stay in their planes, so the grids differ only by shifts within each slice. The
    new grid is enlarged along the in-plane axes until every slice fits.

    Returns
    -------
    Grid
        Rectangular grid with as many slices as `grid`.
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


def rectangular_labels(labels: NDArray[Any], grid: Grid, outside: float = 0) -> NDArray[Any]:
    """Return labels or values (I, J, K) of a sheared grid on `rectangular_grid`, by nearest voxel.

    Returns
    -------
    array of the same dtype
        Voxels on `rectangular_grid(grid)`, in Fortran order; `outside` beyond the slices.
    """
    axis = grid.shear_axis
    if axis is None:
        return labels
    shifts = _shifts(grid, axis)
    # Slices move by whole voxels (half a voxel is rounded up), so nearest neighbour is a copy.
    offsets = np.floor(shifts - np.floor(shifts.min(axis=0)) + 0.5).astype(int)
    out = np.full(rectangular_grid(grid).shape, outside, labels.dtype, order="F")
    in_plane = [n for n in range(3) if n != axis]
    slices, targets = np.moveaxis(labels, axis, 0), np.moveaxis(out, axis, 0)
    for source, target, offset in zip(slices, targets, offsets[:, in_plane], strict=True):
        rows, columns = (
            slice(start, start + n) for start, n in zip(offset, source.shape, strict=True)
        )
        target[rows, columns] = source
    return out


def _step(grid: Grid, axis: int) -> NDArray[np.float64]:
    """Return the component of the sheared axis along the normal of the others, (3,) mm."""
    in_plane = np.delete(grid.affine[:3, :3], axis, axis=1)
    normal = np.cross(in_plane[:, 0], in_plane[:, 1])
    normal /= np.linalg.norm(normal)
    return np.asarray(normal * (normal @ grid.affine[:3, axis]))


def _shifts(grid: Grid, axis: int) -> NDArray[np.float64]:
    """Return the shift of each slice along each axis in voxels, (slices, 3); 0 for slice 0."""
    shear = grid.affine[:3, axis] - _step(grid, axis)
    voxel_shift = np.linalg.solve(grid.affine[:3, :3], shear)
    voxel_shift[axis] = 0.0
    return np.arange(grid.shape[axis])[:, None] * voxel_shift
