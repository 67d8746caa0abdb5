"""Data shared by DICOM objects made of a series: its patient and study, references, codes, UIDs."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from scanloom.core import Case, Code, Segmentation, Structure
from scanloom.io.dataset_text import (
    decimal_strings,
    decoded_text,
    matching_text,
    plain_text,
    valid_uid,
)
from scanloom.io.dicom import uids
from scanloom.io.scan import SHARED_UIDS, DicomSource
from scanloom.version import __version__

if TYPE_CHECKING:
    from pydicom import Dataset

ITEM = b"\xfe\xff\x00\xe0"
"""Tag of an item, little endian."""
FAMILY = Code("123110", "DCM", "Artificial Intelligence")
"""Family of algorithms (CID 7162)."""
ANATOMY = ("91723000", "123037004")
"""SNOMED CT codes of the category Anatomical Structure: that of DICOM, and that of 3D Slicer."""
_MAX_CHARACTERS = 64
"""Characters of a long string (LO)."""
_DATE = re.compile(r"\d{4}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])")
_TIME = re.compile(r"([01]\d|2[0-3])([0-5]\d([0-5]\d(\.\d{1,6})?)?)?")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_INVALID = re.compile(r"[\x00-\x1f\x7f\\]")
"""Control characters, and the backslash, which would separate two values of what has one."""
_METHOD = re.compile(r"[A-Z0-9_ ]{1,16}")
_NO_DATE, _NO_TIME = "19700101", "000000"

_ALWAYS_LOSSY = dict.fromkeys(
    (
        uids.JPEG_BASELINE_8_BIT,
        uids.JPEG_EXTENDED_12_BIT,
        uids.JPEG_SPECTRAL_SELECTION_NON_HIERARCHICAL_6_8,
        uids.JPEG_FULL_PROGRESSION_NON_HIERARCHICAL_10_12,
    ),
    "ISO_10918_1",
)
_PERHAPS_LOSSY = {
    uids.JPEG_LS_NEAR_LOSSLESS: "ISO_14495_1",
    uids.JPEG_2000: "ISO_15444_1",
    uids.HTJ2K: "ISO_15444_15",
}
"""Transfer syntaxes, and the method of compression of each (PS3.3 C.7.6.1.1.5.1)."""

_TEXT = {
    "PatientID": 64,
    "IssuerOfPatientID": 64,
    "StudyID": 16,
    "AccessionNumber": 16,
    "ReferringPhysicianName": 64,
    "StudyDescription": 64,
    "PositionReferenceIndicator": 64,
}
"""Attributes that a derived object shares with its source (PS3.3 C.7), and their maximum lengths.

No others are copied: invalid values in other attributes would make the derived object invalid.
"""

_OPTIONAL = ("IssuerOfPatientID", "StudyDescription")
"""Those of type 3: absent if unknown; the others are then empty."""


def make_item(**elements: object) -> Dataset:
    """Return a data set of elements by keyword."""
    from pydicom import Dataset

    item = Dataset()
    for keyword, value in elements.items():
        setattr(item, keyword, value)
    return item


def long_string(text: str) -> str:
    """Return as much of a text as a long string holds (PS3.5 6.2, LO).

    A backslash, which would separate two values, becomes a slash; readers strip spaces at the ends.
    """
    return text.replace("\\", "/")[:_MAX_CHARACTERS].strip()


def code_item(code: Code) -> Dataset:
    """Return the item of a code sequence (PS3.3 8)."""
    item = make_item(CodingSchemeDesignator=code.scheme, CodeMeaning=long_string(code.meaning))
    if len(code.value) <= 16:
        item.CodeValue = code.value
    else:  # longer than an SH may be (PS3.3 8.1)
        item.LongCodeValue = code.value
    return item


def type_item(structure: Structure) -> Dataset:
    """Return the item of a structure's type, with its laterality as the modifier."""
    item = code_item(structure.type)
    if structure.laterality is not None:
        item.SegmentedPropertyTypeModifierCodeSequence = [code_item(structure.laterality)]
    return item


def description_of(structure: Structure) -> str:
    """Return as much of a structure's name as a short text holds (PS3.5 6.2, ST)."""
    note = " (experimental)" if structure.experimental else ""
    return f"{structure.name}{note}"[:1024]


def reference_item(sop_class: str, sop_instance: str) -> Dataset:
    """Return the item that refers to a SOP instance."""
    return make_item(ReferencedSOPClassUID=sop_class, ReferencedSOPInstanceUID=sop_instance)


def algorithm_item(segmentation: Segmentation) -> Dataset:
    """Return the identification of the algorithm: model, version, changes (PS3.3 10.16)."""
    algorithm = make_item(AlgorithmName=segmentation.model)
    algorithm.AlgorithmFamilyCodeSequence = [code_item(FAMILY)]
    algorithm.AlgorithmVersion = algorithm_version(segmentation)
    if segmentation.changes:
        algorithm.AlgorithmParameters = f"changes={segmentation.changes}"
    return algorithm


def algorithm_version(segmentation: Segmentation) -> str:
    """Return the version of a model as an algorithm's."""
    return long_string(segmentation.version) or "unknown"


def hashed_uid(*texts: str) -> str:
    """Return a UID made of a 128-bit hash of texts (PS3.5 B.2: 2.25 and an integer)."""
    digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=16, person=b"scanloom")
    return f"2.25.{int.from_bytes(digest.digest(), 'big')}"


def written_datetime(source: DicomSource, case: Case) -> tuple[str, str]:
    """Return the date and time (DA, TM) that the case's outputs ask for."""
    if case.outputs.dates == "now":
        now = datetime.now().astimezone()
        return now.strftime("%Y%m%d"), now.strftime("%H%M%S.%f")
    return content_datetime(source)


def set_dates(dataset: Dataset, content: str, date_time: tuple[str, str]) -> None:
    """Set the dates of a data set, that of its `content` by the beginning of its keyword."""
    for kind in (content, "Series", "InstanceCreation"):
        setattr(dataset, f"{kind}Date", date_time[0])
        setattr(dataset, f"{kind}Time", date_time[1])


def content_datetime(source: DicomSource) -> tuple[str, str]:
    """Return the date and time (DA, TM) of the series' content; 1970 if the series has no date."""
    first = source.first
    for kind in ("Content", "Acquisition", "Series", "Study"):
        date = matching_text(first, f"{kind}Date", _DATE)
        if date:
            return date, matching_text(first, f"{kind}Time", _TIME) or _NO_TIME
    return _NO_DATE, _NO_TIME


def new_object(
    source: DicomSource,
    segmentations: Sequence[Segmentation],
    sop_class: str,
    transfer_syntax: str,
    modality: str,
    description: str,
) -> Dataset:
    """Return the elements that all objects have, but dates and UIDs, with file meta information.

    Patient, study and frame of reference are those of the source. Text is decoded and becomes UTF-8
    if it, or a text of the `segmentations` that the object describes, is not ASCII. Invalid values
    (a date, a StudyID that is too long or has a backslash) are left empty or out, except
    PatientName and PatientID, which are copied unchanged.
    """
    from pydicom.dataset import FileMetaDataset

    first = source.first
    shared = make_item(PatientName=_text(first, "PatientName"))
    for keyword in SHARED_UIDS:
        setattr(shared, keyword, valid_uid(first, keyword))
    for keyword, max_length in _TEXT.items():
        text = _text(first, keyword)
        is_valid = len(text) <= max_length and not _INVALID.search(text)
        text = text if is_valid or keyword == "PatientID" else ""
        if text or keyword not in _OPTIONAL:
            setattr(shared, keyword, text)
    _add_deidentification(shared, first)
    texts = (str(element.value) for element in shared)
    if not all(text.isascii() for text in (*texts, *_texts_of(segmentations))):
        shared.SpecificCharacterSet = "ISO_IR 192"
    for keyword in ("PatientBirthDate", "StudyDate"):
        setattr(shared, keyword, matching_text(first, keyword, _DATE))
    shared.StudyTime = matching_text(first, "StudyTime", _TIME)
    shared.PatientSex = matching_text(first, "PatientSex", re.compile("[MFO]"))
    shared.file_meta = meta = FileMetaDataset()
    meta.TransferSyntaxUID = transfer_syntax
    meta.ImplementationClassUID = hashed_uid("implementation")
    meta.ImplementationVersionName = f"scanloom {__version__}"[:16]
    meta.MediaStorageSOPClassUID = shared.SOPClassUID = sop_class
    shared.Modality, shared.SeriesDescription = modality, description[:_MAX_CHARACTERS]
    shared.Manufacturer = shared.ManufacturerModelName = "scanloom"
    shared.SoftwareVersions, shared.DeviceSerialNumber = __version__, "0"
    return shared


def save_object(path: Path, head: Dataset, tail: Iterable[bytes], recipe: str, digest: str) -> None:
    """Write a data set, with UIDs that follow from a digest, and the encoded elements behind it."""
    from pydicom import dcmwrite

    head.SeriesInstanceUID = hashed_uid("series", recipe, digest)
    head.SOPInstanceUID = hashed_uid("instance", recipe, digest)
    head.file_meta.MediaStorageSOPInstanceUID = head.SOPInstanceUID
    with path.open("wb") as file:
        dcmwrite(file, head, enforce_file_format=True)
        file.writelines(tail)


def add_lossy_compression(shared: Dataset, first: Dataset) -> None:
    """Copy whether, how and how much the source was compressed with loss.

    Where it does not say, its transfer syntax does: one that may have lost something counts as if
    it had, and one that always does counts whatever the source says (PS3.3 C.7.6.1.1.5).
    """
    syntax = plain_text(getattr(first, "file_meta", None) or {}, "TransferSyntaxUID")
    said = plain_text(first, "LossyImageCompression")
    by_syntax = syntax in _ALWAYS_LOSSY or (syntax in _PERHAPS_LOSSY and said != "00")
    lossy = said == "01" or by_syntax
    shared.LossyImageCompression = "01" if lossy else "00"
    ratios, methods = (
        [text.strip() for text in plain_text(first, f"LossyImageCompression{suffix}").split("\\")]
        for suffix in ("Ratio", "Method")
    )
    if lossy and all(map(_NUMBER.fullmatch, ratios)):
        shared.LossyImageCompressionRatio = decimal_strings(ratios)
    if lossy and all(map(_METHOD.fullmatch, methods)):
        shared.LossyImageCompressionMethod = methods
    elif by_syntax:
        shared.LossyImageCompressionMethod = (_ALWAYS_LOSSY | _PERHAPS_LOSSY)[syntax]


def _add_deidentification(shared: Dataset, first: Dataset) -> None:
    """Copy the attributes of a de-identification.

    PatientIdentityRemoved YES requires the method (PS3.3 C.7.1.1): without it, it is not copied.
    """
    texts = map(str.strip, _text(first, "DeidentificationMethod").split("\\"))
    methods = [text for text in texts if 0 < len(text) <= _MAX_CHARACTERS]
    if methods:
        shared.DeidentificationMethod = methods
    if "DeidentificationMethodCodeSequence" in first:
        shared.DeidentificationMethodCodeSequence = first.DeidentificationMethodCodeSequence
    removed = plain_text(first, "PatientIdentityRemoved")
    has_method = methods or "DeidentificationMethodCodeSequence" in shared
    if removed == "NO" or (removed == "YES" and has_method):
        shared.PatientIdentityRemoved = removed


def _texts_of(segmentations: Sequence[Segmentation]) -> Iterator[str]:
    """Yield all texts of segmentations that may be of another character set than ASCII."""
    for segmentation in segmentations:
        yield from (segmentation.version, segmentation.changes)
        for structure in segmentation.structures:
            yield from (structure.name, structure.category.meaning, structure.type.meaning)
            if structure.laterality is not None:
                yield structure.laterality.meaning


def _text(header: Dataset, keyword: str) -> str:
    """Return text of any character set, values joined by a backslash; ASCII as `plain_text`."""
    plain = plain_text(header, keyword)
    if plain.isascii() and "\x1b" not in plain:  # ISO 2022 encodes other sets in ASCII bytes
        return plain
    return decoded_text(header.get(keyword))


# --- encoded elements -----------------------------------------------------------------------------
# Explicit VR, little endian, unless it is said.


def encode_element(group: int, element: int, vr: str, text: str) -> bytes:
    """Return an element of text in UTF-8, padded to an even length (PS3.5 7.1.2, 6.2)."""
    value = text.encode()
    value += (b"\0" if vr == "UI" else b" ") * (len(value) % 2)
    form = "<HH2s2xI" if vr in ("UC", "UT") else "<HH2sH"
    return struct.pack(form, group, element, vr.encode(), len(value)) + value


def encode_sequence(group: int, element: int, *items: bytes) -> bytes:
    """Return a sequence of encoded items (PS3.5 7.5)."""
    chunks = [chunk for item in items for chunk in (ITEM, struct.pack("<I", len(item)), item)]
    head = struct.pack("<HH2s2xI", group, element, b"SQ", sum(map(len, chunks)))
    return b"".join((head, *chunks))


def encode_elements(dataset: Dataset, characters: str, *, implicit: bool = False) -> bytes:
    """Encode the elements of a dataset, without file meta information, in a character set."""
    from pydicom.filebase import DicomBytesIO
    from pydicom.filewriter import write_dataset

    buffer = DicomBytesIO()
    buffer.is_implicit_VR, buffer.is_little_endian = implicit, True
    write_dataset(buffer, dataset, characters)
    return bytes(buffer.getvalue())


def encode_dataset(dataset: Dataset) -> bytes:
    """Encode the elements of a dataset, with its file meta information."""
    from pydicom import dcmwrite
    from pydicom.filebase import DicomBytesIO

    buffer = DicomBytesIO()
    dcmwrite(buffer, dataset, implicit_vr=False, little_endian=True)
    return bytes(buffer.getvalue())
