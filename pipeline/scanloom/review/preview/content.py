"""Content of a preview: the scan, its structures, and the positions of planes and slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from scanloom.core import Layer, Measurement, Segmentation, Volume
from scanloom.core.measurement import Box
from scanloom.review.preview.drawing import color_table, overlay_structures
from scanloom.review.preview.slicing import (
    AXIAL,
    Direction,
    Raster,
    Rectangle,
    View,
    label_pixels,
    scan_pixels,
)
from scanloom.review.preview.windowing import Window, choose_window

MARGIN_MM = 20.0
"""Margin around all structures in the tiles of the mosaic."""
MIN_EXTENT_MM = 80.0
"""Minimum width and height of a tile, so that a small structure is shown with its surroundings."""
MAX_SEARCH_VOXELS = 4_000_000
"""Approximate number of voxels that are searched for the largest slices of a structure."""
MAX_EXTENT_VOXELS = 100_000
"""Approximate number of voxels from which the extent of a structure is estimated."""
NEARLY_LARGEST = 0.97
"""Share of the largest area from which slices qualify; the middle one of them is shown."""

Colors = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class PreviewContent:
    """Content of a preview, and how it is displayed.

    Parameters
    ----------
    volume : Volume
        The scan.
    layers : tuple of (Layer, (N, 3) array)
        All layers of all models, each with the RGB colour of each value.
    view : View
        The volume's grid in patient orientation.
    window : Window
        The intensity window.
    center : (3,) array
        Intersection of the three planes in LPI mm.
    span : (low, high)
        Range of the mosaic's slices along the patient in LPI mm, from edge to edge.
    slices : int
        Number of the scan's slices in that range.
    area : Rectangle
        The part of each slice that the mosaic shows.
    """

    volume: Volume
    layers: tuple[tuple[Layer, Colors], ...]
    view: View
    window: Window
    center: NDArray[np.float64]
    span: tuple[float, float]
    slices: int
    area: Rectangle

    def tiles(self, count: int) -> list[float]:
        """Return the positions in LPI mm of `count` slices spread evenly over the span."""
        low, high = self.span
        positions = (low + (n + 0.5) / count * (high - low) for n in range(count))
        return [self.view.nearest(AXIAL.normal, position) for position in positions]

    def picture(self, direction: Direction, position: float, raster: Raster) -> Image.Image:
        """Return an area of a plane with its structures."""
        scan = self.view.cut(self.volume.array, direction, position, self.window.low, raster)
        gray = self.window.gray(scan_pixels(scan, raster))
        labels = []
        for layer, colors in self.layers:
            cut = self.view.cut(layer.labels, direction, position, None, raster)
            labels.append((label_pixels(cut, raster), colors))
        return overlay_structures(gray, labels)


def choose_subject(
    volume: Volume, segmentations: Sequence[Segmentation], measurements: Sequence[Measurement]
) -> PreviewContent:
    """Choose planes through the largest structure, or through the centre of an empty result."""
    view = View(volume.grid)
    boxes = [(m, m.box) for m in measurements if m.voxels and m.box is not None]
    whole: Box = ((0, 0, 0), _last(volume.grid.shape))
    largest, box = max(boxes, key=lambda pair: pair[0].volume_ml, default=(None, whole))
    center = [(n - 1) // 2 for n in view.shape]
    low, high = _bounds(view, [box])
    span = float(low[2]), float(high[2])
    if largest is not None:
        labels = _layer_of(largest, segmentations).labels
        center = _center_of(view, labels, largest.number, box)
        if not view.upright:  # the ends of an oblique bounding box are empty
            span = _extent(view, labels, largest.number, box)
    return PreviewContent(
        volume=volume,
        layers=tuple(
            (layer, color_table(layer.structures, int(np.iinfo(layer.labels.dtype).max)))
            for segmentation in segmentations
            for layer in segmentation.layers
        ),
        view=view,
        window=choose_window(volume, largest),
        center=view.lpi((center[0], center[1], center[2])),
        span=span,
        slices=max(1, round((span[1] - span[0]) / volume.grid.spacing[view.order[2]])),
        area=_area(view, [box for _, box in boxes] or [box]),
    )


def _last(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    i, j, k = (n - 1 for n in shape)
    return i, j, k


def _layer_of(measurement: Measurement, segmentations: Sequence[Segmentation]) -> Layer:
    """Return the layer that holds a structure."""
    for segmentation in segmentations:
        for layer in segmentation.layers:
            numbers = [s.number for s in layer.structures]
            if segmentation.model == measurement.model and measurement.number in numbers:
                return layer
    raise ValueError(f"{measurement.model} has no structure {measurement.number}")


def _sampled(
    view: View, labels: NDArray[Any], number: int, box: Box, max_voxels: int
) -> tuple[NDArray[np.bool_], NDArray[np.int64], int]:
    """Return the mask of a structure in its box, subsampled to about `max_voxels` voxels.

    Returns
    -------
    (mask, first, step)
        The mask (A, B, C), the index (3,) of its first voxel in the view, and the step.
    """
    corners = np.array([view.index_of(box[0]), view.index_of(box[1])])
    first, last = corners.min(axis=0), corners.max(axis=0)
    i, j, k = (slice(int(a), int(b) + 1) for a, b in zip(first, last, strict=True))
    inside = view.of(labels)[i, j, k]
    step = math.ceil((inside.size / max_voxels) ** (1 / 3))
    return inside[::step, ::step, ::step] == number, first, step


def _center_of(view: View, labels: NDArray[Any], number: int, box: Box) -> list[int]:
    """Return, for each axis of the view, a slice with nearly the largest area of a structure."""
    mask, first, step = _sampled(view, labels, number, box, MAX_SEARCH_VOXELS)
    center = []
    for axis in range(3):
        area = mask.sum(axis=tuple(n for n in range(3) if n != axis))
        candidates = np.flatnonzero(area >= NEARLY_LARGEST * area.max())
        center.append(int(first[axis]) + step * int(candidates[len(candidates) // 2]))
    return center


def _extent(view: View, labels: NDArray[Any], number: int, box: Box) -> tuple[float, float]:
    """Return the range in LPI mm along the patient that holds nearly all of a structure."""
    mask, first, step = _sampled(view, labels, number, box, MAX_EXTENT_VOXELS)
    index = first + step * np.argwhere(mask)
    along = index @ view.to_lpi[2, :3] + view.to_lpi[2, 3]
    low, high = np.percentile(along, (1, 99))
    half = min(view.source.spacing) / 2
    return float(low) - half, float(high) + half


def _bounds(view: View, boxes: Sequence[Box]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the corners (3,), (3,) in LPI mm of a box around boxes of source voxels."""
    corners = []
    for box in boxes:
        ends = np.array([view.index_of(box[0]), view.index_of(box[1])])
        low, high = ends.min(axis=0) - 0.5, ends.max(axis=0) + 0.5
        for n in range(8):
            i, j, k = (high[a] if n >> a & 1 else low[a] for a in range(3))
            corners.append(view.lpi((float(i), float(j), float(k))))
    return np.min(corners, axis=0), np.max(corners, axis=0)


def _area(view: View, boxes: Sequence[Box]) -> Rectangle:
    """Return the area of axial slices that holds boxes of source voxels with a margin."""
    low, high = _bounds(view, boxes)
    whole = view.field_of_view(AXIAL)
    ends = []
    for n, axis in enumerate((AXIAL.across, AXIAL.down)):
        margin = max(MARGIN_MM, (MIN_EXTENT_MM - (high[axis] - low[axis])) / 2)
        ends.append(
            (max(whole.low[n], low[axis] - margin), min(whole.high[n], high[axis] + margin))
        )
    return Rectangle((float(ends[0][0]), float(ends[1][0])), (float(ends[0][1]), float(ends[1][1])))
