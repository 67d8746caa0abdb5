"""What a picture shows: the scan, its structures, and where to look."""

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
from scanloom.review.draw import color_table, overlaid
from scanloom.review.planes import (
    AXIAL,
    Direction,
    Raster,
    Rectangle,
    View,
    label_pixels,
    scan_pixels,
)
from scanloom.review.windowing import Window, choose_window

AROUND = 20.0
"""mm around all structures that the mosaic shows with them."""
SMALLEST_AREA = 80.0
"""mm: the mosaic shows no less than this, so that a small structure has surroundings."""
SEARCH_VOXELS = 4_000_000
"""A larger structure is looked through in steps."""
REACH_VOXELS = 100_000
NEARLY_LARGEST = 0.97
"""Of the slices with at least this share of the largest area, the middle one is shown."""

Colors = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Subject:
    """What is drawn, and how it is looked at.

    Parameters
    ----------
    volume : Volume
        The scan.
    layers : tuple of (Layer, (N, 3) array)
        All layers of all models, with the colour of each value.
    view : View
        Of the volume's grid.
    window : Window
        Of intensities.
    center : (3,) array
        LPI mm of the point through which the three planes go.
    span : (low, high)
        LPI mm along the patient between which the mosaic's slices lie, from edge to edge.
    slices : int
        How many slices of the scan that is.
    area : Rectangle
        What the mosaic shows of each slice.
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
        """Return the LPI mm of `count` slices spread evenly over the span, from head to foot."""
        low, high = self.span
        even = (low + (n + 0.5) / count * (high - low) for n in range(count))
        return [self.view.nearest(AXIAL.normal, position) for position in even]

    def picture(self, direction: Direction, position: float, raster: Raster) -> Image.Image:
        """Return a stretch of a plane with its structures."""
        scan = self.view.cut(self.volume.array, direction, position, self.window.low, raster)
        gray = self.window.gray(scan_pixels(scan, raster))
        labels = []
        for layer, colors in self.layers:
            cut = self.view.cut(layer.labels, direction, position, None, raster)
            labels.append((label_pixels(cut, raster), colors))
        return overlaid(gray, labels)


def choose_subject(
    volume: Volume, segmentations: Sequence[Segmentation], measurements: Sequence[Measurement]
) -> Subject:
    """Choose where to look: through the largest structure; where there is none, the middle."""
    view = View(volume.grid)
    found = [(m, m.box) for m in measurements if m.voxels and m.box is not None]
    whole: Box = ((0, 0, 0), _last(volume.grid.shape))
    largest, box = max(found, key=lambda f: f[0].volume_ml, default=(None, whole))
    center = [(n - 1) // 2 for n in view.shape]
    low, high = _bounds(view, [box])
    span = float(low[2]), float(high[2])
    if largest is not None:
        labels = _layer_of(largest, segmentations).labels
        center = _widest(view, labels, largest.number, box)
        if not view.upright:  # the box of what is tilted has empty ends
            span = _reach(view, labels, largest.number, box)
    return Subject(
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
        area=_area(view, [box for _, box in found] or [box]),
    )


def _last(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    i, j, k = (n - 1 for n in shape)
    return i, j, k


def _layer_of(measurement: Measurement, segmentations: Sequence[Segmentation]) -> Layer:
    """Return the layer in which a structure stands."""
    for segmentation in segmentations:
        for layer in segmentation.layers:
            numbers = [s.number for s in layer.structures]
            if segmentation.model == measurement.model and measurement.number in numbers:
                return layer
    raise ValueError(f"{measurement.model} has no structure {measurement.number}")


def _sampled(
    view: View, mask_of: tuple[NDArray[Any], int], box: Box, most: int
) -> tuple[NDArray[np.bool_], NDArray[np.int64], int]:
    """Return where a structure is, in its box, in steps: the mask, the box's first index, the step.

    `mask_of` is a label map and a number; `most` is about how many voxels are looked at.
    """
    corners = np.array([view.index_of(box[0]), view.index_of(box[1])])
    first, last = corners.min(axis=0), corners.max(axis=0)
    i, j, k = (slice(int(a), int(b) + 1) for a, b in zip(first, last, strict=True))
    inside = view.of(mask_of[0])[i, j, k]
    step = math.ceil((inside.size / most) ** (1 / 3))
    return inside[::step, ::step, ::step] == mask_of[1], first, step


def _widest(view: View, labels: NDArray[Any], number: int, box: Box) -> list[int]:
    """Return, for each axis of the view, the slice in which a structure covers most."""
    mask, first, step = _sampled(view, (labels, number), box, SEARCH_VOXELS)
    middle = []
    for axis in range(3):
        area = mask.sum(axis=tuple(n for n in range(3) if n != axis))
        good = np.flatnonzero(area >= NEARLY_LARGEST * area.max())
        middle.append(int(first[axis]) + step * int(good[len(good) // 2]))
    return middle


def _reach(view: View, labels: NDArray[Any], number: int, box: Box) -> tuple[float, float]:
    """Return between which LPI mm along the patient nearly all of a structure lies."""
    mask, first, step = _sampled(view, (labels, number), box, REACH_VOXELS)
    index = first + step * np.argwhere(mask)
    along = index @ view.to_lpi[2, :3] + view.to_lpi[2, 3]
    low, high = np.percentile(along, (1, 99))
    half = min(view.source.spacing) / 2
    return float(low) - half, float(high) + half


def _bounds(view: View, boxes: Sequence[Box]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the ends (3,), (3,) in LPI mm of what surrounds boxes of source voxels."""
    corners = []
    for box in boxes:
        ends = np.array([view.index_of(box[0]), view.index_of(box[1])])
        low, high = ends.min(axis=0) - 0.5, ends.max(axis=0) + 0.5
        for n in range(8):
            i, j, k = (high[a] if n >> a & 1 else low[a] for a in range(3))
            corners.append(view.lpi((float(i), float(j), float(k))))
    return np.min(corners, axis=0), np.max(corners, axis=0)


def _area(view: View, boxes: Sequence[Box]) -> Rectangle:
    """Return what axial slices have to show of boxes of source voxels, and some surroundings."""
    low, high = _bounds(view, boxes)
    whole = view.field_of_view(AXIAL)
    ends = []
    for n, axis in enumerate((AXIAL.across, AXIAL.down)):
        more = max(AROUND, (SMALLEST_AREA - (high[axis] - low[axis])) / 2)
        ends.append((max(whole.low[n], low[axis] - more), min(whole.high[n], high[axis] + more)))
    return Rectangle((float(ends[0][0]), float(ends[1][0])), (float(ends[0][1]), float(ends[1][1])))
