"""Axial, coronal and sagittal planes through a scan, in millimetres of patient space.

Coordinates are LPI mm: they increase towards the patient's left, back and feet, as columns and
rows do in a radiological picture. LPI is RAS times -1. Also the body in a scan, by which pictures
are cropped, and the window of intensities, from which they get their brightness.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import (
    binary_opening,
    find_objects,
    generate_binary_structure,
    label,
    map_coordinates,
    uniform_filter,
)

from scanloom.core import Grid, Volume, plain_number

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
DIRECTIONS = (AXIAL, CORONAL, SAGITTAL)
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
    def corners(self) -> NDArray[np.float64]:
        """Corners (8, 3) of the scan in LPI mm, at the outer edges of voxels."""
        ends = itertools.product(*((-0.5, n - 0.5) for n in self.shape))
        return np.array([self.lpi((a, b, c)) for a, b, c in ends])

    @property
    def upright(self) -> bool:
        """Whether the voxel axes match the patient axes, within half a voxel at any point."""
        # mm by which the last voxel of each axis leaves the patient's own axis
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

    def turn(self, direction: Direction) -> float:
        """Return the angle in degrees by which voxel axes are turned within a plane."""
        plane = [direction.across, direction.down]
        along = np.abs(self.to_lpi[np.ix_(plane, plane)])  # each column is an axis of voxels
        return float(np.degrees(np.arctan2([along[1, 0], along[0, 1]], np.diag(along)).max()))

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

    def positions(self, index: tuple[float, float, float]) -> NDArray[np.float64]:
        """Return the positions (3,) in LPI mm at which `cut` has the planes through a voxel.

        Each plane of voxels of an upright view has one position, although it may be tilted a little
        against the patient's axes: that of its voxel on the axis through the first voxel.
        """
        if not self.upright:
            return self.lpi(index)
        return np.asarray(self.to_lpi[:3, 3] + np.diag(self.to_lpi)[:3] * index)

    def field_of_view(self, direction: Direction) -> Rectangle:
        """Return the extent of the scan in planes of a direction."""
        inside = self.corners[:, [direction.across, direction.down]]
        (left, top), (right, bottom) = inside.min(axis=0).tolist(), inside.max(axis=0).tolist()
        return Rectangle((left, top), (right, bottom))

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
        # no finer than the scan, nor than the picture
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
    columns, rows = indices
    return np.asarray(cut.values.take(columns, axis=1).take(rows, axis=0))


MAX_VOXELS = 400_000
"""Approximate number of voxels from which the body is found."""
BODY_HU = -400.0
"""Lower limit of the body in CT, between lung and fat."""
BODY_SHARE = 0.12
"""Lower limit of the body in other scans, as a share of the 99th percentile."""
MIN_PART = 0.05
"""Volume of a part, such as a second thigh, as a share of that of the largest part."""


@dataclass(frozen=True, eq=False)
class Body:
    """The body in a subsampled scan.

    Parameters
    ----------
    low, high : (3,) array
        First and last voxel of the body in the view, by index.
    values : (N,) array
        Finite intensities inside the body, without padding; of all voxels if none is found.
    found : bool
        Whether the scan has a body in front of a background.
    enhanced : bool
        Whether a CT shows a contrast agent: even tissue, which bone is not, above `ENHANCED_HU`.
    head : bool
        Whether a CT shows a head: bone encloses much of some axial slices.
    """

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    values: NDArray[np.float64]
    volume_ml: float
    found: bool
    enhanced: bool = False
    head: bool = False


def is_in_hounsfield(volume: Volume, assumed_modality: str | None) -> bool:
    """Return whether intensities are in HU, also those of a CT that does not say so."""
    return volume.unit == "HU" or (
        volume.modality is None and assumed_modality == "CT" and volume.unit == "unknown"
    )


def find_body(volume: Volume, view: View, hounsfield: bool) -> Body:
    """Find the body: large connected parts above a limit, without thin things such as a table.

    Parameters
    ----------
    view : View
        The scan's grid in patient orientation.
    hounsfield : bool
        Whether intensities are in HU.
    """
    steps = _steps(view)
    sample = view.of(volume.array)[tuple(slice(n // 2, None, n) for n in steps)]
    sample = np.ascontiguousarray(sample, dtype=np.float64)
    valid = np.isfinite(sample) & ~volume.is_padding(sample)
    inside = _largest_parts(valid & (sample > _limit(sample[valid], hounsfield)))
    boxes = find_objects(inside.astype(np.uint8))
    values = sample[inside & valid] if boxes else sample[valid]
    if not boxes:
        return Body(np.zeros(3), np.array(view.shape) - 1.0, values, 0.0, found=False)
    last = np.array(view.shape) - 1.0
    low, high = np.zeros(3), last.copy()
    for axis, (extent, step) in enumerate(zip(boxes[0], steps, strict=True)):
        if extent.start > 0:  # else it may reach the border between samples
            low[axis] = extent.start * step + step // 2
        if extent.stop < inside.shape[axis]:
            high[axis] = (extent.stop - 1) * step + step // 2
    ml = np.count_nonzero(inside) * math.prod(steps) * volume.grid.voxel_volume / 1000
    if not hounsfield:
        return Body(low, high, values, float(ml), found=True)
    known = np.where(valid, sample, AIR_HU)
    enhanced, head = _enhanced(known, inside), _head(known)
    return Body(low, high, values, float(ml), found=True, enhanced=enhanced, head=head)


AIR_HU = -1000.0
ENHANCED_HU = 300.0
"""99th percentile of even tissue above which a contrast agent is in the scan. It is at most 210 HU
in scans without one or in the portal venous phase, and 500 HU with contrast in heart and aorta."""
EVEN_HU = 40.0
"""Greatest standard deviation of even tissue, in a cube of 3 samples."""
DENSE_HU = 800.0
"""Intensity from which even tissue is dense bone or metal, and not blood."""
BONE_HU = 300.0
ENCLOSED = 0.3
"""Share of a slice that only a skull encloses: 0.5 and more in a head, 0.05 in a trunk or leg."""
HEAD_SLICES = 2


def _enhanced(sample: NDArray[np.float64], inside: NDArray[np.bool_]) -> bool:
    mean = uniform_filter(sample, 3)
    spread = np.sqrt(np.maximum(uniform_filter(sample**2, 3) - mean**2, 0))
    even = mean[inside & (spread < EVEN_HU) & (mean < DENSE_HU)]
    return bool(even.size) and float(np.percentile(even, 99)) > ENHANCED_HU


def _head(sample: NDArray[np.float64]) -> bool:
    axial = np.moveaxis(sample, AXIAL.normal, 0)
    bone = axial > BONE_HU
    body = np.count_nonzero(filled(axial > BODY_HU), axis=(1, 2))
    enclosed = np.count_nonzero(filled(bone) & ~bone, axis=(1, 2))
    return bool(np.count_nonzero(enclosed > ENCLOSED * np.maximum(1, body)) >= HEAD_SLICES)


def filled(planes: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return masks (N, H, W), each with its holes filled, as by SciPy's `binary_fill_holes`."""
    within_planes = np.zeros((3, 3, 3), bool)
    within_planes[1] = generate_binary_structure(2, 1)
    regions, count = label(~planes, within_planes)
    outside = np.zeros(count + 1, bool)
    for edge in (regions[:, 0], regions[:, -1], regions[:, :, 0], regions[:, :, -1]):
        outside[edge] = True
    outside[0] = False  # the masks themselves
    return np.asarray(~outside[regions])


def _steps(view: View) -> tuple[int, int, int]:
    """Return the step of the sample along each axis of the view, about equal in mm."""
    spacing = np.array([view.source.spacing[n] for n in view.order])
    # cubes, also where slices are thick: the opening must be as wide along each axis
    target = (math.prod(view.shape) * np.prod(spacing) / MAX_VOXELS) ** (1 / 3)
    a, b, c = (int(n) for n in np.maximum(1, np.rint(target / spacing)))
    return a, b, c


def _limit(values: NDArray[np.float64], hounsfield: bool) -> float:
    """Return the intensity above which a voxel is of the body."""
    if hounsfield or not values.size:
        return BODY_HU
    low, high = np.percentile(values, (1, 99))
    return float(low + BODY_SHARE * (high - low))


def _largest_parts(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the large connected parts of a mask, without thin ones."""
    thick = [n > 2 for n in mask.shape]
    shape: Any = tuple(3 if n else 1 for n in thick)
    # opening cuts off thin things such as a table; it would cut off all of a few slices too
    opened = binary_opening(mask, np.ones(shape, bool)) if all(thick[:2]) else mask
    components, count = label(opened if opened.any() else mask)
    if not count:
        return mask
    sizes = np.bincount(components.ravel())
    sizes[0] = 0
    return np.asarray((sizes >= MIN_PART * sizes.max())[components])


NUCLEAR = ("PT", "NM")
"""Modalities that are shown inverted: high uptake is black."""


@dataclass(frozen=True)
class GrayWindow:
    """The intensities at the ends of the grey scale, and their description for a reader.

    `inverted` means that the lowest intensity is white.
    """

    low: float
    high: float
    text: str
    inverted: bool = False

    def gray(self, values: NDArray[Any]) -> NDArray[np.uint8]:
        """Return the brightness of values, 0 to 255, in the same shape; NaN counts as lowest."""
        shown = np.where(np.isnan(values), self.low, values).clip(self.low, self.high)
        gray = np.asarray((shown - self.low) / (self.high - self.low) * 255 + 0.5, dtype=np.uint8)
        return 255 - gray if self.inverted else gray


def hounsfield_window(width: int, level: int) -> GrayWindow:
    """Return a CT window by its width and level in HU."""
    return GrayWindow(level - width / 2, level + width / 2, f"W {width} L {level} HU")


SOFT_TISSUE = hounsfield_window(400, 40)
ENHANCED = hounsfield_window(800, 200)
"""Window of CT with a contrast agent, in which an enhanced heart is not plain white."""
CT_WINDOWS = (SOFT_TISSUE, ENHANCED)
LUNG = hounsfield_window(1500, -600)
HIGHEST_SUV = 7.0
"""SUV that is shown black: usual in reading FDG."""


def choose_window(
    values: NDArray[Any],
    modality: str | None,
    unit: str,
    suv_factor: float | None = None,
    enhanced: bool = False,
) -> GrayWindow:
    """Choose a window.

    Parameters
    ----------
    values : (N,) array
        Finite intensities inside the body.
    modality : str or None
        Modality of the scan, stated or assumed.
    unit : str
        Unit of the intensities; with "HU" one of the windows of CT is chosen.
    suv_factor : float or None
        Standardised uptake value of an intensity of 1, if known.
    enhanced : bool
        Whether a CT shows a contrast agent.

    Returns
    -------
    GrayWindow
        For CT in HU the soft tissue window, or a wider one if it is enhanced; for PET from 0 to an
        SUV of 7, inverted, or to the 99.5th percentile if SUVs are unknown; otherwise from the
        0.5th to the 99.5th percentile.
    """
    # scales of known meaning come first: percentiles differ from scan to scan
    if unit == "HU":
        return ENHANCED if enhanced else SOFT_TISSUE
    if suv_factor is not None:
        text = f"SUV 0 to {HIGHEST_SUV:g}, inverted"
        return GrayWindow(0.0, HIGHEST_SUV / suv_factor, text, inverted=True)
    low, high = (float(v) for v in np.percentile(values, (0.5, 99.5))) if values.size else (0, 1)
    inverted = modality in NUCLEAR
    if inverted and high > 0:
        low = 0.0
    if high - low <= 1e-6 * max(abs(low), abs(high)):  # a constant image is shown grey
        half = max(0.5, 0.01 * abs(low))
        low, high = low - half, low + half
    suffix = f" {unit}" if unit != "unknown" else ""
    ends = f"{plain_number(low, 4)} to {plain_number(high, 4)}"
    text = f"{ends}{suffix}{', inverted' if inverted else ''}"
    return GrayWindow(low, high, text, inverted)
