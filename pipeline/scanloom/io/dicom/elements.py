"""`Elements`: the bytes of the few attributes that decide, as they stand in a file."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

SYNTAX = 0x00020010
MEDIA_CLASS = 0x00020002
LOOKUP_TABLE = 0x00283000
LOOKUP = -2
"""What is kept of it has this tag: it is no value, its length alone counts."""

TWICE, FLOATS = 1, 2
"""Bits of `Elements.faults`: an element of `TAGS` stands there twice, with different values; the
pixels are FloatPixelData or DoubleFloatPixelData."""

_HEAD, _COMMON = struct.Struct("<BQQ"), struct.Struct("<I?")
_COUNT = struct.Struct("<H")

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
        0x00080070,  # Manufacturer
        0x0008103E,  # SeriesDescription
        0x00089208,  # ComplexImageComponent
        0x00089209,  # AcquisitionContrast
        0x00100010,  # PatientName
        0x00100020,  # PatientID
        0x00100030,  # PatientBirthDate
        0x00100040,  # PatientSex
        0x00180010,  # ContrastBolusAgent
        0x00180015,  # BodyPartExamined
        0x00180020,  # ScanningSequence
        0x00180021,  # SequenceVariant
        0x00180022,  # ScanOptions
        0x00180024,  # SequenceName
        0x00180050,  # SliceThickness
        0x00180060,  # KVP
        0x00180080,  # RepetitionTime
        0x00180081,  # EchoTime
        0x00180082,  # InversionTime
        0x00180086,  # EchoNumbers
        0x00180088,  # SpacingBetweenSlices
        0x00181030,  # ProtocolName
        0x00181060,  # TriggerTime
        0x00181120,  # GantryDetectorTilt
        0x00181160,  # FilterType
        0x00181210,  # ConvolutionKernel
        0x00181250,  # ReceiveCoilName
        0x00181314,  # FlipAngle
        0x00185100,  # PatientPosition
        0x00189079,  # InversionTimes
        0x00189082,  # EffectiveEchoTime
        0x00189087,  # DiffusionBValue
        0x00189089,  # DiffusionGradientOrientation
        0x00189361,  # MultienergyCTAcquisition
        0x0019100C,  # Siemens: b-value
        0x0019100E,  # Siemens: diffusion direction
        0x0019109C,  # GE: pulse sequence
        0x001910B3,  # GE: user data 12
        0x001910BB,  # GE: diffusion direction, x
        0x001910BC,  # GE: diffusion direction, y
        0x001910BD,  # GE: diffusion direction, z
        0x0020000D,  # StudyInstanceUID
        0x0020000E,  # SeriesInstanceUID
        0x00200011,  # SeriesNumber
        0x00200012,  # AcquisitionNumber
        0x00200013,  # InstanceNumber
        0x00200032,  # ImagePositionPatient
        0x00200037,  # ImageOrientationPatient
        0x00200052,  # FrameOfReferenceUID
        0x00200100,  # TemporalPositionIdentifier
        0x00209241,  # NominalPercentageOfCardiacPhase
        0x00280002,  # SamplesPerPixel
        0x00280004,  # PhotometricInterpretation
        0x00280008,  # NumberOfFrames
        0x00280010,  # Rows
        0x00280011,  # Columns
        0x00280030,  # PixelSpacing
        0x00280051,  # CorrectedImage
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
        0x0043102F,  # GE: component of a complex image
        0x00431039,  # GE: b-value
        0x0051100F,  # Siemens: coil elements
        0x00511016,  # Siemens: image type
        0x00651009,  # UIH: b-value
        0x00541000,  # SeriesType
        0x00541001,  # Units
        0x00541006,  # SUVType
        0x00541102,  # DecayCorrection
        0x00541103,  # ReconstructionMethod
        0x20011003,  # Philips: b-value
        0x20051011,  # Philips: image type
        0x200510B0,  # Philips: diffusion direction, right to left
        0x200510B1,  # Philips: diffusion direction, front to back
    )
)
"""What is kept of a data set; of the meta header SYNTAX and MEDIA_CLASS."""
CHANGING = frozenset(
    (
        0x00080018,  # SOPInstanceUID
        0x00080022,  # AcquisitionDate
        0x00080023,  # ContentDate
        0x0008002A,  # AcquisitionDateTime
        0x00080032,  # AcquisitionTime
        0x00080033,  # ContentTime
        0x00180081,  # EchoTime
        0x00180086,  # EchoNumbers
        0x00181060,  # TriggerTime
        0x00189087,  # DiffusionBValue
        0x00189089,  # DiffusionGradientOrientation
        0x00200012,  # AcquisitionNumber
        0x00200013,  # InstanceNumber
        0x00200032,  # ImagePositionPatient
        0x00200100,  # TemporalPositionIdentifier
    )
)
"""Of these, what mostly differs between slices of a series, or between its volumes."""
STEADY = (MEDIA_CLASS, *sorted(TAGS - CHANGING))
"""All others: mostly the same in all files of a series."""


class PixelPlace(NamedTuple):
    """Where the value of PixelData lies in the file; `length` is None where it is encapsulated."""

    offset: int
    length: int | None


class Common:
    """Values that files of a series have in common: one object for equal ones, see `common_of`.

    Parameters
    ----------
    syntax : str
        Transfer syntax UID; that of the encoding where a file names none.
    little : bool
        Whether binary values are little endian.
    values : mapping of int to bytes
        Those of `STEADY` that are there, with their padding.
    """

    def __init__(self, syntax: str, little: bool, values: Mapping[int, bytes]) -> None:
        self.syntax, self.little, self.values = syntax, little, values

    @cached_property
    def packed(self) -> bytes:
        """All of it as bytes."""
        syntax = self.syntax.encode("utf-8", "replace")
        return _COMMON.pack(len(syntax), self.little) + syntax + _pack(self.values)


@lru_cache(1024)
def common_of(syntax: str, little: bool, found: tuple[bytes | None, ...]) -> Common:
    """Return the object of these values, in the order of `STEADY`."""
    pairs = zip(STEADY, found, strict=True)
    return Common(syntax, little, {tag: value for tag, value in pairs if value is not None})


class Packed(NamedTuple):
    """`Elements` as bytes: what a file has in common with others, one object for many; the rest."""

    common: bytes
    own: bytes


class Elements(NamedTuple):
    """What one file says, unconverted.

    Parameters
    ----------
    common : Common
        What it shares with most files of its series, and how it is encoded.
    own : mapping of int to bytes
        Values of `CHANGING`, where they are there, with their padding.
    lookup_table : bool
        Whether ModalityLUTSequence holds anything.
    pixels : PixelPlace or None
        None where there is no PixelData, or the file ends before it.
    gzipped : bool
        Whether gzip packed the file.
    faults : int
        Sum of `TWICE` and `FLOATS`, as they apply; the whole series is refused for them.
    """

    common: Common
    own: Mapping[int, bytes]
    lookup_table: bool
    pixels: PixelPlace | None
    gzipped: bool = False
    faults: int = 0

    @property
    def syntax(self) -> str:
        """Transfer syntax UID; that of the encoding where the file names none."""
        return self.common.syntax

    @property
    def little(self) -> bool:
        """Whether binary values are little endian."""
        return self.common.little

    def raw(self, tag: int) -> bytes:
        """Return the bytes of an element, empty where it is absent."""
        return (self.own if tag in CHANGING else self.common.values).get(tag, b"")

    def text(self, tag: int) -> str:
        """Return a value that should be ASCII, without padding."""
        return self.raw(tag).decode("ascii", "replace").strip(" \0")

    def number(self, tag: int, default: int, *, signed: bool = False) -> int:
        """Return a value of two bytes (US, SS); `default` where it is absent or has others."""
        raw = self.raw(tag)
        if len(raw) != 2:
            return default
        return int.from_bytes(raw, "little" if self.little else "big", signed=signed)

    def packed(self) -> Packed:
        """Return all of it as bytes, for another process or the index; see `unpack_elements`."""
        flags, offset, length = self.lookup_table | self.gzipped << 1 | self.faults << 4, 0, 0
        if self.pixels is not None:
            offset, length = self.pixels.offset, self.pixels.length or 0
            flags |= 4 | (self.pixels.length is not None) << 3
        return Packed(self.common.packed, _HEAD.pack(flags, offset, length) + _pack(self.own))


def elements_of(
    values: Mapping[int, bytes], syntax: str, *, little: bool, pixels: PixelPlace | None
) -> Elements:
    """Return what a file says whose values of `TAGS`, MEDIA_CLASS and LOOKUP these are."""
    own = {tag: value for tag, value in values.items() if tag in CHANGING}
    common = common_of(syntax, little, tuple(map(values.get, STEADY)))
    return Elements(common, own, bool(values.get(LOOKUP)), pixels)


def unpack_elements(packed: Packed) -> Elements:
    """Return what `Elements.packed` was made of.

    Raises
    ------
    ValueError, struct.error
        If the bytes are none of its.
    """
    flags, offset, length = _HEAD.unpack_from(packed.own)
    pixels = PixelPlace(offset, length if flags & 8 else None) if flags & 4 else None
    common, own = _unpack_common(packed.common), _unpack(packed.own[_HEAD.size :])
    return Elements(common, own, bool(flags & 1), pixels, bool(flags & 2), flags >> 4)


@lru_cache(1024)
def _unpack_common(packed: bytes) -> Common:
    size, little = _COMMON.unpack_from(packed)
    end = _COMMON.size + size
    values = _unpack(packed[end:])
    return common_of(packed[_COMMON.size : end].decode(), little, tuple(map(values.get, STEADY)))


def _pack(values: Mapping[int, bytes]) -> bytes:
    """Return how many values there are, their tags, their lengths, and themselves."""
    numbers = struct.pack(f"<H{2 * len(values)}I", len(values), *values, *map(len, values.values()))
    return b"".join((numbers, *values.values()))


def _unpack(packed: bytes) -> dict[int, bytes]:
    (count,) = _COUNT.unpack_from(packed)
    numbers: Sequence[int] = struct.unpack_from(f"<{2 * count}I", packed, _COUNT.size)
    start = _COUNT.size + 8 * count
    values = {}
    for tag, size in zip(numbers[:count], numbers[count:], strict=True):
        values[tag] = packed[start : start + size]
        start += size
    if start != len(packed):
        raise ValueError(f"{len(packed)} bytes, not {start}")
    return values
