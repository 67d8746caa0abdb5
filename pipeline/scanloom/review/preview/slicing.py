"""Axial, coronal and sagittal planes through a scan, in millimetres of patient space.

Coordinates are LPI mm: they increase towards the patient's left, back and feet, as columns and
rows do in a radiological picture. LPI is RAS times -1.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import map_coordinates

from scanloom.core import Grid

MAX_OBLIQUE_POINTS = 1024
"""Maximum number of points along each side of a plane that is oblique to the voxel axes."""


@dataclass(frozen=True)
class Direction:
    """Orientation of a plane: LPI axes (0 = L, 1 = P, 2 = I) of its normal, columns and rows."""

    name: str
    normal: int
    across: int
    down: int


AXIAL = Direction("Axial", 2, 0, 1)
CORONAL = Direction("Coronal", 1, 0, 2)
SAGITTAL = Direction("Sagittal", 0, 1, 2)
LETTERS = (("R", "L"), ("A", "P"), ("S", "I"))
"""Letters at the low and at the high end of each LPI axis."""


@dataclass(frozen=True)
class Rectangle:
    """A rectangle in a plane, by its outer edges in LPI mm: (columns, rows)."""

    low: tuple[float, float]
    high: tuple[float, float]

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in mm."""
        return self.high[0] - self.low[0], self.high[1] - self.low[1]


@dataclass(frozen=True)
class Raster:
    """A rectangle in a plane, and the size (width, height) in pixels of its picture."""

    area: Rectangle
    size: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Cut:
    """Values of a plane through an array.

    Parameters
    ----------
    values : (H, W) array
        Pixels of the plane, row by row.
    low : (x, y)
        LPI mm of the outer corner of the first pixel.
    step : (x, y)
        Pixel spacing in mm.
    """

    values: NDArray[Any]
    low: tuple[float, float]
    step: tuple[float, float]


@dataclass(frozen=True, eq=False)
class View:
    """A grid with its axes reordered and flipped so that indices increase towards L, P and I.

    Arrays are reoriented without a copy.
    """

    source: Grid
    order: tuple[int, int, int] = field(init=False)
    """Source axis of each axis of the view."""
    flipped: tuple[bool, bool, bool] = field(init=False)
    """Whether each axis of the view is opposite to its source axis."""
    to_lpi: NDArray[np.float64] = field(init=False)
    """Affine (4, 4) from an index of the view to LPI mm."""

    def __post_init__(self) -> None:
        order = [self.source.axes.index(axis) for axis in range(3)]
        flipped = [bool(self.source.affine[axis, n] > 0) for axis, n in enumerate(order)]
        to_source = np.zeros((4, 4))
        to_source[3, 3] = 1
        for axis, (n, flip) in enumerate(zip(order, flipped, strict=True)):
            to_source[n, axis] = -1 if flip else 1
            to_source[n, 3] = self.source.shape[n] - 1 if flip else 0
        object.__setattr__(self, "order", tuple(order))
        object.__setattr__(self, "flipped", tuple(flipped))
        object.__setattr__(
            self, "to_lpi", np.diag((-1, -1, -1, 1)) @ self.source.affine @ to_source
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of voxels along each axis of the view."""
        a, b, c = (self.source.shape[n] for n in self.order)
        return a, b, c

    @property
    def low(self) -> NDArray[np.float64]:
        """Low corner (3,) in LPI mm of the bounding box of all voxels, at their outer edges."""
        return np.asarray(self._corners().min(axis=0))

    @property
    def high(self) -> NDArray[np.float64]:
        """High corner (3,) in LPI mm of that bounding box."""
        return np.asarray(self._corners().max(axis=0))

    @property
    def upright(self) -> bool:
        """Whether the voxel axes match the patient axes, within half a voxel at any point."""
        drift = np.abs(self.to_lpi[:3, :3]) * (np.array(self.shape) - 1)
        np.fill_diagonal(drift, 0)
        return bool(drift.max() <= 0.5 * min(self.source.spacing))

    def as_acquired(self) -> View:
        """Return a view of the same voxels whose axes are exactly those of the patient.

        Its planes are the stored slices, at true proportions. The middle of the scan stays where
        it is.
        """
        affine = np.eye(4)
        for axis, (n, flip) in enumerate(zip(self.order, self.flipped, strict=True)):
            affine[:3, n] = 0
            affine[axis, n] = self.source.spacing[n] * (1 if flip else -1)
        middle = (np.array(self.source.shape) - 1) / 2
        affine[:3, 3] = self.source.world(middle) - affine[:3, :3] @ middle
        return View(Grid(self.source.shape, affine))

    def tilt(self, axis: int) -> float:
        """Return the angle in degrees between the slices across an axis and the patient's."""
        a, b = (self.to_lpi[:3, n] for n in range(3) if n != axis)
        normal = np.cross(a, b)
        return float(np.degrees(np.arccos(min(1.0, abs(normal[axis]) / np.linalg.norm(normal)))))

    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return an array (I, J, K) of the source, reoriented to the view."""
        i, j, k = (slice(None, None, -1 if flip else 1) for flip in self.flipped)
        return array.transpose(self.order)[i, j, k]

    def back(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return an array of the view on the axes of the source (I, J, K)."""
        a, b, c = (slice(None, None, -1 if flip else 1) for flip in self.flipped)
        order = [self.order.index(n) for n in range(3)]
        return array[a, b, c].transpose(order)

    def index_of(self, source: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the index in the view of a voxel, given by its source index."""
        a, b, c = (
            self.source.shape[n] - 1 - source[n] if flip else source[n]
            for n, flip in zip(self.order, self.flipped, strict=True)
        )
        return a, b, c

    def lpi(self, index: tuple[float, float, float]) -> NDArray[np.float64]:
        """Return the LPI mm (3,) of an index of the view."""
        return np.asarray(self.to_lpi[:3, :3] @ np.array(index) + self.to_lpi[:3, 3])

    def field_of_view(self, direction: Direction) -> Rectangle:
        """Return the extent of the scan in planes of a direction."""
        low, high, (a, b) = self.low, self.high, (direction.across, direction.down)
        return Rectangle((float(low[a]), float(low[b])), (float(high[a]), float(high[b])))

    def cut(
        self,
        array: NDArray[Any],
        direction: Direction,
        position: float,
        outside: float | None,
        raster: Raster | None = None,
    ) -> Cut:
        """Return the values of a plane through an array.

        Parameters
        ----------
        array : (I, J, K) array
            Values on the source grid.
        direction : Direction
            The orientation of the plane.
        position : float
            Position along the normal of the plane in LPI mm.
        outside : float or None
            Value outside the scan, with linear interpolation inside it; None for a label map, which
            takes the nearest voxel and 0 outside. An upright view is never interpolated.
        raster : Raster or None
            Required area and resolution of an oblique plane; None for the whole extent.
        """
        if self.upright:
            return self._slice(array, direction, position)
        raster = raster or Raster(
            self.field_of_view(direction), (MAX_OBLIQUE_POINTS, MAX_OBLIQUE_POINTS)
        )
        return self._sampled(array, direction, position, outside, raster)

    def nearest(self, axis: int, position: float) -> float:
        """Return the LPI mm of the voxel plane nearest to a position; the position if oblique."""
        if not self.upright:
            return position
        origin, step = float(self.to_lpi[axis, 3]), float(self.to_lpi[axis, axis])
        index = min(max(round((position - origin) / step), 0), self.shape[axis] - 1)
        return origin + index * step

    def _corners(self) -> NDArray[np.float64]:
        ends = itertools.product(*((-0.5, n - 0.5) for n in self.shape))
        return np.array([self.lpi((a, b, c)) for a, b, c in ends])

    def _slice(self, array: NDArray[Any], direction: Direction, position: float) -> Cut:
        n, step = direction.normal, np.diag(self.to_lpi)
        index = round((self.nearest(n, position) - self.to_lpi[n, 3]) / step[n])
        values = np.moveaxis(self.of(array), n, 0)[index]  # a view; take() would copy the scan
        low = self.to_lpi[:3, 3] - step[:3] / 2
        across, down = direction.across, direction.down
        return Cut(
            values.T,
            (float(low[across]), float(low[down])),
            (float(step[across]), float(step[down])),
        )

    def _sampled(
        self,
        array: NDArray[Any],
        direction: Direction,
        position: float,
        outside: float | None,
        raster: Raster,
    ) -> Cut:
        area = raster.area
        pixel = min(mm / n for mm, n in zip(area.size, raster.size, strict=True))
        spacing = max(min(self.source.spacing), pixel)
        columns, rows = (max(1, round(length / spacing)) for length in area.size)
        step = area.size[0] / columns, area.size[1] / rows
        points = np.empty((3, rows, columns))
        points[direction.normal] = position
        points[direction.across] = area.low[0] + step[0] * (np.arange(columns) + 0.5)
        points[direction.down] = (area.low[1] + step[1] * (np.arange(rows) + 0.5))[:, None]
        inverse = np.linalg.inv(self.to_lpi)
        index = np.tensordot(inverse[:3, :3], points, 1) + inverse[:3, 3, None, None]
        ends = np.array(self.shape)[:, None, None] - 0.5
        within = ((index >= -0.5) & (index < ends)).all(axis=0)
        order, dtype, fill = (0, array.dtype, 0) if outside is None else (1, np.float32, outside)
        values = map_coordinates(self.of(array), index, dtype, order, mode="nearest")
        return Cut(np.where(within, values, fill), area.low, step)


def scan_pixels(cut: Cut, raster: Raster) -> NDArray[np.float32]:
    """Return intensities (H, W) of an area of a cut, resampled with smoothing if reduced."""
    area, (height, width) = raster.area, cut.values.shape
    x = [(edge - cut.low[0]) / cut.step[0] for edge in (area.low[0], area.high[0])]
    y = [(edge - cut.low[1]) / cut.step[1] for edge in (area.low[1], area.high[1])]
    box = (max(0.0, x[0]), max(0.0, y[0]), min(float(width), x[1]), min(float(height), y[1]))
    image = Image.fromarray(np.ascontiguousarray(cut.values, dtype=np.float32))
    return np.asarray(image.resize(raster.size, Image.Resampling.BILINEAR, box=box))


def label_pixels(cut: Cut, raster: Raster) -> NDArray[Any]:
    """Return labels (H, W) of an area of a cut, each from the nearest voxel."""
    area, indices = raster.area, []
    for axis, (pixels, n) in enumerate(zip(raster.size, cut.values.shape[::-1], strict=True)):
        position = area.low[axis] + (np.arange(pixels) + 0.5) / pixels * area.size[axis]
        index = np.floor((position - cut.low[axis]) / cut.step[axis]).astype(int)
        indices.append(index.clip(0, n - 1))
    return np.asarray(cut.values[indices[1][:, None], indices[0]])
