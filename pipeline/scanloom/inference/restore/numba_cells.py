"""Labels a block of a slice where many classes remain, as in noise, compiled by Numba.

Scores of the block are copied with all classes of a voxel together, so that processors interpolate
and compare many classes at once. Few can win in each cell between four network voxels of a slice.
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
"""Edge of a block in network voxels: larger blocks exclude fewer classes, smaller cost more."""
LANES = 16
"""Classes are padded to a multiple of it, which processors compare at once."""
EDGE = BLOCK + 1
CORNERS = EDGE * EDGE

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function that releases the GIL; compiled code is kept in Numba's cache folder.

    Floating point may ignore the sign of zero and fuse multiply-add: neither changes a comparison.
    """
    decorate = numba.njit(nogil=True, cache=True, fastmath={"nsz", "contract"})
    return cast(Callable[_P, _R], decorate(function))


def _generated(function: Callable[_P, Any]) -> Callable[..., Any]:
    """Make a compiled function from a generator of LLVM code."""
    return cast(Callable[..., Any], intrinsic(function))


@_generated
def to_float32(_context: Any, stored: Any) -> Any:
    """Convert a stored score to float32: half is stored as uint16, bfloat16 as int16."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        bits = arguments[0]
        if stored == types.uint16:  # half: converted by the processor
            return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
        if stored == types.int16:  # bfloat16: the upper half of a float32
            extended = builder.zext(bits, ir.IntType(32))
            high = builder.shl(extended, ir.Constant(ir.IntType(32), 16))
            return builder.bitcast(high, ir.FloatType())
        return bits

    return types.float32(stored), generate


@_generated
def rounded(_context: Any, value: Any, half: Any) -> Any:
    """Round a float32 score to half precision if `half` is not None, which its type says."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if isinstance(half, types.NoneType):
            return arguments[0]
        return builder.fpext(builder.fptrunc(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(value, half), generate


@compiled
def gather(scores: Any, base: int, steps: Any, size: Any, classes: Any, out: Any) -> None:
    """Copy the scores of some classes in a block to `out` (planes, corners, classes).

    `size` is the block's (planes, rows, columns). Voxels beyond it repeat the last one.
    """
    for k in range(out.shape[2]):
        start = base + classes[min(k, classes.shape[0] - 1)] * steps[1]
        for p in range(EDGE):
            for b in range(EDGE):
                row = start + min(p, size[0] - 1) * steps[0] + min(b, size[1] - 1) * steps[2]
                for d in range(EDGE):
                    v = to_float32(scores[row + min(d, size[2] - 1)])
                    out[p, b * EDGE + d, k] = v


@compiled
def lerp(below: Any, above: Any, t: Any, out: Any) -> None:
    """Interpolate between two planes of `gather`."""
    a, b = below.ravel(), above.ravel()
    for n in range(a.shape[0]):
        out[n] = a[n] + t * (b[n] - a[n])


@compiled
def _find_in_cell(plane: Any, corner: int, count: int, bounds: Any, found: Any, half: Any) -> int:
    """Write to `found` which of the first `count` classes can win in a cell; return their number.

    `plane` has shape (corners, classes), interpolated between two planes; `corner` is the cell's
    first; `bounds` is a (2, classes) work array.
    """
    for k in range(plane.shape[1]):
        a, b = plane[corner, k], plane[corner + 1, k]
        c, d = plane[corner + EDGE, k], plane[corner + EDGE + 1, k]
        low, high = a if a < b else b, a if a > b else b
        below, above = c if c < d else d, c if c > d else d
        bounds[0, k] = low if low < below else below
        bounds[1, k] = high if high > above else above
    largest_minimum = bounds[0, 0]
    for k in range(1, count):
        largest_minimum = max(largest_minimum, bounds[0, k])
    largest_minimum = rounded(largest_minimum, half)
    n = 0
    for k in range(count):
        found[n] = k
        n += 0 if rounded(bounds[1, k], half) < largest_minimum else 1
    return n


@compiled
def label_cells(
    plane: Any, classes: Any, rows: Any, columns: Any, out: Any, place: Any, work: Any, half: Any
) -> None:
    """Label a block of a slice, cell by cell.

    `plane` is as of `_find_in_cell`; `classes` are the numbers of its first classes; `rows` and
    `columns` are (index in the block, weight) of the block's source rows and columns; `place` is
    (first label, step of rows, step of columns) in `out`; `work` is (bounds, found).
    """
    bounds, found = work
    i = 0
    while i < rows[0].shape[0]:
        i_end = i + 1
        while i_end < rows[0].shape[0] and rows[0][i_end] == rows[0][i]:
            i_end += 1
        j = 0
        while j < columns[0].shape[0]:
            j_end = j + 1
            while j_end < columns[0].shape[0] and columns[0][j_end] == columns[0][j]:
                j_end += 1
            corner = rows[0][i] * EDGE + columns[0][j]
            n = _find_in_cell(plane, corner, classes.shape[0], bounds, found, half)
            for y in range(i, i_end):
                for x in range(j, j_end):
                    label, best = found[0], np.float32(-np.inf)
                    for q in range(n if n > 1 else 0):
                        k = found[q]
                        a, b = plane[corner, k], plane[corner + 1, k]
                        c, d = plane[corner + EDGE, k], plane[corner + EDGE + 1, k]
                        a += columns[1][x] * (b - a)
                        c += columns[1][x] * (d - c)
                        v = rounded(a + rows[1][y] * (c - a), half)
                        label, best = (k, v) if v > best else (label, best)
                    out[place[0] + y * place[1] + x * place[2]] = classes[label]
            j = j_end
        i = i_end
