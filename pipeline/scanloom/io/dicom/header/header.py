"""The header of one DICOM file, read once and without its pixels."""

from __future__ import annotations

import logging
import math
import struct
import threading
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scanloom.core import Reason, ScanError, is_passing
from scanloom.io.dataset_text import decoded_text
from scanloom.io.dicom import tags
from scanloom.io.dicom.header.elements import Elements, PixelDataLocation, SharedElements
from scanloom.io.dicom.header.parser import (
    PARSE_ERRORS,
    parse_plain,
    parse_with_pydicom,
    read_dataset,
    read_first_bytes,
    unreadable_error,
)
from scanloom.io.dicom.slice_attributes import PHASE_ATTRIBUTES
from scanloom.io.system.unpacking import inflate_start, is_gzip

if TYPE_CHECKING:
    from pydicom import Dataset

MAX_CACHED_HEADERS = 4096
"""Headers kept between finding a series and reading it: more than one series has, 5 kB each."""

_PHASE_TAGS = tuple(PHASE_ATTRIBUTES.values())
_EMPTY = (b"",) * len(_PHASE_TAGS)
PATIENT_KEYWORDS = ("PatientName", "PatientID", "PatientBirthDate")
"""Attributes of `Header.patient`."""
_NAME, _ID_AND_BIRTH_DATE = tags.PATIENT_NAME, (tags.PATIENT_ID, tags.PATIENT_BIRTH_DATE)


@dataclass(frozen=True)
class PixelFormat:
    """Storage of a sample (DICOM PS3.3 C.7.6.3.1): `representation` is 0, or 1 for signed."""

    allocated: int
    stored: int
    high_bit: int
    representation: int

    @property
    def signed(self) -> bool:
        """Return whether samples are in two's complement."""
        return self.representation == 1


class Header:
    """Attributes of one DICOM file that geometry, values and grouping depend on; never changed.

    They are converted straight from the bytes: pydicom's own conversion warns with text of the
    header, which may name a patient. Files of a series share the objects of most of them: the
    `__init__` of a dataclass with so many fields would take a tenth of the time of reading a file.

    Parameters
    ----------
    path : Path or str
        Path of the file.
    elements : Elements
        The unconverted attributes. They may identify the patient.

    Attributes
    ----------
    path_string : str
        Path of the file; `path` is the same as a Path.
    syntax : str
        Transfer syntax UID.
    pixels : PixelDataLocation or None
        Location of the pixels; None if PixelData is missing, or the file ends before it.
    patient : tuple of bytes
        PatientName, PatientID and PatientBirthDate, unconverted but without padding; of the name
        only the first group, in upper case and without empty components at its end.
    position, orientation, spacing : tuple of float or None
        ImagePositionPatient (LPS mm), ImageOrientationPatient (direction cosines in LPS) and
        PixelSpacing (between rows, between columns; mm). None if absent or not of 3, 6 and 2
        numbers.
    slope, intercept : float
        1 and 0 if both are absent; NaN if not a number, or absent while the other is present.
    rescale_given : bool
        Whether slope or intercept is present.
    lookup_table : bool
        Whether ModalityLUTSequence has a value.
    padding : int or None
        PixelPaddingValue as a stored sample.
    phase : tuple of bytes
        Unconverted values of `PHASE_ATTRIBUTES`, which may distinguish volumes of one series; empty
        if absent.
    shared : SharedElements
        Values that files of a series usually share: one object for all headers with equal ones.
    """

    path_string: str
    elements: Elements
    syntax: str
    pixels: PixelDataLocation | None
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
    shared: SharedElements

    def __init__(self, path: Path | str, elements: Elements) -> None:
        own = elements.own
        vars(self).update(_shared_fields(elements.common))
        self.path_string, self.elements, self.shared = str(path), elements, elements.common
        self.pixels, self.lookup_table = elements.pixels, elements.lookup_table
        self.position = _floats(own.get(tags.IMAGE_POSITION_PATIENT, b""), 3)
        self.phase = tuple(map(own.get, _PHASE_TAGS, _EMPTY))
        self.sop_instance = elements.text(tags.SOP_INSTANCE_UID)

    @cached_property
    def path(self) -> Path:
        """The file as a Path, made on first access: an index needs it for few files."""
        return Path(self.path_string)

    def read_dataset(self) -> Dataset:
        """Read all elements before the pixels with pydicom. They may identify the patient.

        Raises
        ------
        ScanError
            UNREADABLE or DAMAGED, if the file has changed since.
        """
        try:
            with pydicom_muted():
                return read_dataset(self.path)
        except OSError as exc:
            raise unreadable_error(exc) from exc

    def decoded(self, keyword: str) -> str:
        """Return a text element by the file's character set. It may identify the patient.

        Raises
        ------
        ScanError
            DAMAGED if the element can't be parsed; UNREADABLE if the file has changed since.
        """
        dataset = self.read_dataset()
        with parsing("a text of a header"):  # pydicom parses an element when it is asked for
            return decoded_text(dataset.get(keyword))

    def decoded_patient(self, n: int) -> str:
        """Return the value of `patient` at `n`, as `decoded`. It names the patient."""
        text = unicodedata.normalize("NFC", self.decoded(PATIENT_KEYWORDS[n])).strip(" \0")
        return text if n else text.split("=")[0].rstrip(" \0^").upper()  # as `_normalised_name`


def read_headers(paths: Iterable[Path]) -> list[Header | ScanError | None]:
    """Read the header of each file.

    Returns
    -------
    list of Header, ScanError or None
        In the order of `paths`. None for a file that is not DICOM. For a file that can't be opened
        (UNREADABLE) or parsed (DAMAGED) the error, not raised, so that the others are still read.
    """
    with pydicom_muted():
        return [read_header(path) for path in paths]


_muting, _muting_lock = ExitStack(), threading.Lock()
_muted_blocks = 0


@contextmanager
def pydicom_muted() -> Iterator[None]:
    """Suppress warnings and logs of pydicom: they quote the header, which names a patient.

    Both belong to the process: they are suppressed while any thread is in such a block.
    """
    global _muted_blocks
    logger = logging.getLogger("pydicom")
    with _muting_lock:
        if not _muted_blocks:
            _muting.enter_context(warnings.catch_warnings(action="ignore"))
            _muting.callback(setattr, logger, "disabled", logger.disabled)
            logger.disabled = True
        _muted_blocks += 1
    try:
        yield
    finally:
        with _muting_lock:
            _muted_blocks -= 1
            if not _muted_blocks:
                _muting.close()


@contextmanager
def parsing(
    subject: str, reason: Reason = Reason.DAMAGED, *further_errors: type[Exception]
) -> Iterator[None]:
    """Mute pydicom in the block, and refuse data that it can't parse, by default as DAMAGED."""
    # pydicom raises OSError for truncated data
    errors: tuple[type[Exception], ...] = (OSError, *PARSE_ERRORS, *further_errors)
    try:
        with pydicom_muted():
            yield
    except errors as exc:
        if isinstance(exc, OSError) and is_passing(exc):
            raise unreadable_error(exc) from exc
        raise ScanError(reason, f"{subject} can't be parsed ({type(exc).__name__})") from exc


def read_header(path: Path | str) -> Header | ScanError | None:
    """Read the header of one file, as `read_headers` does; pydicom is not muted."""
    try:
        elements = read_elements(path)
    except ScanError as error:
        return error
    except OSError as exc:
        return unreadable_error(exc)
    return None if elements is None else Header(path, elements)


def read_elements(path: Path | str) -> Elements | None:
    """Read the attributes of one file, compressed by gzip or not; None if it is not DICOM.

    Raises
    ------
    OSError
        If it can't be read.
    ScanError
        DAMAGED if it can't be parsed.
    """
    start = read_first_bytes(path)
    if is_gzip(start):
        start = inflate_start(start, len(start))
        return parse_with_pydicom(Path(path))._replace(gzipped=True) if is_dicom(start) else None
    if not is_dicom(start):
        return None
    return parse_plain(path, start) or parse_with_pydicom(Path(path))


def is_dicom(start: bytes) -> bool:
    """Recognise DICOM by its content (PS3.10 7.1), even without preamble and meta header."""
    if start[128:132] == b"DICM":
        return True
    if len(start) < 16:
        return False
    group, element, vr, short = struct.unpack("<HH2sH", start[:8])
    (long,) = struct.unpack("<I", start[4:8])
    explicit = vr.isalpha() and vr.isupper() and short <= 256
    return group in (2, 8) and element <= 0x20 and (explicit or long <= 256)


@lru_cache(1024)
def _shared_fields(common: SharedElements) -> dict[str, Any]:
    """Return the fields of `Header` that depend on shared values alone. Do not modify them."""
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
        "patient": (
            _normalised_name(raw(_NAME)),
            *(raw(tag).strip(b" \0") for tag in _ID_AND_BIRTH_DATE),
        ),
        "modality": text(tags.MODALITY).upper(),
        "image_type": tuple(value.strip().upper() for value in text(tags.IMAGE_TYPE).split("\\")),
        "orientation": _floats(raw(tags.IMAGE_ORIENTATION_PATIENT), 6),
        "spacing": _floats(raw(tags.PIXEL_SPACING), 2),
        "rows": number(tags.ROWS, 0),
        "columns": number(tags.COLUMNS, 0),
        "samples": number(tags.SAMPLES_PER_PIXEL, 1),
        "frames": _frame_count(text(tags.NUMBER_OF_FRAMES)),
        "photometric": text(tags.PHOTOMETRIC_INTERPRETATION).upper(),
        "format": PixelFormat(allocated, stored, number(tags.HIGH_BIT, stored - 1), representation),
        "slope": _float(slope, math.nan if _is_present(intercept) else 1.0),
        "intercept": _float(intercept, math.nan if _is_present(slope) else 0.0),
        "rescale_given": _is_present(slope) or _is_present(intercept),
        "rescale_type": text(tags.RESCALE_TYPE).upper(),
        "padding": _padding(elements, representation == 1),
        "burned_in": text(tags.BURNED_IN_ANNOTATION).upper() == "YES",
        "multi_energy": text(tags.MULTIENERGY_CT_ACQUISITION).upper() == "YES",
    }


def _normalised_name(raw: bytes) -> bytes:
    """Return the first group of a name in upper case, without empty components at its end.

    Doe^John, DOE^JOHN^^ and Doe^John=(ideographs) are the same person (PS3.5 6.2.1.1).
    """
    return raw.strip(b" \0").split(b"=")[0].rstrip(b" \0^").upper()


def _padding(elements: Elements, signed: bool) -> int | None:
    """Return PixelPaddingValue, signed like the pixels (PS3.3 C.7.5.1.1.2) whatever its VR."""
    if len(elements.raw(tags.PIXEL_PADDING_VALUE)) != 2:
        return None
    return elements.number(tags.PIXEL_PADDING_VALUE, 0, signed=signed)


def _frame_count(text: str) -> int:
    """Return NumberOfFrames: 1 if it is absent or 0, 0 if it is not a number (PS3.5 6.2, IS)."""
    if not text:
        return 1
    return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) <= 12 else 0


def _floats(raw: bytes, count: int) -> tuple[float, ...] | None:
    """Return the numbers of a decimal string; None unless there are `count` of them."""
    if b"_" in raw:
        return None  # allowed in Python numbers, not in decimal strings (PS3.5 6.2, DS)
    try:
        numbers = tuple([float(number.strip(b" \0")) for number in raw.split(b"\\")])
    except ValueError:
        return None
    return numbers if len(numbers) == count else None


def _is_present(raw: bytes) -> bool:
    return bool(raw.strip(b" \0"))


def _float(raw: bytes, default: float) -> float:
    text = raw.strip(b" \0")
    if not text:
        return default
    numbers = _floats(text, 1)
    return math.nan if numbers is None else numbers[0]


class HeaderCache:
    """Cache of headers between finding a series and reading it, so that none is parsed twice.

    Taking a header removes it from the cache. The header of a file that has changed (size or
    modification time) is not returned.
    """

    def __init__(self, limit: int = MAX_CACHED_HEADERS) -> None:
        self._limit = limit
        self._headers: dict[tuple[str, int, int], Header] = {}
        self._lock = threading.Lock()

    def put(self, headers: Iterable[Header]) -> None:
        """Add headers; the oldest ones are dropped beyond the limit."""
        with self._lock:
            for header in headers:
                key = _file_key(header.path)
                if key is not None:
                    self._headers[key] = header
            while len(self._headers) > self._limit:
                del self._headers[next(iter(self._headers))]

    def take(self, path: Path) -> Header | None:
        """Remove and return the header of a file; None if missing, or if the file has changed."""
        key = _file_key(path)
        if key is None:
            return None
        with self._lock:
            return self._headers.pop(key, None)


def _file_key(path: Path) -> tuple[str, int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return str(path), state.st_size, state.st_mtime_ns
