"""Kernels that label source voxels from planes of scores on a CPU, compiled by Numba.

Linear interpolation mixes neighbours with weights that add up to 1. So within a block of network
voxels, a class can win only if its maximum there reaches the largest of all classes' minima. If one
class remains, the block is filled with it; else only the remaining classes are interpolated. Labels
equal those of plain torch, except for exact ties, which rounding decides.

All functions release the GIL and are called from a thread pool of `restore.cpu`: Numba's own
threading layers abort if two threads call a parallel function. Scores and labels are passed as flat
arrays with their strides in elements, so that one compiled function supports any strides.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from scanloom.inference.restore.numba_blocks import (
    BLOCK,
    CORNERS,
    EDGE,
    LANES,
    compiled,
    gather,
    inner,
    label_block,
    lerp,
    rounded,
    to_float32,
)

_FEW = 3
"""Classes that are interpolated one by one; more are interpolated and compared at once."""


@inner
def _bounds(
    scores: Any, start: int, steps: Any, planes: int, rows: int, low: Any, high: Any, work: Any
) -> None:
    """Write the minimum and the maximum of one class in each block of a row of blocks.

    `start` is the index of the row's first score; `planes` and `rows` are the size of a block;
    `low` and `high` have one element per block; `work` is a (2, columns) work array.
    """
    columns = work.shape[1]
    work[0, :] = np.inf
    work[1, :] = -np.inf
    for p in range(planes):
        for b in range(rows):
            offset = start + p * steps[0] + b * steps[2]
            row = scores[offset : offset + columns]
            for d in range(columns):
                v = to_float32(row[d])
                work[0, d] = v if v < work[0, d] else work[0, d]
                work[1, d] = v if v > work[1, d] else work[1, d]
    for n in range(low.shape[0]):
        first, last = n * BLOCK, min(n * BLOCK + BLOCK, columns - 1)
        low[n], high[n] = work[0, first], work[1, first]
        for d in range(first + 1, last + 1):
            low[n] = min(low[n], work[0, d])
            high[n] = max(high[n], work[1, d])


@inner
def _find_remaining(low: Any, high: Any, n: int, remaining: Any) -> int:
    """Write to `remaining` which classes can win in block `n`; return their number, at least 1."""
    largest_minimum = low[0, n]
    for c in range(1, low.shape[0]):
        largest_minimum = max(largest_minimum, low[c, n])
    count = 0
    for c in range(low.shape[0]):
        if not high[c, n] < largest_minimum:
            remaining[count] = c
            count += 1
    if count == 0:  # some class has only NaN there
        remaining[0] = 0
        return 1
    return count


@inner
def _interpolate(
    scores: Any,
    base: Any,
    steps: Any,
    size: Any,
    index: Any,
    weight: Any,
    plane: Any,
    at_columns: Any,
) -> None:
    """Interpolate one class between two planes, then along columns, for a block of one slice.

    `base` is (index of the block's first score, step to the plane above, weight of that plane);
    `size` is the block's (rows, columns). `index` and `weight` belong to the block's source
    columns; `index` is relative to the block. `plane` is a work array; results go to `at_columns`.
    """
    start, to_above, t = base
    for b in range(size[0]):
        offset = start + b * steps[2]
        for d in range(size[1]):
            v = to_float32(scores[offset + d])
            w = to_float32(scores[offset + to_above + d])
            plane[b, d] = v + t * (w - v)
    for b in range(size[0]):
        for j in range(index.shape[0]):
            d = index[j]
            at_columns[b, j] = plane[b, d] + weight[j] * (plane[b, d + 1] - plane[b, d])


@inner
def _fill(out: Any, offset: int, layout: Any, size: Any, label: int) -> None:
    """Fill a block of a slice with one label."""
    for i in range(size[0]):
        for j in range(size[1]):
            out[offset + i * layout[2] + j * layout[3]] = label


@compiled
def argmax_rows(
    scores: Any,
    shape: Any,
    steps: Any,
    taps: Any,
    out: Any,
    layout: Any,
    row_range: Any,
    half: Any = None,
) -> None:
    """Label the source voxels of a range of rows of blocks by the first largest score.

    A single function, so that work arrays are allocated once per call and shared by all blocks.

    Parameters
    ----------
    scores : (.) array
        Scores on the network's grid: float32, half as uint16 or bfloat16 as int16.
    shape : (P, C, B, D)
        Planes, classes, rows and columns of the scores.
    steps : (p, c, b)
        Strides of planes, classes and rows, in elements; columns are contiguous.
    taps : (along, rows, columns), each (index, weight, starts)
        For each source index along the axis, ascending: the network voxel below and the weight of
        the voxel above; `starts` is the first source index in each block. Shapes are (L, N), (L, N)
        and (L, blocks + 1), with one line, or one per slice of a sheared stack.
    out : (.) uint8 or uint16 array
        Output labels.
    layout : (offset, s, j, i)
        Index of the first label, and strides of slices, rows and columns, in elements.
    row_range : (first, last)
        Range of rows of blocks, without `last`.
    half : True or None
        True rounds interpolated scores to half precision. Bounds of blocks need no rounding, since
        scores are half precision then.
    """
    planes, classes, height, width = shape
    along, rows, columns = taps
    blocks = columns[2].shape[1] - 1
    low = np.empty((classes, blocks), np.float32)
    high = np.empty((classes, blocks), np.float32)
    work = np.empty((2, width), np.float32)
    remaining = np.zeros(classes, np.int64)
    max_rows, max_columns = _max_per_block(rows[2]), _max_per_block(columns[2])
    plane = np.zeros((BLOCK + 1, BLOCK + 1), np.float32)
    at_columns = np.zeros((BLOCK + 1, max_columns), np.float32)
    best = np.zeros((max_rows, max_columns), np.float32)
    labels = np.zeros((max_rows, max_columns), np.int32)
    index = np.zeros(max_columns, np.int64)
    row_index = np.zeros(max_rows, np.int64)
    lanes = -(-classes // LANES) * LANES
    gathered = np.empty(EDGE * CORNERS * lanes, np.float32)
    between = np.empty(CORNERS * lanes, np.float32)
    block_columns = np.empty(EDGE * max_columns * lanes, np.float32)
    for n in range(along[2].shape[1] - 1):
        if along[2][0, n] == along[2][0, n + 1]:
            continue
        n_planes = min(BLOCK, planes - 1 - n * BLOCK) + 1
        for y in range(row_range[0], row_range[1]):
            b0 = y * BLOCK
            n_rows = min(BLOCK, height - 1 - b0) + 1
            for c in range(classes):
                start = n * BLOCK * steps[0] + c * steps[1] + b0 * steps[2]
                _bounds(scores, start, steps, n_planes, n_rows, low[c], high[c], work)
            for x in range(blocks):
                d0 = x * BLOCK
                n_columns = min(BLOCK, width - 1 - d0) + 1
                count = _find_remaining(low, high, x, remaining)
                padded = -(-count // LANES) * LANES
                corners = gathered[: EDGE * CORNERS * padded].reshape(EDGE, CORNERS, padded)
                in_slice = between[: CORNERS * padded].reshape(CORNERS, padded)
                if count > _FEW:
                    start = n * BLOCK * steps[0] + b0 * steps[2] + d0
                    block = (n_planes, n_rows, n_columns)
                    gather(scores, start, steps, block, remaining[:count], corners)
                for s in range(along[2][0, n], along[2][0, n + 1]):
                    row_line = s if rows[2].shape[0] > 1 else 0
                    column_line = s if columns[2].shape[0] > 1 else 0
                    i0, i1 = rows[2][row_line, y], rows[2][row_line, y + 1]
                    j0, j1 = columns[2][column_line, x], columns[2][column_line, x + 1]
                    if i0 == i1 or j0 == j1:
                        continue
                    offset = layout[0] + s * layout[1] + i0 * layout[2] + j0 * layout[3]
                    if count == 1:
                        _fill(out, offset, layout, (i1 - i0, j1 - j0), remaining[0])
                        continue
                    for j in range(j1 - j0):
                        index[j] = columns[0][column_line, j0 + j] - d0
                    p, t = along[0][0, s], along[1][0, s]
                    if count > _FEW:
                        lerp(corners, p - n * BLOCK, t, in_slice)
                        for i in range(i1 - i0):
                            row_index[i] = rows[0][row_line, i0 + i] - b0
                        label_block(
                            in_slice,
                            remaining[:count],
                            (row_index[: i1 - i0], rows[1][row_line, i0:i1]),
                            (index[: j1 - j0], columns[1][column_line, j0:j1]),
                            out,
                            (offset, layout[2], layout[3]),
                            block_columns,
                            half,
                        )
                        continue
                    to_above = steps[0] if p + 1 < planes else 0
                    base = p * steps[0] + b0 * steps[2] + d0
                    for k in range(count):
                        _interpolate(
                            scores,
                            (base + remaining[k] * steps[1], to_above, t),
                            steps,
                            (n_rows, n_columns),
                            index[: j1 - j0],
                            columns[1][column_line, j0:j1],
                            plane,
                            at_columns,
                        )
                        for i in range(i0, i1):
                            b, u = rows[0][row_line, i] - b0, rows[1][row_line, i]
                            for j in range(j1 - j0):
                                v = at_columns[b, j] + u * (at_columns[b + 1, j] - at_columns[b, j])
                                v = rounded(v, half)
                                larger = k == 0 or v > best[i - i0, j]
                                best[i - i0, j] = v if larger else best[i - i0, j]
                                labels[i - i0, j] = remaining[k] if larger else labels[i - i0, j]
                    for i in range(i1 - i0):
                        for j in range(j1 - j0):
                            out[offset + i * layout[2] + j * layout[3]] = labels[i, j]


@compiled
def threshold_rows(
    scores: Any,
    shape: Any,
    steps: Any,
    taps: Any,
    out: Any,
    layout: Any,
    row_range: Any,
    rule: Any,
    half: Any = None,
) -> None:
    """Label the source voxels of a range of rows of blocks where one class reaches a threshold.

    Parameters are those of `argmax_rows`. `rule` is (class, threshold, label). Other labels are not
    changed.
    """
    planes, _, height, width = shape
    along, rows, columns = taps
    c, value, label = rule
    blocks = columns[2].shape[1] - 1
    low, high = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    work = np.empty((2, width), np.float32)
    max_columns = _max_per_block(columns[2])
    plane = np.zeros((BLOCK + 1, BLOCK + 1), np.float32)
    at_columns = np.zeros((BLOCK + 1, max_columns), np.float32)
    index = np.zeros(max_columns, np.int64)
    for n in range(along[2].shape[1] - 1):
        if along[2][0, n] == along[2][0, n + 1]:
            continue
        n_planes = min(BLOCK, planes - 1 - n * BLOCK) + 1
        for y in range(row_range[0], row_range[1]):
            b0 = y * BLOCK
            n_rows = min(BLOCK, height - 1 - b0) + 1
            start = n * BLOCK * steps[0] + c * steps[1] + b0 * steps[2]
            _bounds(scores, start, steps, n_planes, n_rows, low, high, work)
            for x in range(blocks):
                if high[x] < value:
                    continue
                d0 = x * BLOCK
                n_columns = min(BLOCK, width - 1 - d0) + 1
                for s in range(along[2][0, n], along[2][0, n + 1]):
                    row_line = s if rows[2].shape[0] > 1 else 0
                    column_line = s if columns[2].shape[0] > 1 else 0
                    i0, i1 = rows[2][row_line, y], rows[2][row_line, y + 1]
                    j0, j1 = columns[2][column_line, x], columns[2][column_line, x + 1]
                    if i0 == i1 or j0 == j1:
                        continue
                    offset = layout[0] + s * layout[1] + i0 * layout[2] + j0 * layout[3]
                    if low[x] >= value:
                        _fill(out, offset, layout, (i1 - i0, j1 - j0), label)
                        continue
                    for j in range(j1 - j0):
                        index[j] = columns[0][column_line, j0 + j] - d0
                    p, t = along[0][0, s], along[1][0, s]
                    to_above = steps[0] if p + 1 < planes else 0
                    base = p * steps[0] + c * steps[1] + b0 * steps[2] + d0
                    _interpolate(
                        scores,
                        (base, to_above, t),
                        steps,
                        (n_rows, n_columns),
                        index[: j1 - j0],
                        columns[1][column_line, j0:j1],
                        plane,
                        at_columns,
                    )
                    for i in range(i0, i1):
                        b, u = rows[0][row_line, i] - b0, rows[1][row_line, i]
                        for j in range(j1 - j0):
                            v = at_columns[b, j] + u * (at_columns[b + 1, j] - at_columns[b, j])
                            if rounded(v, half) >= value:
                                out[offset + (i - i0) * layout[2] + j * layout[3]] = label


@compiled
def _max_per_block(starts: Any) -> int:
    """Return the maximum number of source indices in a block, at least 1."""
    largest = 1
    for line in range(starts.shape[0]):
        for n in range(starts.shape[1] - 1):
            largest = max(largest, starts[line, n + 1] - starts[line, n])
    return largest
