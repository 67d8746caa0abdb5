"""`Grid`: the shape of a volume and the affine from voxel indices to patient space; `Box` in it.

Patient space is RAS mm in scanloom and NIfTI, LPS mm in DICOM and ITK.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scanloom.core.errors import ScanError
from scanloom.core.reasons import Reason

LPS_TO_RAS = np.array([-1.0, -1.0, 1.0])
"""Signs (3,) that convert coordinates from LPS to RAS, and from RAS to LPS."""
LPS_TO_RAS_AFFINE = np.diag([*LPS_TO_RAS, 1.0])
"""The same conversion as an affine (4, 4)."""
LPS_TO_RAS.flags.writeable = LPS_TO_RAS_AFFINE.flags.writeable = False

ORTHOGONAL = 1e-4
"""Largest cosine between two axes that counts as a right angle (0.006 degrees: header rounding)."""

Shape = tuple[int, int, int]
Index = tuple[int, int, int]


class Box(NamedTuple):
    """The voxels of a grid between two corners, both included.

    Parameters
    ----------
    first, last : (i, j, k)
        Indices of the first and the last voxel.
    """

    first: Index
    last: Index

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        """Index of the box in an array (I, J, K)."""
        i, j, k = (slice(a, b + 1) for a, b in zip(self.first, self.last, strict=True))
        return i, j, k

    @property
    def shape(self) -> Shape:
        """Number of voxels along each axis."""
        i, j, k = (b - a + 1 for a, b in zip(self.first, self.last, strict=True))
        return i, j, k


@dataclass(frozen=True, eq=False)
class Grid:
    """Shape and affine of a volume.

    Parameters
    ----------
    shape : (I, J, K)
        Number of voxels along each axis.
    affine : (4, 4) array-like
        Voxel index to RAS mm: the centre of voxel (i, j, k) lies at ``affine @ (i, j, k, 1)``.

    Raises
    ------
    ScanError
        BAD_GEOMETRY if two axes are parallel, an axis has zero length, a number is not finite, or
        no two axes are at right angles: such a grid is not a stack of slices.
    """

    shape: Shape
    affine: NDArray[np.float64]
    shear_axis: int | None = field(init=False)
    """The axis that is oblique to the other two (gantry tilt); None if all are orthogonal."""

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise ValueError(f"shape must be three positive numbers, got {self.shape}")
        affine = np.array(self.affine, dtype=np.float64)
        if affine.shape != (4, 4) or not np.allclose(affine[3], (0, 0, 0, 1)):
            raise ValueError(f"affine must be 4x4 with last row 0 0 0 1, got\n{affine}")
        if not np.isfinite(affine).all():
            raise ScanError(Reason.BAD_GEOMETRY, "a position or direction is not a finite number")
        lengths = np.linalg.norm(affine[:3, :3], axis=0)
        if lengths.min() < 1e-6 or abs(np.linalg.det(affine[:3, :3] / lengths)) < 1e-3:
            raise ScanError(Reason.BAD_GEOMETRY, "two voxel axes are parallel")
        affine[3] = (0, 0, 0, 1)
        affine.flags.writeable = False
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "affine", affine)
        object.__setattr__(self, "shear_axis", _shear_axis(affine[:3, :3] / lengths))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support pickling: arrays come back writable."""
        self.__dict__.update(state)
        self.affine.flags.writeable = False

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Distance in mm between voxel centres along each axis (along the step if sheared)."""
        i, j, k = np.linalg.norm(self.affine[:3, :3], axis=0)
        return float(i), float(j), float(k)

    @property
    def sheared(self) -> bool:
        """Whether one axis is oblique to the others."""
        return self.shear_axis is not None

    @property
    def voxel_volume(self) -> float:
        """Volume of one voxel in mm^3."""
        if not self.sheared:  # limits of volumes are met exactly, which a determinant is not
            return math.prod(self.spacing)
        return float(abs(np.linalg.det(self.affine[:3, :3])))

    @property
    def extent(self) -> tuple[float, float, float]:
        """Length in mm of the field of view along each axis, from outer edge to outer edge."""
        i, j, k = (n * s for n, s in zip(self.shape, self.spacing, strict=True))
        return i, j, k

    @property
    def axes(self) -> tuple[int, int, int]:
        """The patient axis (0 = R, 1 = A, 2 = S) that each voxel axis follows most closely."""
        weight = np.abs(self.affine[:3, :3] / np.linalg.norm(self.affine[:3, :3], axis=0))
        # Of all permutations: two axes of an oblique grid may follow the same patient axis most
        best = max(
            itertools.permutations(range(3)), key=lambda p: sum(weight[p[n], n] for n in range(3))
        )
        return best[0], best[1], best[2]

    @property
    def tilt(self) -> float:
        """Largest angle in degrees between a voxel axis and the patient axis that it follows."""
        weight = np.abs(self.affine[:3, :3] / np.linalg.norm(self.affine[:3, :3], axis=0))
        least = min(weight[axis, n] for n, axis in enumerate(self.axes))
        return float(np.degrees(np.arccos(min(1.0, least))))

    @property
    def axis_codes(self) -> str:
        """The patient direction in which each index grows, for example "LPS"."""
        signs = [self.affine[axis, n] > 0 for n, axis in enumerate(self.axes)]
        return "".join("RAS"[a] if up else "LPI"[a] for a, up in zip(self.axes, signs, strict=True))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.summary})"

    @property
    def summary(self) -> str:
        """Shape, spacing and axes: "512 x 512 x 60 voxels of 0.80 x 0.80 x 5.00 mm, LPS"."""
        shape = " x ".join(str(n) for n in self.shape)
        spacing = " x ".join(f"{s:.2f}" for s in self.spacing)
        tilt = ", sheared" if self.sheared else ""
        return f"{shape} voxels of {spacing} mm, {self.axis_codes}{tilt}"

    def world(self, index: ArrayLike) -> NDArray[np.float64]:
        """Return the RAS mm (..., 3) of voxel indices (..., 3), which may be fractions."""
        points = np.asarray(index, dtype=np.float64)
        return np.asarray(points @ self.affine[:3, :3].T + self.affine[:3, 3])

    def index(self, world: ArrayLike) -> NDArray[np.float64]:
        """Return the voxel indices (..., 3), as fractions, of RAS mm (..., 3)."""
        points = np.asarray(world, dtype=np.float64) - self.affine[:3, 3]
        return np.asarray(np.linalg.solve(self.affine[:3, :3], points[..., None])[..., 0])

    def matches(self, other: Grid, tolerance: float = 1e-3) -> bool:
        """Return whether all voxel centres of both grids coincide within `tolerance` mm."""
        if self.shape != other.shape:
            return False
        corners = np.array(list(itertools.product(*((0, n - 1) for n in self.shape))))
        return bool(np.abs(self.world(corners) - other.world(corners)).max() <= tolerance)


def _shear_axis(directions: NDArray[np.float64]) -> int | None:
    """Return the axis that is oblique to the others; None if all are at right angles."""
    cosines = np.abs(directions.T @ directions)
    pairs = {(0, 1): 2, (0, 2): 1, (1, 2): 0}  # pair of axes: the third axis
    oblique = [pair for pair in pairs if cosines[pair] > ORTHOGONAL]
    if not oblique:
        return None
    candidates = [third for pair, third in pairs.items() if pair not in oblique]
    if not candidates:
        raise ScanError(Reason.BAD_GEOMETRY, "no two voxel axes are at right angles")
    if len(candidates) == 1:  # two oblique pairs share one axis
        return candidates[0]
    return max(oblique[0])  # one oblique pair: the later axis is the stacking direction
