"""WRITE_MISMATCH, the error of every check of a written file."""

from __future__ import annotations

import gzip
import itertools
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid, Reason, ScanError


def mismatch_error(detail: str) -> ScanError:
    """Return the error for a written file that differs from the content of its case."""
    return ScanError(Reason.WRITE_MISMATCH, detail)


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """Turn any exception of a decoder into WRITE_MISMATCH."""
    from pydicom.errors import BytesLengthException, InvalidDicomError

    errors: tuple[type[Exception], ...] = (
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
        BytesLengthException,
        InvalidDicomError,
        gzip.BadGzipFile,
        struct.error,
        zlib.error,
    )
    try:
        yield
    except errors as exc:
        raise mismatch_error(f"{name} can't be decoded ({type(exc).__name__})") from exc


# --- comparison by slices -------------------------------------------------------------------------
# Compares the slices of a decoded file with label maps, by their position in patient space.

_NEAREST_SHIFT_VOXELS = 0.5 + 1e-3
"""Largest shift of a label by nearest-neighbour resampling, in voxels, with rounding."""

_STEP_TOLERANCE = 1e-6
"""Largest relative error of a voxel step: rounding to float32, and ITK's conversion of it."""


def check_rectangular(
    written: NDArray[Any], affine: NDArray[Any], labels: NDArray[Any], grid: Grid, name: str
) -> None:
    """Compare labels on the rectangular grid with the sheared labels that they were made from.

    Each slice of `labels` must reappear completely, in its own plane and at most half a voxel from
    its position; all other voxels must be 0.

    Parameters
    ----------
    written : (I', J', K') array
        The decoded rectangular labels.
    affine : (4, 4) array
        Their decoded voxel index to RAS mm.
    labels : (I, J, K) array
        The labels on `grid`.
    grid : Grid
        A sheared grid.
    name : str
        Name of the file, for the message.

    Raises
    ------
    ScanError
        WRITE_MISMATCH.
    """
    axis = grid.shear_axis
    if axis is None:
        raise ValueError("the grid is not sheared")
    in_plane = [n for n in range(3) if n != axis]
    deviation = np.abs(affine - grid.affine)[:3, in_plane].max()
    if not deviation <= _STEP_TOLERANCE * max(grid.spacing):
        raise mismatch_error(f"{name} has different directions or spacing")
    starts = np.zeros((grid.shape[axis], 3))
    starts[:, axis] = np.arange(grid.shape[axis])
    indices = np.linalg.solve(affine[:3, :3], (grid.world(starts) - affine[:3, 3]).T).T
    if written.shape[axis] != grid.shape[axis] or np.abs(indices - starts)[:, axis].max() > 0.01:
        raise mismatch_error(f"{name} has different slices")
    copy, source = np.moveaxis(written, axis, 0), np.moveaxis(labels, axis, 0)
    for plane, expected, origin in zip(copy, source, indices[:, in_plane], strict=True):
        if not contains_only(plane, expected, origin):
            raise mismatch_error(f"{name} contains different voxels")


def contains_only(plane: NDArray[Any], expected: NDArray[Any], origin: NDArray[np.float64]) -> bool:
    """Return whether `plane` (R', C') contains `expected` (R, C), and is 0 elsewhere.

    `origin` (2,) is the index in `plane` of the first element of `expected`; it may be a fraction.
    """
    nearest = [
        [int(n) for n in (np.floor(p), np.ceil(p)) if abs(n - p) <= _NEAREST_SHIFT_VOXELS]
        for p in origin
    ]
    rows, columns = expected.shape
    for row, column in itertools.product(*(sorted(set(n)) for n in nearest)):
        section = plane[max(row, 0) : row + rows, max(column, 0) : column + columns]
        if np.array_equal(section, expected):
            outside = plane.size > section.size
            return not (outside and np.count_nonzero(plane) - np.count_nonzero(section))
    return False


def count_labels(planes: Iterable[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[np.int64]:
    """Count the voxels of each label number, slice by slice.

    This is independent of the code that measures structures.
    """
    size = int(np.iinfo(dtype).max) + 1
    total = np.zeros(size, np.int64)
    for plane in planes:
        total += np.bincount(plane.ravel(), minlength=size)
    return total
