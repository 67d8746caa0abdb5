"""What the header of one DICOM file says, read once and without its pixels."""

from __future__ import annotations

import logging
import math
import struct
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import tags
from scanloom.io.dicom.elements import Common, Elements, PixelPlace
from scanloom.io.dicom.fast_header import read_plain, read_start
from scanloom.io.dicom.odd_header import read_dataset, read_odd
from scanloom.io.unpack import inflated_start, starts_gzip

if TYPE_CHECKING:
    from pydicom import Dataset

KEPT_HEADERS = 4096
"""Headers kept between finding a series and reading it: larger than a series, 5 kB each."""

PHASE_TAGS = {
    "TemporalPositionIdentifier": tags.TEMPORAL_POSITION_IDENTIFIER,
    "EchoNumbers": tags.ECHO_NUMBERS,
    "EchoTime": tags.ECHO_TIME,
    "DiffusionBValue": tags.DIFFUSION_B_VALUE,
    "DiffusionGradientOrientation": tags.DIFFUSION_GRADIENT_ORIENTATION,
    "AcquisitionNumber": tags.ACQUISITION_NUMBER,
    "TriggerTime": tags.TRIGGER_TIME,
    "AcquisitionTime": tags.ACQUISITION_TIME,
    "ContentTime": tags.CONTENT_TIME,
    "InstanceNumber": tags.INSTANCE_NUMBER,
}
"""What may tell volumes of one series apart, in the order of `Header.phase`: of `CHANGING`."""


@dataclass(frozen=True)
class PixelFormat:
    """How a sample is stored (DICOM PS3.3 C.7.6.3.1): `representation` is 0, or 1 for signed."""

    allocated: int
    stored: int
    high_bit: int
    representation: int

    @property
    def signed(self) -> bool:
        """Whether samples are in two's complement."""
        return self.representation == 1


@dataclass(frozen=True, eq=False)
class Header:
    """One DICOM file without its pixels.

    Only what decides about geometry, values and grouping is read out, straight from the bytes:
    pydicom's own conversion warns with the header's text, which may name a patient.

    Parameters
    ----------
    place : str
        Where the file lies; `path` as a Path.
    elements : Elements
        What was kept of it, unconverted. It holds identity.
    syntax : str
        Transfer syntax UID.
    pixels : PixelPlace or None
        None where the file has no PixelData, or ends before it.
    patient : tuple of bytes
        PatientName, PatientID and PatientBirthDate as they stand in the file, without padding, the
        name also without delimiters that end it.
    position, orientation, spacing : tuple of float or None
        ImagePositionPatient and ImageOrientationPatient (LPS mm), PixelSpacing (between rows,
        between columns; mm). None where absent or not made of that many numbers.
    slope, intercept : float
        1 and 0 where both are absent; NaN where they are no numbers, or the other one is alone.
    phase : tuple of bytes
        What may tell volumes of one series apart: the values of `PHASE_TAGS` as they stand in the
        file, empty where absent.
    shared : Common
        What files of a series mostly have in common: one object for headers in which it is the
        same.
    """

    place: str
    elements: Elements
    syntax: str
    pixels: PixelPlace | None
    sop_class: str
    study_uid: str
    series_uid: str
    frame_of_reference: str
    patient: tuple[bytes, ...]
    modality: str
    image_type: tuple[str, ...]
    position: tuple[float, ...] | None
    orientation: tuple[float, ...] | None
    spacing: tuple[float, ...] | None
    rows: int
    columns: int
    samples: int
    frames: int
    photometric: str
    format: PixelFormat
    slope: float
    intercept: float
    rescale_given: bool
    rescale_type: str
    lookup_table: bool
    padding: int | None
    burned_in: bool
    multi_energy: bool
    phase: tuple[bytes, ...]
    sop_instance: str
    shared: Common

    @cached_property
    def path(self) -> Path:
        """The file; made when it is asked for, since an index needs none for most files."""
        return Path(self.place)

    def read_dataset(self) -> Dataset:
        """Return all elements before the pixels, read by pydicom. They hold identity.

        Raises
        ------
        ScanError
            UNREADABLE or DAMAGED, if the file was changed since.
        """
        try:
            with quiet():
                return read_dataset(self.path)
        except OSError as exc:
            detail = f"a file can't be read ({type(exc).__name__})"
            raise ScanError(Reason.UNREADABLE, detail) from exc


def read_headers(paths: Iterable[Path]) -> list[Header | ScanError | None]:
    """Read the header of each file.

    Returns
    -------
    list of Header, ScanError or None
        In the order of `paths`: None where a file is no DICOM; the error, not raised, where it
        can't be opened (UNREADABLE) or parsed (DAMAGED), so that the others are still read.
    """
    with quiet():
        return [_read_or_say_why(path) for path in paths]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep pydicom from warning and logging: its words quote the header, which names a patient."""
    logger = logging.getLogger("pydicom")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before


def _read_or_say_why(path: Path) -> Header | ScanError | None:
    try:
        return _read_header(path)
    except ScanError as error:
        return error


def _read_header(path: Path) -> Header | None:
    try:
        elements = read_elements(path)
        return None if elements is None else make_header(path, elements)
    except OSError as exc:
        detail = f"a file can't be read ({type(exc).__name__})"
        raise ScanError(Reason.UNREADABLE, detail) from exc


def read_elements(path: Path | str) -> Elements | None:
    """Return what one file says, packed by gzip or not; None if it is no DICOM.

    Raises
    ------
    OSError
        If it can't be read.
    ScanError
        DAMAGED if it can't be parsed.
    """
    start = read_start(path)
    if starts_gzip(start):
        start = inflated_start(start, len(start))
        return read_odd(Path(path))._replace(gzipped=True) if is_dicom(start) else None
    if not is_dicom(start):
        return None
    return read_plain(path, start) or read_odd(Path(path))


def is_dicom(start: bytes) -> bool:
    """Tell DICOM by its content (PS3.10 7.1), also where preamble and meta header are missing."""
    if start[128:132] == b"DICM":
        return True
    if len(start) < 16:
        return False
    group, element, vr, short = struct.unpack("<HH2sH", start[:8])
    (long,) = struct.unpack("<I", start[4:8])
    explicit = vr.isalpha() and vr.isupper() and short <= 256
    return group in (2, 8) and element <= 0x20 and (explicit or long <= 256)


def make_header(path: Path | str, elements: Elements) -> Header:
    """Return what the elements of a file mean."""
    own = elements.own
    header = object.__new__(Header)  # its own __init__ takes as long as reading the file
    header.__dict__.update(
        _meaning(elements.common),
        shared=elements.common,
        place=str(path),
        elements=elements,
        pixels=elements.pixels,
        position=_floats(own.get(tags.IMAGE_POSITION_PATIENT, b""), 3),
        lookup_table=elements.lookup_table,
        phase=tuple(map(own.get, _PHASE, _ABSENT)),
        sop_instance=elements.text(tags.SOP_INSTANCE_UID),
    )
    return header


_PHASE = tuple(PHASE_TAGS.values())
_ABSENT = (b"",) * len(_PHASE)
_NAME, _PATIENT = tags.PATIENT_NAME, (tags.PATIENT_ID, tags.PATIENT_BIRTH_DATE)
PRIVATE_B_VALUE = "private b-value"
MADE_BY = {
    "KVP": (tags.KVP,),
    "ConvolutionKernel": (tags.CONVOLUTION_KERNEL,),
    "SliceThickness": (tags.SLICE_THICKNESS,),
    "InversionTime": (tags.INVERSION_TIME, tags.INVERSION_TIMES),
    "FlipAngle": (tags.FLIP_ANGLE,),
    PRIVATE_B_VALUE: (
        tags.SIEMENS_B_VALUE,
        tags.GE_B_VALUE,
        tags.PHILIPS_DIFFUSION_B_FACTOR,
    ),
    "ScanningSequence": (tags.SCANNING_SEQUENCE,),
    "SequenceVariant": (tags.SEQUENCE_VARIANT,),
    "ScanOptions": (tags.SCAN_OPTIONS,),
    "SequenceName": (tags.SEQUENCE_NAME,),
    "RepetitionTime": (tags.REPETITION_TIME,),
    "FilterType": (tags.FILTER_TYPE,),
    "Units": (tags.UNITS,),
    "CorrectedImage": (tags.CORRECTED_IMAGE,),
    "ReconstructionMethod": (tags.RECONSTRUCTION_METHOD,),
    "ProtocolName": (tags.PROTOCOL_NAME,),
    "SeriesNumber": (tags.SERIES_NUMBER,),
    "SeriesDescription": (tags.SERIES_DESCRIPTION,),
    "ContrastBolusAgent": (tags.CONTRAST_BOLUS_AGENT,),
}
"""Attributes that slices of one volume share: how it was made. Of frames, the same in groups."""


@lru_cache(1024)
def _meaning(common: Common) -> dict[str, Any]:
    """Return the fields that come of what files have in common; nobody may change them."""
    elements = Elements(common, {}, False, None)
    raw, text, number = elements.raw, elements.text, elements.number
    representation = number(tags.PIXEL_REPRESENTATION, -1)
    allocated = number(tags.BITS_ALLOCATED, 0)
    stored = number(tags.BITS_STORED, allocated)
    slope, intercept = raw(tags.RESCALE_SLOPE), raw(tags.RESCALE_INTERCEPT)
    return {
        "syntax": common.syntax,
        "sop_class": text(tags.SOP_CLASS_UID) or text(tags.MEDIA_STORAGE_SOP_CLASS_UID),
        "study_uid": text(tags.STUDY_INSTANCE_UID),
        "series_uid": text(tags.SERIES_INSTANCE_UID),
        "frame_of_reference": text(tags.FRAME_OF_REFERENCE_UID),
        "patient": (_person(raw(_NAME)), *(raw(tag).strip(b" \0") for tag in _PATIENT)),
        "modality": text(tags.MODALITY).upper(),
        "image_type": tuple(part.strip().upper() for part in text(tags.IMAGE_TYPE).split("\\")),
        "orientation": _floats(raw(tags.IMAGE_ORIENTATION_PATIENT), 6),
        "spacing": _floats(raw(tags.PIXEL_SPACING), 2),
        "rows": number(tags.ROWS, 0),
        "columns": number(tags.COLUMNS, 0),
        "samples": number(tags.SAMPLES_PER_PIXEL, 1),
        "frames": _frames(text(tags.NUMBER_OF_FRAMES)),
        "photometric": text(tags.PHOTOMETRIC_INTERPRETATION).upper(),
        "format": PixelFormat(allocated, stored, number(tags.HIGH_BIT, stored - 1), representation),
        "slope": _float(slope, math.nan if _said(intercept) else 1.0),
        "intercept": _float(intercept, math.nan if _said(slope) else 0.0),
        "rescale_given": _said(slope) or _said(intercept),
        "rescale_type": text(tags.RESCALE_TYPE).upper(),
        "padding": _padding(elements, representation == 1),
        "burned_in": text(tags.BURNED_IN_ANNOTATION).upper() == "YES",
        "multi_energy": text(tags.MULTIENERGY_CT_ACQUISITION).upper() == "YES",
    }


def _person(raw: bytes) -> bytes:
    """Return what tells persons apart: the first group of a name, without empty components.

    Doe^John, DOE^JOHN^^ and Doe^John=(ideographs) are one (PS3.5 6.2.1.1).
    """
    return raw.strip(b" \0").split(b"=")[0].rstrip(b" \0^").upper()


def _padding(elements: Elements, signed: bool) -> int | None:
    """PixelPaddingValue has the sign of the pixels (PS3.3 C.7.5.1.1.2), whatever its VR says."""
    if len(elements.raw(tags.PIXEL_PADDING_VALUE)) != 2:
        return None
    return elements.number(tags.PIXEL_PADDING_VALUE, 0, signed=signed)


def _frames(text: str) -> int:
    """Return NumberOfFrames: 1 where it is absent, 0 where it is no number (PS3.5 6.2, IS)."""
    if not text:
        return 1
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else 0


def _floats(raw: bytes, count: int) -> tuple[float, ...] | None:
    if b"_" in raw:
        return None  # Python allows it, DICOM does not (PS3.5 6.2, DS)
    try:
        numbers = tuple([float(part.strip(b" \0")) for part in raw.split(b"\\")])
    except ValueError:
        return None
    return numbers if len(numbers) == count else None


def _said(raw: bytes) -> bool:
    return bool(raw.strip(b" \0"))


def _float(raw: bytes, default: float) -> float:
    text = raw.strip(b" \0")
    if not text:
        return default
    numbers = _floats(text, 1)
    return math.nan if numbers is None else numbers[0]


class HeaderShelf:
    """Headers between finding a series and reading it, so that none is parsed twice.

    Each is taken out once: afterwards it belongs to the reader alone. A file that changed in
    between (size or time of change) is read again.
    """

    def __init__(self, limit: int = KEPT_HEADERS) -> None:
        self._limit = limit
        self._kept: OrderedDict[tuple[str, int, int], Header] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, headers: Iterable[Header]) -> None:
        """Keep headers, the oldest ones giving way."""
        with self._lock:
            for header in headers:
                key = _file_key(header.path)
                if key is not None:
                    self._kept[key] = header
            while len(self._kept) > self._limit:
                self._kept.popitem(last=False)

    def take(self, path: Path) -> Header | None:
        """Return the header of a file and forget it; None if it is not here, or was changed."""
        key = _file_key(path)
        if key is None:
            return None
        with self._lock:
            return self._kept.pop(key, None)


def _file_key(path: Path) -> tuple[str, int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return str(path), state.st_size, state.st_mtime_ns


SHELF = HeaderShelf()
