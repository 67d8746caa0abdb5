"""`Slice`: one plane of a scan, from a single-frame file or a frame of a multi-frame file."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from scanloom.io.dicom.header.elements import PER_SLICE_TAGS
from scanloom.io.dicom.header.header import Header, parsing
from scanloom.io.dicom.slice_attributes import (
    PHASE_ATTRIBUTES,
    SLICE_ATTRIBUTES,
    Rule,
    SliceAttribute,
    attributes_with,
)

_MAX_VALUE_BYTES = 256
"""Longest value that is compared to distinguish volumes."""
_MAX_SEQUENCE_DEPTH = 4
"""Depth of nested sequences whose values are collected."""
_DOUBLES = ("DiffusionBValue", "DiffusionGradientOrientation")
"""Attributes stored as doubles (FD); the others are text."""


@dataclass(frozen=True)
class Tile:
    """Position of a slice within a frame that holds several: first row and column, and size."""

    top: int
    left: int
    rows: int
    columns: int


@dataclass(frozen=True, eq=False)
class Slice:
    """One plane with its attributes, from the file's header or the frame's functional groups.

    Parameters
    ----------
    header : Header
        Header of the file; pixel format and compression are the same for all its frames.
    frame : int
        Frame number in the file, from 0.
    position, orientation, spacing : tuple of float or None
        As in `Header`, but of this plane.
    slope, intercept : float
        Rescale from stored sample to value.
    rescaled : str or None
        Normalised RescaleType, see `normalized_rescale_type`; None without a rescale.
    hounsfield : bool
        Whether a CT's rescale gives Hounsfield units.
    phase : mapping of str to str
        Attributes that may distinguish the volumes of a series, except InstanceNumber, by name.
        Numbers are decimal text; attributes without a value are absent. Slices with equal
        attributes may share the mapping.
    multiframe : bool
        Whether the SOP class of the file is a multi-frame class.
    tile : Tile or None
        The tile of the frame that is the slice; None if it is the whole frame.
    shared : object or None
        Token: slices with the same object here agree on size, orientation, spacing and frame of
        reference, among others. None if unknown.
    group : pydicom.Dataset or None
        The frame's own functional groups; None for a single-frame file.
    """

    header: Header
    frame: int
    position: tuple[float, ...] | None
    orientation: tuple[float, ...] | None
    spacing: tuple[float, ...] | None
    slope: float
    intercept: float
    rescaled: str | None
    hounsfield: bool
    phase: Mapping[str, str]
    multiframe: bool = False
    tile: Tile | None = None
    shared: object = None
    group: Any = None

    @cached_property
    def attributes(self) -> dict[tuple[int, ...], bytes]:
        """Raw values of the slice by path of tags, outermost sequence first; may identify people.

        Raises
        ------
        ScanError
            UNREADABLE or DAMAGED if the file was changed since its header was read.
        """
        dataset = self.header.read_dataset() if self.group is None else self.group
        with parsing("a header's sequences"):
            return flatten_elements(dataset)

    def phase_text(self, name: str) -> str:
        """Return an attribute of `phase`, or InstanceNumber; empty if it has no value."""
        if name == "InstanceNumber":
            return decode_text(self.header.phase[-1])
        return self.phase.get(name, "")

    def value_of(self, attribute: SliceAttribute) -> str:
        """Return an attribute as text, of the frame if it has one; empty if it has no value."""
        text = self.phase.get(attribute.name) if self.multiframe else None
        if not text:
            elements = self.header.elements
            raw = next((value for tag in attribute.tags if (value := elements.raw(tag))), b"")
            text = untyped_as_text(raw, little=elements.little)
        return "" if attribute.says_nothing(text) else text

    @property
    def rows(self) -> int:
        """Number of rows of the plane."""
        return self.tile.rows if self.tile else self.header.rows

    @property
    def columns(self) -> int:
        """Number of columns of the plane."""
        return self.tile.columns if self.tile else self.header.columns


def single_slice(header: Header) -> Slice:
    """Return the slice of a single-frame file."""
    return Slice(
        header=header,
        frame=0,
        position=header.position,
        orientation=header.orientation,
        spacing=header.spacing,
        slope=header.slope,
        intercept=header.intercept,
        rescaled=normalized_rescale_type(header.rescale_given, header.rescale_type),
        hounsfield=gives_hounsfield(header, header.rescale_given, header.rescale_type),
        phase=header_volume_attributes(header),
        shared=header.shared,
    )


def unique_by_shared(slices: Sequence[Slice]) -> Sequence[Slice]:
    """Return one slice for each distinct `Slice.shared`; all slices if any of them has none."""
    distinct = {id(s.shared): s for s in slices}
    return slices if id(None) in distinct else tuple(distinct.values())


def normalized_rescale_type(has_rescale: bool, rescale_type: str) -> str | None:
    """Return RescaleType, empty for HU and US, which some slices of a series may leave out."""
    return ("" if rescale_type in ("HU", "US") else rescale_type) if has_rescale else None


def gives_hounsfield(header: Header, has_rescale: bool, rescale_type: str) -> bool:
    """Whether a rescale with this RescaleType gives HU (DICOM PS3.3 C.8.2.1, C.11.1.1.2).

    A CT may leave RescaleType out if it is HU, except a multi-energy one, which has to name its
    type: HU also for monoenergetic images, HU_MOD, EDW, Z_EFF, MGML and others for derived ones.
    """
    return has_rescale and (rescale_type or ("" if header.multi_energy else "HU")) == "HU"


def header_volume_attributes(header: Header) -> Mapping[str, str]:
    """Return `Slice.phase` of a file without functional groups."""
    return _phase(header.image_type, header.phase[:-1], header.elements.little)


@lru_cache(256)
def _phase(
    image_type: tuple[str, ...], values: tuple[bytes, ...], little: bool
) -> Mapping[str, str]:
    phase = {"ImageType": "\\".join(image_type)}
    for name, raw in zip(PHASE_ATTRIBUTES, values, strict=False):
        phase[name] = doubles_as_text(raw, little=little) if name in _DOUBLES else decode_text(raw)
    return {name: value for name, value in phase.items() if value}


def decode_text(raw: bytes) -> str:
    """Return ASCII text without padding."""
    return raw.decode("ascii", "replace").strip(" \0")


def flatten_elements(dataset: Any, depth: int = 0) -> dict[tuple[int, ...], bytes]:
    """Return the short raw values of a data set and of its nested sequences, by path of tags."""
    values: dict[tuple[int, ...], bytes] = {}
    for tag in dataset.keys():  # noqa: SIM118 iterating a Dataset converts each element
        element = dataset.get_item(tag)
        value = element.value
        if isinstance(value, bytes) and element.VR != "SQ":
            if len(value) <= _MAX_VALUE_BYTES:
                values[int(tag),] = value
        elif element.VR == "SQ" and depth < _MAX_SEQUENCE_DEPTH:
            for item in dataset[tag].value or ():
                for path, inner in flatten_elements(item, depth + 1).items():
                    path = (int(tag), *path)
                    values[path] = values.get(path, b"") + inner
    return values


def untyped_as_text(raw: bytes, *, little: bool) -> str:
    """Return a value of unknown VR as text: as ASCII, doubles, a float, an integer or hex."""
    # Text first: most values are, and numbers are rarely printable in all their bytes
    stripped = raw.rstrip(b" \0")
    if (stripped or not raw) and stripped.isascii() and stripped.decode("ascii").isprintable():
        return stripped.decode("ascii").strip()
    byte_order = "<" if little else ">"
    if len(raw) % 8 == 0:
        return doubles_as_text(raw, little=little)
    if len(raw) == 4:
        return f"{struct.unpack(f'{byte_order}f', raw)[0]:g}"
    return str(int.from_bytes(raw, "little" if little else "big")) if len(raw) == 2 else raw.hex()


def attribute_name(tag: int) -> str:
    """Return the DICOM keyword of a tag for messages; private and unknown ones have no name."""
    from pydicom.datadict import keyword_for_tag

    return str(keyword_for_tag(tag)) or "a private attribute"


def parse_decimal(text: str) -> float:
    """Return the number in a decimal string; ValueError for Python-only syntax such as 1_0."""
    if "_" in text:
        raise ValueError("not a decimal string")
    return float(text)


def finite_number(header: Header, tag: int) -> float | None:
    """Return the number of an attribute; None if it is missing, malformed or not finite."""
    try:
        number = parse_decimal(header.elements.text(tag))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def doubles_as_text(raw: bytes, *, little: bool) -> str:
    """Return doubles (FD) as backslash-separated decimal text; empty if the length is invalid."""
    if not raw or len(raw) % 8:
        return ""
    numbers = struct.unpack(f"{'<' if little else '>'}{len(raw) // 8}d", raw)
    return "\\".join(f"{n:.9g}" for n in numbers)


# --- agreement of slices on the meaning of their values -------------------------------------------

_MEANING, _RECORDED = attributes_with(Rule.MEANING), attributes_with(Rule.RECORDED)


def kinds_of(
    attribute: SliceAttribute, slices: Sequence[Slice], *, exact: bool = False
) -> dict[str, str]:
    """Return the kind of each value that slices have; see `SliceAttribute.kinds_of`."""
    values = {slice_.value_of(attribute) for slice_ in slices}
    return attribute.kinds_of(values, len(slices), exact=exact)


def first_disagreement(
    slices: Sequence[Slice], may_differ: Collection[SliceAttribute] = ()
) -> SliceAttribute | None:
    """Return the first attribute that changes the meaning of a value and differs between slices.

    None if slices agree on all of them but `may_differ`.
    """
    return next((a for a in differing(slices, _MEANING) if a not in may_differ), None)


def differ_in_records(slices: Sequence[Slice]) -> bool:
    """Return whether slices differ in an attribute that may matter, or some lack one.

    Such a difference does not prevent reading, but the user must know of it.
    """
    if differing(slices, _RECORDED):
        return True
    flagged = [attribute for attribute in _MEANING if attribute.absent == "flagged"]
    distinct = distinct_by(slices, flagged)
    return len(distinct) > 1 and any(
        len({slice_.value_of(attribute) == "" for slice_ in distinct}) > 1 for attribute in flagged
    )


def differing(
    slices: Sequence[Slice], attributes: Sequence[SliceAttribute] = SLICE_ATTRIBUTES
) -> list[SliceAttribute]:
    """Return the attributes of which slices have several kinds of values."""
    distinct = distinct_by(slices, attributes)
    if len(distinct) < 2:
        return []
    return [
        attribute
        for attribute in attributes
        if len(set(kinds_of(attribute, slices if attribute.counts else distinct).values())) > 1
    ]


def distinct_by(slices: Sequence[Slice], attributes: Sequence[SliceAttribute]) -> tuple[Slice, ...]:
    """Return a slice for each combination of values of attributes.

    Values that files of a series usually share are compared by the object that holds them all.
    """
    own = sorted(PER_SLICE_TAGS.intersection(tag for a in attributes for tag in a.tags))
    names = tuple(attribute.name for attribute in attributes)
    distinct: dict[object, Slice] = {}
    for slice_ in slices:
        header = slice_.header
        key: tuple[object, ...] = (id(header.shared), *map(header.elements.own.get, own))
        if slice_.multiframe:
            key = (*key, *map(slice_.phase.get, names))
        distinct.setdefault(key, slice_)
    return tuple(distinct.values())
