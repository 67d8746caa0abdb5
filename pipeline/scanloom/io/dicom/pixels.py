"""The values of a stack: every slice decoded and rescaled straight into its place."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError, byte_words
from scanloom.io.dicom.codecs import read_plane, tables_of
from scanloom.io.dicom.encapsulated import SLACK, Frames
from scanloom.io.dicom.headers import Header
from scanloom.io.dicom.planes import Plane, as_words, frame_of, from_words, plane_of, stored_dtype
from scanloom.io.dicom.slices import Slice
from scanloom.io.dicom.sources import inflated_size
from scanloom.io.limits import VOXEL_LIMIT
from scanloom.io.sandbox import Limits, progress, run_limited, shared_empty

MOST_THREADS = 8
"""More gain nothing: the disk or the memory is the limit."""
SCRATCH = 24
"""Bytes that decoders take for a sample: OpenJPEG has it twice as int32, and its codes."""
SPARE = 384 << 20
"""Bytes that a series may take beside its values, or above its limit, while it is decoded."""
PER_THREAD = 24 << 20
"""Bytes for the stack of a thread and what its decoder takes whatever the size."""
PATIENCE = 20.0
"""Seconds that a small slice may take; most need 0.03 s."""
SLOWEST = 1 << 20
"""Bytes of samples a second below which a decoder counts as stuck; they do 15 MB at least."""

LARGEST_RESCALE = 1e15
"""Slopes and intercepts beyond it are damage, and would overflow int64 and float32."""
SMALLEST_SLOPE = 1e-30
"""The same of float32 on its other side."""


class _DoesNotFitError(Exception):
    """A value is too large for the type that was tried."""


def read_values(slices: Sequence[Slice | None], limit: int = VOXEL_LIMIT) -> NDArray[Any]:
    """Read all slices as slope * stored + intercept.

    What is compressed is decoded in a child process.

    Parameters
    ----------
    slices : sequence of Slice or None
        All of one size. None where there is no slice: its values stay 0.
    limit : int
        Bytes that the values may take.

    Returns
    -------
    (columns, rows, slices) array, the first axis fastest in memory
        int16 or else int32 where all slopes and intercepts are whole numbers and the values fit;
        float32 otherwise.

    Raises
    ------
    ScanError
        RESCALE, PIXEL_TYPE, TOO_LARGE, TRUNCATED, DAMAGED, DECODE_TIMEOUT, DECODER, UNREADABLE or
        OUT_OF_MEMORY.
    """
    check_values([s for s in slices if s])
    planes = [plane_of(s) if s else None for s in slices]
    check_size([p for p in planes if p], limit, len(planes))
    whole = all(p.slope.is_integer() and p.intercept.is_integer() for p in planes if p)
    kinds: tuple[type, ...] = (np.int16, np.int32, np.float32) if whole else (np.float32,)
    for kind in kinds:
        values = _read_as(kind, planes, limit)
        if values is not None:
            return values.T
    raise AssertionError("every value fits float32")


def check_values(slices: Sequence[Slice]) -> None:
    """Refuse values that can't be, or that this reader can't give, by the headers alone.

    Raises
    ------
    ScanError
        RESCALE, PIXEL_TYPE or DAMAGED.
    """
    if any(one.header.lookup_table for one in slices):
        raise ScanError(Reason.RESCALE, "its values need a lookup table")
    for slope, intercept in {(one.slope, one.intercept) for one in slices}:
        if not (math.isfinite(slope) and math.isfinite(intercept)) or slope == 0:
            detail = "a rescale slope or intercept is missing, no number, or a slope of 0"
            raise ScanError(Reason.RESCALE, detail)
        if max(abs(slope), abs(intercept)) > LARGEST_RESCALE or abs(slope) < SMALLEST_SLOPE:
            raise ScanError(Reason.RESCALE, "a rescale slope or intercept that can't be")
    if len({one.rescaled for one in slices}) > 1:
        raise ScanError(Reason.RESCALE, "some slices have no rescale, or one of another type")
    for form in {one.header.format for one in slices}:
        stored_dtype(form)
    if any(one.rows * one.columns < 1 for one in slices):
        raise ScanError(Reason.DAMAGED, "a slice has no rows or no columns")


def check_size(planes: Sequence[Plane], limit: int = VOXEL_LIMIT, count: int = 0) -> None:
    """Refuse, by the headers alone, what would be larger than the limit.

    Raises
    ------
    ScanError
        TOO_LARGE; PIXEL_TYPE or DAMAGED for samples that can't be.
    """
    if not planes or any(not p.count for p in planes):
        raise ScanError(Reason.DAMAGED, "a slice has no rows or no columns")
    one = max(math.prod(p.shape) * max(2, p.dtype.itemsize) for p in planes)
    whole = max(p.count * p.dtype.itemsize for p in planes)  # a frame of which it is a tile
    size = max(one * max(count, len(planes)), whole)
    if size > limit:
        detail = f"{byte_words(size)} of voxels, the limit is {byte_words(limit)}"
        raise ScanError(Reason.TOO_LARGE, detail)


def read_into(header: Header, out: NDArray[Any], frame: int = 0) -> None:
    """Read the stored samples of one frame of a file into `out`, unused high bits cleared.

    Parameters
    ----------
    out : (rows, columns) array of the stored type
        Contiguous.
    frame : int
        Which one, from 0.

    Raises
    ------
    ScanError
        As `read_values`.
    """
    np.copyto(out, _stored([frame_of(header, frame)])[0])


def same_content(one: Slice, other: Slice) -> bool:
    """Whether two slices say the same: pixels and rescale."""
    if _coding(one) != _coding(other):
        return False
    first, second = _stored([plane_of(s) for s in (one, other)])
    return bool(np.array_equal(first, second))


def _coding(one: Slice) -> tuple[object, ...]:
    plane = plane_of(one)
    return plane.format, plane.shape, plane.slope, plane.intercept


def threads() -> int:
    """Return how many threads are worth starting on this machine."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux
    cores = len(allowed(0)) if allowed else os.cpu_count() or 1
    return min(cores, MOST_THREADS)


def _read_as(kind: type, planes: list[Plane | None], limit: int) -> NDArray[Any] | None:
    """Read values (slices, rows, columns) as one type; None if they do not fit."""
    real = [p for p in planes if p]
    shape = (len(planes), *real[0].shape)
    places = [k for k, p in enumerate(planes) if p]
    if all(p.is_plain for p in real):
        values: NDArray[Any] = np.empty(shape, kind)
        for k in set(range(len(planes))).difference(places):
            values[k] = 0
        return values if fill(real, places, values, threads()) else None
    values = shared_empty(shape, kind)
    limits, workers = _limits(real, values.nbytes, limit)
    words = [as_words(p) for p in real]
    fits = run_limited(fill_from_words, words, places, values, workers, limits=limits)
    return values if fits else None


def _stored(planes: list[Plane]) -> list[NDArray[Any]]:
    """Return the stored samples of some planes, each (rows, columns)."""
    check_size(planes)
    words = [as_words(p) for p in planes]
    if all(p.is_plain for p in planes):
        return store_from_words(words)
    limits, _ = _limits(planes, 0, VOXEL_LIMIT)
    return run_limited(store_from_words, words, limits=limits)


def _limits(planes: list[Plane], taken: int, limit: int) -> tuple[Limits, int]:
    """Return what decoding may take, and by how many threads.

    With what is taken for the values, it stays within the limit and `SPARE`.
    """
    each = PER_THREAD + max(
        SCRATCH * p.count + 4 * p.count * p.dtype.itemsize + SLACK + inflated_size(p)
        for p in planes
    )
    most = SPARE + max(0, limit - taken)
    workers = max(1, min(threads(), most // each, len(planes)))
    unit = max(p.count * p.dtype.itemsize + inflated_size(p) for p in planes)
    total = sum(p.count * p.dtype.itemsize + inflated_size(p) for p in planes)
    memory = min(most, PER_THREAD + workers * each)
    silence = PATIENCE + unit / SLOWEST
    return Limits(memory, silence, 2 * PATIENCE + total / SLOWEST + silence), workers


def fill_from_words(
    words: list[list[Any]], places: list[int], values: NDArray[Any], workers: int
) -> bool:
    """Do `fill` for planes that were sent to a child process."""
    return fill([from_words(w) for w in words], places, values, workers)


def store_from_words(words: list[list[Any]]) -> list[NDArray[Any]]:
    """Return the stored samples of planes that were sent to a child process."""
    planes = [from_words(w) for w in words]
    tables = tables_of(planes)
    stored = []
    for plane in planes:
        stored.append(shared_empty(plane.shape, plane.dtype))
        frame = np.empty((plane.rows, plane.columns), plane.dtype) if plane.tile else stored[-1]
        read_plane(plane, frame, tables)
        if plane.tile:
            np.copyto(stored[-1], _tile(plane, frame))
        progress()
    return stored


def fill(planes: list[Plane], places: list[int], values: NDArray[Any], workers: int) -> bool:
    """Read planes into `values`, in this process.

    Parameters
    ----------
    planes, places : list of Plane, list of int
        What is read, and into which slice.
    values : (slices, rows, columns) array
        Of the type of the result.
    workers : int
        Threads.

    Returns
    -------
    bool
        Whether all values fit that type.

    Raises
    ------
    ScanError
        As `read_values`.
    """
    tables = tables_of(planes)
    frames: dict[tuple[Path, int], list[tuple[Plane, NDArray[Any]]]] = {}
    for plane, k in zip(planes, places, strict=True):
        frames.setdefault((plane.path, plane.frame), []).append((plane, values[k]))
    with ThreadPoolExecutor(workers) as pool:
        tasks = [pool.submit(_read_parts, parts, tables) for parts in frames.values()]
        try:
            for task in tasks:
                task.result()
        except _DoesNotFitError:
            pool.shutdown(cancel_futures=True)
            return False
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return True


def _read_parts(parts: list[tuple[Plane, NDArray[Any]]], tables: Mapping[Path, Frames]) -> None:
    """Read the slices of one frame: itself, or its tiles; each has the type of the result."""
    plane, out = parts[0]
    kind = plane.dtype
    if plane.tile is None and out.dtype.kind == "i" and out.dtype.itemsize == kind.itemsize:
        read_plane(plane, out.view(kind), tables)
        for _, other in parts[1:]:
            np.copyto(other, out)
        for one, place in parts:
            _rescale_in_place(one, place)
    else:
        frame = np.empty((plane.rows, plane.columns), kind)
        read_plane(plane, frame, tables)
        for one, place in parts:
            stored = _tile(one, frame)
            if place.dtype.kind == "i":
                _check_fits(one, stored, place.dtype)
            np.copyto(place, stored * one.slope + one.intercept, casting="unsafe")  # in float64
    progress()


def _rescale_in_place(plane: Plane, out: NDArray[Any]) -> None:
    """Turn stored samples into values of the same size: modulo 2^bits is exact, as all fit."""
    _check_fits(plane, out.view(plane.dtype), out.dtype)
    slope, intercept = (np.array(int(v)).astype(out.dtype) for v in (plane.slope, plane.intercept))
    if slope != 1:
        np.multiply(out, slope, out=out)
    if intercept != 0:
        np.add(out, intercept, out=out)


def _tile(plane: Plane, frame: NDArray[Any]) -> NDArray[Any]:
    if plane.tile is None:
        return frame
    top, left, rows, columns = plane.tile
    return frame[top : top + rows, left : left + columns]


def _check_fits(plane: Plane, stored: NDArray[Any], kind: np.dtype[Any]) -> None:
    bits, signed = plane.format.stored, plane.format.signed
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    if not _fits(plane, low, high, kind) and not _fits(
        plane, int(stored.min()), int(stored.max()), kind
    ):
        raise _DoesNotFitError


def _fits(plane: Plane, low: int, high: int, kind: np.dtype[Any]) -> bool:
    limits = np.iinfo(kind)
    ends = [int(plane.slope) * v + int(plane.intercept) for v in (low, high)]
    return limits.min <= min(ends) and max(ends) <= limits.max
