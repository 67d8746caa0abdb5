"""Encodes the frames of a DICOM SEG directly from label maps.

A mask for every frame and a pydicom object for every element of its functional groups would take
most of the time. Groups that the frames of a slice share are encoded once; those of its segments
differ in two numbers only.

The frames of a BINARY may take more memory than the scan. They are made as they are hashed, and
again as they are written, a few at a time.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pydicom import Dataset

_ITEM = b"\xfe\xff\x00\xe0"
_UNDEFINED = b"\xff\xff\xff\xff"
_SEQUENCE_END = b"\xfe\xff\xdd\xe0\x00\x00\x00\x00"
_TOGETHER = 8
"""Frames that are made at once: they stay in the processor's cache."""
_LOW_BITS = 2
"""Bits of a label in which structures differ that share a mask of all other bits."""

Planes = NDArray[Any]
"""Labels (K, J, I): slices of rows and columns."""
Chunk = bytes | memoryview


@dataclass(frozen=True, eq=False)
class SegFrame:
    """One frame to be encoded.

    Parameters
    ----------
    planes : (K, J, I) array
        Labels of all slices.
    number : int
        Number of the frame's structure in `planes`; 0 in a LABELMAP, whose frames contain all
        structures.
    segment : int
        SegmentNumber in the file; 0 in a LABELMAP.
    slice : int
        Index of the frame's slice in `planes`.
    """

    planes: Planes
    number: int
    segment: int
    slice: int


@dataclass(frozen=True)
class Pixels:
    """The value of PixelData.

    Parameters
    ----------
    length : int
        In bytes.
    chunks : callable
        Returns an iterator over the bytes. A chunk is overwritten as the next is made.
    """

    length: int
    chunks: Callable[[], Iterator[Chunk]]


@dataclass(frozen=True, eq=False)
class SegFile:
    """A DICOM SEG: a dataset without frames, and the frames as encoded bytes.

    Parameters
    ----------
    dataset : Dataset
        All elements but PerFrameFunctionalGroupsSequence and PixelData.
    groups : bytes
        The items of PerFrameFunctionalGroupsSequence, explicit little endian.
    pixels : Pixels
        The value of PixelData.
    """

    dataset: Dataset
    groups: bytes
    pixels: Pixels

    @property
    def tail(self) -> Iterator[Chunk]:
        """The two encoded elements at the end of the file (PS3.5 7.1.2, A.4)."""
        yield struct.pack("<HH2s2xI", 0x5200, 0x9230, b"SQ", len(self.groups))
        yield self.groups
        encapsulated = self.dataset.file_meta.TransferSyntaxUID.is_encapsulated
        length = _UNDEFINED if encapsulated else struct.pack("<I", self.pixels.length)
        yield struct.pack("<HH2s2x", 0x7FE0, 0x0010, b"OB") + length
        yield from self.pixels.chunks()
        if encapsulated:
            yield _SEQUENCE_END

    def save(self, file: BinaryIO) -> None:
        """Write the file."""
        from pydicom import dcmwrite

        dcmwrite(file, self.dataset, enforce_file_format=True)
        for chunk in self.tail:
            file.write(chunk)


def binary_frames(frames: Sequence[SegFrame]) -> Pixels:
    """Return the frames of a BINARY, one bit per pixel (PS3.5 8.1.1), padded to an even length."""
    size = math.prod(frames[0].planes.shape[1:])
    length = -(-size * len(frames) // 8)
    padding = b"\0" * (length % 2)
    if size % 8:
        return Pixels(length + len(padding), lambda: _frames_across_bytes(frames, padding))
    # By identity: the frames of a layer share its array
    layers = {id(frame.planes): frame.planes for frame in frames}
    packed = {key: _PackedLabels(planes) for key, planes in layers.items()}
    return Pixels(length + len(padding), lambda: _frames_of_bytes(frames, packed, padding))


def _frames_across_bytes(frames: Sequence[SegFrame], padding: bytes) -> Iterator[Chunk]:
    """Yield frames of which not all begin with a byte, as few at once as fill whole bytes."""
    rows, columns = frames[0].planes.shape[1:]
    together = 8 // math.gcd(rows * columns, 8)
    masks = np.empty((together, rows, columns), np.bool_)
    for first in range(0, len(frames), together):
        batch = frames[first : first + together]
        for frame, mask in zip(batch, masks, strict=False):
            np.equal(frame.planes[frame.slice], frame.number, out=mask)
        yield memoryview(np.packbits(masks[: len(batch)], bitorder="little"))
    yield padding


def _frames_of_bytes(
    frames: Sequence[SegFrame], packed: dict[int, _PackedLabels], padding: bytes
) -> Iterator[Chunk]:
    """Yield frames that consist of whole bytes, neighbouring slices of a structure at once."""
    size = math.prod(frames[0].planes.shape[1:]) // 8
    out = np.empty(_TOGETHER * size, np.uint8)
    first = 0
    while first < len(frames):
        begin = frames[first]
        count = 1
        for frame in frames[first + 1 : first + _TOGETHER]:
            if (frame.number, frame.slice) != (begin.number, begin.slice + count):
                break
            count += 1
        slices, chunk = slice(begin.slice, begin.slice + count), out[: count * size]
        packed[id(begin.planes)].write(begin.number, slices, chunk.reshape(count, size))
        yield memoryview(chunk)
        first += count
    yield padding


class _PackedLabels:
    """Labels (K, J, I), a bit per pixel for each bit of the labels; J times I is divisible by 8.

    To pack the bits of labels once takes a fraction of packing the mask of each structure.
    """

    def __init__(self, planes: Planes) -> None:
        count = max(_LOW_BITS, int(planes.max(initial=0)).bit_length())
        shape = len(planes), planes[0].size // 8
        self._bits = [np.empty(shape, np.uint8) for _ in range(count)]
        plane_bit = np.empty(planes.shape[1:], planes.dtype)
        for k, plane in enumerate(planes):
            for n, packed in enumerate(self._bits):
                np.bitwise_and(plane, 1 << n, out=plane_bit)
                packed[k] = np.packbits(plane_bit, bitorder="little")
        self._high, self._mask = -1, np.empty(shape, np.uint8)

    def write(self, number: int, slices: slice, out: NDArray[np.uint8]) -> None:
        """Write the mask of a number in some slices to `out` (slices, bytes).

        It is fastest if numbers ascend: four in a row have all bits but two in common.
        """
        if self._high != number >> _LOW_BITS:
            self._high = number >> _LOW_BITS
            self._mask[:] = 0xFF if self._high >> (len(self._bits) - _LOW_BITS) == 0 else 0
            for n, packed in enumerate(self._bits[_LOW_BITS:]):
                _and(self._mask, packed, self._high >> n & 1, self._mask)
        mask = self._mask[slices]
        for n, packed in enumerate(self._bits[:_LOW_BITS]):
            _and(mask, packed[slices], number >> n & 1, out)
            mask = out


def _and(
    mask: NDArray[np.uint8], packed: NDArray[np.uint8], bit: int, out: NDArray[np.uint8]
) -> None:
    """Write the bits of a mask where the packed bits are `bit`."""
    if bit:
        np.bitwise_and(mask, packed, out=out)
    else:
        np.bitwise_or(mask, packed, out=out)
        np.bitwise_xor(out, packed, out=out)


def rle_frames(frames: Sequence[SegFrame]) -> Pixels:
    """Return the frames of a LABELMAP, run-length encoded and encapsulated (PS3.5 A.4, G)."""
    from pydicom.encaps import encapsulate
    from pydicom.pixels.encoders import RLELosslessEncoder

    rows, columns = frames[0].planes.shape[1:]
    bits = 8 * frames[0].planes.itemsize
    encoded = [
        RLELosslessEncoder.encode(
            np.ascontiguousarray(frame.planes[frame.slice]),
            rows=rows,
            columns=columns,
            samples_per_pixel=1,
            number_of_frames=1,
            bits_allocated=bits,
            bits_stored=bits,
            pixel_representation=0,
            photometric_interpretation="MONOCHROME2",
        )
        for frame in frames
    ]
    value = bytes(encapsulate(encoded))
    return Pixels(len(value), lambda: iter((value,)))


def encode_groups(
    frames: Sequence[SegFrame],
    derivations: Mapping[int, bytes],
    positions: Mapping[int, bytes],
    *,
    shared_segment: bool,
) -> bytes:
    """Return the items of PerFrameFunctionalGroupsSequence, one per frame.

    Parameters
    ----------
    frames : sequence of SegFrame
        In their order in the file.
    derivations, positions : mapping of int to bytes
        The encoded DerivationImageSequence and PlanePositionSequence of each stored slice, in the
        order of their dimension indices, which count from 1.
    shared_segment : bool
        Whether all frames are of one segment, which the shared functional groups name.
    """
    index_of = {k: n for n, k in enumerate(positions, 1)}
    items = []
    for frame in frames:
        index, segment = struct.pack("<I", index_of[frame.slice]), b""
        if frame.segment:
            index = struct.pack("<I", frame.segment) + index
        if frame.segment and not shared_segment:
            number = struct.pack("<HH2sHH", 0x0062, 0x000B, b"US", 2, frame.segment)
            segment = _sequence(0x0062, 0x000A, number)
        values = struct.pack("<HH2sH", 0x0020, 0x9157, b"UL", len(index)) + index
        content = _sequence(0x0020, 0x9111, values)
        # In the order of their tags
        groups = b"".join((derivations[frame.slice], content, positions[frame.slice], segment))
        items.append(_ITEM + struct.pack("<I", len(groups)) + groups)
    return b"".join(items)


def _sequence(group: int, element: int, content: bytes) -> bytes:
    """Return a sequence of one item, explicit little endian (PS3.5 7.5)."""
    head = struct.pack("<HH2s2xI", group, element, b"SQ", len(content) + 8)
    return b"".join((head, _ITEM, struct.pack("<I", len(content)), content))


def encode_dataset(dataset: Dataset) -> bytes:
    """Encode the elements of a dataset in explicit little endian."""
    from pydicom import dcmwrite
    from pydicom.filebase import DicomBytesIO

    buffer = DicomBytesIO()
    dcmwrite(buffer, dataset, implicit_vr=False, little_endian=True)
    return bytes(buffer.getvalue())
