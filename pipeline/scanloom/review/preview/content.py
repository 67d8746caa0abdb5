"""Content of a preview: the scan, its structures, and the positions of planes and slices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from scanloom.cards.codes import colors_of_models
from scanloom.core import Layer, Measurement, Segmentation, Volume
from scanloom.core.grid import Box
from scanloom.core.segmentation import Color
from scanloom.review.preview import slicing
from scanloom.review.preview.overlay import OVERSAMPLING, Overlay, overlay_structures
from scanloom.review.preview.slicing import View
from scanloom.review.preview.solid import Solid, solid_of

TILES = 16
"""Slices of the mosaic."""
TILES_BESIDE_VIEWS = 12
"""Slices of the mosaic if shaded views stand beside it."""
TILES_BEYOND = 0.05
"""Part of the structures' extent by which the mosaic begins before, and ends after them."""
MARGIN_MM = 10.0
"""Margin around the body and all structures."""
MAX_SEARCH_VOXELS = 4_000_000
"""Approximate number of voxels that are searched for the largest slices of a structure."""
NEARLY_LARGEST = 0.75
"""Share of the largest area from which slices qualify; the middle one of them is shown."""
MAX_FILLED_SHARE = 0.3
"""Share of the body above which the area of the largest structure is not filled."""
LUNG_CODES = frozenset({"39607008", "45653009", "90572001", "72481006"})
"""SNOMED CT codes of the lung and its lobes."""
MAX_ATTEMPTS = 4
"""Number of times that the mosaic is changed to show every structure."""
ANISOTROPY = 1.8
"""Ratio of spacings from which the slices across the largest one are those acquired."""
THIN = 0.2
"""Ratio of a stack's height to its width below which its slices are those acquired."""


@dataclass(frozen=True)
class About:
    """Facts of a case that are not in its scan and results.

    Parameters
    ----------
    case_id : str
        Id of the case; empty if it has none.
    assumed_modality : str or None
        Modality that was assumed because the scan states none.
    limitations : tuple of str
        Known errors of the models, as sentences.
    """

    case_id: str = ""
    assumed_modality: str | None = None
    limitations: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class DrawnLayer:
    """A layer with the display of each value: RGB (N, 3), whether it is filled, whether lung."""

    layer: Layer
    colors: NDArray[np.float32]
    filled: NDArray[np.bool_]
    lung: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Plane:
    """Position and area of a plane in one of the views of a scan.

    `name` describes it for a reader, `short` in a tile.
    """

    view: View
    direction: slicing.Direction
    position: float
    area: slicing.Rectangle
    name: str
    short: str = ""


@dataclass(frozen=True, eq=False)
class PreviewContent:
    """Content of a preview, and how it is displayed.

    Parameters
    ----------
    window : GrayWindow
        The intensity window, without lungs.
    planes : (Plane, Plane, Plane)
        The main plane, which has the acquired slices, and the two others.
    tiles : tuple of Plane
        The slices of the mosaic, parallel to the main plane.
    solid : Solid or None
        The structures for shaded views; None if these would not show more than slices do.
    """

    volume: Volume
    segmentations: tuple[Segmentation, ...]
    measurements: tuple[Measurement, ...]
    about: About
    layers: tuple[DrawnLayer, ...]
    window: slicing.GrayWindow
    planes: tuple[Plane, Plane, Plane]
    tiles: tuple[Plane, ...]
    solid: Solid | None = None
    color_of: dict[tuple[str, int], Color] = field(default_factory=dict)
    """Colour of each structure by model and number."""

    @property
    def outside(self) -> float:
        """Intensity outside the scan: that of air in CT, else the lowest of the window."""
        return (
            min(slicing.AIR_HU, self.window.low)
            if self.window in slicing.CT_WINDOWS
            else self.window.low
        )

    @property
    def modality(self) -> str:
        """Modality, for a reader."""
        if self.volume.modality is None and self.about.assumed_modality is not None:
            return f"{self.about.assumed_modality} (assumed)"
        return self.volume.modality or "modality unknown"

    @property
    def window_text(self) -> str:
        """Description of the windows, for a reader."""
        lungs = {
            (s.model, t.number)
            for s in self.segmentations
            for t in s.structures
            if t.type.value in LUNG_CODES
        }
        has_lung = any(m.voxels and (m.model, m.number) in lungs for m in self.measurements)
        is_shown = has_lung and self.window in slicing.CT_WINDOWS
        return f"{self.window.text}, in lungs {slicing.LUNG.text}" if is_shown else self.window.text

    def picture(
        self, plane: Plane, size: tuple[int, int], show: Literal["labels", "scan"] = "labels"
    ) -> Image.Image:
        """Return a plane with or without its structures, in pixels.

        In CT, lungs are shown in the lung window where their label is.
        """
        raster = slicing.Raster(plane.area, size)
        cut = plane.view.cut(
            self.volume.array, plane.direction, plane.position, self.outside, raster
        )
        values = slicing.scan_pixels(cut, raster)
        gray = self.window.gray(values)
        if show == "scan":
            return overlay_structures(gray, [])
        fine = slicing.Raster(plane.area, (size[0] * OVERSAMPLING, size[1] * OVERSAMPLING))
        overlays = []
        for drawn in self.layers:
            cut = plane.view.cut(drawn.layer.labels, plane.direction, plane.position, None, raster)
            overlays.append(Overlay(slicing.label_pixels(cut, fine), drawn.colors, drawn.filled))
            if self.window in slicing.CT_WINDOWS and drawn.lung.any():
                lung = drawn.lung[overlays[-1].middle]
                gray[lung] = slicing.LUNG.gray(values[lung])
        return overlay_structures(gray, overlays)


def choose_content(
    volume: Volume,
    segmentations: Sequence[Segmentation],
    measurements: Sequence[Measurement],
    about: About = About(),
) -> PreviewContent:
    """Choose planes where most structures are, or through the middle of an empty result."""
    view = View(volume.grid)
    hounsfield = slicing.is_in_hounsfield(volume, about.assumed_modality)
    body = slicing.find_body(volume, view, hounsfield)
    main_axis = acquired_axis(view)
    by_volume = sorted(measurements, key=lambda m: -m.volume_ml)
    boxes = {(m.model, m.number): m.box for m in by_volume if m.voxels and m.box is not None}
    center = _fullest(view, boxes, segmentations)
    crop = crop_box(view, body, list(boxes.values()))
    # a tilted stack is shown slice by slice, as it was acquired
    main = view if view.upright else view.as_acquired()
    color_of = colors_of_models((s.model, s.structures) for s in segmentations)
    modality = volume.modality or about.assumed_modality
    solid = solid_of(view, segmentations, boxes, color_of, (body.low, body.high), main_axis)
    count = TILES if solid is None else TILES_BESIDE_VIEWS
    return PreviewContent(
        volume=volume,
        segmentations=tuple(segmentations),
        measurements=tuple(measurements),
        about=about,
        layers=tuple(_drawn_layers(segmentations, measurements, color_of, body.volume_ml)),
        window=slicing.choose_window(
            body.values,
            modality,
            "HU" if hounsfield else volume.unit,
            volume.suv_factor,
            body.enhanced,
        ),
        planes=_planes(view, main, main_axis, center, crop),
        tiles=_tiles(view, main, main_axis, crop, boxes, segmentations, count),
        solid=solid,
        color_of=color_of,
    )


def acquired_axis(view: View) -> int:
    """Return the axis of the view across which slices were acquired; that of the feet if unclear.

    It is the axis of a much larger spacing, or of few slices.
    """
    spacing = [view.source.spacing[n] for n in view.order]
    axes = sorted(range(3), key=lambda n: spacing[n])
    if spacing[axes[2]] >= ANISOTROPY * spacing[axes[1]]:
        return axes[2]
    extent = [n * mm for n, mm in zip(view.shape, spacing, strict=True)]
    axes = sorted(range(3), key=lambda n: extent[n])
    return axes[0] if extent[axes[0]] < THIN * extent[axes[1]] else slicing.AXIAL.normal


def _drawn_layers(
    segmentations: Sequence[Segmentation],
    measurements: Sequence[Measurement],
    color_of: dict[tuple[str, int], Color],
    body_ml: float,
) -> list[DrawnLayer]:
    # an outline alone does not say on which side its structure lies: only the largest has no fill
    largest = max(measurements, key=lambda m: m.volume_ml, default=None)
    unfilled = None
    if largest is not None and body_ml > 0 and largest.volume_ml > MAX_FILLED_SHARE * body_ml:
        unfilled = largest.model, largest.number
    drawn = []
    for segmentation in segmentations:
        for layer in segmentation.layers:
            size = int(np.iinfo(layer.labels.dtype).max) + 1
            colors = np.zeros((size, 3), np.float32)
            filled, lung = np.zeros(size, bool), np.zeros(size, bool)
            for s in layer.structures:
                colors[s.number] = color_of[segmentation.model, s.number]
                filled[s.number] = (segmentation.model, s.number) != unfilled
                lung[s.number] = s.type.value in LUNG_CODES
            drawn.append(DrawnLayer(layer, colors, filled, lung))
    return drawn


Key = tuple[str, int]
"""Model and number of a structure."""
Corners = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Lowest and highest index of a box in a view, at the outer edges of voxels."""


def crop_box(view: View, body: slicing.Body, boxes: Sequence[Box]) -> Corners:
    """Return a box around the body and all structures, so that errors beside it are shown."""
    if not body.found:
        return np.full(3, -0.5), np.array(view.shape) - 0.5
    ends = np.array([body.low, body.high, *(view.index_of(end) for box in boxes for end in box)])
    return ends.min(axis=0) - 0.5, ends.max(axis=0) + 0.5


def _area(view: View, direction: slicing.Direction, crop: Corners) -> slicing.Rectangle:
    """Return the part of a plane that holds a box with the margin, within the scan."""
    corners = np.array(
        [view.lpi((a, b, c)) for a, b, c in itertools.product(*zip(*crop, strict=True))]
    )
    whole, axes = view.field_of_view(direction), (direction.across, direction.down)
    low = [max(whole.low[n], corners[:, a].min() - MARGIN_MM) for n, a in enumerate(axes)]
    high = [min(whole.high[n], corners[:, a].max() + MARGIN_MM) for n, a in enumerate(axes)]
    return slicing.Rectangle((float(low[0]), float(low[1])), (float(high[0]), float(high[1])))


def _planes(
    view: View, main: View, main_axis: int, center: Sequence[int], crop: Corners
) -> tuple[Plane, Plane, Plane]:
    """Return the main plane and the two others, through a voxel of the view."""
    a, b, c = center
    point, positions = view.lpi((a, b, c)).tolist(), view.positions((a, b, c)).tolist()
    first = _acquired_plane(view, main, main_axis, center[main_axis], crop)
    second, third = (
        Plane(
            view,
            d,
            positions[d.normal],
            _area(view, d, crop),
            f"{d.name}, {_distance(d.normal, point[d.normal])}",
        )
        for d in slicing.DIRECTIONS
        if d.normal != main_axis
    )
    return first, second, third


def _acquired_plane(view: View, main: View, axis: int, n: int, crop: Corners) -> Plane:
    """Return the n-th slice across an axis of the view, as it was acquired."""
    direction = next(d for d in slicing.DIRECTIONS if d.normal == axis)
    index = [(a + b) / 2 for a, b in zip(*crop, strict=True)]
    index[axis] = n
    i, j, k = index
    stated = float(view.lpi((i, j, k))[axis])
    position = float(main.positions((i, j, k))[axis])
    tilt, turn, distance = view.tilt(axis), view.turn(direction), _distance(axis, stated)
    name = direction.name if tilt < 0.5 else f"{direction.name}, tilted {tilt:.1f}°"
    name = name if turn < 0.5 else f"{name}, turned {turn:.1f}°"  # so are the letters of the sides
    name = f"{name}, slice {n + 1} of {view.shape[axis]}, {distance}"
    short = f"{n + 1}: {distance}"
    return Plane(main, direction, position, _area(main, direction, crop), name, short)


def _distance(axis: int, position: float) -> str:
    """Return a position along an LPI axis as text, such as "I 250 mm"."""
    return f"{('RL', 'AP', 'SI')[axis][position > 0]} {abs(position):.0f} mm"


def _tiles(
    view: View,
    main: View,
    axis: int,
    crop: Corners,
    boxes: Mapping[Key, Box],
    segmentations: Sequence[Segmentation],
    count: int,
) -> tuple[Plane, ...]:
    """Return the slices of the mosaic: every structure is in one of them.

    They extend a little beyond the structures, within the body; the other planes show all of it.
    """
    spans: dict[Key, Span] = {}
    for key, box in boxes.items():
        a, b = (view.index_of(end)[axis] for end in box)
        spans[key] = min(a, b), max(a, b)
    body = round(float(crop[0][axis]) + 0.5), round(float(crop[1][axis]) - 0.5)
    if spans:
        first, last = min(low for low, _ in spans.values()), max(high for _, high in spans.values())
        beyond = math.ceil(TILES_BEYOND * (last - first + 1))
        body = max(body[0], first - beyond), min(body[1], last + beyond)
    slices = choose_slices(body, list(spans.values()), count)
    for _ in range(MAX_ATTEMPTS):  # a structure may be interrupted in a slice of its box
        absent = boxes.keys() - _present(view, axis, slices, segmentations)
        if not absent:
            break
        for key in absent:
            n = _fullest(view, {key: boxes[key]}, segmentations)[axis]
            spans[key] = n, n
        slices = choose_slices(body, list(spans.values()), count)
    return tuple(_acquired_plane(view, main, axis, n, crop) for n in slices)


def _present(
    view: View, axis: int, slices: Sequence[int], segmentations: Sequence[Segmentation]
) -> set[Key]:
    """Return model and number of the structures in some slices across an axis of the view."""
    return {
        (segmentation.model, int(number))
        for segmentation in segmentations
        for layer in segmentation.layers
        for n in slices
        for number in np.flatnonzero(
            np.bincount(np.moveaxis(view.of(layer.labels), axis, 0)[n].ravel(order="K"))
        )
    }


def _fullest(
    view: View, boxes: Mapping[Key, Box], segmentations: Sequence[Segmentation]
) -> list[int]:
    """Return, for each axis of the view, the slice with most structures at nearly full area."""
    center = []
    areas = _areas(view, boxes, segmentations)
    for axis, n in enumerate(view.shape):
        score = np.zeros(n)
        for of_axis in (each[axis] for each in areas.values()):
            # above nearly the largest area no slice is better than another
            score += np.minimum(of_axis / of_axis.max(), NEARLY_LARGEST)
        # the best slice itself may be at an end of a structure with a flat side
        candidates = np.flatnonzero(score >= score.max() * (1 - 1e-9))
        center.append(int(candidates[(len(candidates) - (not boxes)) // 2]))
    return center


def _areas(
    view: View, boxes: Mapping[Key, Box], segmentations: Sequence[Segmentation]
) -> dict[Key, tuple[NDArray[np.float64], ...]]:
    """Return the area of each structure in the slices across each axis, in sampled voxels."""
    areas = {}
    for segmentation in segmentations:
        for layer in segmentation.layers:
            labels = view.of(layer.labels)
            for s in layer.structures:
                key = segmentation.model, s.number
                if key not in boxes:
                    continue
                ends = np.array([view.index_of(end) for end in boxes[key]])
                first, last = ends.min(axis=0), ends.max(axis=0)
                inside = labels[
                    tuple(slice(int(a), int(b) + 1) for a, b in zip(first, last, strict=True))
                ]
                # every step-th voxel: a large structure does not hang on single voxels
                step = math.ceil((inside.size / MAX_SEARCH_VOXELS) ** (1 / 3))
                mask = inside[::step, ::step, ::step] == s.number
                of_axes = []
                for axis, n in enumerate(view.shape):
                    area = np.zeros(n)
                    counted = mask.sum(axis=tuple(a for a in range(3) if a != axis))
                    spread = np.repeat(counted, step)[: last[axis] - first[axis] + 1]
                    area[first[axis] : last[axis] + 1] = spread
                    of_axes.append(area if area.any() else np.ones(n))
                areas[key] = tuple(of_axes)
    return areas


Span = tuple[int, int]
"""First and last slice of a structure, both included."""


def choose_slices(body: Span, spans: Sequence[Span], count: int) -> list[int]:
    """Choose slices: the first and the last, others evenly, and some through every structure.

    Parameters
    ----------
    body : (first, last)
        Slices to choose from: all structures are in them.
    spans : sequence of (first, last)
        Slices of each structure.
    count : int
        Number of slices to choose; more are chosen only if the structures need more.

    Returns
    -------
    list of int
        Slices in ascending order, none twice.
    """
    first, last = body
    # few slices: all are shown
    if last - first < count:
        return list(range(first, last + 1))
    ends = {first, last}
    low, high = min((s[0] for s in spans), default=first), max((s[1] for s in spans), default=last)
    needed: set[int] = set()
    # as many evenly spaced slices as leave room for those that structures need
    for room in range(count - 2, -1, -1):
        even = {int(low + (n + 0.5) / room * (high - low + 1)) for n in range(room)}
        shown = ends | {min(n, last) for n in even}
        needed = _piercing([s for s in spans if not any(s[0] <= n <= s[1] for n in shown)])
        if len(shown | needed) <= count:
            return _filled(shown | needed, count)
    return sorted(ends | needed)


def _piercing(spans: Sequence[Span]) -> set[int]:
    """Return few slices such that each span has one of them."""
    chosen: set[int] = set()
    waiting = sorted(spans, key=lambda s: s[1])
    # greedy by the last slice is optimal for intervals: no fewer slices would do
    while waiting:
        end = waiting[0][1]
        group = [s for s in waiting if s[0] <= end]
        chosen.add((max(s[0] for s in group) + end) // 2)
        waiting = [s for s in waiting if s[0] > end]
    return chosen


def _filled(shown: set[int], count: int) -> list[int]:
    """Return the slices with further ones in the widest gaps, up to `count`."""
    chosen = sorted(shown)
    while len(chosen) < count:
        gaps = np.diff(chosen)
        widest = int(np.argmax(gaps))
        chosen.insert(widest + 1, (chosen[widest] + chosen[widest + 1]) // 2)
    return chosen
