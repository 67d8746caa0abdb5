"""Connected parts of label maps: keep the largest ones, count them.

Parts are found slab by slab and joined across slab borders, so that no array of parts of the size
of the scan exists; short slabs also stay in the processor's cache, which makes it faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import cc3d
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from scanloom.cards.card import KeepLargest
from scanloom.ops.runs import Labels, runs_of, slabs_of

Connectivity = Literal[6, 18, 26]
Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Parts:
    """The connected parts of a label map; part 0 is background.

    Parameters
    ----------
    slabs : tuple of slice
        The stretches of the last axis in which pieces were sought.
    part_of : tuple of (N + 1,) arrays
        For each slab, the part to which its pieces 0, 1, ... N belong.
    value : (P,) array
        The value that the label map has in each part.
    voxels : (P,) array
        How many voxels each part has; 0 for part 0.
    """

    slabs: tuple[slice, ...]
    part_of: tuple[Counts, ...]
    value: Counts
    voxels: Counts


def keep_largest(labels: Labels, rule: KeepLargest) -> Labels:
    """Return the label map with only the largest part(s) of the structures that `rule` names.

    Parameters
    ----------
    labels : (I, J, K) uint8 or uint16 array
        A label map.
    rule : KeepLargest
        Which structures, each by itself or joined, how many parts, which neighbours.

    Returns
    -------
    (I, J, K) array
        Of the same dtype, Fortran order; what was dropped is 0. `labels` itself where nothing was.

    Notes
    -----
    The same voxels as MONAI's KeepLargestConnectedComponent. Of parts of one size, those stay whose
    first voxel in C order comes last, which is what MONAI does where NumPy's sort is stable; on
    processors where it isn't, MONAI's choice is anyone's.
    """
    labels = np.asfortranarray(labels)
    table = _table(labels, rule)
    parts = find_parts(labels, rule.connectivity, table)
    keep = np.ones(len(parts.voxels), bool)
    for value in np.unique(parts.value[1:]):
        mine = np.flatnonzero(parts.value == value)
        keep[_too_small(labels, table, parts, mine, rule)] = False
    if keep.all():
        return labels
    result = labels.copy(order="F")
    for slab, part_of in zip(parts.slabs, parts.part_of, strict=True):
        dropped = ~keep[part_of]
        if dropped.any():
            pieces = _pieces(labels, slab, rule.connectivity, table)[0][:, :, _lead(slab) :]
            result[:, :, slab][dropped[pieces]] = 0
    return result


def count_components(
    labels: Labels, numbers: Iterable[int], connectivity: Connectivity = 26
) -> dict[int, int]:
    """Return how many connected parts each structure has.

    Parameters
    ----------
    labels : (I, J, K) uint8 or uint16 array
        A label map.
    numbers : iterable of int
        Which structures.
    connectivity : 6, 18 or 26
        Neighbours that count as connected.

    Returns
    -------
    dict of int to int
        For each of `numbers`; 0 where no voxel has that value.
    """
    parts = find_parts(np.asfortranarray(labels), connectivity)
    counts = np.bincount(parts.value[1:], minlength=int(np.iinfo(labels.dtype).max) + 1)
    return {number: int(counts[number]) for number in numbers}


def find_parts(labels: Labels, connectivity: Connectivity, table: Labels | None = None) -> Parts:
    """Find all connected parts of equal value; 0 is background.

    Parameters
    ----------
    labels : (I, J, K) uint8 or uint16 array
        Fortran order.
    connectivity : 6, 18 or 26
        Neighbours that count as connected.
    table : (256 or 65536,) array or None
        What each value is taken for; None takes them as they are.
    """
    slabs = tuple(slabs_of(labels.shape))
    before, links = [0], []  # how many pieces came before each slab; which pieces are one
    values, voxels = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
    last: NDArray[Any] | None = None
    for slab in slabs:
        pieces, found = _pieces(labels, slab, connectivity, table)
        if last is not None:
            links.append(_links(last, pieces[:, :, 0]) + np.array(before[-2:]))
        pieces = pieces[:, :, _lead(slab) :]
        runs = runs_of(pieces)
        value = np.zeros(found + 1, np.int64)
        value[runs.value] = _taken(labels[:, :, slab].reshape(-1, order="F")[runs.start], table)
        values.append(value[1:])
        voxels.append(np.bincount(runs.value, runs.length, found + 1)[1:].astype(np.int64))
        last = pieces[:, :, -1]
        before.append(before[-1] + found)
    part = _joined(before[-1] + 1, links)
    value = np.zeros(part.max() + 1, np.int64)
    np.maximum.at(value, part, np.concatenate(values))
    size = np.zeros_like(value)
    np.add.at(size, part, np.concatenate(voxels))
    ends = itertools.pairwise(before)
    return Parts(slabs, tuple(np.append(0, part[a + 1 : b + 1]) for a, b in ends), value, size)


def _pieces(
    labels: Labels, slab: slice, connectivity: Connectivity, table: Labels | None
) -> tuple[NDArray[Any], int]:
    """Return the pieces of a slab and of the slice before it, numbered from 1, and how many.

    The slice before is there too, so that the pieces of two slabs can be joined: a voxel of that
    slice has a piece in either, and the two are one.
    """
    wanted = _taken(labels[:, :, slab.start - _lead(slab) : slab.stop], table)
    writable = np.array(wanted, order="F")  # cc3d takes no array that it may not write
    pieces, found = cc3d.connected_components(writable, connectivity=connectivity, return_N=True)
    return pieces.reshape(wanted.shape, order="F"), int(found)


def _lead(slab: slice) -> int:
    """Return how many slices a slab's pieces begin early."""
    return min(1, int(slab.start))


def _taken(labels: Labels, table: Labels | None) -> Labels:
    """Return labels as `table` takes them."""
    return labels if table is None else table[labels]


def _links(above: NDArray[Any], below: NDArray[Any]) -> Counts:
    """Return the pairs (N, 2) of pieces that share a voxel of the slice that both slabs hold."""
    first, second = above.reshape(-1, order="F"), below.reshape(-1, order="F")
    changes = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    begins = np.append(True, changes) & (first != 0)
    pairs = np.stack([first[begins], second[begins]], axis=1).astype(np.int64)
    return np.asarray(np.unique(pairs, axis=0))


def _joined(n: int, links: list[Counts]) -> Counts:
    """Return the part to which each of `n` pieces belongs; piece 0, the background, is part 0."""
    pairs = np.concatenate([np.zeros((0, 2), np.int64), *links])
    graph = coo_array((np.ones(len(pairs), bool), (pairs[:, 0], pairs[:, 1])), shape=(n, n))
    part = connected_components(graph, directed=False)[1]
    return np.asarray(part, dtype=np.int64)


def _too_small(
    labels: Labels, table: Labels, parts: Parts, mine: Counts, rule: KeepLargest
) -> Counts:
    """Return those of a structure's parts that don't stay."""
    if len(mine) <= rule.parts:
        return mine[:0]
    size = parts.voxels[mine]
    least = np.sort(size)[-rule.parts]
    smaller, equal = mine[size < least], mine[size == least]
    surplus = len(mine) - len(smaller) - rule.parts
    if surplus:
        order = np.argsort(_first_voxels(labels, table, parts, equal, rule.connectivity))
        smaller = np.append(smaller, equal[order[:surplus]])
    return np.asarray(smaller, dtype=np.int64)


def _first_voxels(
    labels: Labels, table: Labels, parts: Parts, wanted: Counts, connectivity: Connectivity
) -> Counts:
    """Return the place in C order of the first voxel of each wanted part."""
    first = np.full(len(parts.voxels), np.iinfo(np.int64).max)
    asked = np.zeros(len(parts.voxels), bool)
    asked[wanted] = True
    for slab, part_of in zip(parts.slabs, parts.part_of, strict=True):
        if asked[part_of].any():
            pieces = _pieces(labels, slab, connectivity, table)[0][:, :, _lead(slab) :]
            i, j, k = np.nonzero(asked[part_of][pieces])
            place = np.ravel_multi_index((i, j, k + slab.start), labels.shape)
            np.minimum.at(first, part_of[pieces[i, j, k]], place)
    return first[wanted]


def _table(labels: Labels, rule: KeepLargest) -> Labels:
    """Return what each value is taken for: itself, 1 where joined, 0 where it isn't concerned."""
    size = int(np.iinfo(labels.dtype).max) + 1
    numbers = np.array(rule.numbers or range(1, size))
    numbers = numbers[numbers < size]
    table = np.zeros(size, labels.dtype)
    table[numbers] = 1 if rule.together else numbers
    return table
