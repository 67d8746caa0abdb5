"""Attributes that say what the values of a slice mean; slices of one volume agree on them.

Slices that disagree are what is left of several volumes, wherever they lie: echoes, b-values,
water and fat, units, scans of two years.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Sequence
from datetime import date
from typing import NamedTuple

from scanloom.io.dicom.headers import PHASE_TAGS, Header
from scanloom.io.dicom.slices import Slice, as_text

ROUNDING = 0.05
"""Share of the larger one by which two numbers may differ: scanners round and correct them."""
SAME_SESSION = 1
"""Days between slices of one volume, at most: a scan may pass midnight."""
MADE_LATER = 366
"""Days between the making of the images of one volume, at most: some are reconstructed again."""

_PRODUCTS = re.compile(
    r"[MPRIWF]|[IO]P|FF|WF|FA|SUB|B0"
    r"|.*(?:MAGN|PHASE|REAL|IMAG|WATER|FAT|DIXON|STAR|ADC|TRACE|MAP|FIELD|FLOW|VELOC|PERF|CB[FV]"
    r"|SUBTR|DIFFU|KEV|IODINE|VNC|DET_).*"
    r"|[TR][12].*"
)
"""Words of ImageType that say what an image shows: part of a complex image, water or fat, a map."""
_BETWEEN_WORDS = re.compile(r"[\\/ ]+")
_KINDS = ("ORIGINAL", "DERIVED", "PRIMARY", "SECONDARY")


class Attribute(NamedTuple):
    """An attribute on which the slices of a volume agree.

    Parameters
    ----------
    name : str
        The standard's keyword, or words of ours for a private one.
    tags : tuple of int
        The first that has a value counts.
    kinds : function of (collection of str)
        Returns for each value what stands for all that mean the same.
    always : bool
        Whether a slice without it is unlike those that have it.
    """

    name: str
    tags: tuple[int, ...]
    kinds: Callable[[Collection[str]], dict[str, str]]
    always: bool = True

    def of(self, one: Slice) -> str:
        """Return what a slice says of it, as text; empty where it says nothing."""
        if one.multiframe and (said := one.phase.get(self.name)):
            return said
        elements = one.header.elements
        raw = next((value for tag in self.tags if (value := elements.raw(tag))), b"")
        return as_text(raw, little=elements.little)

    def kinds_of(self, slices: Sequence[Slice]) -> dict[str, str]:
        """Return for each value that slices have what it means; an absent one means nothing."""
        values = {self.of(one) for one in slices}
        found = self.kinds(values - {""})
        if "" in values and (self.always or not found):
            found[""] = ""
        elif "" in values:
            found[""] = min(found.values())
        return found


def differing(slices: Sequence[Slice]) -> Attribute | None:
    """Return the first attribute on which slices disagree that they have to agree on."""
    if slices[0].multiframe:
        some = tuple({_all_said(one): one for one in slices}.values())
    else:
        some = tuple({_of_a_file(one.header): one for one in slices}.values())
    if len(some) < 2:
        return None
    for attribute in MEANING:
        if len(set(attribute.kinds_of(some).values())) > 1:
            return attribute
    return None


def mean_the_same(name: str, slices: Sequence[Slice]) -> bool:
    """Whether values of an attribute are only written in several ways, such as 4.6 and 4.60."""
    attribute = _NUMBERS.get(name)
    return attribute is not None and len(set(attribute.kinds_of(slices).values())) == 1


def _all_said(one: Slice) -> object:
    """Return what is equal for slices that say the same of all attributes."""
    if one.multiframe:
        return id(one.header.shared), tuple(map(one.phase.get, _NAMES))
    return _of_a_file(one.header)


def _of_a_file(header: Header) -> object:
    said = header.elements.own.get
    return id(header.shared), header.phase[:_TIMES_FROM], *map(said, _DATES)


# --- which values mean the same -------------------------------------------------------------------


def _texts(values: Collection[str]) -> dict[str, str]:
    return {value: value.upper() for value in values}


def _sets(values: Collection[str]) -> dict[str, str]:
    return {value: "\\".join(sorted(set(value.upper().split("\\")))) for value in values}


def _products(values: Collection[str]) -> dict[str, str]:
    """Take the words that say what an image shows; no others count."""
    words = {value: set(_BETWEEN_WORDS.split(value.upper())) for value in values}
    return {
        value: "\\".join(sorted(filter(_PRODUCTS.fullmatch, found.difference(_KINDS)))) or "-"
        for value, found in words.items()
    }


def _numbers(values: Collection[str]) -> dict[str, str]:
    """Take numbers, also directions, for the same that differ by no more than `ROUNDING`."""
    try:
        numbers = sorted((tuple(map(float, value.split("\\"))), value) for value in values)
    except ValueError:
        return _texts(values)
    found: dict[str, str] = {}
    firsts: list[tuple[tuple[float, ...], str]] = []
    for number, value in numbers:
        same = next((text for first, text in firsts if _is_near(first, number)), None)
        if same is None:
            firsts.append((number, value))
        found[value] = value if same is None else same
    return found


def _is_near(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    scale = max(map(abs, one + other), default=0.0)
    return len(one) == len(other) and all(
        abs(a - b) <= ROUNDING * scale for a, b in zip(one, other, strict=True)
    )


def _first_numbers(values: Collection[str]) -> dict[str, str]:
    """Take the first of several numbers."""
    firsts = {value: value.split("\\")[0] for value in values}
    same = _numbers(set(firsts.values()))
    return {value: same[first] for value, first in firsts.items()}


def _within(days: int) -> Callable[[Collection[str]], dict[str, str]]:
    """Return the function that takes dates for the same which are no further from each other."""

    def dates(values: Collection[str]) -> dict[str, str]:
        known = {value: day for value in values if (day := _day(value)) is not None}
        ordered = sorted(known.items(), key=lambda item: item[1])
        found = dict.fromkeys(values, ordered[0][0] if ordered else "-")
        for (before, day), (value, later) in itertools.pairwise(ordered):
            found[value] = found[before] if later - day <= days else value
        return found

    return dates


def _day(value: str) -> int | None:
    try:
        return date.fromisoformat(value[:8]).toordinal()
    except ValueError:
        return None


MEANING = (
    Attribute("Modality", (0x00080060,), _texts),
    Attribute("ImageType", (0x00080008,), _products),
    Attribute("the makers' image type", (0x20051011, 0x00511016), _products, always=False),
    Attribute("the makers' image component", (0x0043102F,), _texts, always=False),
    Attribute("ComplexImageComponent", (0x00089208,), _texts),
    Attribute("AcquisitionContrast", (0x00089209,), _texts),
    Attribute("Units", (0x00541001,), _texts),
    Attribute("SUVType", (0x00541006,), _texts),
    Attribute("DecayCorrection", (0x00541102,), _texts),
    Attribute("CorrectedImage", (0x00280051,), _sets),
    Attribute("EchoTime", (0x00180081,), _numbers),
    Attribute("EchoNumbers", (0x00180086,), _texts, always=False),
    Attribute("DiffusionBValue", (0x00189087,), _numbers),
    Attribute("the makers' b-values", (0x0019100C, 0x00431039, 0x20011003), _first_numbers),
    Attribute("DiffusionGradientOrientation", (0x00189089,), _numbers),
    Attribute("InversionTime", (0x00180082, 0x00189079), _numbers),
    Attribute("FlipAngle", (0x00181314,), _numbers),
    Attribute("KVP", (0x00180060,), _numbers),
    Attribute("ReceiveCoilName", (0x00181250,), _texts),
    Attribute("ContrastBolusAgent", (0x00180010,), _texts),
    Attribute("TemporalPositionIdentifier", (0x00200100,), _texts, always=False),
    Attribute("StudyDate", (0x00080020,), _within(SAME_SESSION), always=False),
    Attribute("AcquisitionDate", (0x00080022, 0x0008002A), _within(SAME_SESSION), always=False),
    Attribute("SeriesDate", (0x00080021,), _within(MADE_LATER), always=False),
    Attribute("ContentDate", (0x00080023,), _within(MADE_LATER), always=False),
)
"""All attributes on which the slices of a volume agree."""
_NUMBERS = {one.name: one for one in MEANING if one.kinds in (_numbers, _first_numbers, _sets)}
_NAMES = tuple(attribute.name for attribute in MEANING)
_DATES = (0x00080022, 0x00080023, 0x0008002A)
_TIMES_FROM = list(PHASE_TAGS).index("AcquisitionNumber")
