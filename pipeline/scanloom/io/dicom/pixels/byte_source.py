"""Byte sources for pixel data: the file itself, or its inflated bytes in memory up to a limit."""

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
from scanloom.io.dicom.pixels.frame import FrameRef

_MAX_HEADER_BYTES = 1 << 26
"""Largest size of everything except the pixels in a deflated file, once inflated: 64 MiB."""

_CHUNK_BYTES = 1 << 18
_GROUP_LENGTH_END = 132 + 12  # preamble and "DICM", then FileMetaInformationGroupLength


class ByteSource(Protocol):
    """Bytes with random access; `size` is their number."""

    size: int

    def read(self, position: int, count: int) -> bytes:
        """Return `count` bytes from `position`, fewer at the end."""

    def read_into(self, position: int, view: memoryview) -> int:
        """Fill `view` from `position`, and return the number of bytes read."""


class _FileSource:
    """An open file, read by `pread`, so that threads can share its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read(self, position: int, count: int) -> bytes:
        data = os.pread(self._descriptor, min(count, max(0, self.size - position)), position)
        while 0 < len(data) < count and position + len(data) < self.size:
            more = os.pread(self._descriptor, count - len(data), position + len(data))
            if not more:
                break
            data += more
        return data

    def read_into(self, position: int, view: memoryview) -> int:
        filled = 0
        while filled < len(view):
            count = os.preadv(self._descriptor, [view[filled:]], position + filled)
            if not count:
                break
            filled += count
        return filled


class MemorySource:
    """Byte source in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.size = len(data)

    def read(self, position: int, count: int) -> bytes:
        """Return `count` bytes from `position`, fewer at the end."""
        return bytes(self._data[position : position + count])

    def read_into(self, position: int, view: memoryview) -> int:
        """Fill `view` from `position`, and return the number of bytes read."""
        data = self._data[position : position + len(view)]
        view[: len(data)] = data
        return len(data)


@contextmanager
def open_pixels(frame: FrameRef) -> Iterator[tuple[FrameRef, ByteSource]]:
    """Open the file of a frame, inflating it if it is deflated.

    Yields
    ------
    (FrameRef, ByteSource)
        The byte source, and the frame as located in it: native if the file was deflated.

    Raises
    ------
    OSError
        If the file can't be read.
    ScanError
        TRUNCATED, DAMAGED or TOO_LARGE if a deflated file can't be inflated.
    """
    descriptor = os.open(frame.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        source = _FileSource(descriptor)
        yield (
            _inflated_source(frame, source)
            if frame.syntax == uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN
            else (frame, source)
        )
    finally:
        os.close(descriptor)


def inflation_bytes(frame: FrameRef) -> int:
    """Return the most memory, in bytes, that `open_pixels` needs; 0 if the file is not deflated."""
    return (
        2 * _max_inflated_bytes(frame)
        if frame.syntax == uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN
        else 0
    )


def _max_inflated_bytes(frame: FrameRef) -> int:
    """Return the largest size, in bytes, of an inflated file of such frames."""
    return frame.frames * frame.count * frame.dtype.itemsize + _MAX_HEADER_BYTES


def _inflated_source(frame: FrameRef, source: ByteSource) -> tuple[FrameRef, ByteSource]:
    """Inflate a deflated data set (PS3.5 A.5) and locate the frame in it."""
    from pydicom import dcmread
    from pydicom.uid import ExplicitVRLittleEndian

    from scanloom.io.dicom.header.header import pydicom_muted

    start = source.read(0, _GROUP_LENGTH_END)
    if start[128:132] != b"DICM" or len(start) < _GROUP_LENGTH_END:
        raise ScanError(Reason.DAMAGED, "a deflated file has no file meta information")
    (meta_length,) = struct.unpack("<I", start[-4:])
    data = _inflate(source, _GROUP_LENGTH_END + meta_length, _max_inflated_bytes(frame))
    stream = BytesIO(data)
    try:
        with pydicom_muted():
            dcmread(stream, stop_before_pixels=True, force=True)
        position = stream.tell()
        group, element, vr, value_length = struct.unpack("<HH2s2xI", data[position : position + 12])
    except (ArithmeticError, EOFError, LookupError, OSError, TypeError, ValueError) as exc:
        raise ScanError(Reason.DAMAGED, "a deflated file can't be parsed") from exc
    except (AttributeError, NotImplementedError, RecursionError, struct.error) as exc:
        raise ScanError(Reason.TRUNCATED, "a deflated file has no pixels") from exc
    if (group, element) != (0x7FE0, 0x0010) or vr not in (b"OB", b"OW", b"UN"):
        raise ScanError(Reason.DAMAGED, "a deflated file has no pixels")
    located = replace(
        frame, syntax=ExplicitVRLittleEndian, offset=position + 12, length=value_length
    )
    return located, MemorySource(data)


def _inflate(source: ByteSource, start: int, max_bytes: int) -> bytes:
    """Inflate the bytes after `start`; refuse more than `max_bytes`."""
    decompressor, chunks, size, position = zlib.decompressobj(-zlib.MAX_WBITS), [], 0, start
    compressed = b""
    while not decompressor.eof:
        if not compressed:
            compressed = source.read(position, _CHUNK_BYTES)
            position += len(compressed)
        if not compressed:
            raise ScanError(Reason.TRUNCATED, "a deflated file is truncated")
        try:
            chunks.append(decompressor.decompress(compressed, max_bytes + 1 - size))
        except zlib.error as exc:
            raise ScanError(Reason.DAMAGED, "a deflated file can't be inflated") from exc
        size += len(chunks[-1])
        if size > max_bytes:
            raise ScanError(Reason.TOO_LARGE, "a deflated file is larger than its header describes")
        compressed = decompressor.unconsumed_tail
    return b"".join(chunks)
