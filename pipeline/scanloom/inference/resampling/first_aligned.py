"""Network grids whose first voxel is the scan's: those of MONAI's Spacingd."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import NetworkGrid
from scanloom.core import Grid
from scanloom.inference.resampling.alignment import SAME_AFFINE, wanted_spacing

Affine = NDArray[np.float64]


def first_aligned_grid(
    oriented: Grid, requested: NetworkGrid, sheared: int | None
) -> tuple[Grid, Affine]:
    """Return the grid of the requested spacing (MONAI Spacing, sp_resample), else `oriented`.

    Also returns the affine from an index of that grid to an index of `oriented`. Without a
    requested spacing the voxels are seen as they are stored, sheared ones too (MONAI).
    """
    if requested.spacing is None:
        return oriented, np.eye(4)
    directions = _directions(oriented, sheared)
    affine = np.eye(4)
    affine[:3, :3] = directions * _spacing(oriented, requested)
    ends = ((0.0, n - 1.0) for n in oriented.shape)
    corners = np.array([(*corner, 1.0) for corner in itertools.product(*ends)]).T
    corners = (np.linalg.solve(affine, oriented.affine) @ corners)[:3]
    shape = np.round(np.ptp(corners, axis=1) + 1.0)
    affine[:3, 3] = _origin(oriented, affine, shape, corners)
    if tuple(shape) == oriented.shape and _same(oriented.affine, affine):
        return oriented, np.eye(4)
    x, y, z = (int(n) for n in shape)
    # as MONAI's trace stores it, one multiplication later: nearest neighbours at exact ratios
    # are decided by the last bit
    step = np.asarray(np.linalg.solve(oriented.affine, affine), dtype=np.float64)
    return Grid((x, y, z), oriented.affine @ step), step


def _directions(oriented: Grid, sheared: int | None) -> Affine:
    """Return three orthogonal unit vectors as columns, each the nearest to its axis."""
    axes = oriented.affine[:3, :3]
    if sheared is None:
        upper = np.linalg.cholesky(axes.T @ axes).T
        return np.asarray(axes @ np.linalg.inv(upper) * np.sign(np.diag(upper)))
    a, b, c = sheared, (sheared + 1) % 3, (sheared + 2) % 3
    directions: Affine = axes / np.linalg.norm(axes, axis=0)
    normal = np.cross(directions[:, b], directions[:, c])
    normal *= np.sign(normal @ axes[:, a]) / np.linalg.norm(normal)
    directions[:, a] = normal
    directions[:, c] -= directions[:, b] * (directions[:, b] @ directions[:, c])
    directions[:, c] /= np.linalg.norm(directions[:, c])
    return np.asarray(directions)


def _spacing(oriented: Grid, requested: NetworkGrid) -> NDArray[np.float64]:
    """Return the network's spacing: the requested one, or the scan's own if it is as good."""
    own = np.array(oriented.spacing)
    target = wanted_spacing(requested, own)
    return np.where((target - SAME_AFFINE <= own) & (own <= target + SAME_AFFINE), own, target)


def _origin(
    oriented: Grid, affine: Affine, shape: NDArray[np.float64], corners: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the position of voxel (0, 0, 0): the corner that is lowest along all new axes.

    If no corner is (a shear, or directions that were rounded in a file), the centres of both grids
    coincide (MONAI compute_shape_offset, with its tolerance of 1e-8 voxels).

    `corners` (3, 8) are the corners of `oriented` as indices by `affine`.
    """
    axes, offset = oriented.affine[:3, :3], oriented.affine[:3, 3]
    for n, corner in enumerate(itertools.product(*((0.0, n - 1.0) for n in oriented.shape))):
        if np.allclose(np.min(corners - corners[:, n : n + 1], axis=1), 0.0):
            return np.asarray(axes @ np.array(corner) + offset)
    middle = axes @ (np.array(oriented.shape) / 2.0) + offset
    return np.asarray(middle - affine[:3, :3] @ (shape / 2.0))


def _same(first: Affine, second: Affine) -> bool:
    """Return whether resampling between two affines of the same shape would change nothing."""
    step = np.linalg.solve(first, second)
    return np.allclose(first, second, atol=SAME_AFFINE) or np.allclose(
        step, np.eye(4), atol=SAME_AFFINE
    )
