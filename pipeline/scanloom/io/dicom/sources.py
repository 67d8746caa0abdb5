"""The bytes of a file: as they stand on the disk, or inflated in memory, never beyond a limit."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from typing import Protocol

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import uids
from scanloom.io.dicom.planes import Plane

MOST_BEFORE = 1 << 26
"""Bytes of a header, and of what follows the pixels, in a file that is inflated: 64 MiB."""

_PIECE = 1 << 18
_META_END = 132 + 12  # preamble, DICM, and FileMetaInformationGroupLength itself


class Source(Protocol):
    """Bytes that can be read anywhere."""

    size: int

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes, fewer at the end."""

    def read_into(self, at: int, view: memoryview) -> int:
        """Fill `view`, and return how many bytes there were."""


class _Disk:
    """A file, read without a position, so that threads may share it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read(self, at: int, count: int) -> bytes:
        data = os.pread(self._descriptor, min(count, max(0, self.size - at)), at)
        while 0 < len(data) < count and at + len(data) < self.size:
            more = os.pread(self._descriptor, count - len(data), at + len(data))
            if not more:
                break
            data += more
        return data

    def read_into(self, at: int, view: memoryview) -> int:
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], at + done)
            if not count:
                break
            done += count
        return done


class Memory:
    """Bytes that are in memory already."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.size = len(data)

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes, fewer at the end."""
        return bytes(self._data[at : at + count])

    def read_into(self, at: int, view: memoryview) -> int:
        """Fill `view`, and return how many bytes there were."""
        found = self._data[at : at + len(view)]
        view[: len(found)] = found
        return len(found)


@contextmanager
def opened(plane: Plane) -> Iterator[tuple[Plane, Source]]:
    """Open the file of a plane.

    Yields
    ------
    (Plane, Source)
        The plane as it lies in these bytes: native where the file was deflated.

    Raises
    ------
    OSError
        If it can't be read.
    ScanError
        TRUNCATED, DAMAGED or TOO_LARGE where it has to be inflated.
    """
    descriptor = os.open(plane.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        disk = _Disk(descriptor)
        yield (
            _found(plane, disk)
            if plane.syntax == uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN
            else (plane, disk)
        )
    finally:
        os.close(descriptor)


def inflated_size(plane: Plane) -> int:
    """Return the bytes of memory that opening its file takes at most; 0 where it stays packed."""
    return 2 * _most(plane) if plane.syntax == uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN else 0


def _most(plane: Plane) -> int:
    """Return the bytes that an inflated file of such frames can have."""
    return plane.frames * plane.count * plane.dtype.itemsize + MOST_BEFORE


def _found(plane: Plane, source: Source) -> tuple[Plane, Source]:
    """Inflate a deflated data set (PS3.5 A.5) and find the pixels in it."""
    from pydicom import dcmread
    from pydicom.uid import ExplicitVRLittleEndian

    from scanloom.io.dicom.headers import quiet

    head = source.read(0, _META_END)
    if head[128:132] != b"DICM" or len(head) < _META_END:
        raise ScanError(Reason.DAMAGED, "a deflated file has no meta header")
    (length,) = struct.unpack("<I", head[-4:])
    data = _inflated(source, _META_END + length, _most(plane))
    file = BytesIO(data)
    try:
        with quiet():
            dcmread(file, stop_before_pixels=True, force=True)
        at = file.tell()
        group, element, vr, size = struct.unpack("<HH2s2xI", data[at : at + 12])
    except (ArithmeticError, EOFError, LookupError, OSError, TypeError, ValueError) as exc:
        raise ScanError(Reason.DAMAGED, "a deflated file can't be parsed") from exc
    except (AttributeError, NotImplementedError, RecursionError, struct.error) as exc:
        raise ScanError(Reason.TRUNCATED, "a deflated file has no pixels") from exc
    if (group, element) != (0x7FE0, 0x0010) or vr not in (b"OB", b"OW", b"UN"):
        raise ScanError(Reason.DAMAGED, "a deflated file has no pixels")
    found = replace(plane, syntax=ExplicitVRLittleEndian, offset=at + 12, length=size)
    return found, Memory(data)


def _inflated(source: Source, start: int, most: int) -> bytes:
    """Inflate from `start` on; refuse more than `most` bytes."""
    state, parts, size, at = zlib.decompressobj(-zlib.MAX_WBITS), [], 0, start
    packed = b""
    while not state.eof:
        if not packed:
            packed = source.read(at, _PIECE)
            at += len(packed)
        if not packed:
            raise ScanError(Reason.TRUNCATED, "a deflated file ends too early")
        try:
            parts.append(state.decompress(packed, most + 1 - size))
        except zlib.error as exc:
            raise ScanError(Reason.DAMAGED, "a deflated file can't be inflated") from exc
        size += len(parts[-1])
        if size > most:
            raise ScanError(Reason.TOO_LARGE, "a deflated file holds more than its header says")
        packed = state.unconsumed_tail
    return b"".join(parts)
