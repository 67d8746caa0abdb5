"""Tools of a correction: each returns the voxels of a label map that change, with new labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import distance_transform_edt, gaussian_filter, generate_binary_structure, label

from scanloom.ops.label_maps import box_of_labels, enlarge_box
from scanloom.review.server.drafts import Box, Region, Stroke, painted_box

_LEVELS = (0.35, 0.65)
"""Range of the share of a structure around a voxel from which it is of the smoothed structure."""
MAX_BETWEEN = 200
"""Slices that are filled at once."""


@dataclass(frozen=True, eq=False)
class Canvas:
    """The label map that a tool changes.

    Parameters
    ----------
    layer : int
        Index of the label map.
    labels : (X, Y, Z) array
        As they are now, in the view.
    spacing : (x, y, z)
        In mm.
    """

    layer: int
    labels: NDArray[Any]
    spacing: tuple[float, float, float]

    def changed(self, box: Box, after: NDArray[Any]) -> Region | None:
        """Return the change of a box of the labels to others; None if they are equal."""
        return Region.of(self.layer, box, self.labels[box], after)


@dataclass(frozen=True, eq=False)
class Values:
    """Where something is painted: where the pixels of the scan lie in a range.

    Parameters
    ----------
    image : (X, Y, Z) array
        Pixels of the scan, in the view.
    low, high : float
        First and last pixel that is painted.
    """

    image: NDArray[Any]
    low: float
    high: float


def paint_between(canvas: Canvas, stroke: Stroke, values: Values) -> Region | None:
    """Paint a stroke where the scan lies in a range: a brush with a threshold.

    Raises
    ------
    IndexError
        If there is no such slice.
    """
    _check_slice(canvas, stroke)
    painted = painted_box(stroke, canvas.labels.shape, canvas.spacing)
    if painted is None:
        return None
    return _painted(canvas, stroke, *painted, values)


def paint_polygon(canvas: Canvas, stroke: Stroke, values: Values | None = None) -> Region | None:
    """Paint the inside of the polygon through the points of a stroke, by the even-odd rule.

    With `values`, where the scan lies in their range. Voxels count by their centres, whatever the
    radius.

    Raises
    ------
    IndexError
        If there is no such slice.
    """
    _check_slice(canvas, stroke)
    size = (canvas.labels.shape[stroke.across], canvas.labels.shape[stroke.down])
    points = np.array(stroke.points, dtype=np.float64)
    x, y = (np.arange(n, dtype=np.float64) for n in size)
    inside = np.zeros(size, bool)
    for (x0, y0), (x1, y1) in zip(points, np.roll(points, -1, axis=0), strict=True):
        if y0 == y1:
            continue
        # rows whose centre the edge passes; it turns over all voxels on its right
        rows = (y >= min(y0, y1)) & (y < max(y0, y1))
        crossing = x0 + (y[rows] - y0) / (y1 - y0) * (x1 - x0)
        inside[:, rows] ^= x[:, None] > crossing[None, :]
    box: list[slice] = [slice(None)] * 3
    box[stroke.normal] = slice(stroke.index, stroke.index + 1)
    plane = inside if stroke.across < stroke.down else inside.T
    whole = np.expand_dims(plane, stroke.normal)
    return _painted(canvas, stroke, (box[0], box[1], box[2]), whole, values)


def _check_slice(canvas: Canvas, stroke: Stroke) -> None:
    if not 0 <= stroke.index < canvas.labels.shape[stroke.normal]:
        raise IndexError("there is no such slice")


def _painted(
    canvas: Canvas, stroke: Stroke, box: Box, inside: NDArray[np.bool_], values: Values | None
) -> Region | None:
    before = canvas.labels[box]
    if values is not None:
        image = values.image[box]
        inside = inside & (image >= values.low) & (image <= values.high)
    if stroke.only is not None:
        inside = inside & np.isin(before, stroke.only)
    return canvas.changed(box, np.where(inside, before.dtype.type(stroke.label), before))


def fill_between(canvas: Canvas, number: int, normal: int, first: int, last: int) -> Region | None:
    """Interpolate a structure between two slices, by the distances to its borders in both.

    Slices between them get a shape that changes evenly (Raya and Udupa 1990, doi 10.1109/42.52980);
    what they had of the structure before is replaced.

    Raises
    ------
    IndexError
        If there are no such slices, or more than `MAX_BETWEEN` between them.
    """
    first, last = sorted((first, last))
    count = canvas.labels.shape[normal]
    if not 0 <= first < last < count or last - first > MAX_BETWEEN:
        raise IndexError(f"slices {first} and {last} of {count}")
    box: list[slice] = [slice(None)] * 3
    box[normal] = slice(first + 1, last)
    chosen = (box[0], box[1], box[2])
    flat = [canvas.spacing[axis] for axis in range(3) if axis != normal]
    depths = [
        _depth(np.moveaxis(canvas.labels, normal, 0)[index] == number, flat)
        for index in (first, last)
    ]
    if any(depth is None for depth in depths):
        return None
    begin, end = (np.asarray(depth) for depth in depths)
    share = (np.arange(first + 1, last) - first) / (last - first)
    steps = share.reshape(-1, 1, 1)
    inside = np.moveaxis((1 - steps) * begin + steps * end > 0, 0, normal)
    return canvas.changed(chosen, _replaced(canvas.labels[chosen], number, inside, canvas.spacing))


def _depth(mask: NDArray[np.bool_], spacing: list[float]) -> NDArray[np.float64] | None:
    """Return the distance (mm) of each voxel to the border: positive inside; None if empty."""
    if not mask.any():
        return None
    if mask.all():  # there is no border: SciPy would give the distance from a corner
        return np.full(mask.shape, np.linalg.norm(np.multiply(mask.shape, spacing)))
    within = distance_transform_edt(mask, sampling=spacing)
    return np.asarray(within - distance_transform_edt(~mask, sampling=spacing))


def smooth(canvas: Canvas, number: int, radius_mm: float) -> Region | None:
    """Smooth the surface of a structure: what is thinner than the radius, about, vanishes.

    Its volume stays, about: a threshold of half would shrink what is round.
    """
    a, b, c = (int(np.ceil(2 * radius_mm / mm)) + 1 for mm in canvas.spacing)
    box = _box_of(canvas, number, (a, b, c))
    if box is None:
        return None
    mask = canvas.labels[box] == number
    sigma = [radius_mm / 2 / mm for mm in canvas.spacing]
    blurred = gaussian_filter(mask.astype(np.float32), sigma, mode="nearest")
    count = int(np.count_nonzero(mask))
    level = np.partition(blurred.ravel(), -count)[-count]
    # but what is thin all over must not swell
    inside = blurred >= np.clip(level, *_LEVELS)
    return canvas.changed(box, _replaced(canvas.labels[box], number, inside, canvas.spacing))


def erase_islands(canvas: Canvas, number: int) -> Region | None:
    """Keep the largest part of a structure, and the structure around each other part in its place.

    Voxels that share a corner are of one part.
    """
    box = _box_of(canvas, number, (1, 1, 1))
    if box is None:
        return None
    components, count = label(canvas.labels[box] == number, generate_binary_structure(3, 3))
    if count < 2:
        return None
    sizes = np.bincount(components.ravel())
    sizes[0] = 0
    inside = components == sizes.argmax()
    return canvas.changed(box, _replaced(canvas.labels[box], number, inside, canvas.spacing))


def _box_of(canvas: Canvas, number: int, margin: tuple[int, int, int]) -> Box | None:
    """Return the box around a structure with a margin in voxels; None if it is empty."""
    box = box_of_labels(canvas.labels, [number])
    return None if box is None else enlarge_box(box, margin, canvas.labels.shape).slices


def _replaced(
    before: NDArray[Any],
    number: int,
    inside: NDArray[np.bool_],
    spacing: tuple[float, float, float],
) -> NDArray[Any]:
    """Return labels in which a structure is where `inside` says.

    What it leaves gets the nearest other label, which may be none.
    """
    after = np.where(inside, before.dtype.type(number), before)
    removed = (before == number) & ~inside
    is_other = before != number
    if removed.any():
        if not is_other.any():
            after[removed] = 0
            return after
        nearest = distance_transform_edt(
            ~is_other, sampling=spacing, return_distances=False, return_indices=True
        )
        after[removed] = before[tuple(axis[removed] for axis in nearest)]
    return after
