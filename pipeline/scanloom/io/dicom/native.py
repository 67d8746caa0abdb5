"""Uncompressed samples: whole bytes or packed bits, little or big endian (PS3.5 8.1.1, 8.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import uids
from scanloom.io.dicom.planes import Plane
from scanloom.io.dicom.sources import Source

_AT_ONCE = 1 << 17
"""Packed samples that are unpacked together, each bit taking a byte; bytes that are looked at."""


def read_native(plane: Plane, source: Source, out: NDArray[Any]) -> None:
    """Read the samples of a frame into `out`.

    Parameters
    ----------
    out : (rows, columns) array of the stored type
        Contiguous.

    Raises
    ------
    ScanError
        TRUNCATED or DAMAGED.
    """
    if plane.length is None:
        raise ScanError(Reason.DAMAGED, "uncompressed pixels have no length")
    bits = plane.format.allocated
    total = -(-plane.frames * plane.count * bits // 8)
    if plane.length >= 2 * max(total, 1):
        raise ScanError(Reason.DAMAGED, "the file holds more pixels than its header says")
    if plane.frame == 0:
        _check_rest(plane, source, total)
    if -(-(plane.frame + 1) * plane.count * bits // 8) > plane.length:
        raise _cut()
    if bits == 8 * out.itemsize and not _has_swapped_bytes(plane, source):
        at = plane.offset + plane.frame * out.nbytes
        if source.read_into(at, memoryview(out).cast("B")) < out.nbytes:
            raise _cut()
        if plane.syntax == uids.EXPLICIT_VR_BIG_ENDIAN and out.itemsize > 1:
            out.byteswap(inplace=True)
        return
    _read_packed(plane, source, out.reshape(-1))


def _check_rest(plane: Plane, source: Source, total: int) -> None:
    """Refuse a line and more behind the pixels, but for zeros: rows or columns are not as said."""
    rest = (plane.length or 0) - total
    if 8 * rest < min(plane.rows, plane.columns) * plane.format.allocated:
        return
    for start in range(total, total + rest, _AT_ONCE):
        if source.read(plane.offset + start, min(_AT_ONCE, total + rest - start)).strip(b"\0"):
            raise ScanError(Reason.DAMAGED, "the file holds more pixels than its header says")


def _read_packed(plane: Plane, source: Source, out: NDArray[Any]) -> None:
    """Read samples that share bytes: the first in the lowest bits, frames without a gap."""
    bits = plane.format.allocated
    weights = (1 << np.arange(bits, dtype=np.uint64)).astype(np.uint32)
    first = plane.frame * plane.count
    for begin in range(0, plane.count, _AT_ONCE):
        count = min(_AT_ONCE, plane.count - begin)
        start = (first + begin) * bits
        data = _bytes(plane, source, start // 8, -(-(start + count * bits) // 8))
        unpacked = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        skipped = start % 8
        samples = unpacked[skipped : skipped + count * bits].reshape(count, bits) @ weights
        out[begin : begin + count] = samples.astype(out.dtype)


def _bytes(plane: Plane, source: Source, start: int, stop: int) -> bytes:
    """Return bytes of the pixel data in their little endian order."""
    low, high = start & ~1, stop + (stop & 1)  # whole words
    data = source.read(plane.offset + low, high - low)
    if len(data) < stop - low:
        raise _cut()
    if _has_swapped_bytes(plane, source):
        data = np.frombuffer(data[: len(data) & ~1], ">u2").astype("<u2").tobytes()
    return data[start - low : stop - low]


def _has_swapped_bytes(plane: Plane, source: Source) -> bool:
    """Whether samples smaller than a word stand in big endian words (OW)."""
    if plane.syntax != uids.EXPLICIT_VR_BIG_ENDIAN or plane.format.allocated in (16, 32):
        return False
    return source.read(plane.offset - 8, 2) == b"OW"


def _cut() -> ScanError:
    return ScanError(Reason.TRUNCATED, "a slice ends in the middle of its pixels")
