"""Connected components of label maps: keep the largest, remove small ones, fill holes, count them.

Rules of a card are applied to label maps (I, J, K) of uint8 or uint16. The result is of the same
type, in Fortran order; it is the label map itself if no voxel changes. `voxel_volume` is in mm^3.

Components are labelled slab by slab and merged across slab borders, so that no component array of
the size of the scan is needed. Short slabs also stay in the processor's cache, which is faster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import Cleaning, FillHoles, KeepLargest, RemoveSmall, RemoveSmallObjects
from scanloom.ops.run_length import Labels, find_runs, iter_slabs

Connectivity = Literal[6, 18, 26]
_IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Components:
    """Connected components of equal value of a label map; component 0 is background.

    Parameters
    ----------
    labels : (I, J, K) uint8 or uint16 array
        The label map, in Fortran order.
    connectivity : 6, 18 or 26
        Neighbours that count as connected.
    table : (256 or 65536,) array or None
        Lookup table applied to the labels first; None for no mapping.
    slabs : tuple of slice
        Ranges of the last axis that were labelled separately.
    component_of : tuple of (N + 1,) arrays
        For each slab, the component to which its pieces 0, 1, ... N belong.
    value : (C,) array
        Value of the mapped labels in each component.
    voxels : (C,) array
        Number of voxels of each component; 0 for component 0.
    """

    labels: Labels
    connectivity: Connectivity
    table: Labels | None
    slabs: tuple[slice, ...]
    component_of: tuple[_IntArray, ...]
    value: _IntArray
    voxels: _IntArray

    def pieces(
        self, wanted: NDArray[np.bool_] | None = None
    ) -> Iterator[tuple[slice, NDArray[Any], _IntArray]]:
        """Yield each slab, its pieces (I, J, .), and the component to which each piece belongs.

        Slabs without a piece of the components that are `wanted` (C,) are left out.
        """
        for slab, component_of in zip(self.slabs, self.component_of, strict=True):
            if wanted is None or wanted[component_of].any():
                pieces, _ = _label_slab(self.labels, slab, self.connectivity, self.table)
                yield slab, pieces[:, :, _lead_in(slab) :], component_of


def keep_largest(labels: Labels, rule: KeepLargest) -> Labels:
    """Return the label map with only the largest component(s) of the structures in `rule`.

    Keeps the same voxels as MONAI's KeepLargestConnectedComponent, or, with `ties` "all", as
    nnU-Net's remove_all_but_largest_component. Otherwise, of components of equal size, those are
    kept whose first voxel in C order comes last, as in MONAI if NumPy's sort is stable. On
    processors where that sort is not stable, MONAI's choice is undefined.
    """
    labels = np.asfortranarray(labels)
    table = _lookup(labels, rule.numbers)
    if rule.together:
        table[table > 0] = 1
    components = find_components(labels, rule.connectivity, table)
    dropped = np.zeros(len(components.voxels), bool)
    for value in np.unique(components.value[1:]):
        candidates = np.flatnonzero(components.value == value)
        dropped[_components_to_drop(components, candidates, rule)] = True
    return _drop(components, dropped)


def remove_small(labels: Labels, rule: RemoveSmall, voxel_volume: float) -> Labels:
    """Return the label map without the small components of the structures in `rule`."""
    labels = np.asfortranarray(labels)
    components = find_components(labels, rule.connectivity, _lookup(labels, rule.numbers))
    return _drop(components, components.voxels <= rule.volume / voxel_volume)


def remove_small_objects(labels: Labels, rule: RemoveSmallObjects, voxel_volume: float) -> Labels:
    """Return the label map without objects that are smaller than a size; see the rule."""
    labels = np.asfortranarray(labels)
    least = math.ceil(rule.size / voxel_volume) if rule.unit == "mm3" else rule.size
    largest = int(labels.max())
    if int(labels.min()) == largest:
        return labels  # a map of a single value has no objects in MONAI
    if rule.together or largest <= 1:
        table = _lookup(labels, ())
        table[1:] = 1
        components = find_components(labels, rule.connectivity, table)
        return _drop(components, components.voxels < least)
    counts = np.zeros(largest + 1, np.int64)
    for slab in iter_slabs(labels.shape):
        counts += np.bincount(labels[:, :, slab].ravel(order="K"), minlength=largest + 1)
    kept = np.arange(largest + 1, dtype=labels.dtype)
    kept[counts < least] = 0
    return kept[labels] if (counts[1:] < least).any() else labels


def fill_holes(labels: Labels, rule: FillHoles) -> Labels:
    """Return the label map with the holes of the structures in `rule` filled, one after another."""
    from scipy import ndimage  # here, as cc3d

    result = labels = np.asfortranarray(labels)
    for number, box in enumerate(ndimage.find_objects(labels), 1):
        if box is None or (rule.numbers and number not in rule.numbers):
            continue
        # Beyond the structure's box all is open: what does not reach its faces is a hole
        rest = np.asfortranarray(result[box] != number).view(np.uint8)
        components = find_components(rest, rule.connectivity)
        outside = _drop(components, ~_reaching_border(components))
        if outside is not rest:
            result = result.copy(order="F") if result is labels else result
            result[box][outside != rest] = number
    return result


def clean(labels: Labels, rules: Iterable[Cleaning], voxel_volume: float, when: str) -> Labels:
    """Return the label map after a card's cleaning "before" or "after" it is restored."""
    for rule in rules:
        if rule.when == when:
            match rule:
                case KeepLargest():
                    labels = keep_largest(labels, rule)
                case RemoveSmall():
                    labels = remove_small(labels, rule, voxel_volume)
                case RemoveSmallObjects():
                    labels = remove_small_objects(labels, rule, voxel_volume)
                case FillHoles():
                    labels = fill_holes(labels, rule)
    return labels


def count_components(
    labels: Labels, numbers: Iterable[int], connectivity: Connectivity = 26
) -> dict[int, int]:
    """Return the number of connected components of each of `numbers`, 0 if no voxel has it."""
    components = find_components(np.asfortranarray(labels), connectivity)
    counts = np.bincount(components.value[1:], minlength=int(np.iinfo(labels.dtype).max) + 1)
    return {number: int(counts[number]) for number in numbers}


def find_components(
    labels: Labels, connectivity: Connectivity, table: Labels | None = None
) -> Components:
    """Find all connected components of equal value; arguments as of `Components`."""
    slabs = tuple(iter_slabs(labels.shape))
    offsets, links = [0], []  # pieces before each slab; pairs of pieces to merge
    values, piece_voxels = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
    previous: NDArray[Any] | None = None
    for slab in slabs:
        pieces, count = _label_slab(labels, slab, connectivity, table)
        if previous is not None:  # the common slice is labelled in both slabs
            links.append(_overlaps(previous, pieces[:, :, 0]) + np.array(offsets[-2:]))
        pieces = pieces[:, :, _lead_in(slab) :]
        runs = find_runs(_mapped(labels[:, :, slab], table))  # each is part of a single piece
        piece = pieces.reshape(-1, order="F")[runs.start]
        value = np.zeros(count + 1, np.int64)
        value[piece] = runs.value
        values.append(value[1:])
        piece_voxels.append(np.bincount(piece, runs.length, count + 1)[1:].astype(np.int64))
        previous = pieces[:, :, -1]
        offsets.append(offsets[-1] + count)
    component = _merge(offsets[-1] + 1, links)
    value = np.zeros(component.max() + 1, np.int64)
    np.maximum.at(value, component, np.concatenate(values))
    voxels = np.zeros_like(value)
    np.add.at(voxels, component, np.concatenate(piece_voxels))
    bounds = itertools.pairwise(offsets)
    component_of = tuple(np.append(0, component[a + 1 : b + 1]) for a, b in bounds)
    return Components(labels, connectivity, table, slabs, component_of, value, voxels)


def _drop(components: Components, dropped: NDArray[np.bool_]) -> Labels:
    """Return the label map without the components that are `dropped` (C,); itself if none is.

    The background always stays.
    """
    dropped[0] = False
    if not dropped.any():
        return components.labels
    result = components.labels.copy(order="F")
    for slab, pieces, component_of in components.pieces(dropped):
        result[:, :, slab][dropped[component_of][pieces]] = 0
    return result


def _reaching_border(components: Components) -> NDArray[np.bool_]:
    """Return which components (C,) of a label map have a voxel on its border."""
    reaching = np.zeros(len(components.voxels), bool)
    last = components.labels.shape[2] - 1
    for slab, pieces, component_of in components.pieces():
        ends = [k - slab.start for k in (0, last) if slab.start <= k < slab.stop]
        for face in (pieces[[0, -1]], pieces[:, [0, -1]], pieces[:, :, ends]):
            reaching[component_of[np.unique(face)]] = True
    return reaching


def _label_slab(
    labels: Labels, slab: slice, connectivity: Connectivity, table: Labels | None
) -> tuple[NDArray[Any], int]:
    """Label the components of a slab and of the slice before it; return pieces and their count.

    The preceding slice is included so that two slabs can be merged: its voxels have a piece in
    either slab, and the two pieces are connected. Pieces are numbered from 1.
    """
    import cc3d  # here, since a scan that is refused needs no components

    mapped = _mapped(labels[:, :, slab.start - _lead_in(slab) : slab.stop], table)
    writable = np.array(mapped, order="F")  # cc3d requires a writable array
    pieces, count = cc3d.connected_components(writable, connectivity=connectivity, return_N=True)
    return pieces.reshape(mapped.shape, order="F"), int(count)


def _lead_in(slab: slice) -> int:
    """Return the number of slices before the slab that are labelled with it: 0 or 1."""
    return min(1, int(slab.start))


def _mapped(labels: Labels, table: Labels | None) -> Labels:
    """Return labels mapped by `table`, if there is one."""
    return labels if table is None else table[labels]


def _overlaps(above: NDArray[Any], below: NDArray[Any]) -> _IntArray:
    """Return the distinct pairs (N, 2) of pieces that share a voxel of the common slice."""
    first, second = above.reshape(-1, order="F"), below.reshape(-1, order="F")
    changes = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    begins = np.append(True, changes) & (first != 0)
    # One number for each pair: to sort numbers takes a small fraction of sorting rows
    pairs = np.unique(first[begins].astype(np.uint64) << np.uint64(32) | second[begins])
    return np.stack([pairs >> np.uint64(32), pairs & np.uint64(0xFFFFFFFF)], 1).astype(np.int64)


def _merge(piece_count: int, links: list[_IntArray]) -> _IntArray:
    """Return the component of each piece (piece_count,); piece 0, the background, is 0."""
    from scipy.sparse import coo_array  # here, as cc3d
    from scipy.sparse.csgraph import connected_components

    pairs = np.concatenate([np.zeros((0, 2), np.int64), *links])
    graph = coo_array(
        (np.ones(len(pairs), bool), (pairs[:, 0], pairs[:, 1])), shape=(piece_count, piece_count)
    )
    component = connected_components(graph, directed=False)[1]
    return np.asarray(component, dtype=np.int64)


def _components_to_drop(
    components: Components, candidates: _IntArray, rule: KeepLargest
) -> _IntArray:
    """Return the components of a structure that are not kept."""
    if len(candidates) <= rule.parts:
        return candidates[:0]
    size = components.voxels[candidates]
    # Larger ones are kept and smaller ones are not, whatever the ties
    smallest_kept = np.sort(size)[-rule.parts]
    smaller, equal = candidates[size < smallest_kept], candidates[size == smallest_kept]
    surplus = len(candidates) - len(smaller) - rule.parts
    if surplus and rule.ties == "last":
        order = np.argsort(_first_voxels(components, equal))
        smaller = np.append(smaller, equal[order[:surplus]])
    return np.asarray(smaller, dtype=np.int64)


def _first_voxels(components: Components, candidates: _IntArray) -> _IntArray:
    """Return the flat index in C order of the first voxel of each candidate component."""
    first = np.full(len(components.voxels), np.iinfo(np.int64).max)
    is_candidate = np.zeros(len(components.voxels), bool)
    is_candidate[candidates] = True
    for slab, pieces, component_of in components.pieces(is_candidate):
        i, j, k = np.nonzero(is_candidate[component_of][pieces])
        offset = np.ravel_multi_index((i, j, k + slab.start), components.labels.shape)
        np.minimum.at(first, component_of[pieces[i, j, k]], offset)
    return first[candidates]


def _lookup(labels: Labels, allowed: Sequence[int]) -> Labels:
    """Return the lookup table of structures: a value itself, 0 if it is not one of theirs."""
    size = int(np.iinfo(labels.dtype).max) + 1
    numbers = np.array(allowed or range(1, size))
    numbers = numbers[numbers < size]
    table = np.zeros(size, labels.dtype)
    table[numbers] = numbers
    return table
