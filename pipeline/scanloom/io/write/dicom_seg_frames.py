"""Encodes the frames of a DICOM SEG directly from label maps.

highdicom would create a mask for every frame and an object for every element of its functional
groups. Here it creates one frame of a single pixel per slice. The functional groups are encoded
once per slice; those of the segments of a slice differ in two numbers only.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pydicom import Dataset

_ITEM = b"\xfe\xff\x00\xe0"
_UNDEFINED = b"\xff\xff\xff\xff"
_SEQUENCE_END = b"\xfe\xff\xdd\xe0\x00\x00\x00\x00"
_INDEX_VALUES = struct.pack("<HH2s", 0x0020, 0x9157, b"UL")
"""Tag and VR of DimensionIndexValues. The UIDs and codes before it cannot contain these bytes."""

Planes = NDArray[Any]
"""Labels (K, J, I): slices of rows and columns."""


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


@dataclass(frozen=True, eq=False)
class SegFile:
    """A DICOM SEG: a dataset without frames, and the frames as encoded bytes.

    Parameters
    ----------
    dataset : Dataset
        All elements but PerFrameFunctionalGroupsSequence and PixelData.
    groups : bytes
        The items of PerFrameFunctionalGroupsSequence, explicit little endian.
    pixels : bytes or memoryview
        The value of PixelData.
    """

    dataset: Dataset
    groups: bytes
    pixels: bytes | memoryview

    @property
    def tail(self) -> Iterator[bytes | memoryview]:
        """The two encoded elements at the end of the file (PS3.5 7.1.2, A.4)."""
        yield struct.pack("<HH2s2xI", 0x5200, 0x9230, b"SQ", len(self.groups))
        yield self.groups
        encapsulated = self.dataset.file_meta.TransferSyntaxUID.is_encapsulated
        length = _UNDEFINED if encapsulated else struct.pack("<I", len(self.pixels))
        yield struct.pack("<HH2s2x", 0x7FE0, 0x0010, b"OB") + length
        yield self.pixels
        if encapsulated:
            yield _SEQUENCE_END

    def save(self, file: BinaryIO) -> None:
        """Write the file."""
        from pydicom import dcmwrite

        dcmwrite(file, self.dataset, enforce_file_format=True)
        for chunk in self.tail:
            file.write(chunk)


def binary_frames(frames: Sequence[SegFrame]) -> memoryview:
    """Return the frames of a BINARY, one bit per pixel (PS3.5 8.1.1), padded to an even length."""
    rows, columns = frames[0].planes.shape[1:]
    size = rows * columns
    length = -(-size * len(frames) // 8)
    packed = np.zeros(length + length % 2, np.uint8)
    together = 8 // math.gcd(size, 8)  # as few frames as fill whole bytes
    masks = np.empty((together, rows, columns), np.bool_)
    # Slice by slice: the labels of a slice stay in the processor's cache for all segments
    for first in sorted(range(0, len(frames), together), key=lambda n: frames[n].slice):
        batch = frames[first : first + together]
        for frame, mask in zip(batch, masks, strict=False):
            np.equal(frame.planes[frame.slice], frame.number, out=mask)
        bits = np.packbits(masks[: len(batch)], bitorder="little")
        offset = first * size // 8
        packed[offset : offset + bits.size] = bits
    return memoryview(packed)


def rle_frames(frames: Sequence[SegFrame]) -> bytes:
    """Return the frames of a LABELMAP, run-length encoded and encapsulated (PS3.5 A.4, G)."""
    from highdicom.frame import encode_frame
    from pydicom.encaps import encapsulate
    from pydicom.uid import RLELossless

    bits = 8 * frames[0].planes.itemsize
    encoded = [
        encode_frame(
            np.ascontiguousarray(frame.planes[frame.slice]),
            transfer_syntax_uid=RLELossless,
            photometric_interpretation="MONOCHROME2",
            bits_allocated=bits,
            bits_stored=bits,
        )
        for frame in frames
    ]
    return bytes(encapsulate(encoded))


def functional_groups(frames: Sequence[SegFrame], templates: dict[int, Dataset]) -> bytes:
    """Return the items of PerFrameFunctionalGroupsSequence, one per frame.

    Parameters
    ----------
    frames : sequence of Frame
        In their order in the file.
    templates : dict of int to Dataset
        For each slice, the item of its frame of segment 1.
    """
    encoded = {k: _Template.from_item(item) for k, item in templates.items()}
    return b"".join(encoded[frame.slice].item(frame.segment) for frame in frames)


@dataclass(frozen=True)
class _Template:
    """The encoded item of a slice, in which the segment number can be replaced.

    Parameters
    ----------
    content : bytes
        The item's elements, explicit little endian.
    index : int
        Offset of the first dimension index, which is the segment number (uint32).
    identified : bool
        Whether the item ends with a ReferencedSegmentNumber (uint16); false in a LABELMAP.
    """

    content: bytes
    index: int
    identified: bool

    @classmethod
    def from_item(cls, item: Dataset) -> _Template:
        content = encode_dataset(item)
        index = content.index(_INDEX_VALUES) + len(_INDEX_VALUES) + 2  # 2-byte length
        return cls(content, index, "SegmentIdentificationSequence" in item)

    def item(self, segment: int) -> bytes:
        """Return the item for that segment number."""
        content = bytearray(self.content)
        if self.identified:
            struct.pack_into("<I", content, self.index, segment)
            struct.pack_into("<H", content, len(content) - 2, segment)
        return _ITEM + struct.pack("<I", len(content)) + content


def encode_dataset(dataset: Dataset) -> bytes:
    """Encode the elements of a dataset in explicit little endian."""
    from pydicom import dcmwrite
    from pydicom.filebase import DicomBytesIO

    buffer = DicomBytesIO()
    dcmwrite(buffer, dataset, implicit_vr=False, little_endian=True)
    return bytes(buffer.getvalue())
