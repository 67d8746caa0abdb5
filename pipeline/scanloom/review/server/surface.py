"""Surfaces of structures as points, which the page of a case draws from any side.

A label map is sampled in cubic cells around what it has. A cell is a point of the surface if one of
its six neighbours has another label, so that a structure inside another one has a surface too. Its
slope points to where the labels around it are others.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

CELLS = 192
"""Cells along the longest side, if they are not smaller than the smallest side of a voxel."""
MAX_POINTS = 400_000
"""Of a label map: noise gets larger cells."""
STEPS_PER_VOXEL = 8
"""Positions are stored in so many steps of a voxel, as uint16: up to 8191 voxels along an axis."""
RADIUS = 3
"""Distance in cells up to which labels decide on a slope."""
_STEEPEST = 127


def surface(labels: NDArray[Any], spacing: Sequence[float]) -> bytes:
    """Return points of the surfaces of all structures of a label map.

    Parameters
    ----------
    labels : (X, Y, Z) array
        In a view.
    spacing : (x, y, z)
        Of its voxels, in mm.

    Returns
    -------
    bytes
        Little-endian: size of a cell (mm, float32), then of N points all positions (N, 3) from
        the outer corner of the first voxel, in steps of 1 / `STEPS_PER_VOXEL` of a voxel (uint16),
        all labels (uint16), and all unit vectors (N, 3) out of the structure, times 127 (int8; 0
        without a direction).
        Nothing if there is no structure.

    Raises
    ------
    IndexError
        If there are too many voxels along an axis.
    """
    if max(labels.shape) > np.iinfo(np.uint16).max // STEPS_PER_VOXEL:
        raise IndexError(f"an axis has {max(labels.shape)} voxels")
    box = _box_of(labels)
    if box is None:
        return b""
    first, size = np.array(box[0]), np.array(box[1]) - box[0] + 1
    lengths = size * spacing
    cell = max(float(lengths.max()) / CELLS, min(spacing))
    while True:
        counts = np.maximum(1, np.rint(lengths / cell)).astype(int)
        places = [
            start + (np.arange(count) + 0.5) * (length / count)
            for start, length, count in zip(first, size, counts, strict=True)
        ]
        cells = _sampled(labels, places)
        at = np.flatnonzero(_is_surface(cells))
        if len(at) <= MAX_POINTS:
            break
        cell *= max(1.1, (len(at) / MAX_POINTS) ** (1 / 3))  # noise fills volumes
    own, vectors = cells.ravel()[at], _slopes(cells, at)
    index = np.unravel_index(at, cells.shape)[::-1]
    point = np.stack([axis[n - RADIUS] for axis, n in zip(places, index, strict=True)], axis=1)
    return b"".join(
        (
            np.float32(cell).astype("<f4").tobytes(),
            np.floor(point * STEPS_PER_VOXEL).astype("<u2").tobytes(),
            own.astype("<u2").tobytes(),
            vectors.tobytes(),
        )
    )


def _box_of(labels: NDArray[Any]) -> tuple[list[int], list[int]] | None:
    """Return the first and the last voxel of the box around all structures; None without any."""
    columns = np.any(labels, axis=2)
    ends = [np.flatnonzero(np.any(columns, axis=n)) for n in (1, 0)]
    if not len(ends[0]):
        return None
    (i, j), (i1, j1) = (int(e[0]) for e in ends), (int(e[-1]) for e in ends)
    slices = np.flatnonzero(labels[i : i1 + 1, j : j1 + 1].any(axis=(0, 1)))
    return [i, j, int(slices[0])], [i1, j1, int(slices[-1])]


def _sampled(labels: NDArray[Any], places: Sequence[NDArray[np.float64]]) -> NDArray[Any]:
    """Return the labels (Z, Y, X) at places along each axis, within a margin of `RADIUS` zeros."""
    x, y, z = (np.floor(axis).astype(np.intp) for axis in places)
    return np.pad(labels.T[np.ix_(z, y, x)], RADIUS)  # in the order of memory


def _is_surface(cells: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which cells of a structure have a neighbour with another label."""
    surface = np.zeros(cells.shape, bool)
    for axis in range(3):
        before, after = (
            np.moveaxis(cells, axis, 0)[section] for section in (np.s_[:-1], np.s_[1:])
        )
        edge = before != after
        np.moveaxis(surface, axis, 0)[:-1] |= edge
        np.moveaxis(surface, axis, 0)[1:] |= edge
    return surface & (cells > 0)


def _slopes(cells: NDArray[Any], at: NDArray[np.intp]) -> NDArray[np.int8]:
    """Return the vectors (N, 3; X, Y, Z) out of the structures at cells, by flat index."""
    flat = cells.ravel()
    own, total = flat[at], np.zeros((3, len(at)), np.float32)
    steps = cells.shape[1] * cells.shape[2], cells.shape[2], 1
    reach = range(-RADIUS, RADIUS + 1)
    for offset in itertools.product(reach, reach, reach):  # Z, Y, X
        distance = sum(n * n for n in offset)
        if offset <= (0, 0, 0) or distance > RADIUS**2:
            continue  # each pair of opposite cells once
        shift = int(np.dot(offset, steps))
        more = (flat[at + shift] != own).astype(np.int8) - (flat[at - shift] != own)
        for axis, n in enumerate(reversed(offset)):
            if n:
                total[axis] += n * more
    length = np.sqrt((total**2).sum(axis=0))
    return np.asarray(np.rint(total / np.maximum(length, 1) * _STEEPEST).T, np.int8)
