"""`Slice`: one plane of a scan, whether it has a file of its own or is a frame among others."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from scanloom.core import Reason, ScanError
from scanloom.io.dicom.headers import PHASE_TAGS, Header, quiet
from scanloom.io.dicom.odd_header import PARSE_ERRORS

LONGEST = 256
"""Bytes of a value that may tell volumes apart."""
DEEPEST = 4
"""Sequences in sequences that are looked into."""
_BINARY = ("DiffusionBValue", "DiffusionGradientOrientation")
"""Doubles (FD) in the file; the others are text."""


@dataclass(frozen=True)
class Tile:
    """The part of a frame that a slice is: its first row and column, and its size."""

    top: int
    left: int
    rows: int
    columns: int


@dataclass(frozen=True, eq=False)
class Slice:
    """One plane, and what its file or its functional groups say of it.

    Parameters
    ----------
    header : Header
        Of the file that it lies in: format and compression are those of all its frames.
    frame : int
        Which frame of the file, from 0.
    position, orientation, spacing : tuple of float or None
        As in `Header`, but of this plane.
    slope, intercept : float
        Stored sample to value.
    rescaled : str or None
        What a rescale gives, see `rescale_kind`; None where there is none.
    hounsfield : bool
        Whether a CT's rescale gives Hounsfield units.
    phase : mapping of str to str
        What may tell volumes of one series apart, by attribute, but for InstanceNumber; those
        without a value are absent. Numbers as decimal text. Slices that say the same may share it.
    multiframe : bool
        Whether the file is of a class that holds several frames.
    tile : Tile or None
        Which part of the frame it is; None for all of it.
    shared : object or None
        What slices have in common that have the same object here: size, directions, spacing and
        frame of reference among it. None where that is not known.
    group : pydicom.Dataset or None
        A frame's own functional groups; None for a file of one slice.
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
        """All that is said of it, by tags from the outermost sequence on; it may hold identity.

        Raises
        ------
        ScanError
            UNREADABLE or DAMAGED, if its file was changed since.
        """
        dataset = self.header.read_dataset() if self.group is None else self.group
        try:
            with quiet():
                return leaves(dataset)
        except (OSError, *PARSE_ERRORS) as exc:
            detail = f"a header's sequences can't be parsed ({type(exc).__name__})"
            raise ScanError(Reason.DAMAGED, detail) from exc

    def said(self, name: str) -> str:
        """Return what it says of an attribute of `phase`, or of InstanceNumber."""
        if name == "InstanceNumber":
            return plain_text(self.header.phase[-1])
        return self.phase.get(name, "")

    @property
    def rows(self) -> int:
        """Number of rows of the plane."""
        return self.tile.rows if self.tile else self.header.rows

    @property
    def columns(self) -> int:
        """Number of columns of the plane."""
        return self.tile.columns if self.tile else self.header.columns


def single_slice(header: Header) -> Slice:
    """Return the one slice of a file that holds one."""
    one = object.__new__(Slice)  # as with headers: there are as many
    one.__dict__.update(
        header=header,
        frame=0,
        position=header.position,
        orientation=header.orientation,
        spacing=header.spacing,
        slope=header.slope,
        intercept=header.intercept,
        rescaled=rescale_kind(header.rescale_given, header.rescale_type),
        hounsfield=in_hounsfield(header, header.rescale_given, header.rescale_type),
        phase=header_phase(header),
        multiframe=False,
        tile=None,
        shared=header.shared,
        group=None,
    )
    return one


def one_of_each(slices: Sequence[Slice]) -> Sequence[Slice]:
    """Return one of those that have all in common with others but their place and phase."""
    kinds = {id(one.shared): one for one in slices}
    return slices if id(None) in kinds else tuple(kinds.values())


def rescale_kind(given: bool, kind: str) -> str | None:
    """Return RescaleType, empty for its usual values, of which some slices may lack the word."""
    return ("" if kind in ("HU", "US") else kind) if given else None


def in_hounsfield(header: Header, given: bool, kind: str) -> bool:
    """Whether a rescale with this RescaleType gives HU (DICOM PS3.3 C.8.2.1.1.2)."""
    return given and kind in ("", "HU") and not header.multi_energy


def header_phase(header: Header) -> Mapping[str, str]:
    """Return what a file says of its phase, see `Slice`."""
    return _phase(header.image_type, header.phase[:-1], header.elements.little)


@lru_cache(256)
def _phase(
    image_type: tuple[str, ...], values: tuple[bytes, ...], little: bool
) -> Mapping[str, str]:
    phase = {"ImageType": "\\".join(image_type)}
    for name, raw in zip(PHASE_TAGS, values, strict=False):
        phase[name] = doubles(raw, little=little) if name in _BINARY else plain_text(raw)
    return {name: value for name, value in phase.items() if value}


def plain_text(raw: bytes) -> str:
    """Return ASCII text without padding."""
    return raw.decode("ascii", "replace").strip(" \0")


def leaves(dataset: Any, depth: int = 0) -> dict[tuple[int, ...], bytes]:
    """Return the short values of a data set and of the sequences in it, as they stand there."""
    found: dict[tuple[int, ...], bytes] = {}
    for tag in dataset.keys():  # noqa: SIM118 a data set gives elements, converted
        element = dataset.get_item(tag)
        value = element.value
        if isinstance(value, bytes) and element.VR != "SQ":
            if len(value) <= LONGEST:
                found[int(tag),] = value
        elif element.VR == "SQ" and depth < DEEPEST:
            for item in dataset[tag].value or ():
                for place, inner in leaves(item, depth + 1).items():
                    place = (int(tag), *place)
                    found[place] = found.get(place, b"") + inner
    return found


def as_text(raw: bytes, *, little: bool) -> str:
    """Return a value whose type nobody names as text: words, doubles, or a float or number."""
    text = raw.rstrip(b" \0")
    if (text or not raw) and text.isascii() and text.decode("ascii").isprintable():
        return text.decode("ascii").strip()
    order = "<" if little else ">"
    if len(raw) % 8 == 0:
        return doubles(raw, little=little)
    if len(raw) == 4:
        return f"{struct.unpack(f'{order}f', raw)[0]:g}"
    return str(int.from_bytes(raw, "little" if little else "big")) if len(raw) == 2 else raw.hex()


def keyword(tag: int) -> str:
    """Return the standard's name of an attribute."""
    from pydicom.datadict import keyword_for_tag

    return keyword_for_tag(tag) or "a private attribute"


def to_float(text: str) -> float:
    """Return a decimal string's number; ValueError for what Python alone takes for one (1_0)."""
    if "_" in text:
        raise ValueError("no decimal string")
    return float(text)


def doubles(raw: bytes, *, little: bool) -> str:
    """Return doubles (FD) as decimal text, joined by backslashes; of other lengths, nothing."""
    if not raw or len(raw) % 8:
        return ""
    numbers = struct.unpack(f"{'<' if little else '>'}{len(raw) // 8}d", raw)
    return "\\".join(f"{n:.9g}" for n in numbers)
