"""Attributes that determine the meaning of a slice's values; slices of one volume agree on them.

Slices that disagree are remains of several volumes, wherever they lie: echoes, b-values, water and
fat, units, scans of two years.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Sequence
from datetime import date
from typing import NamedTuple

from scanloom.io.dicom import tags
from scanloom.io.dicom.geometry.slices import Slice, untyped_as_text
from scanloom.io.dicom.header.elements import PER_SLICE_TAGS
from scanloom.io.dicom.header.header import ACQUISITION_TAGS, PRIVATE_B_VALUE, Header

ROUNDING_SHARE = 0.05
"""Largest difference of equivalent numbers, as a share of the larger: scanners round them."""
ADAPTED_SHARE = 0.25
"""The same for numbers that scanners adapt to the slice: inversion time, flip angle, voltage."""
MIN_YEAR = 1900
"""Earlier dates are placeholders."""
SAME_SESSION_DAYS = 1
"""Days between slices of one volume, at most: a scan may pass midnight."""
RECONSTRUCTION_DAYS = 366
"""Days between the creation dates of the images of one volume, at most: some are reconstructed
again."""

_CONTENT_WORD = re.compile(
    r"[MPRIWF]|[MPRI]_[A-Z0-9]+|[IO]P|FF|WF|FA|SUB|B0|INV\d|UNI|SWI|MI?NIP|TTP|MTT"
    r"|.*(?:MAGN|PHASE|REAL|IMAG|WATER|FAT|DIXON|STAR|ADC|TRACE|MAP|FIELD|FLOW|VELOC|PERF|CB[FV]"
    r"|SUBTR|DIFFU|KEV|MONO_|IODINE|VNC|DET_|LABEL|CONTROL).*"
    r"|[TR][12].*"
)
"""Values of ImageType that name the content: a part of a complex image, water or fat, a map."""
_SEPARATORS = re.compile(r"[\\/ ]+")
_NEUTRAL = "-"
"""Canonical value of all values without relevant information."""
_SEQUENCE_WITH_B_VALUE = re.compile(r".*_B(\d+)T?(#\d+)?")
"""Siemens' names of diffusion sequences: b-value, and the number of the direction."""
_COIL_ELEMENT = re.compile(r"[A-Z]{1,4}\d{1,3}")
"""Name of a single coil element, whose image was not combined with others."""
_NO_AGENT = ("NO", "NONE", "N", "0", "NOT GIVEN", "WITHOUT")
_ORIGINS = ("ORIGINAL", "DERIVED", "PRIMARY", "SECONDARY")

Canonicalise = Callable[[Collection[str]], dict[str, str]]
"""Maps each of several values to a canonical one, which is the same for equivalent values."""


class Attribute(NamedTuple):
    """An attribute on which the slices of a volume agree.

    Parameters
    ----------
    name : str
        The standard's keyword, or a description of private attributes; of no other attribute.
    tags : tuple of int
        Tags of the attribute; the first that has a value counts.
    canonicalise : function of (collection of str)
        Maps each value to its canonical value.
    absent : str or None
        Canonical value of absent ones; None if they are equivalent to the lowest present one.
    counts : bool
        Whether the attribute may number the slices: as many values as slices are all equivalent.
    """

    name: str
    tags: tuple[int, ...]
    canonicalise: Canonicalise
    absent: str | None = ""
    counts: bool = False

    def of(self, slice_: Slice) -> str:
        """Return the value of a slice as text; empty if it is absent."""
        if slice_.multiframe and (text := slice_.phase.get(self.name)):
            return text
        elements = slice_.header.elements
        raw = next((value for tag in self.tags if (value := elements.raw(tag))), b"")
        return untyped_as_text(raw, little=elements.little)

    def kinds_of(self, slices: Sequence[Slice]) -> dict[str, str]:
        """Return the canonical value of each value that slices have."""
        values = {self.of(slice_) for slice_ in slices}
        if self.counts and len(values) == len(slices):
            return dict.fromkeys(values, _NEUTRAL)
        canonical = self.canonicalise(values - {""})
        if "" in values:
            lowest = min(canonical.values(), default="")
            canonical[""] = lowest if self.absent is None else self.absent
        return canonical


def first_disagreement(slices: Sequence[Slice]) -> Attribute | None:
    """Return the first of `QUANTITY_TAGS` on which slices disagree; None if they agree."""
    if slices[0].multiframe:
        distinct = tuple({_frame_key(slice_): slice_ for slice_ in slices}.values())
    else:
        distinct = tuple({_file_key(slice_.header): slice_ for slice_ in slices}.values())
    if len(distinct) < 2:
        return None
    for attribute in QUANTITY_TAGS:
        canonical = attribute.kinds_of(slices if attribute.counts else distinct)
        if len(set(canonical.values())) > 1:
            return attribute
    return None


def are_equivalent(name: str, slices: Sequence[Slice]) -> bool:
    """Return whether values differ only in how they are written, such as 4.6 and 4.60."""
    attribute = _TOLERANT.get(name)
    return attribute is not None and len(set(attribute.kinds_of(slices).values())) == 1


def _frame_key(slice_: Slice) -> object:
    """Return a key that is equal for frames in which all attributes are equal."""
    return _file_key(slice_.header), tuple(map(slice_.phase.get, _NAMES))


def _file_key(header: Header) -> object:
    """Return a key that is equal for files in which all attributes are equal."""
    return id(header.shared), *map(header.elements.own.get, _PER_SLICE)


# --- equivalent values ----------------------------------------------------------------------------


def _text(values: Collection[str]) -> dict[str, str]:
    """Ignore case."""
    return {value: value.upper() for value in values}


def _unordered(values: Collection[str]) -> dict[str, str]:
    """Ignore the order of several values."""
    return {value: "\\".join(sorted(set(value.upper().split("\\")))) for value in values}


def _image_content(values: Collection[str]) -> dict[str, str]:
    """Keep only the values that name the content of an image."""
    tokens = {value: set(_SEPARATORS.split(value.upper())) - set(_ORIGINS) for value in values}
    return {
        value: "\\".join(sorted(filter(_CONTENT_WORD.fullmatch, tokens[value]))) or _NEUTRAL
        for value in values
    }


def _number(values: Collection[str], share: float = ROUNDING_SHARE) -> dict[str, str]:
    """Treat numbers and vectors as equivalent if they differ by no more than a share."""
    try:
        vectors = sorted((tuple(map(float, value.split("\\"))), value) for value in values)
    except ValueError:
        return _text(values)
    canonical: dict[str, str] = {}
    references: list[tuple[tuple[float, ...], str]] = []
    for vector, value in vectors:
        near = (text for reference, text in references if _is_near(reference, vector, share))
        equivalent = next(near, None)
        if equivalent is None:
            references.append((vector, value))
        canonical[value] = value if equivalent is None else equivalent
    return canonical


def _is_near(reference: tuple[float, ...], vector: tuple[float, ...], share: float) -> bool:
    scale = max(map(abs, reference + vector), default=0.0)
    return len(reference) == len(vector) and all(
        abs(a - b) <= share * scale for a, b in zip(reference, vector, strict=True)
    )


def _adapted_number(values: Collection[str]) -> dict[str, str]:
    return _number(values, ADAPTED_SHARE)


def _matching(pattern: re.Pattern[str]) -> Canonicalise:
    """Return the function that distinguishes only values which match a pattern."""

    def canonicalise(values: Collection[str]) -> dict[str, str]:
        matches = {value: pattern.fullmatch(value.upper()) for value in values}
        return {value: match[0] if match else _NEUTRAL for value, match in matches.items()}

    return canonicalise


def _contrast_agent(values: Collection[str]) -> dict[str, str]:
    """Distinguish only whether an agent was given."""
    return {value: "" if value.upper() in _NO_AGENT else _NEUTRAL for value in values}


def _first_number(values: Collection[str]) -> dict[str, str]:
    """Compare the first of several numbers."""
    firsts = {value: value.split("\\")[0] for value in values}
    canonical = _number(set(firsts.values()))
    return {value: canonical[first] for value, first in firsts.items()}


def _dates_within(days: int) -> Canonicalise:
    """Return the function that treats dates as equivalent if each is near enough to the next."""

    def canonicalise(values: Collection[str]) -> dict[str, str]:
        known = {value: day for value in values if (day := _day(value)) is not None}
        ordered = sorted(known.items(), key=lambda pair: pair[1])
        canonical = dict.fromkeys(values, ordered[0][0] if ordered else _NEUTRAL)
        for (earlier, earlier_day), (later, later_day) in itertools.pairwise(ordered):
            canonical[later] = canonical[earlier] if later_day - earlier_day <= days else later
        return canonical

    return canonicalise


def _day(value: str) -> int | None:
    """Return the number of the day of a date or time; None if it is invalid or a placeholder."""
    try:
        day = date.fromisoformat(value[:8])
    except ValueError:
        return None
    return day.toordinal() if day.year >= MIN_YEAR else None


_PRIVATE_DIRECTIONS = {
    "Siemens": tags.SIEMENS_DIFFUSION_GRADIENT_DIRECTION,
    "GE, first": tags.GE_USER_DATA_20,
    "GE, second": tags.GE_USER_DATA_21,
    "GE, third": tags.GE_USER_DATA_22,
    "Philips, RL": tags.PHILIPS_DIFFUSION_DIRECTION_RL,
    "Philips, AP": tags.PHILIPS_DIFFUSION_DIRECTION_AP,
}
QUANTITY_TAGS = (
    Attribute("Modality", (tags.MODALITY,), _text),
    Attribute("Manufacturer", (tags.MANUFACTURER,), _text, None),
    Attribute("PatientSex", (tags.PATIENT_SEX,), _text, None),
    Attribute("PatientPosition", (tags.PATIENT_POSITION,), _text, None),
    Attribute("PhotometricInterpretation", (tags.PHOTOMETRIC_INTERPRETATION,), _text, None),
    Attribute("ImageType", (tags.IMAGE_TYPE,), _image_content, _NEUTRAL),
    Attribute(
        "private image type",
        (tags.PHILIPS_IMAGE_TYPE, tags.SIEMENS_IMAGE_TYPE),
        _image_content,
        None,
    ),
    Attribute("private image component", (tags.GE_IMAGE_TYPE,), _text, None),
    Attribute("ComplexImageComponent", (tags.COMPLEX_IMAGE_COMPONENT,), _text),
    Attribute("AcquisitionContrast", (tags.ACQUISITION_CONTRAST,), _text),
    Attribute("Units", (tags.UNITS,), _text),
    Attribute("SUVType", (tags.SUV_TYPE,), _text),
    Attribute("DecayCorrection", (tags.DECAY_CORRECTION,), _text),
    Attribute("CorrectedImage", (tags.CORRECTED_IMAGE,), _unordered),
    Attribute("EchoTime", (tags.ECHO_TIME, tags.EFFECTIVE_ECHO_TIME), _number),
    Attribute("EchoNumbers", (tags.ECHO_NUMBERS,), _text, None, counts=True),
    Attribute("DiffusionBValue", (tags.DIFFUSION_B_VALUE,), _number),
    Attribute(PRIVATE_B_VALUE, ACQUISITION_TAGS[PRIVATE_B_VALUE], _first_number),
    Attribute("SequenceName", (tags.SEQUENCE_NAME,), _matching(_SEQUENCE_WITH_B_VALUE), None),
    Attribute("DiffusionGradientOrientation", (tags.DIFFUSION_GRADIENT_ORIENTATION,), _number),
    *(
        Attribute(f"private diffusion direction ({component})", (tag,), _number, None)
        for component, tag in _PRIVATE_DIRECTIONS.items()
    ),
    Attribute("InversionTime", (tags.INVERSION_TIME, tags.INVERSION_TIMES), _adapted_number),
    Attribute("FlipAngle", (tags.FLIP_ANGLE,), _adapted_number, None),
    Attribute("KVP", (tags.KVP,), _adapted_number, None),
    Attribute("ReceiveCoilName", (tags.RECEIVE_COIL_NAME,), _text, None),
    Attribute("private coil element", (tags.SIEMENS_COIL_STRING,), _matching(_COIL_ELEMENT), None),
    Attribute("ContrastBolusAgent", (tags.CONTRAST_BOLUS_AGENT,), _contrast_agent),
    Attribute(
        "TemporalPositionIdentifier",
        (tags.TEMPORAL_POSITION_IDENTIFIER,),
        _text,
        None,
        counts=True,
    ),
    Attribute(
        "NominalPercentageOfCardiacPhase",
        (tags.NOMINAL_PERCENTAGE_OF_CARDIAC_PHASE,),
        _number,
        None,
    ),
    Attribute("StudyDate", (tags.STUDY_DATE,), _dates_within(SAME_SESSION_DAYS), None),
    Attribute(
        "AcquisitionDate",
        (tags.ACQUISITION_DATE, tags.ACQUISITION_DATE_TIME),
        _dates_within(SAME_SESSION_DAYS),
        None,
    ),
    Attribute("SeriesDate", (tags.SERIES_DATE,), _dates_within(RECONSTRUCTION_DAYS), None),
    Attribute("ContentDate", (tags.CONTENT_DATE,), _dates_within(RECONSTRUCTION_DAYS), None),
)
"""All attributes on which the slices of a volume agree. Names are distinct: `Slice.phase` has the
values of a frame by name."""
_TOLERANT = {
    attribute.name: attribute
    for attribute in QUANTITY_TAGS
    if attribute.canonicalise
    in (_number, _first_number, _adapted_number, _unordered, _contrast_agent)
}
"""Attributes by name that have equivalent values."""
_NAMES = tuple(attribute.name for attribute in QUANTITY_TAGS)
_PER_SLICE = tuple(
    sorted(PER_SLICE_TAGS.intersection(tag for a in QUANTITY_TAGS for tag in a.tags))
)
"""Tags of `QUANTITY_TAGS` whose values differ between files with the same `Header.shared`."""
