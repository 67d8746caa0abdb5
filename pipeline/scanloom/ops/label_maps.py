"""Label maps: boxes around structures, crops of a scan, and maps put back, restricted or united."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import KeepLargest
from scanloom.core import Grid, Layer, Segmentation, Volume
from scanloom.core.grid import Box
from scanloom.ops.components import keep_largest
from scanloom.ops.run_length import Labels, iter_slabs
from scanloom.ops.uncertainty import change_maps

Triple = tuple[int, int, int]


def box_of_labels(labels: Labels, numbers: Iterable[int] = ()) -> Box | None:
    """Return the smallest box around structures of a label map (I, J, K), by default around all.

    Returns
    -------
    Box or None
        None if no voxel has one of the numbers.
    """
    table = label_table(labels.dtype, numbers)
    inside = [np.zeros(n, bool) for n in labels.shape]
    for slab in iter_slabs(labels.shape):
        mask = table[labels[:, :, slab]]
        for axis, across in enumerate(((1, 2), (0, 2))):
            inside[axis] |= mask.any(axis=across)
        inside[2][slab] = mask.any(axis=(0, 1))
    if not inside[0].any():
        return None
    at = [np.flatnonzero(axis) for axis in inside]
    return Box(_triple(axis[0] for axis in at), _triple(axis[-1] for axis in at))


def box_of_largest(layers: Iterable[tuple[Labels, Sequence[int]]], box: Box) -> Box:
    """Return the smallest box around the largest connected component of structures, taken together.

    Parameters
    ----------
    layers : iterable of ((I, J, K) array, sequence of int)
        Label maps of a scan, with the numbers of the structures in each.
    box : Box
        A box around all of them, which has at least one voxel of theirs. Of components of equal
        size, the result is around all.
    """
    mask = np.zeros(box.shape, np.uint8, order="F")
    for labels, numbers in layers:
        mask |= label_table(labels.dtype, numbers)[labels[box.slices]].view(np.uint8)
    inside = box_of_labels(keep_largest(mask, KeepLargest(ties="all")))
    if inside is None:
        raise ValueError("the box has no voxel of the structures")
    first, last = (np.add(box.first, corner) for corner in inside)
    return Box(_triple(first), _triple(last))


def union_of_boxes(boxes: Iterable[Box | None]) -> Box | None:
    """Return the smallest box around all boxes; None without any."""
    present = [box for box in boxes if box is not None]
    if not present:
        return None
    firsts, lasts = np.array([box.first for box in present]), np.array([b.last for b in present])
    return Box(_triple(firsts.min(axis=0)), _triple(lasts.max(axis=0)))


def margin_voxels(grid: Grid, margin_mm: float) -> Triple:
    """Return a margin in voxels along each axis, rounded up."""
    return _triple(math.ceil(margin_mm / spacing) for spacing in grid.spacing)


def enlarge_box(box: Box, margin: Triple, shape: Triple) -> Box:
    """Return a box with `margin` voxels around it, as far as a grid of this shape extends."""
    return Box(
        _triple(max(0, a - m) for a, m in zip(box.first, margin, strict=True)),
        _triple(min(n - 1, b + m) for b, m, n in zip(box.last, margin, shape, strict=True)),
    )


def crop_grid(grid: Grid, box: Box) -> Grid:
    """Return the grid of the voxels in a box, at their positions in the patient."""
    affine = np.array(grid.affine)
    affine[:3, 3] = grid.world(box.first)
    return Grid(box.shape, affine)


def crop_volume(volume: Volume, box: Box) -> Volume:
    """Return the voxels of a scan in a box, as a scan of their own; the voxels are copied."""
    return replace(volume, array=volume.array[box.slices], grid=crop_grid(volume.grid, box))


def paste_labels(labels: Labels, box: Box, shape: Triple) -> Labels:
    """Return a label map of a scan of this shape from one (I', J', K') of a box; 0 outside it."""
    whole = np.zeros(shape, labels.dtype, order="F")
    whole[box.slices] = labels
    return whole


def paste_segmentation(segmentation: Segmentation, box: Box, grid: Grid) -> Segmentation:
    """Return a segmentation of a whole scan, on its `grid`, from one of a box."""
    layers = tuple(
        Layer(paste_labels(layer.labels, box, grid.shape), layer.structures)
        for layer in segmentation.layers
    )
    uncertainty = change_maps(
        segmentation.uncertainty, lambda values: paste_labels(values, box, grid.shape)
    )
    return replace(segmentation, layers=layers, grid=grid, uncertainty=uncertainty)


def label_table(dtype: np.dtype[Any], numbers: Iterable[int] = ()) -> NDArray[np.bool_]:
    """Return a lookup table: whether a label is one of `numbers`; of all but 0 if it is empty."""
    table = np.zeros(int(np.iinfo(dtype).max) + 1, bool)
    table[list(numbers) or slice(1, None)] = True
    return table


def _triple(values: Iterable[Any]) -> Triple:
    i, j, k = (int(value) for value in values)
    return i, j, k


def keep_numbers(labels: Labels, numbers: Iterable[int]) -> Labels:
    """Return a label map in which all other numbers are background."""
    kept = sorted(numbers)
    table = np.zeros(int(np.iinfo(labels.dtype).max) + 1, labels.dtype)
    table[kept] = kept
    return table[labels]


def restrict_segmentation(
    segmentation: Segmentation, limits: Segmentation, structures: Iterable[str] = ()
) -> Segmentation:
    """Return a segmentation that is background outside structures of another one on its grid.

    `structures` are labels of `limits`; empty for all.
    """
    selected = set(structures)
    masks = [
        (layer.labels, label_table(layer.labels.dtype, numbers))
        for layer in limits.layers
        if (numbers := [s.number for s in layer.structures if not selected or s.label in selected])
    ]
    layers = [layer.labels.copy(order="F") for layer in segmentation.layers]
    for slab in iter_slabs(segmentation.grid.shape):
        inside = np.any([table[mask[:, :, slab]] for mask, table in masks], axis=0)
        for labels in layers:
            labels[:, :, slab][~inside] = 0
    restricted = zip(layers, segmentation.layers, strict=True)
    return replace(
        segmentation, layers=tuple(Layer(labels, layer.structures) for labels, layer in restricted)
    )


def unite_layers(layers: Sequence[tuple[Labels, Mapping[int, int]]], numbers: int) -> Labels:
    """Return one label map from several; a voxel has the label of the first layer that has one.

    Parameters
    ----------
    layers : sequence of ((I, J, K) array, mapping of int to int)
        Label maps, the first with the highest priority, each with the new number of each of its
        structures; structures that are not in the mapping are left out.
    numbers : int
        The largest new number, which determines the type of the result.
    """
    dtype = np.dtype(np.uint8 if numbers <= 255 else np.uint16)
    united = np.zeros(layers[0][0].shape, dtype, order="F")
    for labels, new_number in layers:
        table = np.zeros(int(np.iinfo(labels.dtype).max) + 1, dtype)
        table[list(new_number)] = list(new_number.values())
        for slab in iter_slabs(labels.shape):
            target = united[:, :, slab]
            np.copyto(target, table[labels[:, :, slab]], where=target == 0)
    return united
