"""Rotations as the qform of a NIfTI holds them: b, c, d of a unit quaternion, in float32.

Readers work out a = sqrt(1 - b² - c² - d²) (nifti1.h). Within a few milliradians of half a turn,
where the grids of most scans lie, a is small and takes all the rounding of b, c and d: float32 then
has no rotation near the true one, and what counts as a = 0 differs from reader to reader. So a
rotation is judged as all of them read it.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

APART = 0.01
"""mm by which a qform may place a corner otherwise than the sform: a twentieth of 0.2 mm."""

HALF_TURN = 1e-7
"""1 - b² - c² - d² below which a is 0 for nifti1_io, and so for ITK."""

HALF_TURN_DOUBLE = 1e-15
"""The same for the float64 of NIfTI-2 (nifti2_io)."""

_HALF_TURN_NIBABEL = 3 * float(np.finfo(np.float32).eps)
_CORNERS = np.array(list(itertools.product((0, 1), repeat=3)))
_NEIGHBOURS = np.array(list(itertools.product((0, 1, -1), repeat=3)), np.float32)


def rotations(bcd: NDArray[np.float64], half_turn: float = HALF_TURN) -> NDArray[np.float64]:
    """Return the rotations (N, 3, 3) that nifti1_io reads from quaternions (N, 3).

    Where a counts as 0, b, c and d are made a unit vector.
    """
    square = (bcd * bcd).sum(axis=1)
    is_half = 1 - square < half_turn
    length = np.where(is_half, np.sqrt(np.where(is_half, square, 1)), 1)
    return _matrices(np.sqrt(np.where(is_half, 0, 1 - square)), bcd / length[:, None])


def quaternion_of(
    affine: NDArray[np.float64], shape: tuple[int, int, int]
) -> tuple[float, float, float] | None:
    """Return the b, c, d, each a float32, by which all readers see an affine best.

    A left-handed affine stands for its rotation after the third axis was turned round (qfac -1).

    Parameters
    ----------
    affine : (4, 4) array
        Voxel index to mm.
    shape : (I, J, K)
        Of the grid whose corners are compared.

    Returns
    -------
    tuple of float or None
        None where a reader would place a corner by more than `APART` off: no float32 is near
        enough, or the axes lean.
    """
    from nibabel.quaternions import mat2quat

    linear = np.array(affine[:3, :3])
    if np.linalg.det(linear) < 0:
        linear[:, 2] *= -1
    spacing = np.linalg.norm(linear, axis=0)
    left, _, right = np.linalg.svd(linear / spacing)
    nearest = mat2quat(left @ right)[1:].astype(np.float32)
    near = (nearest + _NEIGHBOURS * np.spacing(np.abs(nearest))).astype(np.float64)
    corners = (_CORNERS * (np.array(shape) - 1)).T
    off = (_readings(near) * spacing.astype(np.float32) - linear) @ corners
    far = np.linalg.norm(off, axis=-2).max(axis=(0, -1))
    best = int(np.argmin(far))
    b, c, d = map(float, near[best])
    return (b, c, d) if far[best] <= APART else None


def _readings(bcd: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what nifti1_io, nibabel and a reader by the bare formula make of it (3, N, 3, 3)."""
    rest = 1 - (bcd * bcd).sum(axis=1)
    bare = np.sqrt(np.maximum(rest, 0))
    a = np.where(np.abs(rest) < _HALF_TURN_NIBABEL, 0, bare)
    length = np.sqrt(a * a + (bcd * bcd).sum(axis=1))
    nibabel = _matrices(a / length, bcd / length[:, None])
    return np.stack([rotations(bcd), nibabel, _matrices(bare, bcd)])


def _matrices(a: NDArray[np.float64], bcd: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the matrices (N, 3, 3) of nifti1.h, method 2."""
    b, c, d = bcd.T
    rows = [
        [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
        [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
        [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c],
    ]
    return np.moveaxis(np.array(rows), -1, 0)
