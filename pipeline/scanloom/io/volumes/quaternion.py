"""Rotations as a NIfTI qform stores them: b, c, d of a unit quaternion, in float32.

Readers compute a = sqrt(1 - b² - c² - d²) (nifti1.h). Within a few milliradians of half a turn,
where the grids of most scans are, a is small and takes all the rounding of b, c and d. Then float32
has no quaternion near the true rotation, and readers differ in their threshold for a = 0. So a
quaternion is accepted only if all of them read it well.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

MAX_DISPLACEMENT_MM = 0.01
"""Largest distance between the corners of a grid by sform and by qform: a twentieth of 0.2 mm."""

HALF_TURN_FLOAT32 = 1e-7
"""1 - b² - c² - d² below which nifti1_io, and so ITK, takes a as 0."""

HALF_TURN_FLOAT64 = 1e-15
"""The same threshold for the float64 of NIfTI-2 (nifti2_io)."""

_HALF_TURN_NIBABEL = 3 * float(np.finfo(np.float32).eps)
_CORNERS = np.array(list(itertools.product((0, 1), repeat=3)))
_NEIGHBOURS = np.array(list(itertools.product((0, 1, -1), repeat=3)), np.float32)


def rotations_from_quaternions(
    bcd: NDArray[np.float64], half_turn: float = HALF_TURN_FLOAT32
) -> NDArray[np.float64]:
    """Return the rotations (N, 3, 3) that nifti1_io reads from quaternions (N, 3).

    If a counts as 0, (b, c, d) is normalised.
    """
    square = (bcd * bcd).sum(axis=1)
    is_half = 1 - square < half_turn
    length = np.where(is_half, np.sqrt(np.where(is_half, square, 1)), 1)
    return _matrices(np.sqrt(np.where(is_half, 0, 1 - square)), bcd / length[:, None])


def quaternion_from_affine(
    affine: NDArray[np.float64], shape: tuple[int, int, int]
) -> tuple[float, float, float] | None:
    """Return the b, c, d, each a float32, from which all readers get an affine most accurately.

    The third axis of a left-handed affine is reversed first (qfac -1).

    Parameters
    ----------
    affine : (4, 4) array
        Voxel index to mm.
    shape : (I, J, K)
        Shape of the grid whose corners are compared.

    Returns
    -------
    tuple of float or None
        None if a corner would be off by more than `MAX_DISPLACEMENT_MM` in a reader: no float32
        is near enough, or the affine is sheared.
    """
    from nibabel.quaternions import mat2quat

    linear = np.array(affine[:3, :3])
    if np.linalg.det(linear) < 0:
        linear[:, 2] *= -1
    spacing = np.linalg.norm(linear, axis=0)
    u, _, vt = np.linalg.svd(linear / spacing)
    nearest = mat2quat(u @ vt)[1:].astype(np.float32)
    candidates = (nearest + _NEIGHBOURS * np.spacing(np.abs(nearest))).astype(np.float64)
    corners = (_CORNERS * (np.array(shape) - 1)).T
    errors = (_readings(candidates) * spacing.astype(np.float32) - linear) @ corners
    worst = np.linalg.norm(errors, axis=-2).max(axis=(0, -1))
    best = int(np.argmin(worst))
    b, c, d = map(float, candidates[best])
    return (b, c, d) if worst[best] <= MAX_DISPLACEMENT_MM else None


def _readings(bcd: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rotations (3, N, 3, 3) by nifti1_io, by nibabel and by the bare formula."""
    a_squared = 1 - (bcd * bcd).sum(axis=1)
    bare_a = np.sqrt(np.maximum(a_squared, 0))
    a = np.where(np.abs(a_squared) < _HALF_TURN_NIBABEL, 0, bare_a)
    length = np.sqrt(a * a + (bcd * bcd).sum(axis=1))
    nibabel = _matrices(a / length, bcd / length[:, None])
    return np.stack([rotations_from_quaternions(bcd), nibabel, _matrices(bare_a, bcd)])


def _matrices(a: NDArray[np.float64], bcd: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rotation matrices (N, 3, 3) of unit quaternions (nifti1.h, method 2)."""
    b, c, d = bcd.T
    rows = [
        [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
        [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
        [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c],
    ]
    return np.moveaxis(np.array(rows), -1, 0)
