"""Labels a block of a slice where many classes remain, as in noise, compiled by Numba.

Scores of the block are copied with all classes of a voxel together, so that processors interpolate
and compare many classes at once. No branch depends on the scores: in noise, wrongly predicted
branches would take longer than the interpolation of classes that cannot win.
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
def _copy(_context: Any, scores: Any, at: Any, out: Any, place: Any) -> Any:
    """Copy a score as stored at index `at` to `place` in `out`, a float32 array.

    Both are contiguous. An index counts elements in memory and is not negative.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        source = context.make_array(kinds[0])(context, builder, arguments[0]).data
        target = context.make_array(kinds[2])(context, builder, arguments[2]).data
        value = builder.load(builder.gep(source, [arguments[1]]))
        value = as_float32(builder, scores.dtype, value)
        builder.store(value, builder.gep(target, [arguments[3]]))
        return context.get_dummy_value()

    return types.void(scores, types.intp, out, types.intp), generate


@inner
def gather(scores: Any, base: int, steps: Any, size: Any, classes: Any, out: Any) -> None:
    """Copy the scores of some classes in a block to `out` (planes, corners, classes).

    `size` is the block's (planes, rows, columns). Voxels beyond it repeat the last one, classes
    beyond the last the last.
    """
    lanes = out.shape[2]
    whole = size[2] == EDGE
    for k in range(lanes):
        start, place = base + classes[min(k, classes.shape[0] - 1)] * steps[1], k
        for p in range(EDGE):
            for b in range(EDGE):
                row = start + min(p, size[0] - 1) * steps[0] + min(b, size[1] - 1) * steps[2]
                for d in range(EDGE):
                    at = row + (d if whole else min(d, size[2] - 1))
                    _copy(scores, at, out, place + d * lanes)
                place += EDGE * lanes


_LANE_KINDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.HalfType(), LANES)


def _place(context: Any, builder: Any, kind: Any, array: Any, first: Any) -> Any:
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
        builder.load(_place(context, builder, kind, arguments[0], n), align=4)
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
def _interpolate(_context: Any, scores: Any, a: Any, b: Any, t: Any, out: Any, place: Any) -> Any:
    """Interpolate `LANES` scores at indices `a` and `b`; write them to `out` from `place` on.

    Both arrays are contiguous float32. An index counts elements in memory and is not negative.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = _between(context, builder, signature.args[0], arguments)
        target = _place(context, builder, signature.args[4], *arguments[4:6])
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
def lerp(corners: Any, below: int, t: Any, out: Any) -> None:
    """Interpolate between plane `below` of `gather` and the next one."""
    size = corners.shape[1] * corners.shape[2]
    first = below * size
    for n in range(0, size, LANES):
        _interpolate(corners, first + n, first + size + n, t, out, n)


@inner
def label_block(
    plane: Any, classes: Any, rows: Any, columns: Any, out: Any, place: Any, work: Any, half: Any
) -> None:
    """Label a block of a slice by the first largest score.

    `plane` has shape (corners, classes), interpolated between two planes; `classes` are the
    numbers of its first classes, the others repeat the last; `rows` and `columns` are (index in
    the block, weight) of the block's source rows and columns; `place` is (first label, step of
    rows, step of columns) in `out`; `work` is an array of at least EDGE x columns x classes.
    """
    lanes, n_columns = plane.shape[1], columns[0].shape[0]
    line = n_columns * lanes
    for b in range(rows[0][0], rows[0][-1] + 2):
        for j in range(n_columns):
            corner, start = (b * EDGE + columns[0][j]) * lanes, b * line + j * lanes
            for k in range(0, lanes, LANES):
                a = corner + k
                _interpolate(plane, a, a + lanes, columns[1][j], work, start + k)
    for i in range(rows[0].shape[0]):
        u, first = rows[1][i], rows[0][i] * line
        for j in range(n_columns):
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
            out[place[0] + i * place[1] + j * place[2]] = classes[label]
            first += lanes
