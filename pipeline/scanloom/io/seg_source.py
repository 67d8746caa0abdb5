"""What a DICOM SEG takes over from the series that it lies on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scanloom.io.scan import DicomSource

if TYPE_CHECKING:
    from pydicom import Dataset

_SHARED_UIDS = ("StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID")
_OWN_UIDS = ("SOPInstanceUID", "SOPClassUID")
_UID = re.compile(r"(?=.{1,64}$)(0|[1-9]\d*)(\.(0|[1-9]\d*))+")  # PS3.5 9.1
_DATE = re.compile(r"\d{8}")
_TIME = re.compile(r"([01]\d|2[0-3])([0-5]\d([0-5]\d(\.\d{1,6})?)?)?")
_NO_DATE, _NO_TIME = "19700101", "000000"

_TEXT = {
    "PatientID": 64,
    "IssuerOfPatientID": 64,
    "StudyID": 16,
    "AccessionNumber": 16,
    "ReferringPhysicianName": 64,
    "StudyDescription": 64,
    "DeidentificationMethod": 64,
    "PositionReferenceIndicator": 64,
}
"""Attributes that a derived object shares with its source (PS3.3 C.7), and how long each may be.

No more than these: what a scanner wrote elsewhere need not be valid, and would make ours invalid.
"""

_ALWAYS = frozenset(("PatientID", "StudyID", "AccessionNumber", "ReferringPhysicianName"))
"""Type 2: present, and empty where not known. So is PositionReferenceIndicator, by highdicom."""


def can_refer(source: DicomSource) -> bool:
    """Whether a DICOM SEG can refer to these images.

    It must name study, series, frame of reference and each image (PS3.3 C.8.20, C.7.6.16.2.1).
    """
    shared = {tuple(_uid(h, keyword) for keyword in _SHARED_UIDS) for h in source.headers}
    own = [tuple(_uid(h, keyword) for keyword in _OWN_UIDS) for h in source.headers]
    instances = {sop for sop, _ in own}
    complete = all(all(uids) for uids in (*shared, *own))
    return len(shared) == 1 and complete and len(instances) == len(own)


def reference_headers(source: DicomSource, distance: float) -> list[Dataset]:
    """Return headers with only what a DICOM SEG takes over, made valid, one for each k.

    Text is decoded and comes out as UTF-8 where it is not plain ASCII. What is not valid (a date,
    a StudyID that is too long) is left empty, but for PatientID, which is taken as it is. The name
    of the patient is not among them: highdicom would show it in a warning; see `patient_name`.

    Parameters
    ----------
    source : DicomSource
        For which `can_refer` holds.
    distance : float
        Of neighbouring slices, mm. It stands for SliceThickness too: between the slices of a
        segment there are no gaps and no overlaps, whatever the scan's have.
    """
    from pydicom import Dataset

    first = source.headers[0]
    common = _common(first, patient_name(source))
    common.SliceThickness = common.SpacingBetweenSlices = decimals([distance])[0]
    references = []
    for header in source.headers:
        reference = Dataset()
        reference.update(common)
        for keyword in _OWN_UIDS:
            setattr(reference, keyword, _uid(header, keyword))
        reference.ImagePositionPatient = decimals(header.ImagePositionPatient)
        references.append(reference)
    return references


def source_moment(source: DicomSource) -> tuple[str, str]:
    """Return the date and time (DA, TM) of the series' content, 1970 where it has none."""
    first = source.headers[0]
    for kind in ("Content", "Acquisition", "Series", "Study"):
        date = _matching(first, f"{kind}Date", _DATE)
        if date:
            return date, _matching(first, f"{kind}Time", _TIME) or _NO_TIME
    return _NO_DATE, _NO_TIME


def patient_name(source: DicomSource) -> str:
    """Return the patient's name as the series has it."""
    return _text(source.headers[0], "PatientName")


def decimals(values: object) -> list[str]:
    """Return numbers as decimal strings of at most 16 characters (PS3.5 6.2, DS)."""
    from pydicom.valuerep import format_number_as_ds

    texts = [str(v) for v in values]  # type: ignore[attr-defined]
    return [t if len(t) <= 16 else format_number_as_ds(float(t)) for t in texts]


def _common(first: Dataset, name: str) -> Dataset:
    """Return what all slices share; `name` only decides on the character set."""
    from pydicom import Dataset

    common = Dataset()
    for keyword in _SHARED_UIDS:
        setattr(common, keyword, _uid(first, keyword))
    common.PatientName = ""
    for keyword, longest in _TEXT.items():
        text = _text(first, keyword)
        text = text if len(text) <= longest or keyword == "PatientID" else ""
        if text or keyword in _ALWAYS:
            setattr(common, keyword, text)
    if not all(str(element.value).isascii() for element in common) or not name.isascii():
        common.SpecificCharacterSet = "ISO_IR 192"
    for keyword in ("PatientBirthDate", "StudyDate"):
        setattr(common, keyword, _matching(first, keyword, _DATE))
    common.StudyTime = _matching(first, "StudyTime", _TIME)
    common.PatientSex = _matching(first, "PatientSex", re.compile("[MFO]"))
    common.Modality = _plain(first, "Modality")
    common.Rows = common.Columns = 1  # as highdicom gets them; frames are put in afterwards
    common.PixelSpacing = decimals(first.PixelSpacing)
    common.ImageOrientationPatient = decimals(first.ImageOrientationPatient)
    _add_history(common, first)
    return common


def _add_history(common: Dataset, first: Dataset) -> None:
    """Take over that pixels were compressed lossily, and that identity was removed."""
    if _plain(first, "LossyImageCompression") == "01":
        common.LossyImageCompression = "01"
        for keyword in ("LossyImageCompressionRatio", "LossyImageCompressionMethod"):
            if _plain(first, keyword):
                setattr(common, keyword, _plain(first, keyword).split("\\"))
    if _plain(first, "PatientIdentityRemoved") in ("YES", "NO"):
        common.PatientIdentityRemoved = _plain(first, "PatientIdentityRemoved")
    if "DeidentificationMethodCodeSequence" in first:
        common.DeidentificationMethodCodeSequence = first.DeidentificationMethodCodeSequence


def _uid(header: Dataset, keyword: str) -> str:
    """Return a valid UID, or an empty string."""
    return _matching(header, keyword, _UID)


def _matching(header: Dataset, keyword: str, form: re.Pattern[str]) -> str:
    text = _plain(header, keyword)
    return text if form.fullmatch(text) else ""


def _plain(header: Dataset, keyword: str) -> str:
    """Return ASCII text, values joined by a backslash, without what pydicom makes of it.

    To convert a value that is not valid, pydicom would warn and show it: it may name a patient.
    """
    if keyword not in header:
        return ""
    value: object = header.get_item(keyword).value
    if isinstance(value, bytes):
        return value.decode("ascii", "replace").strip("\0 ")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "\\".join(str(v) for v in value)
    return "" if value is None else str(value).strip("\0 ")


def _text(header: Dataset, keyword: str) -> str:
    """Return text of any character set; plain ASCII without converting it, see `_plain`."""
    plain = _plain(header, keyword)
    if plain.isascii() and "\x1b" not in plain:  # ISO 2022 escapes to others by plain bytes
        return plain
    return str(header.get(keyword) or "")
