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

from scanloom.io.dicom import tags
from scanloom.io.dicom.elements import CHANGING
from scanloom.io.dicom.headers import PRIVATE_B_VALUE, Header
from scanloom.io.dicom.slices import Slice, as_text

ROUNDING = 0.05
"""Share of the larger one by which two numbers may differ: scanners round and correct them."""
ADAPTED = 0.25
"""The same of what scanners adapt from slice to slice: inversion time, flip angle, voltage."""
FIRST_YEAR = 1900
"""Dates before it stand for none."""
SAME_SESSION = 1
"""Days between slices of one volume, at most: a scan may pass midnight."""
MADE_LATER = 366
"""Days between the making of the images of one volume, at most: some are reconstructed again."""

_PRODUCTS = re.compile(
    r"[MPRIWF]|[MPRI]_[A-Z0-9]+|[IO]P|FF|WF|FA|SUB|B0|INV\d|UNI|SWI|MI?NIP|TTP|MTT"
    r"|.*(?:MAGN|PHASE|REAL|IMAG|WATER|FAT|DIXON|STAR|ADC|TRACE|MAP|FIELD|FLOW|VELOC|PERF|CB[FV]"
    r"|SUBTR|DIFFU|KEV|MONO_|IODINE|VNC|DET_|LABEL|CONTROL).*"
    r"|[TR][12].*"
)
"""Words of ImageType that say what an image shows: part of a complex image, water or fat, a map."""
_BETWEEN_WORDS = re.compile(r"[\\/ ]+")
_ANY = "-"
"""What all values stand for that say nothing of it."""
_SHELL = re.compile(r".*_B(\d+)T?(#\d+)?")
"""Siemens' names of diffusion sequences: b-value, and the number of the direction."""
_ELEMENT = re.compile(r"[A-Z]{1,4}\d{1,3}")
"""The name of a single coil element, the image of which was not combined with others."""
_NO_AGENT = ("NO", "NONE", "N", "0", "NOT GIVEN", "WITHOUT")
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
    absent : str or None
        What an absent value stands for: nothing that others mean, or None for what they mean.
    counts : bool
        Whether as many values as slices do no more than count these.
    """

    name: str
    tags: tuple[int, ...]
    kinds: Callable[[Collection[str]], dict[str, str]]
    absent: str | None = ""
    counts: bool = False

    def of(self, one: Slice) -> str:
        """Return what a slice says of it, as text; empty where it says nothing."""
        if one.multiframe and (said := one.phase.get(self.name)):
            return said
        elements = one.header.elements
        raw = next((value for tag in self.tags if (value := elements.raw(tag))), b"")
        return as_text(raw, little=elements.little)

    def kinds_of(self, slices: Sequence[Slice]) -> dict[str, str]:
        """Return for each value that slices have what it means."""
        values = {self.of(one) for one in slices}
        if self.counts and len(values) == len(slices):
            return dict.fromkeys(values, _ANY)
        found = self.kinds(values - {""})
        if "" in values:
            usual = min(found.values(), default="")
            found[""] = usual if self.absent is None else self.absent
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
        kinds = attribute.kinds_of(slices if attribute.counts else some)
        if len(set(kinds.values())) > 1:
            return attribute
    return None


def mean_the_same(name: str, slices: Sequence[Slice]) -> bool:
    """Whether values of an attribute are only written in several ways, such as 4.6 and 4.60."""
    attribute = _NUMBERS.get(name)
    return attribute is not None and len(set(attribute.kinds_of(slices).values())) == 1


def _all_said(one: Slice) -> object:
    """Return what is equal for slices that say the same of all attributes."""
    if one.multiframe:
        return _of_a_file(one.header), tuple(map(one.phase.get, _NAMES))
    return _of_a_file(one.header)


def _of_a_file(header: Header) -> object:
    return id(header.shared), *map(header.elements.own.get, _PER_SLICE)


# --- which values mean the same -------------------------------------------------------------------


def _texts(values: Collection[str]) -> dict[str, str]:
    return {value: value.upper() for value in values}


def _sets(values: Collection[str]) -> dict[str, str]:
    return {value: "\\".join(sorted(set(value.upper().split("\\")))) for value in values}


def _products(values: Collection[str]) -> dict[str, str]:
    """Take the words that say what an image shows; no others count."""
    words = {value: set(_BETWEEN_WORDS.split(value.upper())) for value in values}
    return {
        value: "\\".join(sorted(filter(_PRODUCTS.fullmatch, found.difference(_KINDS)))) or _ANY
        for value, found in words.items()
    }


def _numbers(values: Collection[str], share: float = ROUNDING) -> dict[str, str]:
    """Take numbers, also directions, for the same that differ by no more than a share."""
    try:
        numbers = sorted((tuple(map(float, value.split("\\"))), value) for value in values)
    except ValueError:
        return _texts(values)
    found: dict[str, str] = {}
    firsts: list[tuple[tuple[float, ...], str]] = []
    for number, value in numbers:
        same = next((text for first, text in firsts if _is_near(first, number, share)), None)
        if same is None:
            firsts.append((number, value))
        found[value] = value if same is None else same
    return found


def _is_near(one: tuple[float, ...], other: tuple[float, ...], share: float) -> bool:
    scale = max(map(abs, one + other), default=0.0)
    return len(one) == len(other) and all(
        abs(a - b) <= share * scale for a, b in zip(one, other, strict=True)
    )


def _adapted(values: Collection[str]) -> dict[str, str]:
    return _numbers(values, ADAPTED)


def _matching(form: re.Pattern[str]) -> Callable[[Collection[str]], dict[str, str]]:
    """Return the function that takes for the same what does not have a form."""

    def texts(values: Collection[str]) -> dict[str, str]:
        found = {value: form.fullmatch(value.upper()) for value in values}
        return {value: match[0] if match else _ANY for value, match in found.items()}

    return texts


def _given(values: Collection[str]) -> dict[str, str]:
    """Tell apart only whether anything was given."""
    return {value: "" if value.upper() in _NO_AGENT else _ANY for value in values}


def _firsts(values: Collection[str]) -> dict[str, str]:
    """Take the first of several numbers."""
    firsts = {value: value.split("\\")[0] for value in values}
    same = _numbers(set(firsts.values()))
    return {value: same[first] for value, first in firsts.items()}


def _within(days: int) -> Callable[[Collection[str]], dict[str, str]]:
    """Return the function that takes dates for the same which are no further from each other."""

    def dates(values: Collection[str]) -> dict[str, str]:
        known = {value: day for value in values if (day := _day(value)) is not None}
        ordered = sorted(known.items(), key=lambda item: item[1])
        found = dict.fromkeys(values, ordered[0][0] if ordered else _ANY)
        for (before, day), (value, later) in itertools.pairwise(ordered):
            found[value] = found[before] if later - day <= days else value
        return found

    return dates


def _day(value: str) -> int | None:
    try:
        day = date.fromisoformat(value[:8])
    except ValueError:
        return None
    return day.toordinal() if day.year >= FIRST_YEAR else None


MEANING = (
    Attribute("Modality", (tags.MODALITY,), _texts),
    Attribute("Manufacturer", (tags.MANUFACTURER,), _texts, None),
    Attribute("PatientSex", (tags.PATIENT_SEX,), _texts, None),
    Attribute("PatientPosition", (tags.PATIENT_POSITION,), _texts, None),
    Attribute("PhotometricInterpretation", (tags.PHOTOMETRIC_INTERPRETATION,), _texts, None),
    Attribute("ImageType", (tags.IMAGE_TYPE,), _products, _ANY),
    Attribute(
        "private image type",
        (tags.PHILIPS_IMAGE_TYPE, tags.SIEMENS_IMAGE_TYPE),
        _products,
        None,
    ),
    Attribute("private image component", (tags.GE_IMAGE_TYPE,), _texts, None),
    Attribute("ComplexImageComponent", (tags.COMPLEX_IMAGE_COMPONENT,), _texts),
    Attribute("AcquisitionContrast", (tags.ACQUISITION_CONTRAST,), _texts),
    Attribute("Units", (tags.UNITS,), _texts),
    Attribute("SUVType", (tags.SUV_TYPE,), _texts),
    Attribute("DecayCorrection", (tags.DECAY_CORRECTION,), _texts),
    Attribute("CorrectedImage", (tags.CORRECTED_IMAGE,), _sets),
    Attribute("EchoTime", (tags.ECHO_TIME, tags.EFFECTIVE_ECHO_TIME), _numbers),
    Attribute("EchoNumbers", (tags.ECHO_NUMBERS,), _texts, None, counts=True),
    Attribute("DiffusionBValue", (tags.DIFFUSION_B_VALUE,), _numbers),
    Attribute(
        PRIVATE_B_VALUE,
        (tags.SIEMENS_B_VALUE, tags.GE_B_VALUE, tags.PHILIPS_DIFFUSION_B_FACTOR, tags.UIH_B_VALUE),
        _firsts,
    ),
    Attribute("SequenceName", (tags.SEQUENCE_NAME,), _matching(_SHELL), None),
    Attribute("DiffusionGradientOrientation", (tags.DIFFUSION_GRADIENT_ORIENTATION,), _numbers),
    *(
        Attribute("private diffusion direction", (tag,), _numbers, None)
        for tag in (
            tags.SIEMENS_DIFFUSION_GRADIENT_DIRECTION,
            tags.GE_USER_DATA_20,
            tags.GE_USER_DATA_21,
            tags.GE_USER_DATA_22,
            tags.PHILIPS_DIFFUSION_DIRECTION_RL,
            tags.PHILIPS_DIFFUSION_DIRECTION_AP,
        )
    ),
    Attribute("InversionTime", (tags.INVERSION_TIME, tags.INVERSION_TIMES), _adapted),
    Attribute("FlipAngle", (tags.FLIP_ANGLE,), _adapted, None),
    Attribute("KVP", (tags.KVP,), _adapted, None),
    Attribute("ReceiveCoilName", (tags.RECEIVE_COIL_NAME,), _texts, None),
    Attribute("private coil element", (tags.SIEMENS_COIL_STRING,), _matching(_ELEMENT), None),
    Attribute("ContrastBolusAgent", (tags.CONTRAST_BOLUS_AGENT,), _given),
    Attribute(
        "TemporalPositionIdentifier",
        (tags.TEMPORAL_POSITION_IDENTIFIER,),
        _texts,
        None,
        counts=True,
    ),
    Attribute(
        "NominalPercentageOfCardiacPhase",
        (tags.NOMINAL_PERCENTAGE_OF_CARDIAC_PHASE,),
        _numbers,
        None,
    ),
    Attribute("StudyDate", (tags.STUDY_DATE,), _within(SAME_SESSION), None),
    Attribute(
        "AcquisitionDate",
        (tags.ACQUISITION_DATE, tags.ACQUISITION_DATE_TIME),
        _within(SAME_SESSION),
        None,
    ),
    Attribute("SeriesDate", (tags.SERIES_DATE,), _within(MADE_LATER), None),
    Attribute("ContentDate", (tags.CONTENT_DATE,), _within(MADE_LATER), None),
)
"""All attributes on which the slices of a volume agree."""
_NUMBERS = {
    one.name: one for one in MEANING if one.kinds in (_numbers, _firsts, _adapted, _sets, _given)
}
_NAMES = tuple(attribute.name for attribute in MEANING)
_PER_SLICE = tuple(sorted(CHANGING.intersection(tag for one in MEANING for tag in one.tags)))
"""Tags of `MEANING` whose values differ between files with the same `Header.shared`."""
