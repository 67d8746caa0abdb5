"""Texts and numbers of a million rows, in temporary files without a name.

What is small stays in memory. A process that dies leaves nothing behind. Adding to a file that
can't be written is an OSError.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import weakref
from array import array
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

WRITTEN_BYTES = 1 << 20
"""Bytes that are written at a time."""
COLUMN_NUMBERS = 4096
"""Numbers of a column that are in memory while it grows."""

if TYPE_CHECKING:
    import pyarrow as pa

Key = TypeVar("Key", bound=Hashable)
Stored = TypeVar("Stored")


class _ScratchFile:
    """Bytes that are appended and read again.

    Parameters
    ----------
    folder : Path or None
        A folder of the file system that has room for them; None for memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._descriptor = -1
        self._written, self._new = 0, bytearray()

    def append(self, data: bytes) -> int:
        """Append bytes; return their offset."""
        offset = self._written + len(self._new)
        self._new += data
        if self._folder is not None and len(self._new) >= WRITTEN_BYTES:
            if self._descriptor < 0:
                file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  # closed with this object
                self._descriptor = file.fileno()
                weakref.finalize(self, file.close)
            rest = bytes(self._new)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            self._written += len(self._new)
            self._new = bytearray()
        return offset

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes that were appended at once."""
        if offset >= self._written:
            start = offset - self._written
            return bytes(self._new[start : start + size])
        return os.pread(self._descriptor, size, offset)


def encoded(text: str) -> bytes:
    """Return a text in UTF-8, surrogates too, which names in headers and files may have."""
    return text.encode("utf-8", "surrogatepass")


def decoded(data: bytes) -> str:
    """Return the text that was `encoded`."""
    return data.decode("utf-8", "surrogatepass")


class _Entries:
    """Bytes of different lengths that are added one by one and read by their index, from 0."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file, self._ends = _ScratchFile(folder), array("Q", [0])

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._ends) - 1

    def _add(self, data: bytes) -> None:
        self._ends.append(self._file.append(data) + len(data))

    def _read(self, index: int) -> bytes:
        begin, end = self._ends[index], self._ends[index + 1]
        return self._file.read(begin, end - begin)


class Texts(_Entries):
    """Texts that are added one by one and read by their index, from 0."""

    def __getitem__(self, index: int) -> str:
        """Return a text."""
        return decoded(self._read(index))

    def __iter__(self) -> Iterator[str]:
        """Yield all texts in their order."""
        return map(self.__getitem__, range(len(self)))

    def as_bytes(self) -> NDArray[np.bytes_]:
        """Return all texts in UTF-8 (N,), whose order is that of the texts."""
        width = int(np.diff(np.frombuffer(self._ends, np.uint64)).max(initial=1))
        return np.fromiter(map(self._read, range(len(self))), f"S{width}", len(self))

    def as_arrow(self) -> pa.LargeBinaryArray:
        """Return all texts in UTF-8 (N,), as far as they are in memory: without a folder."""
        import pyarrow as pa

        buffers = (None, pa.py_buffer(self._ends), pa.py_buffer(self._file.read(0, self._ends[-1])))
        return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(self), buffers)

    def add(self, text: str) -> None:
        """Add a text."""
        self._add(encoded(text))


class Objects(_Entries, Generic[Stored]):
    """Objects that are added one by one and read by their index, from 0; by any threads.

    They are pickled into a file that no other process can open.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(folder)
        self._guard = threading.Lock()

    def add(self, stored: Stored) -> int:
        """Add an object; return its index."""
        pickled = pickle.dumps(stored)
        with self._guard:
            self._add(pickled)
            return len(self) - 1

    def __iter__(self) -> Iterator[Stored]:
        """Yield all objects in their order."""
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Stored:
        """Return an object, equal to the one that was added."""
        with self._guard:
            pickled = self._read(index)
        stored: Stored = pickle.loads(pickled)  # noqa: S301  # of this process
        return stored


class Columns(Generic[Key]):
    """Numbers in columns, each of which is read as a whole."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = _ScratchFile(folder)
        self._offsets: dict[Key, array[int]] = {}
        self._new: dict[Key, array[float]] = {}

    def __iter__(self) -> Iterator[Key]:
        """Yield the keys of the columns, those first that were begun first."""
        return iter(self._new)

    def add(self, key: Key, number: float) -> None:
        """Add a number to a column."""
        column = self._new.get(key)
        if column is None:
            column = self._new[key] = array("d")
            self._offsets[key] = array("Q")
        column.append(number)
        if len(column) == COLUMN_NUMBERS:
            self._offsets[key].append(self._file.append(column.tobytes()))
            del column[:]

    def count(self, key: Key) -> int:
        """Return how many numbers a column has; 0 if it was not begun."""
        return COLUMN_NUMBERS * len(self._offsets.get(key, ())) + len(self._new.get(key, ()))

    def read(self, key: Key) -> NDArray[np.float64]:
        """Return a column (N,), in the order in which its numbers were added."""
        size = COLUMN_NUMBERS * array("d").itemsize
        numbers = np.empty(self.count(key))
        end = 0
        for offset in self._offsets.get(key, ()):
            first, end = end, end + COLUMN_NUMBERS
            numbers[first:end] = np.frombuffer(self._file.read(offset, size))
        numbers[end:] = self._new.get(key, ())
        return numbers
