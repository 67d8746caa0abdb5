"""Shaded views of structures from the front and from the left, as an object in a photograph.

A view is orthographic: of each pixel, the first structure along the line of sight is shown, with
the light that its slope reflects. Slopes come from the depths, which are smoothed where they are
continuous, so that steps of voxels and slices do not show.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from scanloom.cards.codes import OTHER, shown_name, system_of
from scanloom.core import Segmentation, Structure
from scanloom.core.grid import Box
from scanloom.core.segmentation import Color
from scanloom.review.preview import slicing
from scanloom.review.preview.slicing import View

FRONT, LEFT = slicing.CORONAL, slicing.SAGITTAL
"""Directions of the views. Their columns and rows are those of coronal and sagittal planes."""
CELLS = 256
"""Cells along the longest side of the structures."""
OVERSAMPLING = 2
"""Points along each side of a pixel, for smooth edges."""
HULL_CODES = frozenset({"55603005", "39937001", "87784001", "91727004"})
"""Fat, skin, soft tissue and muscle, by SNOMED CT."""
HULL_SHARE = 0.85
"""Share of the body, from right to left and from front to back, from which such a structure, or one
whose code is in no system of the body, would hide all others."""
MIN_SLICES, MIN_SHARE = 24, 0.35
"""Fewest slices of the structures, and their least height across slices as a share of their longest
side: flatter ones look like their slices."""
OBLIQUE_CELL = 2.0
"""Size of the cells of an oblique scan, as a factor: they take longer."""
MARGIN = 0.04
"""Room around the structures, as a share of their longest side."""
MAX_SMOOTHINGS = 16
JUMP = 2.5
"""Steps of the depth, or of a slice, from which a difference of depths is an edge."""
LIGHT = (-0.4, -0.5, 0.77)
"""Direction to the light: from the upper left, before the structures. X is right, Y down."""
AMBIENT, DIFFUSE, FADING = 0.32, 0.75, 0.35
"""Light from everywhere, light from `LIGHT`, and the loss of light at the far end."""

Corners = tuple[NDArray[np.float64], NDArray[np.float64]]
"""First and last voxel of a box in a view, by index."""


@dataclass(frozen=True, eq=False)
class Solid:
    """Structures in cells along the patient's axes.

    Parameters
    ----------
    labels : (A, B, C) array
        Index of the structure in each cell, 0 for none, towards L, P and I.
    colors : (N, 3) array
        Colour of each index.
    low, step : (3,) array
        LPI mm of the outer corner of the first cell, and the size of a cell.
    left_out : tuple of str
        Names of structures that would hide the others.
    """

    labels: NDArray[Any]
    colors: NDArray[np.float32]
    low: NDArray[np.float64]
    step: NDArray[np.float64]
    left_out: tuple[str, ...] = ()

    def area(self, direction: slicing.Direction) -> slicing.Rectangle:
        """Return the rectangle of a view, with the margin, in LPI mm."""
        high = self.low + self.step * self.labels.shape
        margin = MARGIN * float((high - self.low).max())
        axes = direction.across, direction.down
        (left, top), (right, bottom) = ([float(end[n]) for n in axes] for end in (self.low, high))
        return slicing.Rectangle((left - margin, top - margin), (right + margin, bottom + margin))

    def picture(self, direction: slicing.Direction, size: tuple[int, int]) -> Image.Image:
        """Return the view against a direction, in pixels, on black."""
        # from the left, the highest index along L is the nearest
        planes = self.labels[::-1] if direction is LEFT else np.moveaxis(self.labels, 1, 0)
        label, depth = _first(planes)
        area, fine = self.area(direction), [n * OVERSAMPLING for n in size]
        indices, inside = [], []
        for axis, low, mm, n in zip(
            (direction.across, direction.down), area.low, area.size, fine, strict=True
        ):
            at = (low + (np.arange(n) + 0.5) / n * mm - self.low[axis]) / self.step[axis]
            inside.append((at >= 0) & (at < self.labels.shape[axis]))
            indices.append(np.floor(at).astype(int).clip(0, self.labels.shape[axis] - 1))
        across, down = indices
        label = label[across][:, down].T * (inside[1][:, None] & inside[0])
        mm = depth[across][:, down].T * np.float32(self.step[direction.normal])
        pixel = area.size[0] / fine[0]
        thick = float(self.step.max())
        light = _light(np.where(label > 0, mm, np.float32(np.inf)), pixel, thick)
        image = Image.fromarray(
            (self.colors[label] * light[..., None]).clip(0, 255).astype(np.uint8)
        )
        return image.resize(size, Image.Resampling.BOX)


def hides_others(structure: Structure, box: NDArray[np.int64], body: Corners) -> bool:
    """Return whether a structure spans the body without being an organ, and so hides all others.

    `box` (2, 3) and `body` are first and last voxel in a view, by index.
    """
    share = (box[1] - box[0] + 1)[:2] / (body[1] - body[0] + 1)[:2]
    is_hull = structure.type.value in HULL_CODES or system_of(structure) == OTHER
    return bool(is_hull and share.min() >= HULL_SHARE)


def solid_of(
    view: View,
    segmentations: Sequence[Segmentation],
    boxes: Mapping[tuple[str, int], Box],
    color_of: Mapping[tuple[str, int], Color],
    body: Corners,
    slice_axis: int,
) -> Solid | None:
    """Return the structures that are worth a shaded view; None if none are, or too flat.

    Parameters
    ----------
    view : View
        Of the scan.
    segmentations : sequence of Segmentation
        Results; a later one lies over an earlier one.
    boxes : mapping
        Box of each structure with voxels, by model and number.
    color_of : mapping
        Colour of each structure, by model and number.
    body : (low, high)
        First and last voxel of the body in the view, by index.
    slice_axis : int
        Axis of the view across which slices were acquired.
    """
    spacing = np.array([view.source.spacing[n] for n in view.order])
    ends = {
        key: np.sort(np.array([view.index_of(end) for end in box]), axis=0)
        for key, box in boxes.items()
    }
    structures = {(s.model, t.number): t for s in segmentations for t in s.structures}
    hulls = {key for key, box in ends.items() if hides_others(structures[key], box, body)}
    shown = {key: n for n, key in enumerate((k for k in structures if k in ends.keys() - hulls), 1)}
    if not shown:
        return None
    first = np.min([ends[key][0] for key in shown], axis=0)
    last = np.max([ends[key][1] for key in shown], axis=0)
    lengths = (last - first + 1) * spacing
    slices, height = last[slice_axis] - first[slice_axis] + 1, lengths[slice_axis]
    if slices < MIN_SLICES or height < MIN_SHARE * max(lengths):
        return None
    grid = _CellGrid.of(view, (first, last), float(max(lengths)) / CELLS)
    labels = np.zeros(grid.shape, np.min_scalar_type(len(shown)))
    for segmentation in segmentations:
        for layer in segmentation.layers:
            index_of = np.zeros(int(np.iinfo(layer.labels.dtype).max) + 1, labels.dtype)
            for s in layer.structures:
                index_of[s.number] = shown.get((segmentation.model, s.number), 0)
            # NumPy makes 8 bytes of each index: plane by plane, as scans mostly lie in memory
            for plane, cells in zip(labels.T, grid.sample(layer.labels).T, strict=True):
                indices = index_of[cells]
                np.copyto(plane, indices, where=indices > 0)
    colors = np.array([(0, 0, 0), *(color_of[key] for key in shown)], np.float32)
    names = tuple(shown_name(structures[key].name) for key in structures if key in hulls)
    return Solid(labels, colors, grid.low, grid.step, names)


@dataclass(frozen=True, eq=False)
class _CellGrid:
    """Cells along the patient's axes, towards L, P and I: each has the label of one voxel.

    Parameters
    ----------
    view : View
        Of the scan.
    first, last : (3,) array
        Index in the view of the first and the last voxel.
    low, step : (3,) array
        LPI mm of the outer corner of the first cell, and the size of a cell.
    shape : (A, B, C)
        Number of cells along each axis.
    """

    view: View
    first: NDArray[np.float64]
    last: NDArray[np.float64]
    low: NDArray[np.float64]
    step: NDArray[np.float64]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, view: View, ends: Corners, finest: float) -> _CellGrid:
        """Return cells of about `finest` mm, or of a voxel if that is larger."""
        first, last = ends
        if view.upright:
            spacing = np.diag(view.to_lpi)[:3]
            strides = np.maximum(1, np.rint(finest / spacing)).astype(int)
            shape = tuple(int(n) for n in -(-(last - first + 1) // strides))
            low = view.lpi((first[0], first[1], first[2])) - spacing * strides / 2
            return cls(view, first, last, low, spacing * strides, shape)
        corners = itertools.product(*zip(first - 0.5, last + 0.5, strict=True))
        points = np.array([view.lpi(corner) for corner in corners])
        low, high = points.min(axis=0), points.max(axis=0)
        size = max(finest * OBLIQUE_CELL, min(view.source.spacing))
        shape = tuple(int(n) for n in np.ceil((high - low) / size))
        return cls(view, first, last, low, np.full(3, size), shape)

    def sample(self, labels: NDArray[Any]) -> NDArray[Any]:
        """Return the labels (A, B, C) of a label map (I, J, K) of the scan."""
        array = self.view.of(labels)
        if self.view.upright:
            strides = np.rint(self.step / np.diag(self.view.to_lpi)[:3]).astype(int)
            a, b, c = (
                slice(int(n), int(m) + 1, int(stride))
                for n, m, stride in zip(self.first, self.last, strides, strict=True)
            )
            return array[a, b, c]
        # ndimage.affine_transform takes ten times longer
        inverse = np.linalg.inv(self.view.to_lpi)
        origin = inverse[:3, :3] @ (self.low + self.step / 2) + inverse[:3, 3]
        steps = [inverse[:3, n, None] * self.step[n] * np.arange(self.shape[n]) for n in range(3)]
        cells = np.zeros(self.shape, array.dtype)
        for n, plane in enumerate(cells):
            start = origin + steps[0][:, n] + 0.5  # the floor then rounds
            index = [
                np.floor(start[axis] + steps[1][axis][:, None] + steps[2][axis]).astype(np.int32)
                for axis in range(3)
            ]
            within = np.logical_and.reduce(
                [(i >= 0) & (i < length) for i, length in zip(index, array.shape, strict=True)]
            )
            a, b, c = (i[within] for i in index)
            plane[within] = array[a, b, c]
        return cells


def _first(planes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Return the first label along axis 0 that is not 0, and the number of its plane."""
    shape = planes.shape[1:]
    label, depth = np.zeros(shape, planes.dtype), np.zeros(shape, np.uint16)
    for plane in planes:
        np.copyto(label, plane, where=label == 0)
        depth += label == 0
    return label, depth.astype(np.float32)


_PAIRS = (
    ((..., slice(None, -1)), (..., slice(1, None))),
    ((slice(None, -1), ...), (slice(1, None), ...)),
)
"""Points of an image and their neighbours: to the right, and below."""


def _rise(
    depth: NDArray[np.float32], pair: tuple[Any, Any], jump: float
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the depth of neighbours beyond that of points, and whether both are one surface."""
    point, neighbor = pair
    with np.errstate(invalid="ignore"):  # infinite less infinite
        rise = depth[neighbor] - depth[point]
        return rise, np.abs(rise) < jump


def _light(depth: NDArray[np.float32], pixel: float, thick: float) -> NDArray[np.float32]:
    """Return the light (H, W) of a surface with depths in mm, infinite beside it.

    `pixel` is the distance of points, `thick` that of the steps of the surface, mm.
    """
    jump = JUMP * max(thick, pixel)
    # steps as long as a slice is thick have to be smoothed
    for _ in range(min(MAX_SMOOTHINGS, 4 + round((thick / pixel) ** 2))):
        total, count = depth.copy(), np.ones(depth.shape, np.uint8)
        for point, neighbor in _PAIRS:
            near = _rise(depth, (point, neighbor), jump)[1]
            np.add(total[point], depth[neighbor], out=total[point], where=near)
            np.add(total[neighbor], depth[point], out=total[neighbor], where=near)
            count[point] += near
            count[neighbor] += near
        depth = np.divide(total, count, dtype=np.float32)
    slopes = []
    for point, neighbor in _PAIRS:
        slope, count = np.zeros(depth.shape, np.float32), np.zeros(depth.shape, np.float32)
        rise, near = _rise(depth, (point, neighbor), jump)
        rise = np.where(near, rise, 0)
        slope[point] += rise
        slope[neighbor] += rise
        count[point] += near
        count[neighbor] += near
        slopes.append(slope / np.maximum(count, 1) / np.float32(pixel))
    # the normal is (across, down, 1): towards the viewer is against the depth
    across, down = slopes
    facing = (across * LIGHT[0] + down * LIGHT[1] + LIGHT[2]) / np.sqrt(across**2 + down**2 + 1)
    light = AMBIENT + DIFFUSE * np.maximum(facing, 0)
    solid = np.isfinite(depth)
    if solid.any():
        nearest, farthest = depth[solid].min(), depth[solid].max()
        light *= 1 - FADING * (np.where(solid, depth, nearest) - nearest) / max(
            farthest - nearest, 1
        )
    return np.asarray(light, np.float32)
