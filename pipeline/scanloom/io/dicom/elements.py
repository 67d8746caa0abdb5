"""`Elements`: the bytes of the few attributes that decide, as they stand in a file."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

SYNTAX = 0x00020010
MEDIA_CLASS = 0x00020002
LOOKUP_TABLE = 0x00283000

_HEAD = struct.Struct("<HBIQQ")

TAGS = frozenset(
    (
        0x00080008,  # ImageType
        0x00080016,  # SOPClassUID
        0x00080018,  # SOPInstanceUID
        0x00080020,  # StudyDate
        0x00080021,  # SeriesDate
        0x00080022,  # AcquisitionDate
        0x00080023,  # ContentDate
        0x0008002A,  # AcquisitionDateTime
        0x00080031,  # SeriesTime
        0x00080032,  # AcquisitionTime
        0x00080033,  # ContentTime
        0x00080060,  # Modality
        0x0008103E,  # SeriesDescription
        0x00100010,  # PatientName
        0x00100020,  # PatientID
        0x00100030,  # PatientBirthDate
        0x00180010,  # ContrastBolusAgent
        0x00180015,  # BodyPartExamined
        0x00180050,  # SliceThickness
        0x00180060,  # KVP
        0x00180081,  # EchoTime
        0x00180082,  # InversionTime
        0x00180086,  # EchoNumbers
        0x00180088,  # SpacingBetweenSlices
        0x00181060,  # TriggerTime
        0x00181120,  # GantryDetectorTilt
        0x00181210,  # ConvolutionKernel
        0x00181314,  # FlipAngle
        0x00189087,  # DiffusionBValue
        0x00189089,  # DiffusionGradientOrientation
        0x00189361,  # MultienergyCTAcquisition
        0x0019100C,  # Siemens: b-value
        0x0020000D,  # StudyInstanceUID
        0x0020000E,  # SeriesInstanceUID
        0x00200011,  # SeriesNumber
        0x00200012,  # AcquisitionNumber
        0x00200013,  # InstanceNumber
        0x00200032,  # ImagePositionPatient
        0x00200037,  # ImageOrientationPatient
        0x00200052,  # FrameOfReferenceUID
        0x00200100,  # TemporalPositionIdentifier
        0x00280002,  # SamplesPerPixel
        0x00280004,  # PhotometricInterpretation
        0x00280008,  # NumberOfFrames
        0x00280010,  # Rows
        0x00280011,  # Columns
        0x00280030,  # PixelSpacing
        0x00280100,  # BitsAllocated
        0x00280101,  # BitsStored
        0x00280102,  # HighBit
        0x00280103,  # PixelRepresentation
        0x00280120,  # PixelPaddingValue
        0x00280121,  # PixelPaddingRangeLimit
        0x00280301,  # BurnedInAnnotation
        0x00281052,  # RescaleIntercept
        0x00281053,  # RescaleSlope
        0x00281054,  # RescaleType
        0x00431039,  # GE: b-value
        0x20011003,  # Philips: b-value
    )
)
"""What is kept of a data set; of the meta header SYNTAX and MEDIA_CLASS."""


class PixelPlace(NamedTuple):
    """Where the value of PixelData lies in the file; `length` is None where it is encapsulated."""

    offset: int
    length: int | None


class Elements(NamedTuple):
    """What one file says, unconverted.

    Parameters
    ----------
    values : mapping of int to bytes
        Values of `TAGS` and MEDIA_CLASS, where they are there, with their padding.
    syntax : str
        Transfer syntax UID; that of the encoding where the file names none.
    little : bool
        Whether binary values are little endian.
    lookup_table : bool
        Whether ModalityLUTSequence holds anything.
    pixels : PixelPlace or None
        None where there is no PixelData, or the file ends before it.
    gzipped : bool
        Whether gzip packed the file.
    """

    values: Mapping[int, bytes]
    syntax: str
    little: bool
    lookup_table: bool
    pixels: PixelPlace | None
    gzipped: bool = False

    def raw(self, tag: int) -> bytes:
        """Return the bytes of an element, empty where it is absent."""
        return self.values.get(tag, b"")

    def text(self, tag: int) -> str:
        """Return a value that should be ASCII, without padding."""
        return self.values.get(tag, b"").decode("ascii", "replace").strip(" \0")

    def number(self, tag: int, default: int, *, signed: bool = False) -> int:
        """Return a value of two bytes (US, SS); `default` where it is absent or has others."""
        raw = self.values.get(tag, b"")
        if len(raw) != 2:
            return default
        return int.from_bytes(raw, "little" if self.little else "big", signed=signed)

    def packed(self) -> bytes:
        """Return all of it as bytes, for another process or the index; see `unpack_elements`."""
        place = self.pixels or PixelPlace(0, None)
        flags = self.little | self.lookup_table << 1 | (self.pixels is not None) << 2
        flags |= (place.length is not None) << 3 | self.gzipped << 4
        syntax, count = self.syntax.encode("utf-8", "replace"), len(self.values)
        lengths = map(len, self.values.values())
        head = _HEAD.pack(count, flags, len(syntax), place.offset, place.length or 0)
        numbers = struct.pack(f"<{2 * count}I", *self.values, *lengths)
        return b"".join((head, numbers, syntax, *self.values.values()))


def unpack_elements(packed: bytes) -> Elements:
    """Return what `Elements.packed` was made of.

    Raises
    ------
    ValueError, struct.error
        If the bytes are none of its.
    """
    count, flags, place, offset, length = _HEAD.unpack_from(packed)
    numbers = struct.unpack_from(f"<{2 * count}I", packed, _HEAD.size)
    start = _HEAD.size + 8 * count
    syntax = packed[start : start + place].decode()
    start += place
    values = {}
    for tag, size in zip(numbers[:count], numbers[count:], strict=True):
        values[tag] = packed[start : start + size]
        start += size
    if start != len(packed):
        raise ValueError(f"{len(packed)} bytes, not {start}")
    pixels = PixelPlace(offset, length if flags & 8 else None) if flags & 4 else None
    return Elements(values, syntax, bool(flags & 1), bool(flags & 2), pixels, bool(flags & 16))
