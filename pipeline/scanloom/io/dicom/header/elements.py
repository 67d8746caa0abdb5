"""`Elements`: the few attributes of a file that are used, as unconverted bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from scanloom.io.dicom import tags
from scanloom.io.dicom.slice_attributes import KEPT_ATTRIBUTE_TAGS

_PRIVATE_ELEMENTS = {
    tag & 0xFFFF00FF | block << 8: tag
    for tag in tags.PRIVATE_CREATORS
    for block in range(0x10, 0x100)
}
"""Private attributes that are used, by their tag in each block that a creator may reserve."""
PRIVATE_TAGS = frozenset(_PRIVATE_ELEMENTS) | {
    tag & 0xFFFF0000 | block for tag in tags.PRIVATE_CREATORS for block in range(0x10, 0x100)
}
"""Tags of these elements and of the creators in their groups."""
MODALITY_LUT_PRESENT = -2
"""Stand-in for the tag of ModalityLUTSequence: only whether it has a value is kept."""

CONTRADICTING_ELEMENT, FLOAT_PIXELS = 1, 2
"""Bits of `Elements.faults`: an element of `KEPT_TAGS` occurs twice with different values; the
pixels are FloatPixelData or DoubleFloatPixelData."""

_FILE_HEAD = struct.Struct("<BQQ")
"""Flags, offset and length of the pixels; it precedes the values of one file."""
_SHARED_HEAD = struct.Struct("<I?")
"""Length of the transfer syntax UID and `little`; it precedes the shared values."""
_COUNT = struct.Struct("<H")

KEPT_TAGS = KEPT_ATTRIBUTE_TAGS | frozenset(
    (
        *(tags.SOP_CLASS_UID, tags.SOP_INSTANCE_UID, tags.FRAME_OF_REFERENCE_UID),
        *(tags.STUDY_INSTANCE_UID, tags.SERIES_INSTANCE_UID, tags.SERIES_TIME, tags.SERIES_TYPE),
        *(tags.PATIENT_NAME, tags.PATIENT_ID, tags.PATIENT_BIRTH_DATE, tags.BODY_PART_EXAMINED),
        *(tags.MR_ACQUISITION_TYPE, tags.MULTIENERGY_CT_ACQUISITION, tags.BURNED_IN_ANNOTATION),
        *(tags.GE_PULSE_SEQUENCE_NAME, tags.GE_USER_DATA_12),
        *(tags.IMAGE_POSITION_PATIENT, tags.IMAGE_ORIENTATION_PATIENT, tags.PIXEL_SPACING),
        *(tags.SPACING_BETWEEN_SLICES, tags.GANTRY_DETECTOR_TILT),
        *(tags.SAMPLES_PER_PIXEL, tags.NUMBER_OF_FRAMES, tags.ROWS, tags.COLUMNS),
        *(tags.BITS_ALLOCATED, tags.BITS_STORED, tags.HIGH_BIT, tags.PIXEL_REPRESENTATION),
        *(tags.RESCALE_INTERCEPT, tags.RESCALE_SLOPE, tags.RESCALE_TYPE),
    )
)
"""Tags of the data set whose values are kept: those of `SLICE_ATTRIBUTES`, and what geometry,
values and lists need."""
PER_SLICE_TAGS = frozenset(
    (
        *(tags.SOP_INSTANCE_UID, tags.INSTANCE_NUMBER, tags.IMAGE_POSITION_PATIENT),
        *(tags.ACQUISITION_NUMBER, tags.TEMPORAL_POSITION_IDENTIFIER, tags.TRIGGER_TIME),
        *(tags.ACQUISITION_DATE, tags.ACQUISITION_TIME, tags.ACQUISITION_DATE_TIME),
        *(tags.CONTENT_DATE, tags.CONTENT_TIME, tags.ECHO_TIME, tags.ECHO_NUMBERS),
        *(tags.DIFFUSION_B_VALUE, tags.DIFFUSION_GRADIENT_ORIENTATION),
        *(tags.IMAGE_COMMENTS, tags.DERIVATION_DESCRIPTION),
    )
)
"""Tags whose values usually differ between the slices or volumes of a series."""
PER_SERIES_TAGS = (tags.MEDIA_STORAGE_SOP_CLASS_UID, *sorted(KEPT_TAGS - PER_SLICE_TAGS))
"""All other tags, whose values are usually the same in all files of a series."""


class PixelDataLocation(NamedTuple):
    """Location of the value of PixelData in a file; `length` is None for encapsulated pixels."""

    offset: int
    length: int | None


class SharedElements:
    """Values that the files of a series share: one object for equal values, see `intern_shared`.

    Parameters
    ----------
    syntax : str
        Transfer syntax UID, inferred from the encoding if the file has no UID.
    little : bool
        Whether binary values are little endian.
    values : mapping of int to bytes
        Values by tag of `PER_SERIES_TAGS`, with their padding; absent attributes are left out.
    """

    def __init__(self, syntax: str, little: bool, values: Mapping[int, bytes]) -> None:
        self.syntax, self.little, self.values = syntax, little, values

    @cached_property
    def packed(self) -> bytes:
        """Encode syntax, byte order and values as bytes."""
        syntax = self.syntax.encode("utf-8", "replace")
        return _SHARED_HEAD.pack(len(syntax), self.little) + syntax + _pack(self.values)


@lru_cache(1024)
def intern_shared(syntax: str, little: bool, values: tuple[bytes | None, ...]) -> SharedElements:
    """Return the one object for these values, given in the order of `PER_SERIES_TAGS`."""
    pairs = zip(PER_SERIES_TAGS, values, strict=True)
    return SharedElements(syntax, little, {tag: value for tag, value in pairs if value is not None})


class EncodedElements(NamedTuple):
    """`Elements` as bytes: values that a file shares with others, and its own."""

    common: bytes
    own: bytes


class Elements(NamedTuple):
    """Attributes of one file that are used, unconverted.

    Parameters
    ----------
    common : SharedElements
        Values that the file shares with most files of its series, and its encoding.
    own : mapping of int to bytes
        Values by tag of `PER_SLICE_TAGS`, with their padding; absent attributes are left out.
    lookup_table : bool
        Whether ModalityLUTSequence has a value.
    pixels : PixelDataLocation or None
        Location of the pixels; None if PixelData is missing, or the file ends before it.
    gzipped : bool
        Whether the file is compressed by gzip.
    faults : int
        Sum of `CONTRADICTING_ELEMENT` and `FLOAT_PIXELS`, as they apply; the whole series is
        refused for them.
    """

    common: SharedElements
    own: Mapping[int, bytes]
    lookup_table: bool
    pixels: PixelDataLocation | None
    gzipped: bool = False
    faults: int = 0

    @property
    def syntax(self) -> str:
        """Transfer syntax UID, inferred from the encoding if the file has no UID."""
        return self.common.syntax

    @property
    def little(self) -> bool:
        """Whether binary values are little endian."""
        return self.common.little

    def raw(self, tag: int) -> bytes:
        """Return the bytes of an element; empty if it is absent."""
        return (self.own if tag in PER_SLICE_TAGS else self.common.values).get(tag, b"")

    def text(self, tag: int) -> str:
        """Return a value that should be ASCII, without padding."""
        return self.raw(tag).decode("ascii", "replace").strip(" \0")

    def number(self, tag: int, default: int, *, signed: bool = False) -> int:
        """Return a value of two bytes (US, SS); `default` if it is absent or of another length."""
        raw = self.raw(tag)
        if len(raw) != 2:
            return default
        return int.from_bytes(raw, "little" if self.little else "big", signed=signed)

    def packed(self) -> EncodedElements:
        """Encode as bytes, for another process or the index; `decode_elements` decodes them."""
        flags, offset, length = self.lookup_table | self.gzipped << 1 | self.faults << 4, 0, 0
        if self.pixels is not None:
            offset, length = self.pixels.offset, self.pixels.length or 0
            flags |= 4 | (self.pixels.length is not None) << 3
        return EncodedElements(
            self.common.packed, _FILE_HEAD.pack(flags, offset, length) + _pack(self.own)
        )


def elements_from_values(
    values: dict[int, bytes],
    syntax: str,
    *,
    little: bool,
    pixels: PixelDataLocation | None,
    faults: int = 0,
) -> Elements:
    """Build `Elements` from values by tag.

    Parameters
    ----------
    values : dict of int to bytes
        Values of `KEPT_TAGS` and `PRIVATE_TAGS`, MediaStorageSOPClassUID and
        `MODALITY_LUT_PRESENT`; absent attributes are left out.
    syntax : str
        Transfer syntax UID.
    little : bool
        Whether binary values are little endian.
    pixels : PixelDataLocation or None
        Location of the pixels.
    faults : int
        As in `Elements`.
    """
    values, contradicting = resolve_private_blocks(values)
    if contradicting:
        faults |= CONTRADICTING_ELEMENT
    own = {tag: value for tag, value in values.items() if tag in PER_SLICE_TAGS}
    common = intern_shared(syntax, little, tuple(map(values.get, PER_SERIES_TAGS)))
    lookup_table = bool(values.get(MODALITY_LUT_PRESENT))
    return Elements(common, own, lookup_table, pixels, faults=faults)


def resolve_private_blocks(values: dict[int, bytes]) -> tuple[dict[int, bytes], bool]:
    """Move private attributes of a data set or item to block 0x10 from the block of their creator.

    Elements of other creators are removed. Block 0x10 without a creator is taken for the
    manufacturer's: some anonymisers remove creators, and nearly all scanners reserve this block.

    Returns
    -------
    resolved : dict of int to bytes
        The values, with each attribute of `tags.PRIVATE_CREATORS` at its tag there.
    contradicting : bool
        Whether a creator reserved several blocks, in which an attribute has different values.
    """
    if not (elements := _PRIVATE_ELEMENTS.keys() & values.keys()):
        return values, False
    resolved: dict[int, bytes] = {}
    without_creator: dict[int, bytes] = {}
    contradicting = False
    for tag in sorted(elements):
        attribute, value = _PRIVATE_ELEMENTS[tag], values[tag]
        creator = values.get(tag & 0xFFFF0000 | tag >> 8 & 0xFF, b"").strip(b" \0").upper()
        if creator == tags.PRIVATE_CREATORS[attribute]:
            contradicting |= resolved.setdefault(attribute, value) != value
        elif not creator and tag == attribute:
            without_creator[tag] = value
    remaining = {tag: value for tag, value in values.items() if tag not in elements}
    return remaining | without_creator | resolved, contradicting


def decode_elements(packed: EncodedElements) -> Elements:
    """Decode the result of `Elements.packed`.

    Raises
    ------
    ValueError, struct.error
        If the bytes are not such a result.
    """
    flags, offset, length = _FILE_HEAD.unpack_from(packed.own)
    pixels = PixelDataLocation(offset, length if flags & 8 else None) if flags & 4 else None
    common, own = _unpack_common(packed.common), _unpack(packed.own[_FILE_HEAD.size :])
    return Elements(common, own, bool(flags & 1), pixels, bool(flags & 2), flags >> 4)


@lru_cache(1024)
def _unpack_common(packed: bytes) -> SharedElements:
    size, little = _SHARED_HEAD.unpack_from(packed)
    end = _SHARED_HEAD.size + size
    values = _unpack(packed[end:])
    return intern_shared(
        packed[_SHARED_HEAD.size : end].decode(), little, tuple(map(values.get, PER_SERIES_TAGS))
    )


def _pack(values: Mapping[int, bytes]) -> bytes:
    """Encode the number of values, their tags, their lengths, and the values."""
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
        raise ValueError(f"encoded elements have {len(packed)} bytes instead of {start}")
    return values
