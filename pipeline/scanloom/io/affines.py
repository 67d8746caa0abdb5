"""Affines of volume files: from axis codes, made orthogonal, checked for plausible sizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Reason, ScanError
from scanloom.core.grid import ORTHOGONAL

MIN_VOXELS = 3
"""Voxels along each axis: as for slices, two are not a volume."""

MAX_COORDINATE_MM = 1e9
"""A thousand kilometres: larger coordinates are damage, and would overflow."""

MAX_VOXEL_MM = 100.0
"""Longest plausible edge of a voxel: a longer one is in micrometres."""

MIN_EXTENT_MM = 1.0
"""Scans shorter than this along all axes are in metres, or in mm labelled as micrometres."""

FLOAT32_COSINE = 1e-6
"""Largest cosine between two axes due to float32 rounding alone, which is not corrected."""

_AXES = {"R": (0, 1), "L": (0, -1), "A": (1, 1), "P": (1, -1), "S": (2, 1), "I": (2, -1)}


def affine_from_codes(
    codes: str, spacing: NDArray[np.float64], shape: tuple[int, int, int]
) -> NDArray[np.float64]:
    """Return the affine of a volume from its axis codes and spacing.

    Parameters
    ----------
    codes : str
        The patient direction in which each index grows, for example "RAS".
    spacing : (3,) array
        In mm.
    shape : (I, J, K)

    Returns
    -------
    (4, 4) array
        Voxel index to RAS mm, with the centre of the volume at the origin: so the position of a
        scan does not depend on the order in which its axes are stored.

    Raises
    ------
    ScanError
        BAD_GEOMETRY if the spacing is not positive or not plausible.
    ValueError
        If `codes` does not name each patient axis once.
    """
    axes = [_AXES[code] for code in codes.upper() if code in _AXES]
    if len(codes) != 3 or sorted(axis for axis, _ in axes) != [0, 1, 2]:
        raise ValueError(f"orientation must be three letters such as 'RAS', got {codes!r}")
    if not ((spacing > 0) & (spacing <= MAX_COORDINATE_MM)).all():
        raise ScanError(Reason.BAD_GEOMETRY, "the voxel size is not a positive length")
    affine = np.zeros((4, 4))
    affine[3, 3] = 1
    for n, (axis, sign) in enumerate(axes):
        affine[axis, n] = sign * spacing[n]
    affine[:3, 3] = -affine[:3, :3] @ ((np.array(shape) - 1) / 2)
    return affine


def orthogonalize(
    affine: NDArray[np.float64], shape: tuple[int, int, int]
) -> tuple[NDArray[np.float64], tuple[Flag, ...]]:
    """Make an affine exactly orthogonal if it is so up to rounding.

    Parameters
    ----------
    affine : (4, 4) array
        Voxel index to mm.
    shape : (I, J, K)

    Returns
    -------
    (4, 4) array, tuple of Flag
        The nearest orthogonal affine (polar decomposition) with the same spacing and centre, and
        AFFINE_ROUNDED. The affine is returned unchanged, without a flag, if it is orthogonal to
        float32 precision (`FLOAT32_COSINE`), or sheared by more than `core.grid.ORTHOGONAL`.

    Raises
    ------
    ScanError
        BAD_GEOMETRY if a number is not finite, or exceeds `MAX_COORDINATE_MM`.
    """
    if not np.abs(affine).max() <= MAX_COORDINATE_MM:  # NaN is not
        raise ScanError(Reason.BAD_GEOMETRY, "a position or direction is not a plausible length")
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    if lengths.min() == 0:
        return affine, ()  # Grid refuses it
    directions = affine[:3, :3] / lengths
    shear = np.abs(directions.T @ directions - np.eye(3)).max()
    if not FLOAT32_COSINE < shear <= ORTHOGONAL:
        return affine, ()
    # The nearest rotation (polar decomposition) turns all axes a little, and none by all the error
    u, _, vt = np.linalg.svd(directions)
    orthogonal, centre = affine.copy(), (np.array(shape) - 1) / 2
    orthogonal[:3, :3] = u @ vt * lengths
    orthogonal[:3, 3] += (affine[:3, :3] - orthogonal[:3, :3]) @ centre
    return orthogonal, (Flag.AFFINE_ROUNDED,)


def check_plausible_size(affine: NDArray[np.float64], shape: tuple[int, int, int]) -> None:
    """Refuse a scan that is implausibly large or small: its lengths are not in mm.

    Raises
    ------
    ScanError
        BAD_GEOMETRY.
    """
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    if spacing.max() > MAX_VOXEL_MM or (0 < (spacing * shape).max() < MIN_EXTENT_MM):
        detail = "the voxel size is implausible for a scan; the unit of length is probably wrong"
        raise ScanError(Reason.BAD_GEOMETRY, detail)
