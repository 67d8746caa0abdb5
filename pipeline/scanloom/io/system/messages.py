"""Messages between a process and its child processes, over a socket.

A message is JSON, so that no process can make another one run code. Bytes follow the JSON
unchanged, arrays travel as descriptors of shared memory (`scanloom.io.system.shared_memory`).
Instances of registered types travel by their fields: the set of types is closed, and none is looked
up by an import path.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from scanloom.core import (
    Case,
    CaseRecord,
    ComputeOptions,
    Flag,
    Measurement,
    Outputs,
    ReadOptions,
    Reason,
    Relations,
    ScanError,
    Series,
    SeriesChoice,
)
from scanloom.core.relations import Asymmetry, CropBy, ResultOf, Share, StructuresOf, Unite
from scanloom.io.system.shared_memory import (
    SharedPages,
    array_from_layout,
    map_shared,
    pages_of,
    to_shared,
)
from scanloom.options import Radiomics

MAX_MESSAGE_BYTES = 1 << 28
"""Size limit of a message; a description of 100,000 slices takes a tenth of it."""

_HEAD = struct.Struct("<QQI")  # bytes of JSON, bytes that follow it, number of descriptors
_MAX_ARRAYS = 64
_JSON_TYPES = frozenset((type(None), bool, int, float, str))
_TYPES: dict[str, tuple[type, Callable[[Any], Iterable[Any]], Callable[..., Any]]] = {}

Record = TypeVar("Record")


def register(
    record_type: type[Record],
    pack: Callable[[Record], Iterable[Any]] | None = None,
    make: Callable[..., Record] | None = None,
) -> None:
    """Let instances of a type, but not of its subclasses, travel in messages.

    Parameters
    ----------
    record_type : type
        A dataclass whose constructor takes all its fields by position, or any other type together
        with `pack`.
    pack : callable or None
        Returns the values by which an instance travels.
    make : callable or None
        Takes these values by position and returns an instance; None for the type itself.

    Raises
    ------
    ValueError
        If another type of the same name is registered.
    """
    if pack is None:
        names = [field.name for field in fields(cast("Any", record_type))]

        def pack(record: Record) -> Iterable[Any]:
            return [getattr(record, name) for name in names]

    known = _TYPES.setdefault(record_type.__name__, (record_type, pack, make or record_type))
    if known[0] is not record_type:
        raise ValueError(f"two types are called {record_type.__name__}")


for _record_type in (
    *(Case, CaseRecord, ComputeOptions, Measurement, Outputs, ReadOptions, Series, SeriesChoice),
    *(Relations, Asymmetry, CropBy, ResultOf, Share, StructuresOf, Unite, Radiomics),
):
    register(_record_type)
register(ScanError, lambda error: (error.reason, error.detail, error.private))
register(Reason, lambda reason: (reason.name,), lambda name: Reason[name])
register(Flag, lambda flag: (flag.name,), lambda name: Flag[name])


class Message:
    """A value ready to be sent.

    Parameters
    ----------
    value
        None, bool, int, float, str, bytes, Path, arrays, instances of registered types, and lists,
        tuples and dicts of these. A relative path becomes absolute: the other process may have
        another working folder.

    Raises
    ------
    TypeError
        For any other type.
    """

    def __init__(self, value: Any) -> None:
        self._arrays: list[NDArray[Any]] = []
        self._blobs: list[bytes] = []
        self._blob_bytes = 0
        self.json = json.dumps(self._pack(value)).encode("ascii")
        """A line: all of the message, unless it has arrays or bytes. See `from_json`."""
        head = _HEAD.pack(len(self.json), self._blob_bytes, len(self._arrays))
        self._data = b"".join((head, self.json, *self._blobs))

    def __len__(self) -> int:
        """Size in bytes, without the contents of arrays."""
        return len(self._data)

    def send(self, connection: socket.socket) -> None:
        """Send the message.

        Raises
        ------
        OSError
            If the other process has closed its end.
        """
        sent = 0
        if self._arrays:
            descriptors = [pages_of(array).descriptor for array in self._arrays]
            sent = socket.send_fds(connection, [self._data[: _HEAD.size]], descriptors)
        connection.sendall(memoryview(self._data)[sent:])

    def _pack(self, value: Any) -> Any:
        """Return JSON for a value; arrays and bytes in it are collected for later."""
        kind = type(value)
        if kind in _JSON_TYPES:
            return value
        if isinstance(value, list):
            if _JSON_TYPES.issuperset(map(type, value)):
                return value  # thousands of numbers or paths: one pass in C
            return [self._pack(element) for element in value]
        registered = _TYPES.get(kind.__name__)
        if registered is not None and registered[0] is kind:
            return {kind.__name__: [self._pack(element) for element in registered[1](value)]}
        return self._pack_other(value)

    def _pack_other(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            shared, layout = to_shared(value)
            self._arrays.append(shared)
            return {"array": [len(self._arrays) - 1, layout]}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, bool | int | float | str):  # a subclass
            return value
        if isinstance(value, Path):
            return {"path": os.path.abspath(value)}
        if isinstance(value, bytes):
            self._blobs.append(value)
            self._blob_bytes += len(value)
            return {"bytes": [self._blob_bytes - len(value), len(value)]}
        if isinstance(value, tuple):
            return {"tuple": self._pack(list(value))}
        if isinstance(value, dict):
            return {"dict": [[self._pack(k), self._pack(v)] for k, v in value.items()]}
        raise TypeError(f"a {type(value).__name__} can't be sent to another process")


def send(connection: socket.socket, value: Any) -> None:
    """Send a value; see `Message` for its types.

    Raises
    ------
    OSError
        If the other process has closed its end.
    TypeError
        For a type that can't be sent.
    """
    Message(value).send(connection)


def from_json(line: bytes) -> Any:
    """Return the value of a message without arrays and bytes, from its `json`.

    Raises
    ------
    ValueError
        If the line is not that of a message.
    """
    try:
        return _Unpacker(b"", ()).unpack(json.loads(line))
    except (AttributeError, LookupError, TypeError, RecursionError) as exc:
        raise ValueError("not a message") from exc


def receive(connection: socket.socket) -> Any:
    """Return the value that the other process sent.

    Raises
    ------
    EOFError
        If the other process has closed its end.
    OSError
        If the connection broke, the socket's timeout passed (TimeoutError), or this process may
        open no more files.
    ValueError
        If the data are not a message.
    """
    head, descriptors, flags, _ = socket.recv_fds(connection, _HEAD.size, _MAX_ARRAYS)
    mapped = []
    try:
        head += _receive_exactly(connection, _HEAD.size - len(head)) if head else b""
        if not head:
            raise EOFError
        size, blob_bytes, count = _HEAD.unpack(head)
        if flags & socket.MSG_CTRUNC and len(descriptors) < count <= _MAX_ARRAYS:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if size + blob_bytes > MAX_MESSAGE_BYTES or count != len(descriptors):
            raise ValueError("not a message")
        document = json.loads(_receive_exactly(connection, size))
        blobs = _receive_exactly(connection, blob_bytes) if blob_bytes else b""
        while descriptors:
            mapped.append(map_shared(descriptors[0]))
            del descriptors[0]
        return _Unpacker(blobs, mapped).unpack(document)
    except (AttributeError, LookupError, TypeError, RecursionError) as exc:
        raise ValueError("not a message") from exc
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


class _Unpacker:
    """Makes values of JSON, the bytes that followed it, and the shared memory that came along."""

    def __init__(self, blobs: bytes, mapped: Sequence[SharedPages]) -> None:
        self._blobs, self._mapped = blobs, mapped

    def unpack(self, packed: Any) -> Any:
        if isinstance(packed, list):
            if _JSON_TYPES.issuperset(map(type, packed)):
                return packed
            return [self.unpack(element) for element in packed]
        if not isinstance(packed, dict):
            return packed
        [(kind, content)] = packed.items()
        if kind in _TYPES:
            make = _TYPES[kind][2]
            return make(*map(self.unpack, content))
        return self._unpack_other(kind, content)

    def _unpack_other(self, kind: str, content: Any) -> Any:
        if kind == "path":
            return Path(content)
        if kind == "bytes":
            start, size = content
            if not 0 <= start <= start + size <= len(self._blobs):
                raise ValueError("not a message")
            return self._blobs[start : start + size]
        if kind == "tuple":
            return tuple(self.unpack(element) for element in content)
        if kind == "dict":
            return {self.unpack(key): self.unpack(value) for key, value in content}
        if kind == "array":
            number, layout = content
            return array_from_layout(layout, self._mapped[number])
        raise ValueError("not a message")
