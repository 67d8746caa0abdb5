"""Kernels that label source voxels from planes of scores on a CPU, compiled by Numba.

Linear interpolation mixes neighbours with weights that add up to 1. So within a block of network
voxels, a class can win only if its maximum there reaches the largest of all classes' minima. If one
class remains, the block is filled with it; else only the remaining classes are interpolated. Labels
equal those of plain torch, except for exact ties, which rounding decides.

All functions release the GIL and are called from a thread pool of `restore.cpu`: Numba's own
threading layers abort if two threads call a parallel function. Scores and labels are passed as flat
arrays with their strides in elements, so that one compiled function supports any strides.

Where many classes remain in a block, as in noise, its scores are copied with all classes of a voxel
together, so that processors interpolate and compare many classes at once. No branch depends on the
scores there: in noise, wrongly predicted branches would take longer than the interpolation of
classes that cannot win.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

BLOCK = 4
"""Edge of a block in network voxels: larger blocks exclude fewer classes, smaller cost more."""
LANES = 16
"""Classes are padded to a multiple of it, which processors compare at once."""
EDGE = BLOCK + 1
CORNERS = EDGE * EDGE

Stored = NDArray[Any]
"""Scores as stored: float32, half as uint16, or bfloat16 as int16."""
Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
Axis = tuple[Indices, Floats, Indices]
"""Taps along an axis: index, weight, and first source index in each block."""
Int = int | np.int64

_P = ParamSpec("_P")
_R = TypeVar("_R")

_LANE_KINDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.HalfType(), LANES)
_FEW = 3
"""Classes that are interpolated one by one; more are interpolated and compared at once."""


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function that releases the GIL; compiled code is kept in Numba's cache folder.

    Floating point may ignore the sign of zero and fuse multiply-add: neither changes a comparison.
    """
    decorate = numba.njit(nogil=True, cache=True, fastmath={"nsz", "contract"})
    return cast(Callable[_P, _R], decorate(function))


def inner(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function as `compiled` does, that allocates no array.

    It does not count references to the arrays it is given: these atomic operations would take
    longer than all else. If Numba drops this option, `restore.cpu` uses plain torch.
    """
    decorate = numba.njit(nogil=True, cache=True, fastmath={"nsz", "contract"}, _nrt=False)
    return cast(Callable[_P, _R], decorate(function))


def _generated(function: Callable[_P, Any]) -> Callable[..., Any]:
    """Make a compiled function from a generator of LLVM code."""
    return cast(Callable[..., Any], intrinsic(function))


def as_float32(builder: Any, stored: Any, bits: Any) -> Any:
    """Generate code for a stored score as float32: half is stored as uint16, bfloat16 as int16."""
    if stored == types.uint16:  # half: converted by the processor
        return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
    if stored == types.int16:  # bfloat16: the upper half of a float32
        extended = builder.zext(bits, ir.IntType(32))
        high = builder.shl(extended, ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(high, ir.FloatType())
    return bits


@_generated
def to_float32(_context: Any, stored: Any) -> Any:
    """Convert a stored score to float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return as_float32(builder, stored, arguments[0])

    return types.float32(stored), generate


@_generated
def rounded(_context: Any, value: Any, half: Any) -> Any:
    """Round a float32 score to half precision if `half` is not None, which its type says."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if isinstance(half, types.NoneType):
            return arguments[0]
        return builder.fpext(builder.fptrunc(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(value, half), generate


@_generated
def _copy(_context: Any, scores: Any, at: Any, out: Any, target_index: Any) -> Any:
    """Copy a score as stored at index `at` to `target_index` in `out`, a float32 array.

    Both are contiguous. An index counts elements in memory and is not negative.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        source = context.make_array(kinds[0])(context, builder, arguments[0]).data
        address = context.make_array(kinds[2])(context, builder, arguments[2]).data
        value = builder.load(builder.gep(source, [arguments[1]]))
        value = as_float32(builder, scores.dtype, value)
        builder.store(value, builder.gep(address, [arguments[3]]))
        return context.get_dummy_value()

    return types.void(scores, types.intp, out, types.intp), generate


@inner
def gather(
    scores: Stored,
    base: int,
    steps: tuple[int, int, int],
    size: tuple[int, int, int],
    classes: Indices,
    out: Floats,
) -> None:
    """Copy the scores of some classes in a block to `out` (planes, corners, classes).

    `size` is the block's (planes, rows, columns). Voxels beyond it repeat the last one, classes
    beyond the last the last.
    """
    lanes = out.shape[2]
    whole = size[2] == EDGE
    for k in range(lanes):
        # Padding repeats the last class, which can't become the first with the largest score
        start, target = base + classes[min(k, classes.shape[0] - 1)] * steps[1], k
        for p in range(EDGE):
            for b in range(EDGE):
                row = start + min(p, size[0] - 1) * steps[0] + min(b, size[1] - 1) * steps[2]
                for d in range(EDGE):
                    at = row + (d if whole else min(d, size[2] - 1))
                    _copy(scores, at, out, target + d * lanes)
                target += EDGE * lanes


def _lane_pointer(context: Any, builder: Any, kind: Any, array: Any, first: Any) -> Any:
    """Generate code for a pointer to `LANES` elements of an array from index `first` on."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [first]), _LANE_KINDS[0].as_pointer())


def _repeated(builder: Any, value: Any) -> Any:
    """Generate code for a vector of one value."""
    vector = ir.Constant(_LANE_KINDS[0], ir.Undefined)
    for lane in range(LANES):
        vector = builder.insert_element(vector, value, ir.Constant(ir.IntType(32), lane))
    return vector


def _between(context: Any, builder: Any, kind: Any, arguments: Any) -> Any:
    """Generate code for `LANES` scores between those at two indices of a contiguous array.

    `arguments` begin with the array, both indices, and the weight of the second.
    """
    a, b = (
        builder.load(_lane_pointer(context, builder, kind, arguments[0], n), align=4)
        for n in arguments[1:3]
    )
    kind = _LANE_KINDS[0]
    # By an intrinsic, so that two calls give the same bits: fused or not, as suits the processor
    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fmuladd.v{LANES}f32"
    )
    return builder.call(multiply_add, [_repeated(builder, arguments[3]), builder.fsub(b, a), a])


def _rounded_between(context: Any, builder: Any, kinds: Any, arguments: Any) -> Any:
    """Generate code as `_between`, and for rounding if the last argument is not None."""
    value = _between(context, builder, kinds[0], arguments)
    if isinstance(kinds[-1], types.NoneType):
        return value
    return builder.fpext(builder.fptrunc(value, _LANE_KINDS[1]), _LANE_KINDS[0])


@_generated
def _interpolate_lanes(
    _context: Any, scores: Any, a: Any, b: Any, t: Any, out: Any, first: Any
) -> Any:
    """Interpolate `LANES` scores at indices `a` and `b`; write them to `out` from `first` on.

    Both arrays are contiguous float32. An index counts elements in memory and is not negative.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = _between(context, builder, signature.args[0], arguments)
        target = _lane_pointer(context, builder, signature.args[4], *arguments[4:6])
        builder.store(value, target, align=4)
        return context.get_dummy_value()

    return types.void(scores, types.intp, types.intp, types.float32, out, types.intp), generate


@_generated
def _largest(_context: Any, at_columns: Any, above: Any, below: Any, t: Any, half: Any) -> Any:
    """Return the largest of `LANES` scores of a voxel, as of `_rounded_between`; NaN is -inf."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = _rounded_between(context, builder, signature.args, arguments)
        lowest = _repeated(builder, ir.Constant(ir.FloatType(), float("-inf")))
        value = builder.select(builder.fcmp_ordered("ord", value, value), value, lowest)
        width = LANES
        while width > 1:  # by halves
            width //= 2
            kind = ir.VectorType(ir.IntType(32), width)
            low, high = (
                builder.shuffle_vector(
                    value, value, ir.Constant(kind, list(range(start, start + width)))
                )
                for start in (0, width)
            )
            value = builder.select(builder.fcmp_ordered(">", low, high), low, high)
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return types.float32(at_columns, types.intp, types.intp, types.float32, half), generate


@_generated
def _first_equal(
    _context: Any, at_columns: Any, above: Any, below: Any, t: Any, score: Any, half: Any
) -> Any:
    """Return which of `LANES` classes of a voxel is the first with this score; `LANES` if none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = _rounded_between(context, builder, signature.args, arguments)
        equal = builder.fcmp_ordered("==", value, _repeated(builder, arguments[4]))
        bits = builder.zext(builder.bitcast(equal, ir.IntType(LANES)), ir.IntType(64))
        bits = builder.or_(bits, ir.Constant(ir.IntType(64), 1 << LANES))
        return builder.cttz(bits, ir.Constant(ir.IntType(1), 1))

    sig = types.int64(at_columns, types.intp, types.intp, types.float32, types.float32, half)
    return sig, generate


@inner
def lerp(corners: Floats, below: Int, t: np.float32, out: Floats) -> None:
    """Interpolate between plane `below` of `gather` and the next one."""
    size = corners.shape[1] * corners.shape[2]
    first = below * size
    for n in range(0, size, LANES):
        _interpolate_lanes(corners, first + n, first + size + n, t, out, n)


@inner
def label_block(
    plane: Floats,
    classes: Indices,
    rows: tuple[Indices, Floats],
    columns: tuple[Indices, Floats],
    out: NDArray[Any],
    layout: tuple[Int, int, int],
    work: Floats,
    half: bool | None,
) -> None:
    """Label a block of a slice by the first largest score.

    `plane` has shape (corners, classes), interpolated between two planes; `classes` are the
    numbers of its first classes, the others repeat the last; `rows` and `columns` are (index in
    the block, weight) of the block's source rows and columns; `layout` is (first label, step of
    rows, step of columns) in `out`; `work` is an array of at least EDGE x columns x classes.
    """
    lanes, n_columns = plane.shape[1], columns[0].shape[0]
    line = n_columns * lanes
    # Columns first, once for all source rows between the same two network rows
    for b in range(rows[0][0], rows[0][-1] + 2):
        for j in range(n_columns):
            corner, start = (b * EDGE + columns[0][j]) * lanes, b * line + j * lanes
            for k in range(0, lanes, LANES):
                a = corner + k
                _interpolate_lanes(plane, a, a + lanes, columns[1][j], work, start + k)
    for i in range(rows[0].shape[0]):
        u, first = rows[1][i], rows[0][i] * line
        for j in range(n_columns):
            # Two passes without a branch on scores: first the largest, then the class that has it
            best = np.float32(-np.inf)
            for k in range(first, first + lanes, LANES):
                best = max(best, _largest(work, k, k + line, u, half))
            label, k = 0, 0
            while k < lanes:
                n = _first_equal(work, first + k, first + k + line, u, best, half)
                if n < LANES:
                    label = k + n
                    break
                k += LANES
            out[layout[0] + i * layout[1] + j * layout[2]] = classes[label]
            first += lanes


@inner
def _bounds(
    scores: Stored,
    start: int,
    steps: tuple[int, int, int],
    planes: int,
    rows: int,
    low: Floats,
    high: Floats,
    work: Floats,
) -> None:
    """Write the minimum and the maximum of one class in each block of a row of blocks.

    `start` is the index of the row's first score; `planes` and `rows` are the size of a block;
    `low` and `high` have one element per block; `work` is a (2, columns) work array.
    """
    columns = work.shape[1]
    # Column by column, so that processors compare many columns at once; then block by block
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
        # With the first column of the next block, which the last source voxels here read too
        first, last = n * BLOCK, min(n * BLOCK + BLOCK, columns - 1)
        low[n], high[n] = work[0, first], work[1, first]
        for d in range(first + 1, last + 1):
            low[n] = min(low[n], work[0, d])
            high[n] = max(high[n], work[1, d])


@inner
def _find_remaining(low: Floats, high: Floats, n: int, remaining: Indices) -> int:
    """Write to `remaining` which classes can win in block `n`; return their number, at least 1."""
    largest_minimum = low[0, n]
    for c in range(1, low.shape[0]):
        largest_minimum = max(largest_minimum, low[c, n])
    count = 0
    for c in range(low.shape[0]):
        # Not `>=`: of a class with NaN only nothing is known, so it stays
        if not high[c, n] < largest_minimum:
            remaining[count] = c
            count += 1
    if count == 0:  # some class has only NaN there
        remaining[0] = 0
        return 1
    return count


@inner
def _interpolate(
    scores: Stored,
    base: tuple[Int, int, np.float32],
    steps: tuple[int, int, int],
    size: tuple[int, int],
    index: Indices,
    weight: Floats,
    plane: Floats,
    at_columns: Floats,
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
def _fill(
    out: NDArray[Any],
    offset: Int,
    layout: tuple[int, int, int, int],
    size: tuple[Int, Int],
    label: Int,
) -> None:
    """Fill a block of a slice with one label."""
    for i in range(size[0]):
        for j in range(size[1]):
            out[offset + i * layout[2] + j * layout[3]] = label


@compiled
def label_rows(
    scores: Stored,
    shape: tuple[int, int, int, int],
    steps: tuple[int, int, int],
    taps: tuple[Axis, Axis, Axis],
    out: NDArray[Any],
    layout: tuple[int, int, int, int],
    row_range: tuple[int, int],
    rule: tuple[int, np.float32, int] | None,
    half: bool | None,
) -> None:
    """Label the source voxels of a range of rows of blocks.

    A single function, so that work arrays are allocated once per call and shared by all blocks.
    Numba compiles it for each type of `rule` and `half`, and drops the branches of the others.

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
    rule : (class, threshold, label) or None
        The label is written where the class reaches the threshold, and others are not changed. None
        writes the class with the first largest score.
    half : True or None
        True rounds interpolated scores to half precision. Bounds of blocks need no rounding, since
        scores are half precision then.
    """
    planes, classes, height, width = shape
    along, rows, columns = taps
    first_class = 0
    if rule is not None:  # only one class is read
        first_class, classes = rule[0], 1
    blocks = columns[2].shape[1] - 1
    low = np.empty((classes, blocks), np.float32)
    high = np.empty((classes, blocks), np.float32)
    work = np.empty((2, width), np.float32)
    remaining = np.full(classes, first_class, np.int64)
    max_rows, max_columns = _max_per_block(rows[2]), _max_per_block(columns[2])
    plane = np.zeros((EDGE, EDGE), np.float32)
    at_columns = np.zeros((EDGE, max_columns), np.float32)
    best = np.zeros((max_rows, max_columns), np.float32)
    labels = np.zeros((max_rows, max_columns), np.int32)
    index = np.zeros(max_columns, np.int64)
    row_index = np.zeros(max_rows, np.int64)
    lanes = -(-classes // LANES) * LANES
    gathered = np.empty(EDGE * CORNERS * lanes, np.float32)
    between = np.empty(CORNERS * lanes, np.float32)
    block_columns = np.empty(EDGE * max_columns * lanes, np.float32)
    # Slices are innermost: the bounds of a block, the costly part, serve all slices that read it
    for n in range(along[2].shape[1] - 1):
        if along[2][0, n] == along[2][0, n + 1]:
            continue  # no slice lies here
        # One voxel more than a block: a source voxel at its end reads the next block's first one
        n_planes = min(BLOCK, planes - 1 - n * BLOCK) + 1
        for y in range(row_range[0], row_range[1]):
            b0 = y * BLOCK
            n_rows = min(BLOCK, height - 1 - b0) + 1
            for c in range(classes):
                start = n * BLOCK * steps[0] + (first_class + c) * steps[1] + b0 * steps[2]
                _bounds(scores, start, steps, n_planes, n_rows, low[c], high[c], work)
            for x in range(blocks):
                d0 = x * BLOCK
                n_columns = min(BLOCK, width - 1 - d0) + 1
                # A convex mean stays within its bounds, so many blocks need no interpolation
                if rule is None:
                    count = _find_remaining(low, high, x, remaining)
                    decided, label = count == 1, remaining[0]
                elif high[0, x] < rule[1]:
                    continue  # the class is nowhere in the block: labels stay
                else:
                    count, decided, label = 1, low[0, x] >= rule[1], rule[2]
                if rule is None and count > _FEW:  # copied once, for all slices of the block
                    padded = -(-count // LANES) * LANES
                    corners = gathered[: EDGE * CORNERS * padded].reshape(EDGE, CORNERS, padded)
                    in_slice = between[: CORNERS * padded].reshape(CORNERS, padded)
                    start = n * BLOCK * steps[0] + b0 * steps[2] + d0
                    block = (n_planes, n_rows, n_columns)
                    gather(scores, start, steps, block, remaining[:count], corners)
                for s in range(along[2][0, n], along[2][0, n + 1]):
                    # Only in a sheared stack have slices weights of their own
                    row_line = s if rows[2].shape[0] > 1 else 0
                    column_line = s if columns[2].shape[0] > 1 else 0
                    i0, i1 = rows[2][row_line, y], rows[2][row_line, y + 1]
                    j0, j1 = columns[2][column_line, x], columns[2][column_line, x + 1]
                    if i0 == i1 or j0 == j1:
                        continue
                    offset = layout[0] + s * layout[1] + i0 * layout[2] + j0 * layout[3]
                    if decided:
                        _fill(out, offset, layout, (i1 - i0, j1 - j0), label)
                        continue
                    for j in range(j1 - j0):
                        index[j] = columns[0][column_line, j0 + j] - d0
                    p, t = along[0][0, s], along[1][0, s]
                    if rule is None and count > _FEW:
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
                    to_above = steps[0] if p + 1 < planes else 0  # the last plane continues
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
                                if rule is None:
                                    # Classes ascend, so that the first of equal scores stays
                                    larger = k == 0 or v > best[i - i0, j]
                                    best[i - i0, j] = v if larger else best[i - i0, j]
                                    labels[i - i0, j] = (
                                        remaining[k] if larger else labels[i - i0, j]
                                    )
                                elif v >= rule[1]:
                                    out[offset + (i - i0) * layout[2] + j * layout[3]] = rule[2]
                    if rule is None:
                        for i in range(i1 - i0):
                            for j in range(j1 - j0):
                                out[offset + i * layout[2] + j * layout[3]] = labels[i, j]


@compiled
def _max_per_block(starts: Indices) -> int:
    """Return the maximum number of source indices in a block, at least 1."""
    largest = 1
    for line in range(starts.shape[0]):
        for n in range(starts.shape[1] - 1):
            largest = max(largest, starts[line, n + 1] - starts[line, n])
    return largest
