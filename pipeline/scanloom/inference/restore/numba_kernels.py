"""Kernels that label source voxels from planes of scores on a CPU, compiled by Numba.

Linear interpolation mixes its neighbours with weights that add up to 1. So within a block of
network voxels a class can win only if its largest value there reaches the largest of all classes'
smallest values. Where one class is left the block is a fill; elsewhere only those that are left
are interpolated. The labels are those of the plain way but for exact ties, decided by rounding.

All functions release the GIL and are called from a thread pool of ours (`restore_cpu`): Numba's
own layers abort when two threads call a parallel function. Scores and labels are passed flat, with
their steps, so that one compiled function serves any strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

BLOCK = 4
"""Edge of a block in network voxels: larger ones leave more classes, smaller ones cost more."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile, without the GIL, into the cache folder that Numba was given.

    Floating point may ignore the sign of zero and fuse multiply-add: neither changes a comparison.
    """
    decorate = numba.njit(nogil=True, cache=True, fastmath={"nsz", "contract"})
    return cast(Callable[_P, _R], decorate(function))


def _generated(function: Callable[_P, Any]) -> Callable[[Any], Any]:
    """Make a function of code that is given to LLVM."""
    return cast(Callable[[Any], Any], intrinsic(function))


@_generated
def _value(_context: Any, stored: Any) -> Any:
    """Return a stored score as float32: float32 itself, half as uint16, bfloat16 as int16."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        bits = arguments[0]
        if stored == types.uint16:  # half: the processor's own conversion
            return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
        if stored == types.int16:  # bfloat16: the upper half of a float32
            wide = builder.zext(bits, ir.IntType(32))
            high = builder.shl(wide, ir.Constant(ir.IntType(32), 16))
            return builder.bitcast(high, ir.FloatType())
        return bits

    return types.float32(stored), generate


@_compiled
def _bounds(
    scores: Any, start: int, steps: Any, planes: int, rows: int, low: Any, high: Any, work: Any
) -> None:
    """Fill the smallest and the largest values of one class in each block of a row of blocks.

    `start` is where the row's first score stands; `planes` and `rows` are how many it has; `low`
    and `high` have an entry a block; `work` is (2, columns).
    """
    columns = work.shape[1]
    work[0, :] = np.inf
    work[1, :] = -np.inf
    for p in range(planes):
        for b in range(rows):
            here = start + p * steps[0] + b * steps[2]
            line = scores[here : here + columns]
            for d in range(columns):
                v = _value(line[d])
                work[0, d] = v if v < work[0, d] else work[0, d]
                work[1, d] = v if v > work[1, d] else work[1, d]
    for n in range(low.shape[0]):
        first, last = n * BLOCK, min(n * BLOCK + BLOCK, columns - 1)
        low[n], high[n] = work[0, first], work[1, first]
        for d in range(first + 1, last + 1):
            low[n] = min(low[n], work[0, d])
            high[n] = max(high[n], work[1, d])


@_compiled
def _survivors(low: Any, high: Any, n: int, alive: Any) -> int:
    """List the classes that can win in block `n`; return how many, at least 1."""
    bar = low[0, n]
    for c in range(1, low.shape[0]):
        bar = max(bar, low[c, n])
    count = 0
    for c in range(low.shape[0]):
        if not high[c, n] < bar:
            alive[count] = c
            count += 1
    if count == 0:  # no score is a number
        alive[0] = 0
        return 1
    return count


@_compiled
def _widen(
    scores: Any, below: Any, steps: Any, size: Any, index: Any, weight: Any, plane: Any, wide: Any
) -> None:
    """Interpolate one class between two planes, then along columns, for a block of one slice.

    `below` is (where the block's first score stands, the step to the plane above, its weight);
    `size` the block's (rows, columns); `index` and `weight` are those of its source columns, the
    index counted from its first; `plane` and `wide` are work space.
    """
    start, up, t = below
    for b in range(size[0]):
        here = start + b * steps[2]
        for d in range(size[1]):
            v = _value(scores[here + d])
            w = _value(scores[here + up + d])
            plane[b, d] = v + t * (w - v)
    for b in range(size[0]):
        for j in range(index.shape[0]):
            d = index[j]
            wide[b, j] = plane[b, d] + weight[j] * (plane[b, d + 1] - plane[b, d])


@_compiled
def _fill(out: Any, at: int, place: Any, size: Any, label: int) -> None:
    """Write one label to a block of a slice."""
    for i in range(size[0]):
        for j in range(size[1]):
            out[at + i * place[2] + j * place[3]] = label


@_compiled
def argmax_rows(
    scores: Any, shape: Any, steps: Any, taps: Any, out: Any, place: Any, part: Any
) -> None:
    """Label the source voxels of some rows of blocks by the first largest score.

    One function, since its work space is made once a call and shared by all blocks.

    Parameters
    ----------
    scores : (.) array
        Of the network's grid: float32, half as uint16 or bfloat16 as int16.
    shape : (P, C, B, D)
        Planes, classes, rows and columns of the scores.
    steps : (p, c, b)
        Entries from one plane, class and row to the next; columns stand side by side.
    taps : (along, rows, columns), each (index, weight, starts)
        For each source index along that axis, ascending: the network voxel below it, the weight
        of the one above, and for each block the first source index in it. Each has a line a slice
        where the stack leans, else one line.
    out : (.) uint8 or uint16 array
        Labels.
    place : (offset, s, j, i)
        Where the first label stands, and entries from one slice, row and column to the next.
    part : (first, last)
        Rows of blocks: from first to before last.
    """
    planes, classes, height, width = shape
    along, rows, columns = taps
    blocks = columns[2].shape[1] - 1
    low = np.empty((classes, blocks), np.float32)
    high = np.empty((classes, blocks), np.float32)
    work = np.empty((2, width), np.float32)
    alive = np.zeros(classes, np.int64)
    tall, broad = _longest(rows[2]), _longest(columns[2])
    plane = np.zeros((BLOCK + 1, BLOCK + 1), np.float32)
    wide = np.zeros((BLOCK + 1, broad), np.float32)
    best = np.zeros((tall, broad), np.float32)
    labels = np.zeros((tall, broad), np.int32)
    index = np.zeros(broad, np.int64)
    for n in range(along[2].shape[1] - 1):
        if along[2][0, n] == along[2][0, n + 1]:
            continue
        deep = min(BLOCK, planes - 1 - n * BLOCK) + 1
        for y in range(part[0], part[1]):
            b0 = y * BLOCK
            size_b = min(BLOCK, height - 1 - b0) + 1
            for c in range(classes):
                start = n * BLOCK * steps[0] + c * steps[1] + b0 * steps[2]
                _bounds(scores, start, steps, deep, size_b, low[c], high[c], work)
            for x in range(blocks):
                d0 = x * BLOCK
                size_d = min(BLOCK, width - 1 - d0) + 1
                count = _survivors(low, high, x, alive)
                for s in range(along[2][0, n], along[2][0, n + 1]):
                    k = s if rows[2].shape[0] > 1 else 0
                    m = s if columns[2].shape[0] > 1 else 0
                    i0, i1 = rows[2][k, y], rows[2][k, y + 1]
                    j0, j1 = columns[2][m, x], columns[2][m, x + 1]
                    if i0 == i1 or j0 == j1:
                        continue
                    at = place[0] + s * place[1] + i0 * place[2] + j0 * place[3]
                    if count == 1:
                        _fill(out, at, place, (i1 - i0, j1 - j0), alive[0])
                        continue
                    for j in range(j1 - j0):
                        index[j] = columns[0][m, j0 + j] - d0
                    p, t = along[0][0, s], along[1][0, s]
                    up = steps[0] if p + 1 < planes else 0
                    first = p * steps[0] + b0 * steps[2] + d0
                    for nth in range(count):
                        _widen(
                            scores,
                            (first + alive[nth] * steps[1], up, t),
                            steps,
                            (size_b, size_d),
                            index[: j1 - j0],
                            columns[1][m, j0:j1],
                            plane,
                            wide,
                        )
                        for i in range(i0, i1):
                            b, u = rows[0][k, i] - b0, rows[1][k, i]
                            for j in range(j1 - j0):
                                v = wide[b, j] + u * (wide[b + 1, j] - wide[b, j])
                                wins = nth == 0 or v > best[i - i0, j]
                                best[i - i0, j] = v if wins else best[i - i0, j]
                                labels[i - i0, j] = alive[nth] if wins else labels[i - i0, j]
                    for i in range(i1 - i0):
                        for j in range(j1 - j0):
                            out[at + i * place[2] + j * place[3]] = labels[i, j]


@_compiled
def threshold_rows(
    scores: Any, shape: Any, steps: Any, taps: Any, out: Any, place: Any, part: Any, rule: Any
) -> None:
    """Label the source voxels of some rows of blocks where one class reaches a value.

    Parameters are those of `argmax_rows`; labels that are not reached stay as they are. `rule` is
    (class, value): the label is the class + 1.
    """
    planes, _, height, width = shape
    along, rows, columns = taps
    c, value = rule
    blocks = columns[2].shape[1] - 1
    low, high = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    work = np.empty((2, width), np.float32)
    broad = _longest(columns[2])
    plane = np.zeros((BLOCK + 1, BLOCK + 1), np.float32)
    wide = np.zeros((BLOCK + 1, broad), np.float32)
    index = np.zeros(broad, np.int64)
    for n in range(along[2].shape[1] - 1):
        if along[2][0, n] == along[2][0, n + 1]:
            continue
        deep = min(BLOCK, planes - 1 - n * BLOCK) + 1
        for y in range(part[0], part[1]):
            b0 = y * BLOCK
            size_b = min(BLOCK, height - 1 - b0) + 1
            start = n * BLOCK * steps[0] + c * steps[1] + b0 * steps[2]
            _bounds(scores, start, steps, deep, size_b, low, high, work)
            for x in range(blocks):
                if high[x] < value:
                    continue
                d0 = x * BLOCK
                size_d = min(BLOCK, width - 1 - d0) + 1
                for s in range(along[2][0, n], along[2][0, n + 1]):
                    k = s if rows[2].shape[0] > 1 else 0
                    m = s if columns[2].shape[0] > 1 else 0
                    i0, i1 = rows[2][k, y], rows[2][k, y + 1]
                    j0, j1 = columns[2][m, x], columns[2][m, x + 1]
                    if i0 == i1 or j0 == j1:
                        continue
                    at = place[0] + s * place[1] + i0 * place[2] + j0 * place[3]
                    if low[x] >= value:
                        _fill(out, at, place, (i1 - i0, j1 - j0), c + 1)
                        continue
                    for j in range(j1 - j0):
                        index[j] = columns[0][m, j0 + j] - d0
                    p, t = along[0][0, s], along[1][0, s]
                    up = steps[0] if p + 1 < planes else 0
                    first = p * steps[0] + c * steps[1] + b0 * steps[2] + d0
                    _widen(
                        scores,
                        (first, up, t),
                        steps,
                        (size_b, size_d),
                        index[: j1 - j0],
                        columns[1][m, j0:j1],
                        plane,
                        wide,
                    )
                    for i in range(i0, i1):
                        b, u = rows[0][k, i] - b0, rows[1][k, i]
                        for j in range(j1 - j0):
                            if wide[b, j] + u * (wide[b + 1, j] - wide[b, j]) >= value:
                                out[at + (i - i0) * place[2] + j * place[3]] = c + 1


@_compiled
def _longest(starts: Any) -> int:
    """Return the most source indices that one block holds, at least 1."""
    most = 1
    for line in range(starts.shape[0]):
        for n in range(starts.shape[1] - 1):
            most = max(most, starts[line, n + 1] - starts[line, n])
    return most
