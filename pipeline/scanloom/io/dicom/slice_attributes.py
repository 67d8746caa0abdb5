"""`SLICE_ATTRIBUTES`: which attributes separate the slices of a series, and which unite them.

The one table of these rules. Headers keep the attributes it names; series are split, checked and
flagged by it, for files of one frame and of many alike; `docs/write_attributes.py` prints it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection
from datetime import date
from enum import Enum
from functools import partial
from typing import Literal, NamedTuple

from scanloom.io.dicom import tags

ROUNDING_SHARE = 0.05
"""Largest difference of equivalent numbers, as a share of the larger: scanners write what they
measured (echo times of 4.6 and 4.61 ms), but no protocol has two echoes or angles so close."""
ADAPTED_SHARE = 0.25
"""The same for numbers that scanners or their users adapt to the slice: the inversion time follows
the contrast agent, the repetition time the heart, the thickness the pitch."""
VOLTAGE_SHARE = 0.02
"""The same for the voltage: the nearest settings that tubes have, 135 and 140 kV, differ by 3.6 %;
a measured voltage is within 1 % of the setting."""
MIN_YEAR = 1900
"""Earlier dates are placeholders."""
SAME_SESSION_DAYS = 1
"""Days between slices of one volume, at most: a scan may pass midnight."""
RECONSTRUCTION_DAYS = 366
"""Days between the creation dates of the images of one volume, at most: some are reconstructed
again."""
MAX_PAUSE_S = 600.0
"""Seconds between the acquisition of one slice and the next, at most, that are no reason for a
flag: passes and bed positions last minutes."""
_DAY_S = 86400.0

_NEUTRAL = "-"
"""Kind of all values without relevant information."""
_JOINTS = re.compile(r"[\s_-]+")  # between words that scanners join differently: "SE_2D", "SE 2D"
_SEPARATORS = re.compile(r"[\\/ ]+")
_CONTENT_WORD = re.compile(
    r"[MPRIWF]|[MPRI]_[A-Z0-9]+|[IO]P|FF|WF|FA|SUB|B0|INV\d|UNI|SWI|MI?NIP|TTP|MTT|NORM|[MC]PR"
    r"|.*(?:MAGN|PHASE|REAL|IMAG|WATER|FAT|DIXON|STAR|ADC|TRACE|MAP|FIELD|FLOW|VELOC|PERF|CB[FV]"
    r"|SUBTR|DIFFU|KEV|MONO_|IODINE|VNC|DET_|LABEL|CONTROL|ENERGY|REFORMAT|RESAMPLE|CURVED|SOFT"
    r"|TISSUE|BONE|LUNG|QUANTITY|STD_DEV|FILTERED|MASKED|ADDITION|DIVISION|MULTIPLIC|MAXIM|MINIM)"
    r".*|MEAN|[TR][12].*|VMI|MAT_.*|EFF_ATOMIC_.*|ELECTRON_DENS.*"
)
"""Words of image types that name the content, of the standard (PS3.3 C.7.6.1.1.2, C.8.3.1.1.1,
C.8.13.3.1.1, C.8.15.3.1.1, C.8.16.1.4) and of manufacturers: a part of a complex image, water or
fat, a map, an energy or a material, a tissue, a reformat, correction of the intensity (NORM)."""
_SILENT_WORDS = frozenset(("", "AXIAL", "VOLUME", "NONE", "OTHER"))
"""Words of image types that say nothing, or only the plane."""
_SEQUENCE_WITH_B_VALUE = re.compile(r"B\d+T?(?:#\d+)?$")
"""End of Siemens' names of diffusion sequences: b-value, and the number of the direction."""
_COIL_ELEMENT = re.compile(r"[A-Z]{1,4}\d{1,3}")
"""Name of a single coil element, whose image was not combined with others."""
_NO_AGENT = ("NO", "NONE", "N", "NOT GIVEN", "WITHOUT")
_COMPRESSION = re.compile(r"COMPRESS|LOSSY|LOSSLESS|JPE?G|JP2|J2K")
"""Texts about another encoding only; GE writes each slice's own compression ratio."""


class Rule(Enum):
    """Meaning of a difference between the slices of a series."""

    MEANING = "never mixed"
    """A voxel means something else: the slices are split, or refused if the parts are no volumes"""
    VARIES = "ignored"
    """It changes from slice to slice by nature"""
    RECORDED = "flagged"
    """It may matter: the slices are read as one volume with the flag SLICES_DIFFER"""


Separates = Literal["first", "then", "as a time", ""]
"""How an attribute separates volumes that share positions, where a reason is not needed: by its
purpose, as part of the acquisition, as a time or number in passes, or as any other attribute."""
Absent = Literal["differs", "flagged", "ignored", "says nothing"]
"""Meaning of slices that lack the attribute: another value; the same value, with the flag
SLICES_DIFFER; the same value; or the same as a value without relevant information."""

Normalise = Callable[[Collection[str]], dict[str, str]]
"""Maps each of several values to its kind, which is the same for equivalent values."""

# --- equivalent values ----------------------------------------------------------------------------


def _text(values: Collection[str]) -> dict[str, str]:
    """Ignore case, and how words are joined."""
    return {value: _joined(value) for value in values}


def _joined(text: str) -> str:
    return _JOINTS.sub("", text.upper())


def _unordered(values: Collection[str]) -> dict[str, str]:
    """Ignore case and the order of several values."""
    sets = {value: set(map(_joined, value.split("\\"))) for value in values}
    return {value: "\\".join(sorted(sets[value] - {""})) for value in values}


def _words(value: str) -> set[str]:
    return set(_SEPARATORS.split(value.upper())) - _SILENT_WORDS


def _image_content(values: Collection[str]) -> dict[str, str]:
    """Keep only the words that name the content of an image, in any order."""
    return {
        value: "\\".join(sorted(filter(_CONTENT_WORD.fullmatch, _words(value)))) or _NEUTRAL
        for value in values
    }


def _other_words(values: Collection[str]) -> dict[str, str]:
    """Keep the other words of an image type, in any order."""
    return {
        value: "\\".join(sorted(w for w in _words(value) if not _CONTENT_WORD.fullmatch(w)))
        for value in values
    }


def _numbers(share: float) -> Normalise:
    """Return the function for numbers and vectors that are equivalent within a share."""

    def normalise(values: Collection[str]) -> dict[str, str]:
        try:
            vectors = sorted((tuple(map(float, value.split("\\"))), value) for value in values)
        except ValueError:
            return _text(values)
        kinds: dict[str, str] = {}
        references: list[tuple[tuple[float, ...], str]] = []
        for vector, value in vectors:
            near = (text for reference, text in references if _is_near(reference, vector, share))
            kinds[value] = next(near, value)
            # A value is compared with the lowest of its kind, not with its neighbour: a chain of
            # small steps must not join the ends
            if kinds[value] == value:
                references.append((vector, value))
        return kinds

    return normalise


def _is_near(reference: tuple[float, ...], vector: tuple[float, ...], share: float) -> bool:
    # Of the largest component: a direction's small components are as inaccurate as the large ones
    scale = max(map(abs, reference + vector), default=0.0)
    return len(reference) == len(vector) and all(
        abs(a - b) <= share * scale for a, b in zip(reference, vector, strict=True)
    )


_number, _adapted_number = _numbers(ROUNDING_SHARE), _numbers(ADAPTED_SHARE)
_voltage, _exact_number = _numbers(VOLTAGE_SHARE), _numbers(1e-9)


def _first_number(values: Collection[str]) -> dict[str, str]:
    """Compare the first of several numbers."""
    firsts = {value: value.split("\\")[0] for value in values}
    kinds = _number(set(firsts.values()))
    return {value: kinds[first] for value, first in firsts.items()}


def _coil_element(values: Collection[str]) -> dict[str, str]:
    """Distinguish single elements of a coil."""
    return {v: v.upper() if _COIL_ELEMENT.fullmatch(v.upper()) else _NEUTRAL for v in values}


def _sequence_name(values: Collection[str]) -> dict[str, str]:
    """Compare letters and b-values: other numbers count echoes or segments, also of a slice."""
    kinds = {}
    for value in values:
        name = value.upper()
        b_value = _SEQUENCE_WITH_B_VALUE.search(name)
        start = b_value.start() if b_value else len(name)
        kinds[value] = re.sub(r"[\d_#*]+", "", name[:start]) + name[start:]
    return kinds


def _unless_none(values: Collection[str]) -> dict[str, str]:
    """Ignore case, and take a value that says so for none."""
    texts = _text(values)
    return {v: _NEUTRAL if text in ("NONE", "NO", "OFF") else text for v, text in texts.items()}


def _contrast_agent(values: Collection[str]) -> dict[str, str]:
    """Distinguish only whether an agent was given."""
    return {value: "GIVEN" if _is_agent(value) else _NEUTRAL for value in values}


def _is_agent(value: str) -> bool:
    """Return whether a value names an agent, or is a volume or dose other than 0."""
    try:
        return float(value) != 0
    except ValueError:
        return value.upper() not in _NO_AGENT


def _derivation(values: Collection[str]) -> dict[str, str]:
    """Ignore case, and texts about compression."""
    texts = _text(values)
    return {v: _NEUTRAL if _COMPRESSION.search(text) else text for v, text in texts.items()}


def _dates_within(days: int) -> Normalise:
    """Return the function that treats dates as equivalent if each is near enough to the next."""

    def normalise(values: Collection[str]) -> dict[str, str]:
        known = {value: day for value in values if (day := _day(value)) is not None}
        ordered = sorted(known.items(), key=lambda pair: pair[1])
        kinds = dict.fromkeys(values, ordered[0][0] if ordered else _NEUTRAL)
        for (earlier, earlier_day), (later, later_day) in itertools.pairwise(ordered):
            kinds[later] = kinds[earlier] if later_day - earlier_day <= days else later
        return kinds

    return normalise


_same_session, _same_year = _dates_within(SAME_SESSION_DAYS), _dates_within(RECONSTRUCTION_DAYS)


def _day(value: str) -> int | None:
    """Return the number of the day of a date or time; None if it is invalid or a placeholder."""
    try:
        day = date.fromisoformat(value[:8])
    except ValueError:
        return None
    return day.toordinal() if day.year >= MIN_YEAR else None


def _times_without_pause(values: Collection[str]) -> dict[str, str]:
    """Treat times of day as equivalent if no pause lies between them; a scan may pass midnight."""
    ordered = sorted((seconds_of(value), value) for value in values)
    kinds = dict.fromkeys(values, _NEUTRAL)
    delays = [time - ordered[n - 1][0] for n, (time, _) in enumerate(ordered)]
    pauses = [n for n, delay in enumerate(delays) if delay % _DAY_S > MAX_PAUSE_S]
    if len(pauses) > 1:  # one of them is the rest of the day
        for n, (_, value) in enumerate(ordered):
            kinds[value] = str(sum(n >= pause for pause in pauses) % len(pauses))
    return kinds


def seconds_of(value: str) -> float:
    """Return a time or date and time as seconds since midnight; 0 if it is not a time."""
    text = value[8:] if len(value.split(".")[0]) > 8 else value
    if not text[:6].isdigit():
        return 0.0
    return int(text[:2]) * 3600.0 + int(text[2:4] or 0) * 60 + int(text[4:6] or 0)


# --- the table ------------------------------------------------------------------------------------


class SliceAttribute(NamedTuple):
    """An attribute, and the meaning of a difference in it between slices of a series.

    Parameters
    ----------
    name : str
        The standard's keyword, or a description; of no other attribute.
    tags : tuple of int
        Tags of the attribute, in a file or in a frame's functional groups; the first that has a
        value counts. None if its values are not compared, or computed for frames.
    rule : Rule
    why : str
        Terms of the standard about it, or habits of scanners.
    normalise : function of (collection of str)
        Maps each value to its kind.
    absent : str
        Meaning of slices that lack the attribute.
    separates : str
        How it separates volumes that share positions.
    counts : bool
        Whether the attribute may number or name each slice: as many values as slices are all
        equivalent.
    positive : bool
        Whether a number of 0 or less counts as no value, which some software writes instead.
    """

    name: str
    tags: tuple[int, ...]
    rule: Rule
    why: str
    normalise: Normalise = _text
    absent: Absent = "flagged"
    separates: Separates = ""
    counts: bool = False
    positive: bool = False

    @property
    def tolerance(self) -> str:
        """Values that count as equal, for the documentation."""
        numbering = "; as many values as slices" if self.counts else ""
        return _TOLERANCES[self.normalise] + numbering + "; 0 or less is none" * self.positive

    def says_nothing(self, value: str) -> bool:
        """Return whether a value is a number that counts as no value."""
        try:
            return self.positive and float(value) <= 0
        except ValueError:
            return False

    def kinds_of(
        self, values: Collection[str], count: int, *, exact: bool = False
    ) -> dict[str, str]:
        """Return the kind of each value, as the lowest of the equivalent values.

        Parameters
        ----------
        values : collection of str
            Distinct values, as text; empty for slices without the attribute.
        count : int
            Number of slices.
        exact : bool
            Whether only notation may differ: 4.6 and 4.60, or the order of several values.
        """
        if self.counts and not exact and len(values) == count > 1:
            return dict.fromkeys(values, min(values))
        normalise = self.normalise
        if exact:
            normalise = _exact_number if normalise in _NUMERIC else _unordered
        forms = dict(sorted(normalise(set(values) - {""}).items()))
        lowest: dict[str, str] = {}
        for value, form in forms.items():
            lowest.setdefault(form, value)
        kinds = {value: lowest[form] for value, form in forms.items()}
        if "" in values:
            if exact or not kinds or self.absent == "differs":
                kinds[""] = ""
            elif self.absent == "says nothing":
                silent = (kinds[value] for value in kinds if forms[value] in ("", _NEUTRAL))
                kinds[""] = next(silent, _NEUTRAL)
            else:
                kinds[""] = min(kinds.values())
        return kinds


_TOLERANCES: dict[Normalise, str] = {
    _text: "in any case",
    _unordered: "in any case and order",
    _image_content: "with equal words, in any order",
    _other_words: "with equal words, in any order",
    _exact_number: "the same number",
    _number: f"within {ROUNDING_SHARE * 100:.0f} %",
    _adapted_number: f"within {ADAPTED_SHARE * 100:.0f} %",
    _voltage: f"within {VOLTAGE_SHARE * 100:.0f} %",
    _first_number: f"the first number within {ROUNDING_SHARE * 100:.0f} %",
    _coil_element: "unless they name single elements",
    _sequence_name: "but for numbers",
    _unless_none: "in any case",
    _contrast_agent: "given or not",
    _derivation: "in any case; texts about compression",
    _same_session: "within a day",
    _same_year: "within a year",
    _times_without_pause: f"without a pause of {MAX_PAUSE_S / 60:.0f} minutes",
}
_NUMERIC = (_number, _adapted_number, _voltage, _first_number, _exact_number)

_PET_CORRECTION = "a correction of PET; absent if not made"
_ANOTHER_VISIT = "another visit; a scan may pass midnight"
_MADE_AGAIN = "another visit; some slices are reconstructed again"
_PADDING = "padding, which is known only if slices agree on it"
_SERIES_LEVEL = "of the series (PS3.3 C.7.3.1): slices that differ were merged from several"


def _attribute(
    rule: Rule,
    name: str,
    why: str,
    *kept_tags: int,
    by: Normalise = _text,
    absent: Absent = "flagged",
    counts: bool = False,
    positive: bool = False,
) -> SliceAttribute:
    return SliceAttribute(name, kept_tags, rule, why, by, absent, counts=counts, positive=positive)


_meaning, _recorded, _varies = (
    partial(_attribute, rule) for rule in (Rule.MEANING, Rule.RECORDED, Rule.VARIES)
)
# Slices without a stated attribute have another meaning; without an optional one, the usual meaning
_stated, _optional = partial(_meaning, absent="differs"), partial(_meaning, absent="says nothing")
_nuclear_vector = partial(_meaning, by=_exact_number, absent="ignored")

_BY_PURPOSE = (
    _recorded(
        "StackID",
        "frames that belong together; a slab of several has its own, too",
        absent="ignored",
    ),
    _meaning(
        "TemporalPositionIdentifier",
        "the time point, as of a contrast agent; some number each slice",
        tags.TEMPORAL_POSITION_IDENTIFIER,
        by=_exact_number,
        counts=True,
    ),
    _varies("TemporalPositionTimeOffset", "the time of a frame from the start of the scan"),
    _meaning("EchoNumbers", "the echo; some number each slice", tags.ECHO_NUMBERS, counts=True),
    _stated(
        "EchoTime", "the weighting by T2", tags.ECHO_TIME, tags.EFFECTIVE_ECHO_TIME, by=_number
    ),
    _stated("DiffusionBValue", "the weighting by diffusion", tags.DIFFUSION_B_VALUE, by=_number),
    _stated(
        "DiffusionGradientOrientation",
        "the direction of diffusion",
        tags.DIFFUSION_GRADIENT_ORIENTATION,
        by=_number,
    ),
    _varies(
        "AcquisitionNumber",
        "a pass, a rotation or a step of one scan has its own",
        tags.ACQUISITION_NUMBER,
    ),
    _optional(
        "ImageType",
        "its words that name the content: part of a complex image, water or fat, map, reformat",
        tags.IMAGE_TYPE,
        tags.FRAME_TYPE,
        by=_image_content,
    ),
    _nuclear_vector("EnergyWindowVector", "the energies that were counted (nuclear medicine)"),
    _nuclear_vector("DetectorVector", "the detector (nuclear medicine)"),
    _nuclear_vector("PhaseVector", "the time point (nuclear medicine)"),
    _nuclear_vector("RRIntervalVector", "the class of heartbeats (nuclear medicine)"),
    _nuclear_vector("TimeSlotVector", "the part of the heartbeat (nuclear medicine)"),
    _nuclear_vector("TimeSliceVector", "the time point (nuclear medicine)"),
    _varies("DimensionIndexValues", "numbers of a frame along dimensions other than space"),
)
"""Attributes whose purpose is to separate volumes of a series; `phase=` counts in this order."""
_OF_THE_ACQUISITION = (
    _meaning("KVP", "the voltage, which CT values depend on", tags.KVP, by=_voltage),
    _meaning(
        "ConvolutionKernel",
        "sharp or soft; edges and noise depend on it",
        tags.CONVOLUTION_KERNEL,
        by=_unordered,
    ),
    _meaning(
        "SliceThickness",
        "a value is the mean over it; it is rounded, and computed from the pitch",
        tags.SLICE_THICKNESS,
        by=_adapted_number,
        positive=True,
    ),
    _stated(
        "InversionTime",
        "the weighting by T1",
        tags.INVERSION_TIME,
        tags.INVERSION_TIMES,
        by=_adapted_number,
    ),
    _meaning("FlipAngle", "the weighting by T1", tags.FLIP_ANGLE, by=_number),
    _stated(
        "private b-value",
        "the weighting by diffusion",
        tags.SIEMENS_B_VALUE,
        tags.GE_B_VALUE,
        tags.PHILIPS_DIFFUSION_B_FACTOR,
        tags.UIH_B_VALUE,
        by=_first_number,
    ),
    _meaning(
        "ScanningSequence",
        "spin echo, gradient echo, inversion",
        tags.SCANNING_SEQUENCE,
        by=_unordered,
    ),
    _meaning(
        "SequenceVariant",
        "preparation, such as magnetisation transfer",
        tags.SEQUENCE_VARIANT,
        by=_unordered,
    ),
    _optional(
        "ScanOptions",
        "options, such as suppression of fat; empty if there are none",
        tags.SCAN_OPTIONS,
        by=_unordered,
    ),
    _meaning(
        "SequenceName",
        "the pulse sequence, with b-value and direction; its other numbers count echoes",
        tags.SEQUENCE_NAME,
        by=_sequence_name,
    ),
    _meaning(
        "RepetitionTime",
        "the weighting by T1; it follows heart or breath",
        tags.REPETITION_TIME,
        by=_adapted_number,
    ),
    _meaning(
        "FilterType",
        "the filter in the beam, which CT values depend on",
        tags.FILTER_TYPE,
        by=_unordered,
    ),
    _stated("Units", "the unit of PET", tags.UNITS),
    _stated(
        "CorrectedImage",
        "corrections of PET and nuclear images",
        tags.CORRECTED_IMAGE,
        by=_unordered,
    ),
    _meaning(
        "ReconstructionMethod",
        "the reconstruction of PET, which sets its resolution and bias",
        tags.RECONSTRUCTION_METHOD,
    ),
    _meaning("ProtocolName", _SERIES_LEVEL, tags.PROTOCOL_NAME, counts=True),
    _meaning("SeriesNumber", _SERIES_LEVEL, tags.SERIES_NUMBER, by=_exact_number, counts=True),
    _meaning("SeriesDescription", _SERIES_LEVEL, tags.SERIES_DESCRIPTION, counts=True),
    _optional(
        "ContrastBolusAgent",
        "whether an agent was given: its name, which may be written in several ways, or else "
        "its ingredient, volume or dose",
        tags.CONTRAST_BOLUS_AGENT,
        tags.CONTRAST_BOLUS_INGREDIENT,
        tags.CONTRAST_BOLUS_VOLUME,
        tags.CONTRAST_BOLUS_TOTAL_DOSE,
        by=_contrast_agent,
    ),
    _optional(
        "ContrastBolusAgentAdministered",
        "which agents a frame has, by their numbers",
        tags.CONTRAST_BOLUS_AGENT_ADMINISTERED,
        by=_unless_none,
    ),
)
"""Attributes of the acquisition or reconstruction as a whole."""
_TIMES = (
    _varies(
        "TriggerTime",
        "the time in a heartbeat; slices of one phase differ a little",
        tags.TRIGGER_TIME,
    ),
    _recorded(
        "AcquisitionTime",
        "slices are acquired one after the other; a pause of more than ten minutes may mean "
        "two scans",
        tags.ACQUISITION_TIME,
        by=_times_without_pause,
        absent="ignored",
    ),
    _varies("ContentTime", "slices are reconstructed one after the other", tags.CONTENT_TIME),
    _varies("InstanceNumber", "the number of a slice, in any order", tags.INSTANCE_NUMBER),
)
"""Attributes that also differ within a volume: they count only if positions repeat, or slices are
not evenly spaced."""
_FURTHER = (
    _stated("Modality", "the modality", tags.MODALITY),
    _meaning("Manufacturer", "the scanner", tags.MANUFACTURER),
    _meaning("PatientSex", "the patient", tags.PATIENT_SEX),
    _meaning(
        "PatientPosition",
        "the patient was turned or moved between the slices",
        tags.PATIENT_POSITION,
    ),
    _meaning(
        "PhotometricInterpretation",
        "how values are shown; slices of one image agree",
        tags.PHOTOMETRIC_INTERPRETATION,
    ),
    _meaning(
        "private image type",
        "part of a complex image, water or fat, map",
        tags.PHILIPS_IMAGE_TYPE,
        tags.SIEMENS_IMAGE_TYPE,
        by=_image_content,
    ),
    _meaning("private image component", "part of a complex image", tags.GE_IMAGE_TYPE),
    _stated("ComplexImageComponent", "part of a complex image", tags.COMPLEX_IMAGE_COMPONENT),
    _stated("AcquisitionContrast", "the weighting", tags.ACQUISITION_CONTRAST),
    _optional(
        "VolumeBasedCalculationTechnique",
        "a reformat or another computation over slices",
        tags.VOLUME_BASED_CALCULATION_TECHNIQUE,
        by=_unless_none,
    ),
    _optional(
        "DerivationDescription",
        "how the image was computed (PS3.3 C.7.6.1.1.3); compression is not counted",
        tags.DERIVATION_DESCRIPTION,
        by=_derivation,
        counts=True,
    ),
    _meaning(
        "ImageComments",
        "free text, in which scanners name what no attribute does: phase, energy, motion",
        tags.IMAGE_COMMENTS,
        tags.FRAME_COMMENTS,
        by=_derivation,
        counts=True,
    ),
    _optional(
        "MagnetizationTransfer",
        "a preparation, which the contrast depends on",
        tags.MAGNETIZATION_TRANSFER,
        by=_unless_none,
    ),
    _optional(
        "SpectrallySelectedSuppression",
        "suppression of fat or water",
        tags.SPECTRALLY_SELECTED_SUPPRESSION,
        by=_unless_none,
    ),
    _stated("ASLContext", "label or control", tags.ASL_CONTEXT),
    _stated("SUVType", "the unit of PET", tags.SUV_TYPE),
    _stated("DecayCorrection", "a correction of PET", tags.DECAY_CORRECTION),
    _stated("AttenuationCorrectionMethod", _PET_CORRECTION, tags.ATTENUATION_CORRECTION_METHOD),
    _stated("ScatterCorrectionMethod", _PET_CORRECTION, tags.SCATTER_CORRECTION_METHOD),
    _stated("RandomsCorrectionMethod", _PET_CORRECTION, tags.RANDOMS_CORRECTION_METHOD),
    _meaning("Radiopharmaceutical", "the tracer of PET", tags.RADIOPHARMACEUTICAL),
    *(
        _meaning(
            f"private diffusion direction ({vendor})",
            "the direction of diffusion",
            tag,
            by=_number,
        )
        for vendor, tag in (
            ("Siemens", tags.SIEMENS_DIFFUSION_GRADIENT_DIRECTION),
            ("GE, first", tags.GE_USER_DATA_20),
            ("GE, second", tags.GE_USER_DATA_21),
            ("GE, third", tags.GE_USER_DATA_22),
            ("Philips, RL", tags.PHILIPS_DIFFUSION_DIRECTION_RL),
            ("Philips, AP", tags.PHILIPS_DIFFUSION_DIRECTION_AP),
        )
    ),
    _meaning("ReceiveCoilName", "a coil has its own sensitivity", tags.RECEIVE_COIL_NAME),
    _meaning(
        "private coil element",
        "the image of a single element",
        tags.SIEMENS_COIL_STRING,
        by=_coil_element,
    ),
    _meaning(
        "NominalPercentageOfCardiacPhase",
        "the phase of the heart",
        tags.NOMINAL_PERCENTAGE_OF_CARDIAC_PHASE,
        by=_number,
    ),
    _meaning(
        "PerformedProcedureStepID", _SERIES_LEVEL, tags.PERFORMED_PROCEDURE_STEP_ID, counts=True
    ),
    _meaning("StudyDate", _ANOTHER_VISIT, tags.STUDY_DATE, by=_same_session),
    _meaning(
        "AcquisitionDate",
        _ANOTHER_VISIT,
        tags.ACQUISITION_DATE,
        tags.ACQUISITION_DATE_TIME,
        by=_same_session,
    ),
    _meaning("SeriesDate", _MADE_AGAIN, tags.SERIES_DATE, by=_same_year),
    _meaning("ContentDate", _MADE_AGAIN, tags.CONTENT_DATE, by=_same_year),
    _recorded(
        "ImageType, other words",
        "original or derived, correction of distortion (ND, DIS2D), words unknown to us",
        tags.IMAGE_TYPE,
        tags.FRAME_TYPE,
        by=_other_words,
        absent="ignored",
    ),
    _recorded(
        "ReconstructionDiameter",
        "the field of view; PixelSpacing decides",
        tags.RECONSTRUCTION_DIAMETER,
        by=_number,
    ),
    _recorded("PixelPaddingValue", _PADDING, tags.PIXEL_PADDING_VALUE, by=_exact_number),
    _recorded("PixelPaddingRangeLimit", _PADDING, tags.PIXEL_PADDING_RANGE_LIMIT, by=_exact_number),
    _recorded(
        "PixelRepresentation",
        "the sign of the samples: where it is wrong, negative values become large ones",
        tags.PIXEL_REPRESENTATION,
        by=_exact_number,
        absent="ignored",
    ),
    _varies("SliceLocation", "a position; ImagePositionPatient decides"),
    _varies("TableHeight", "a position; ImagePositionPatient decides"),
    _varies("SpacingBetweenSlices", "geometry: positions decide, with ATTRIBUTES_CONTRADICT"),
    _varies("GantryDetectorTilt", "geometry: positions decide, with ATTRIBUTES_CONTRADICT"),
    _varies("RescaleSlope", "applied slice by slice; PET has a slope for each slice"),
    _varies("RescaleIntercept", "applied slice by slice"),
    _varies("WindowCenter", "for display"),
    _varies("WindowWidth", "for display"),
    _varies("XRayTubeCurrent", "the dose follows the body"),
    _varies("Exposure", "the dose follows the body"),
    _varies("ExposureTime", "the dose follows the body"),
    _varies("BodyPartExamined", "a scan covers several"),
    _varies("NominalInterval", "the length of a heartbeat"),
    _varies("HeartRate", "the length of a heartbeat"),
    _varies("FrameReferenceTime", "bed positions of PET follow each other"),
    _varies("ActualFrameDuration", "bed positions of PET may differ"),
    _varies("DecayFactor", "follows the time of a bed position"),
)

_SEPARATING: tuple[tuple[Separates, tuple[SliceAttribute, ...]], ...] = (
    ("first", _BY_PURPOSE),
    ("then", _OF_THE_ACQUISITION),
    ("as a time", _TIMES),
    ("", _FURTHER),
)
SLICE_ATTRIBUTES = tuple(
    attribute._replace(separates=how) for how, attributes in _SEPARATING for attribute in attributes
)
"""The table. Its order decides which attribute a message names, which separates volumes first, and
so how `phase=` counts. Names are distinct: `Slice.phase` has the values of a frame by name."""
SERIES_ATTRIBUTES = tuple(a for a in SLICE_ATTRIBUTES if a.why is _SERIES_LEVEL)
"""Attributes that also differ if one volume was sent again as part of another series."""
KEPT_ATTRIBUTE_TAGS = frozenset(tag for attribute in SLICE_ATTRIBUTES for tag in attribute.tags)
"""Tags that headers keep for the table."""
PHASE_ATTRIBUTES = {
    attribute.name: attribute.tags[0]
    for attribute in (*_BY_PURPOSE, *_TIMES)
    if attribute.tags and attribute.name != "ImageType"
}
"""Attributes that may separate volumes and have a value of their own in each file, by name."""


def attributes_that_separate(how: Separates) -> tuple[SliceAttribute, ...]:
    """Return the attributes that separate volumes at shared positions in a certain way."""
    return tuple(a for a in SLICE_ATTRIBUTES if a.separates == how)


def attributes_with(rule: Rule) -> tuple[SliceAttribute, ...]:
    """Return the attributes with a rule."""
    return tuple(a for a in SLICE_ATTRIBUTES if a.rule is rule)
