"""Read native pixel data: whole bytes or packed bits, of either byte order (PS3.5 8.1.1, 8.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import uids
from scanloom.io.dicom.pixels.byte_source import ByteSource
from scanloom.io.dicom.pixels.frame import FrameRef

_BLOCK = 1 << 17
"""Packed samples that are unpacked at a time (one byte a bit); bytes that are checked at a time."""


def read_native(frame: FrameRef, source: ByteSource, out: NDArray[Any]) -> None:
    """Read the samples of a frame into `out`.

    Parameters
    ----------
    frame : FrameRef
        Frame as located in `source`.
    source : ByteSource
        Bytes that hold the frame.
    out : (rows, columns) array of the stored type
        Contiguous.

    Raises
    ------
    ScanError
        TRUNCATED or DAMAGED.
    """
    bits = frame.format.allocated
    if exceeds_header(frame) and frame.frame == 0:
        check_excess(frame, source)
    if -(-(frame.frame + 1) * frame.count * bits // 8) > (frame.length or 0):
        raise _truncated_error()
    if bits == 8 * out.itemsize and not _has_swapped_bytes(frame, source):
        position = frame.offset + frame.frame * out.nbytes
        if source.read_into(position, memoryview(out).cast("B")) < out.nbytes:
            raise _truncated_error()
        if frame.syntax == uids.EXPLICIT_VR_BIG_ENDIAN and out.itemsize > 1:
            out.byteswap(inplace=True)
        return
    _read_packed(frame, source, out.reshape(-1))


def exceeds_header(frame: FrameRef) -> bool:
    """Return whether at least a row or column follows the pixels that the header describes.

    Raises
    ------
    ScanError
        DAMAGED if the length is unknown, or twice that of the pixels: the size is wrong.
    """
    if frame.length is None:
        raise ScanError(Reason.DAMAGED, "uncompressed pixels have no length")
    total_bytes = _total_bytes(frame)
    if frame.length >= 2 * max(total_bytes, 1):
        raise ScanError(Reason.DAMAGED, "the file holds more pixels than its header describes")
    excess_bits = 8 * (frame.length - total_bytes)
    return excess_bits >= min(frame.rows, frame.columns) * frame.format.allocated


def check_excess(frame: FrameRef, source: ByteSource) -> None:
    """Refuse data other than 0 after the pixels: the size is wrong."""
    end = frame.length or 0
    for start in range(_total_bytes(frame), end, _BLOCK):
        if source.read(frame.offset + start, min(_BLOCK, end - start)).strip(b"\0"):
            raise ScanError(Reason.DAMAGED, "the file holds more pixels than its header describes")


def _total_bytes(frame: FrameRef) -> int:
    return -(-frame.frames * frame.count * frame.format.allocated // 8)


def _read_packed(frame: FrameRef, source: ByteSource, out: NDArray[Any]) -> None:
    """Read samples that share bytes: lowest bits first, without gaps between frames."""
    bits = frame.format.allocated
    weights = (1 << np.arange(bits, dtype=np.uint64)).astype(np.uint32)
    first_sample = frame.frame * frame.count
    for done in range(0, frame.count, _BLOCK):
        count = min(_BLOCK, frame.count - done)
        start = (first_sample + done) * bits
        packed = _bytes(frame, source, start // 8, -(-(start + count * bits) // 8))
        unpacked_bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        first_bit = start % 8
        samples = unpacked_bits[first_bit : first_bit + count * bits].reshape(count, bits) @ weights
        out[done : done + count] = samples.astype(out.dtype)


def _bytes(frame: FrameRef, source: ByteSource, start: int, stop: int) -> bytes:
    """Return a byte range of the pixel data in little endian order."""
    aligned_start, aligned_stop = start & ~1, stop + (stop & 1)  # to whole words
    data = source.read(frame.offset + aligned_start, aligned_stop - aligned_start)
    if len(data) < stop - aligned_start:
        raise _truncated_error()
    if _has_swapped_bytes(frame, source):
        data = np.frombuffer(data[: len(data) & ~1], ">u2").astype("<u2").tobytes()
    return data[start - aligned_start : stop - aligned_start]


def _has_swapped_bytes(frame: FrameRef, source: ByteSource) -> bool:
    """Whether samples that are not whole words are stored in big endian words (OW)."""
    if frame.syntax != uids.EXPLICIT_VR_BIG_ENDIAN or frame.format.allocated in (16, 32):
        return False
    return source.read(frame.offset - 8, 2) == b"OW"


def _truncated_error() -> ScanError:
    return ScanError(Reason.TRUNCATED, "a slice ends in the middle of its pixels")
