"""The frames of a DICOM SEG, encoded straight from label maps.

highdicom would make a mask of every frame and an object of every element beside it. Here it makes
one frame a slice, of a single pixel; what stands beside a frame (its functional groups) is written
out once a slice and differs between the segments of a slice in two numbers only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pydicom import Dataset

_TOGETHER = 8
"""Frames packed at a time: so many end with a whole byte, whatever their size."""
_ITEM = b"\xfe\xff\x00\xe0"
_UNDEFINED = b"\xff\xff\xff\xff"
_SEQUENCE_END = b"\xfe\xff\xdd\xe0\x00\x00\x00\x00"
_INDEX_VALUES = struct.pack("<HH2s", 0x0020, 0x9157, b"UL")
"""How DimensionIndexValues begin: nothing before them, UIDs and codes, can hold these bytes."""

Planes = NDArray[Any]
"""Labels as slices of rows and columns: (K, J, I)."""


@dataclass(frozen=True, eq=False)
class Frame:
    """One frame to be.

    Parameters
    ----------
    planes : (K, J, I) array
        Labels.
    number : int
        Of the structure in them; 0 in a LABELMAP, whose frames hold all.
    segment : int
        SegmentNumber in the file.
    slice : int
        Which slice of the scan.
    """

    planes: Planes
    number: int
    segment: int
    slice: int


@dataclass(frozen=True, eq=False)
class SegFile:
    """A DICOM SEG: everything up to the frames, and these as the bytes that stand in the file.

    Parameters
    ----------
    dataset : Dataset
        All elements but the two below.
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
        """The two elements as they stand at the end of the file (PS3.5 7.1.2, A.4)."""
        yield struct.pack("<HH2s2xI", 0x5200, 0x9230, b"SQ", len(self.groups))
        yield self.groups
        encapsulated = self.dataset.file_meta.TransferSyntaxUID.is_encapsulated
        length = _UNDEFINED if encapsulated else struct.pack("<I", len(self.pixels))
        yield struct.pack("<HH2s2x", 0x7FE0, 0x0010, b"OB") + length
        yield self.pixels
        if encapsulated:
            yield _SEQUENCE_END

    def save(self, file: BinaryIO) -> None:
        """Write the whole file."""
        from pydicom import dcmwrite

        dcmwrite(file, self.dataset, enforce_file_format=True)
        for part in self.tail:
            file.write(part)


def packed_bits(frames: Sequence[Frame]) -> memoryview:
    """Return the frames of a BINARY, a bit a pixel (PS3.5 8.1.1), of an even number of bytes."""
    rows, columns = frames[0].planes.shape[1:]
    length = -(-rows * columns * len(frames) // 8)
    packed = np.zeros(length + length % 2, np.uint8)
    masks = np.empty((_TOGETHER, rows, columns), np.bool_)
    at = 0
    for first in range(0, len(frames), _TOGETHER):
        some = frames[first : first + _TOGETHER]
        for frame, mask in zip(some, masks, strict=False):
            np.equal(frame.planes[frame.slice], frame.number, out=mask)
        bits = np.packbits(masks[: len(some)], bitorder="little")
        packed[at : at + bits.size] = bits
        at += bits.size
    return memoryview(packed)


def encoded_runs(frames: Sequence[Frame]) -> bytes:
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


def functional_groups(frames: Sequence[Frame], templates: dict[int, Dataset]) -> bytes:
    """Return the items of PerFrameFunctionalGroupsSequence, one a frame.

    Parameters
    ----------
    frames : sequence of Frame
        In their order in the file.
    templates : dict of int to Dataset
        For each slice, the item of its frame of segment 1.
    """
    written = {k: _Template.of(item) for k, item in templates.items()}
    return b"".join(written[frame.slice].item(frame.segment) for frame in frames)


@dataclass(frozen=True)
class _Template:
    """The item of a slice, written out.

    The segment's number stands in it twice: as the first dimension index, at `index`, and at the
    very end, where segments are `identified` (not in a LABELMAP).
    """

    content: bytes
    index: int
    identified: bool

    @classmethod
    def of(cls, item: Dataset) -> _Template:
        content = written_out(item)
        index = content.index(_INDEX_VALUES) + len(_INDEX_VALUES) + 2  # two bytes of length
        return cls(content, index, "SegmentIdentificationSequence" in item)

    def item(self, segment: int) -> bytes:
        content = bytearray(self.content)
        if self.identified:
            struct.pack_into("<I", content, self.index, segment)
            struct.pack_into("<H", content, len(content) - 2, segment)
        return _ITEM + struct.pack("<I", len(content)) + content


def written_out(dataset: Dataset) -> bytes:
    """Return the elements of a dataset in explicit little endian."""
    from pydicom import dcmwrite
    from pydicom.filebase import DicomBytesIO

    buffer = DicomBytesIO()
    dcmwrite(buffer, dataset, implicit_vr=False, little_endian=True)
    return bytes(buffer.getvalue())
