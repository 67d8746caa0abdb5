"""What the readers of volume files (NIfTI, NRRD, MetaImage) have in common."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Reason, ScanError
from scanloom.core.grid import ORTHOGONAL
from scanloom.core.volume import Unit

MIN_VOXELS = 3
"""Along each axis: as for slices, two of them are no volume."""

FARTHEST = 1e9
"""mm: a thousand kilometres. What is farther is damage, and would overflow."""

LARGEST_VOXEL = 100.0
"""mm: a longer one is in micrometres."""

SMALLEST_SCAN = 1.0
"""mm: what is shorter along all axes is in metres, or in mm and called micrometres."""

SINGLE = 1e-6
"""Largest cosine between two axes that the rounding of float32 leaves: no reason to change them."""

_AXES = {"R": (0, 1), "L": (0, -1), "A": (1, 1), "P": (1, -1), "S": (2, 1), "I": (2, -1)}


def unit_of(modality: str | None) -> Unit:
    """Return the unit of a file that does not say its own, from what the caller says it is."""
    if modality is None:
        return "unknown"
    return "HU" if modality == "CT" else "a.u."


def affine_from_codes(
    codes: str, spacing: NDArray[np.float64], shape: tuple[int, int, int]
) -> NDArray[np.float64]:
    """Return the affine of a volume of which only axis codes and spacing are known.

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
        Index to RAS mm, the middle of the volume at the origin: so the same scan lies at the same
        place in whatever order its axes are stored.

    Raises
    ------
    ScanError
        BAD_GEOMETRY if the spacing is no length.
    ValueError
        If `codes` does not name each axis of the patient once.
    """
    pairs = [_AXES.get(code) for code in codes.upper()]
    known = [pair for pair in pairs if pair is not None]
    if len(pairs) != 3 or sorted(axis for axis, _ in known) != [0, 1, 2]:
        raise ValueError(f"orientation is three letters such as 'RAS' or 'LPS', got {codes!r}")
    if not ((spacing > 0) & (spacing <= FARTHEST)).all():
        raise ScanError(Reason.BAD_GEOMETRY, "its voxel size can't be")
    affine = np.zeros((4, 4))
    affine[3, 3] = 1
    for n, (axis, sign) in enumerate(known):
        affine[axis, n] = sign * spacing[n]
    affine[:3, 3] = -affine[:3, :3] @ ((np.array(shape) - 1) / 2)
    return affine


def straighten(
    affine: NDArray[np.float64], shape: tuple[int, int, int]
) -> tuple[NDArray[np.float64], tuple[Flag, ...]]:
    """Make directions that are at right angles up to rounding exactly so.

    Parameters
    ----------
    affine : (4, 4) array
        Index to mm.
    shape : (I, J, K)

    Returns
    -------
    (4, 4) array, tuple of Flag
        The nearest affine with right angles (polar decomposition), with the same spacing and the
        same middle, and AFFINE_ROUNDED; or the affine as it is, where it is as good as single
        precision can say (`SINGLE`), or leans by more than `core.grid.ORTHOGONAL`: a shear.

    Raises
    ------
    ScanError
        BAD_GEOMETRY if a number is not finite, or farther than `FARTHEST`.
    """
    if not np.abs(affine).max() <= FARTHEST:  # NaN is not
        raise ScanError(Reason.BAD_GEOMETRY, "a position or direction is no number of mm")
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    if lengths.min() == 0:
        return affine, ()  # Grid says what is wrong with it
    directions = affine[:3, :3] / lengths
    leaning = np.abs(directions.T @ directions - np.eye(3)).max()
    if not SINGLE < leaning <= ORTHOGONAL:
        return affine, ()
    left, _, right = np.linalg.svd(directions)
    upright, middle = affine.copy(), (np.array(shape) - 1) / 2
    upright[:3, :3] = left @ right * lengths
    upright[:3, 3] += (affine[:3, :3] - upright[:3, :3]) @ middle
    return upright, (Flag.AFFINE_ROUNDED,)


def check_size(affine: NDArray[np.float64], shape: tuple[int, int, int]) -> None:
    """Refuse what is far too large or small for a scan: its lengths are in another unit than mm.

    Raises
    ------
    ScanError
        BAD_GEOMETRY.
    """
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    if spacing.max() > LARGEST_VOXEL or (0 < (spacing * shape).max() < SMALLEST_SCAN):
        raise ScanError(Reason.BAD_GEOMETRY, "in its unit of length, its voxels are no scan's")
