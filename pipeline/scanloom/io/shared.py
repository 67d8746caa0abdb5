"""Arrays in shared memory, and messages that hand them from one process to another.

A message is JSON, so that nothing a process says can make the other run code; arrays travel as
descriptors of nameless memory (memfd_create(2)), which the system frees with its last user.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import mmap
import os
import socket
import struct
import weakref
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from scanloom.core import Flag, Reason, blame

LONGEST = 1 << 28
"""Bytes of a message; a description of 100,000 slices has a tenth of it."""

_HEAD = struct.Struct("<QI")  # bytes of JSON, number of descriptors
_MOST_ARRAYS = 64
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_ENUMS: dict[str, type[Enum]] = {"reason": Reason, "flag": Flag}


class _Pages(mmap.mmap):
    """Shared memory that is mapped here, with the descriptor that lets another process map it."""

    descriptor: int


def shared_empty(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Return a new array in shared memory: all zeros, in C order, freed with its last user.

    Raises
    ------
    MemoryError
        If the system has no room for it.
    ScanError
        ENVIRONMENT if it is larger than a file may be (ulimit -f), which holds for memory too.
    """
    kind = np.dtype(dtype)
    size = max(1, int(np.prod(shape, dtype=object)) * kind.itemsize)
    descriptor = os.memfd_create("scanloom", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED)
        pages = _map(descriptor, size)
    except OSError as exc:
        os.close(descriptor)
        raise (blame(exc) if exc.errno == errno.EFBIG else MemoryError()) from exc
    return np.ndarray(tuple(shape), kind, buffer=pages)


def _map(descriptor: int, size: int) -> _Pages:
    pages = _Pages(descriptor, size)
    pages.descriptor = descriptor
    weakref.finalize(pages, os.close, descriptor).atexit = False
    return pages


def send(connection: socket.socket, value: Any) -> None:
    """Send None, bool, int, float, str, bytes, Path, Reason, Flag, arrays, lists, tuples, dicts.

    Raises
    ------
    OSError
        If the other end is gone.
    TypeError
        For what is none of these.
    """
    arrays: list[NDArray[Any]] = []
    data = json.dumps(_packed(value, arrays)).encode("ascii")
    descriptors = [_pages(array).descriptor for array in arrays]
    socket.send_fds(connection, [_HEAD.pack(len(data), len(descriptors))], descriptors)
    connection.sendall(data)


def receive(connection: socket.socket) -> Any:
    """Return what the other end sent.

    Raises
    ------
    EOFError
        If it is gone.
    OSError
        If it is gone, or took longer than the socket's timeout (TimeoutError).
    ValueError
        If it sent no proper message.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _HEAD.size, _MOST_ARRAYS)
    mapped = []
    try:
        head += _exactly(connection, _HEAD.size - len(head)) if head else b""
        if not head:
            raise EOFError
        size, count = _HEAD.unpack(head)
        if size > LONGEST or count != len(descriptors):
            raise ValueError("not a message")
        packed = json.loads(_exactly(connection, size))
        while descriptors:
            mapped.append(_received(descriptors[0]))
            del descriptors[0]
        return _unpacked(packed, mapped)
    except (AttributeError, LookupError, TypeError, RecursionError) as exc:
        raise ValueError("not a message") from exc
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _received(descriptor: int) -> _Pages:
    """Map memory that came: only if nobody can cut it off, which would kill who reads it."""
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("memory that may shrink")
    return _map(descriptor, os.fstat(descriptor).st_size)


def _packed(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """Return JSON for a value; the arrays in it are put into `arrays`, in shared memory."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        return _packed_array(value, arrays)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):  # the other process may have another working folder
        return {"path": os.path.abspath(value)}  # resolve() would follow links
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Reason | Flag):
        return {"reason" if isinstance(value, Reason) else "flag": value.name}
    if isinstance(value, list):
        return [_packed(one, arrays) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_packed(one, arrays) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_packed(k, arrays), _packed(v, arrays)] for k, v in value.items()]}
    raise TypeError(f"a {type(value).__name__} can't be sent to another process")


def _packed_array(value: NDArray[Any], arrays: list[NDArray[Any]]) -> Any:
    if value.dtype.kind not in "biufc":
        raise TypeError(f"an array of {value.dtype} can't be sent to another process")
    turned = value.flags.f_contiguous and not value.flags.c_contiguous
    plain = value.T if turned else value
    if not plain.flags.c_contiguous or not _is_shared(plain):
        copy = shared_empty(plain.shape, plain.dtype)
        np.copyto(copy, plain)
        plain = copy
    arrays.append(plain)
    start = np.frombuffer(_pages(plain), np.uint8).ctypes.data
    return {
        "array": len(arrays) - 1,
        "offset": plain.ctypes.data - start,
        "shape": list(plain.shape),
        "dtype": plain.dtype.str,
        "turned": turned,
    }


def _is_shared(array: NDArray[Any]) -> bool:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, _Pages)


def _pages(array: NDArray[Any]) -> _Pages:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, _Pages):
        raise TypeError("the array is not in shared memory")
    return base


def _unpacked(packed: Any, mapped: list[_Pages]) -> Any:
    if isinstance(packed, list):
        return [_unpacked(one, mapped) for one in packed]
    if not isinstance(packed, dict):
        return packed
    if "array" in packed:
        return _unpacked_array(packed, mapped)
    [(kind, inner)] = packed.items()
    if kind == "path":
        return Path(inner)
    if kind == "bytes":
        return base64.b64decode(inner)
    if kind in _ENUMS:
        return _ENUMS[kind][inner]
    if kind == "tuple":
        return tuple(_unpacked(one, mapped) for one in inner)
    if kind == "dict":
        return {_unpacked(k, mapped): _unpacked(v, mapped) for k, v in inner}
    raise ValueError("not a message")


def _unpacked_array(packed: dict[str, Any], mapped: list[_Pages]) -> NDArray[Any]:
    kind = np.dtype(packed["dtype"])
    if kind.kind not in "biufc":
        raise ValueError("not a message")
    array: NDArray[Any] = np.ndarray(
        tuple(packed["shape"]), kind, buffer=mapped[packed["array"]], offset=packed["offset"]
    )
    return array.T if packed["turned"] else array
