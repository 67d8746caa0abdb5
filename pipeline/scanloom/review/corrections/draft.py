"""A correction in progress: strokes of a brush on label maps, with undo and redo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 5_000
"""Points of a stroke."""
MAX_UNDO = 200
"""Strokes that can be undone."""
MAX_UNDO_BYTES = 32 << 20
"""Memory of strokes that can be undone; the last one is kept in any case."""
ROUNDING_MM = 1e-6
"""A voxel whose centre is farther than the radius by this much is on the edge, and is painted."""

Box = tuple[slice, slice, slice]


@dataclass(frozen=True)
class Stroke:
    """A stroke of a round brush in a slice.

    Parameters
    ----------
    layer : int
        Index of the label map.
    normal, across, down : int
        Axes of the slice: across slices, along its columns, along its rows.
    index : int
        The slice.
    points : sequence of (column, row)
        Centres of the brush in voxels; between them it moves in straight lines.
    radius_mm : float
        Radius of the brush. Voxels whose centre is within it are painted.
    label : int
        Number of the structure; 0 erases.
    only : tuple of int or None
        Labels that are replaced; None for all.
    """

    layer: int
    normal: int
    across: int
    down: int
    index: int
    points: Sequence[tuple[float, float]]
    radius_mm: float
    label: int
    only: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class _Change:
    """Voxels that a stroke changed: their place as bits, labels before, and new label."""

    layer: int
    box: Box
    bits: NDArray[np.uint8]
    before: NDArray[Any]
    label: int

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes + self.before.nbytes


class Draft:
    """Label maps as they are being corrected; those given are not changed.

    Parameters
    ----------
    layers : sequence of (X, Y, Z) arrays
        Label maps.
    spacing : (x, y, z)
        Spacing in mm.
    """

    def __init__(self, layers: Sequence[NDArray[Any]], spacing: tuple[float, float, float]) -> None:
        self._given, self.spacing = tuple(layers), spacing
        self._copies: dict[int, NDArray[Any]] = {}
        self._done: list[_Change] = []
        self._undone: list[_Change] = []
        self._forgot = False  # whether strokes can't be undone any more

    @property
    def has_strokes(self) -> bool:
        """Whether there are strokes that were not undone."""
        return bool(self._done) or self._forgot

    @property
    def can_undo(self) -> int:
        """Number of strokes that can be undone."""
        return len(self._done)

    @property
    def can_redo(self) -> int:
        """Number of strokes that can be done again."""
        return len(self._undone)

    @property
    def nbytes(self) -> int:
        """Memory that it takes, without the label maps that were given."""
        copies = sum(copy.nbytes for copy in self._copies.values())
        return copies + sum(change.nbytes for change in (*self._done, *self._undone))

    def layer(self, index: int) -> NDArray[Any]:
        """Return a label map as it is now."""
        return self._copies.get(index, self._given[index])

    @property
    def changed(self) -> dict[int, int]:
        """Number of voxels that differ, by the index of their label map."""
        counts = {
            index: int(np.count_nonzero(copy != self._given[index]))
            for index, copy in self._copies.items()
        }
        return {index: count for index, count in counts.items() if count}

    def stroke(self, stroke: Stroke) -> int:
        """Paint a stroke; return the number of voxels that it changed.

        Raises
        ------
        IndexError
            If there is no such layer or slice.
        """
        labels = self.layer(stroke.layer)
        if not 0 <= stroke.index < labels.shape[stroke.normal]:
            raise IndexError("there is no such slice")
        painted = painted_box(stroke, labels.shape, self.spacing)
        if painted is None:
            return 0
        box, inside = painted
        before = labels[box]
        changed = inside & (before != stroke.label)
        if stroke.only is not None:
            changed &= np.isin(before, stroke.only)
        count = int(np.count_nonzero(changed))
        if count:
            change = _Change(stroke.layer, box, np.packbits(changed), before[changed], stroke.label)
            self._apply(change, change.label)
            self._done.append(change)
            self._forget()
            self._undone.clear()
        return count

    def _forget(self) -> None:
        """Forget how the first strokes are undone, to stay within the limits."""
        held = sum(each.nbytes for each in self._done)
        while len(self._done) > MAX_UNDO or (held > MAX_UNDO_BYTES and len(self._done) > 1):
            held -= self._done.pop(0).nbytes
            self._forgot = True

    def undo(self) -> bool:
        """Undo the last stroke; return whether there was one."""
        if not self._done:
            return False
        change = self._done.pop()
        self._apply(change, change.before)
        self._undone.append(change)
        return True

    def redo(self) -> bool:
        """Paint the last undone stroke again; return whether there was one."""
        if not self._undone:
            return False
        change = self._undone.pop()
        self._apply(change, change.label)
        self._done.append(change)
        return True

    def _apply(self, change: _Change, values: NDArray[Any] | int) -> None:
        if change.layer not in self._copies:
            self._copies[change.layer] = self._given[change.layer].copy(order="K")
        box = self._copies[change.layer][change.box]
        changed = np.unpackbits(change.bits, count=box.size).astype(bool).reshape(box.shape)
        box[changed] = values


def painted_box(
    stroke: Stroke, shape: tuple[int, ...], spacing: tuple[float, float, float]
) -> tuple[Box, NDArray[np.bool_]] | None:
    """Return the box around a stroke, and the voxels in it that the brush covers; None if none.

    A voxel is covered if its centre is at most the radius, in mm, from a point of the stroke or
    from the straight line between two successive points.
    """
    mm = np.array((spacing[stroke.across], spacing[stroke.down]))
    radius = stroke.radius_mm + ROUNDING_MM
    points = np.array(stroke.points, dtype=np.float64).reshape(-1, 2)
    ends = np.array((shape[stroke.across], shape[stroke.down]))
    low = np.maximum(np.ceil(points.min(axis=0) - radius / mm), 0).astype(int)
    high = np.minimum(np.floor(points.max(axis=0) + radius / mm), ends - 1).astype(int)
    if (low > high).any():
        return None
    x, y = (np.arange(a, b + 1) * step for a, b, step in zip(low, high, mm, strict=True))
    covered = np.zeros((len(x), len(y)), bool)
    for begin, end in zip(points, points[1:] if len(points) > 1 else points, strict=False):
        covered |= _near(x[:, None], y[None, :], begin * mm, end * mm) <= radius**2
    if not covered.any():
        return None
    box = [slice(0, 0)] * 3
    box[stroke.normal] = slice(stroke.index, stroke.index + 1)
    box[stroke.across] = slice(int(low[0]), int(high[0]) + 1)
    box[stroke.down] = slice(int(low[1]), int(high[1]) + 1)
    inside = covered if stroke.across < stroke.down else covered.T
    return (box[0], box[1], box[2]), np.expand_dims(inside, stroke.normal)


def _near(
    x: NDArray[Any], y: NDArray[Any], begin: NDArray[Any], end: NDArray[Any]
) -> NDArray[np.float64]:
    """Return the squared distance of points from a line between two points."""
    along = end - begin
    length = float(along @ along)
    share = ((x - begin[0]) * along[0] + (y - begin[1]) * along[1]) / length if length else 0.0
    at = np.clip(share, 0, 1)
    distance = (x - begin[0] - at * along[0]) ** 2 + (y - begin[1] - at * along[1]) ** 2
    return np.asarray(distance, dtype=np.float64)
