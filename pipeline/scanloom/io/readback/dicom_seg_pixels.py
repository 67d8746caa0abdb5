"""Reads the pixels of a DICOM SEG back, a frame at a time.

The frames of a BINARY may take more memory than the scan: they are read from the file one by one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from scanloom.io.readback.mismatch import mismatch_error

if TYPE_CHECKING:
    from pydicom import Dataset

_PIXELS_HEADER = struct.Struct("<HH2s2xI")
"""Tag, VR and length of PixelData, explicit little endian (PS3.5 7.1.2)."""


@dataclass(frozen=True, eq=False)
class Bits:
    """The bits of a frame of a BINARY.

    Parameters
    ----------
    packed : (N,) uint8 array
        The bytes that contain the frame.
    begin : int
        Bits of the first byte that belong to the frame before.
    shape : (rows, columns)
        Shape of the frame.
    """

    packed: NDArray[np.uint8]
    begin: int
    shape: tuple[int, int]

    def unpack(self) -> NDArray[np.bool_]:
        """Return the pixels (rows, columns)."""
        # PS3.5 8.1.1: bits are stored from the lowest
        bits = np.unpackbits(self.packed, bitorder="little")
        size = self.shape[0] * self.shape[1]
        return bits[self.begin : self.begin + size].reshape(self.shape).view(np.bool_)

    def equals(self, mask: NDArray[np.bool_]) -> bool:
        """Return whether the frame has the shape and the pixels of a mask."""
        if mask.shape != self.shape or self.begin or mask.size % 8:
            return np.array_equal(self.unpack(), mask)
        # Whole bytes are compared packed: an eighth of the memory
        return np.array_equal(self.packed, np.packbits(mask, bitorder="little"))


Pixels = Bits | NDArray[Any]
"""Bits of a frame of a BINARY; pixels (rows, columns) of a LABELMAP, which are segment numbers."""


def iter_frames(dataset: Dataset, order: Sequence[int]) -> Iterator[Pixels]:
    """Yield the pixels of frames in this order; they are decoded one at a time, to limit memory."""
    from pydicom.pixels import iter_pixels

    if dataset.BitsAllocated != 1:
        decoded = iter_pixels(dataset)  # without numbers of frames, all fragments are parsed
        if list(order) == sorted(order):
            yield from decoded
        else:
            frames = list(decoded)
            yield from (frames[n] for n in order)
        return
    rows, columns = dataset.Rows, dataset.Columns
    size = rows * columns
    with Path(dataset.filename).open("rb", buffering=0) as file:
        start = _start_of_pixels(file, size * dataset.NumberOfFrames)
        for n in order:
            begin, end = n * size, (n + 1) * size  # PS3.5 8.1.1: a frame may begin within a byte
            file.seek(start + begin // 8)
            packed = np.frombuffer(file.read(-(-end // 8) - begin // 8), np.uint8)
            yield Bits(packed, begin % 8, (rows, columns))


def check_pixels_follow(file: BinaryIO, dataset: Dataset) -> None:
    """Check that PixelData begins where a file was read up to, and ends with the file."""
    begin = file.tell()
    start = _start_of_pixels(file, dataset.Rows * dataset.Columns * dataset.NumberOfFrames)
    if start != begin + _PIXELS_HEADER.size:
        raise mismatch_error("PixelData does not follow the header of the DICOM SEG")


def _start_of_pixels(file: BinaryIO, bits: int) -> int:
    """Return the offset of so many bits in a file that ends with them, as PixelData."""
    length = -(-bits // 8)
    length += length % 2  # PS3.5 8.1: an even number of bytes
    start = file.seek(0, os.SEEK_END) - length
    file.seek(max(0, start - _PIXELS_HEADER.size))
    header = _PIXELS_HEADER.pack(0x7FE0, 0x0010, b"OB", length)
    if file.read(_PIXELS_HEADER.size) != header:
        raise mismatch_error("the length of PixelData in the DICOM SEG does not match its frames")
    return start
