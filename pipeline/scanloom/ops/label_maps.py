"""Label maps changed voxel by voxel: structures kept, restricted to others, united with others.

All functions work slab by slab: no further array of the scan's size is made but the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from scanloom.core import Layer, Segmentation
from scanloom.ops.boxes import label_table
from scanloom.ops.run_length import Labels, iter_slabs


def keep_numbers(labels: Labels, numbers: Iterable[int]) -> Labels:
    """Return a label map in which all other numbers are background."""
    kept = sorted(numbers)
    table = np.zeros(int(np.iinfo(labels.dtype).max) + 1, labels.dtype)
    table[kept] = kept
    return table[labels]


def restrict_segmentation(
    segmentation: Segmentation, limits: Segmentation, structures: Iterable[str] = ()
) -> Segmentation:
    """Return a segmentation that is background outside structures of another one.

    Parameters
    ----------
    segmentation, limits : Segmentation
        On the same grid.
    structures : iterable of str
        Labels of `limits`; empty for all.
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
