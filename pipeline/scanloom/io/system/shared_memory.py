"""Arrays in shared memory, which messages pass from one process to another without a copy.

They lie in anonymous memory (memfd_create(2)), which the system frees after its last user.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from scanloom.core import Reason, blame


class SharedPages(mmap.mmap):
    """Shared memory mapped into this process, with the descriptor to map it in another one."""

    descriptor: int


def shared_empty(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Return a new array in shared memory: all zeros, in C order, freed after its last user.

    Raises
    ------
    MemoryError
        If there is not enough memory.
    ScanError
        ENVIRONMENT if it exceeds the file size limit (ulimit -f), which applies to memory too, or
        the process may open no more files.
    """
    kind = np.dtype(dtype)
    size = max(1, int(np.prod(shape, dtype=object)) * kind.itemsize)
    descriptor = None
    try:
        descriptor = os.memfd_create("scanloom", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        pages = _map(descriptor, size)
    except OSError as exc:
        if descriptor is not None:
            os.close(descriptor)
        fault = blame(exc)
        raise (fault if fault.reason is Reason.ENVIRONMENT else MemoryError()) from exc
    return np.ndarray(tuple(shape), kind, buffer=pages)


def _map(descriptor: int, size: int) -> SharedPages:
    pages = SharedPages(descriptor, size)
    pages.descriptor = descriptor
    weakref.finalize(pages, os.close, descriptor).atexit = False
    return pages


def map_shared(descriptor: int) -> SharedPages:
    """Map memory of another process, if its size is sealed: shrinking it would kill its readers.

    Raises
    ------
    ValueError
        If the memory may shrink.
    """
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("the shared memory may shrink")
    return _map(descriptor, os.fstat(descriptor).st_size)


def to_shared(array: NDArray[Any]) -> tuple[NDArray[Any], dict[str, Any]]:
    """Return an array in shared memory, and its layout there as JSON.

    An array that is not contiguous or not in shared memory is copied; one in Fortran order is
    transposed.

    Raises
    ------
    TypeError
        If the elements are not numbers.
    """
    if array.dtype.kind not in "biufc":
        raise TypeError(f"an array of {array.dtype} can't be sent to another process")
    transposed = array.flags.f_contiguous and not array.flags.c_contiguous
    shared = array.T if transposed else array
    if not shared.flags.c_contiguous or not isinstance(_owner(shared), SharedPages):
        copy = shared_empty(shared.shape, shared.dtype)
        np.copyto(copy, shared)
        shared = copy
    start = np.frombuffer(pages_of(shared), np.uint8).ctypes.data
    return shared, {
        "offset": shared.ctypes.data - start,
        "shape": list(shared.shape),
        "dtype": shared.dtype.str,
        "transposed": transposed,
    }


def array_from_layout(layout: dict[str, Any], pages: SharedPages) -> NDArray[Any]:
    """Return the array that lies in shared memory; the inverse of `to_shared`.

    Raises
    ------
    ValueError
        If the elements are not numbers, or the array exceeds the memory.
    """
    dtype = np.dtype(layout["dtype"])
    if dtype.kind not in "biufc":
        raise ValueError("not an array of numbers")
    array: NDArray[Any] = np.ndarray(
        tuple(layout["shape"]), dtype, buffer=pages, offset=layout["offset"]
    )
    return array.T if layout["transposed"] else array


def pages_of(array: NDArray[Any]) -> SharedPages:
    """Return the shared memory in which an array lies.

    Raises
    ------
    TypeError
        If the array is not in shared memory.
    """
    owner = _owner(array)
    if not isinstance(owner, SharedPages):
        raise TypeError("the array is not in shared memory")
    return owner


def _owner(array: NDArray[Any]) -> Any:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base
