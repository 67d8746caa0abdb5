"""The values of a stack: every slice decoded and rescaled straight into its place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.dicom.codecs import read_into, stored_dtype
from scanloom.io.dicom.slices import Slice

MOST_THREADS = 8
"""More gain nothing: the disk or the memory is the limit."""


class _DoesNotFitError(Exception):
    """A value is too large for the type that was tried."""


def read_values(slices: Sequence[Slice]) -> NDArray[Any]:
    """Read all slices as slope * stored + intercept.

    Returns
    -------
    (columns, rows, slices) array, the first axis fastest in memory
        int16 or else int32 where all slopes and intercepts are whole numbers and the values fit;
        float32 otherwise.

    Raises
    ------
    ScanError
        RESCALE, PIXEL_TYPE, TRUNCATED, DAMAGED, DECODER or UNREADABLE.
    """
    for one in slices:
        _check_rescale(one)
        stored_dtype(one.header.format)
    whole = all(s.slope.is_integer() and s.intercept.is_integer() for s in slices)
    kinds: tuple[type, ...] = (np.int16, np.int32, np.float32) if whole else (np.float32,)
    for kind in kinds:
        values: NDArray[Any] = np.empty(
            (len(slices), slices[0].header.rows, slices[0].header.columns), kind
        )
        try:
            _read_all(slices, values)
        except _DoesNotFitError:
            continue
        return values.T
    raise AssertionError("every value fits float32")


def same_content(one: Slice, other: Slice) -> bool:
    """Whether two files say the same: pixels and rescale."""
    if _coding(one) != _coding(other):
        return False
    first, second = (_stored(s) for s in (one, other))
    return bool(np.array_equal(first, second))


def _coding(one: Slice) -> tuple[object, ...]:
    return one.header.format, one.slope, one.intercept


def _stored(one: Slice) -> NDArray[Any]:
    header = one.header
    pixels: NDArray[Any] = np.empty((header.rows, header.columns), stored_dtype(header.format))
    read_into(header, pixels, one.frame)
    return pixels


def threads() -> int:
    """Return how many threads are worth starting on this machine."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux
    cores = len(allowed(0)) if allowed else os.cpu_count() or 1
    return min(cores, MOST_THREADS)


def _check_rescale(one: Slice) -> None:
    if one.header.lookup_table:
        raise ScanError(Reason.RESCALE, "its values need a lookup table")
    if not np.isfinite((one.slope, one.intercept)).all() or one.slope == 0:
        raise ScanError(Reason.RESCALE, "a rescale slope or intercept is no number, or 0")


def _read_all(slices: Sequence[Slice], values: NDArray[Any]) -> None:
    with ThreadPoolExecutor(threads()) as pool:
        tasks = [pool.submit(_read_slice, s, values[k]) for k, s in enumerate(slices)]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _read_slice(one: Slice, out: NDArray[Any]) -> None:
    """Read one slice into `out`, which has the type of the result."""
    kind = stored_dtype(one.header.format)
    if out.dtype.kind == "i" and out.dtype.itemsize == kind.itemsize:
        stored = out.view(kind)
        read_into(one.header, stored, one.frame)
        _check_fits(one, stored, out.dtype)
        # In place, modulo 2^bits: exact, since every result fits
        slope, intercept = (np.array(int(v)).astype(out.dtype) for v in (one.slope, one.intercept))
        if slope != 1:
            np.multiply(out, slope, out=out)
        if intercept != 0:
            np.add(out, intercept, out=out)
        return
    stored = _stored(one)
    if out.dtype.kind == "i":
        _check_fits(one, stored, out.dtype)
    np.copyto(out, stored * one.slope + one.intercept, casting="unsafe")  # in float64


def _check_fits(one: Slice, stored: NDArray[Any], kind: np.dtype[Any]) -> None:
    bits, signed = one.header.format.stored, one.header.format.signed
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    if not _fits(one, low, high, kind) and not _fits(
        one, int(stored.min()), int(stored.max()), kind
    ):
        raise _DoesNotFitError


def _fits(one: Slice, low: int, high: int, kind: np.dtype[Any]) -> bool:
    limits = np.iinfo(kind)
    ends = [int(one.slope) * v + int(one.intercept) for v in (low, high)]
    return limits.min <= min(ends) and max(ends) <= limits.max
