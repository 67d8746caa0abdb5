"""What a DICOM SEG takes over from the series that it lies on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from scanloom.io.scan import DicomSource

if TYPE_CHECKING:
    from pydicom import Dataset

_SHARED_UIDS = ("StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID")
_SINGLE_FRAME = "1.2.840.10008.5.1.4.1.1.2"
"""CT image: highdicom takes single images, in any order."""
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
    real = [one for one in source.slices if one is not None]
    named = [_UID.fullmatch(uid) for one in real for uid in (one.sop_class, one.sop_instance)]
    images = {(one.sop_instance, one.frame) for one in real}
    shared = [_uid(source.first, keyword) for keyword in _SHARED_UIDS]
    return all(shared) and all(named) and len(images) == len(real) > 0


def reference_headers(source: DicomSource, distance: float) -> list[Dataset]:
    """Return headers with only what a DICOM SEG takes over, made valid, one for each real slice.

    Text is decoded and comes out as UTF-8 where it is not plain ASCII. What is not valid (a date,
    a StudyID that is too long) is left empty, but for PatientID, which is taken as it is. The name
    of the patient is not among them: highdicom would show it in a warning; see `patient_name`.

    Frames of a multi-frame object stand as single images here, with UIDs that hold for this run
    only: `refer_to_frames` puts in the true ones.

    Parameters
    ----------
    source : DicomSource
        For which `can_refer` holds.
    distance : float
        Of neighbouring slices, mm. It stands for SliceThickness too: between the slices of a
        segment there are no gaps and no overlaps, whatever the scan's have.
    """
    from pydicom import Dataset

    common = _common(source)
    common.SliceThickness = common.SpacingBetweenSlices = decimals([distance])[0]
    references = []
    for n, one in enumerate(one for one in source.slices if one is not None):
        reference = Dataset()
        reference.update(common)
        reference.SOPClassUID, reference.SOPInstanceUID = one.sop_class, one.sop_instance
        if one.frame is not None:
            reference.SOPClassUID, reference.SOPInstanceUID = _SINGLE_FRAME, _stand_in(n)
        reference.ImagePositionPatient = list(one.position)
        references.append(reference)
    return references


def refer_to_frames(dataset: Dataset, source: DicomSource) -> None:
    """Put the UIDs and frame numbers of multi-frame objects in place of the stand-ins.

    A frame of the segmentation names object and frame (PS3.3 C.7.6.16.2.6); the lists of all
    images that were used name each object once.
    """
    real = [one for one in source.slices if one is not None]
    meant = {_stand_in(n): one for n, one in enumerate(real) if one.frame is not None}
    if not meant:
        return
    for group in dataset.PerFrameFunctionalGroupsSequence:
        for derivation in group.get("DerivationImageSequence") or []:
            for image in derivation.SourceImageSequence:
                one = meant.get(image.ReferencedSOPInstanceUID)
                if one is not None:
                    image.ReferencedSOPClassUID = one.sop_class
                    image.ReferencedSOPInstanceUID = one.sop_instance
                    image.ReferencedFrameNumber = one.frame
    objects = {one.sop_instance: one.sop_class for one in real}
    dataset.SourceImageSequence = _images(objects)
    dataset.ReferencedSeriesSequence[0].ReferencedInstanceSequence = _images(objects)


def _stand_in(n: int) -> str:
    return f"2.25.{n + 1}"


def _images(objects: Mapping[str, str]) -> list[Dataset]:
    """Return items that refer to objects: SOPInstanceUID to SOPClassUID."""
    from pydicom import Dataset

    items = []
    for sop_instance, sop_class in objects.items():
        item = Dataset()
        item.ReferencedSOPClassUID, item.ReferencedSOPInstanceUID = sop_class, sop_instance
        items.append(item)
    return items


def source_moment(source: DicomSource) -> tuple[str, str]:
    """Return the date and time (DA, TM) of the series' content, 1970 where it has none."""
    first = source.first
    for kind in ("Content", "Acquisition", "Series", "Study"):
        date = _matching(first, f"{kind}Date", _DATE)
        if date:
            return date, _matching(first, f"{kind}Time", _TIME) or _NO_TIME
    return _NO_DATE, _NO_TIME


def patient_name(source: DicomSource) -> str:
    """Return the patient's name as the series has it."""
    return _text(source.first, "PatientName")


def decimals(values: object) -> list[str]:
    """Return numbers as decimal strings of at most 16 characters (PS3.5 6.2, DS)."""
    from pydicom.valuerep import format_number_as_ds

    texts = [str(v) for v in values]  # type: ignore[attr-defined]
    return [t if len(t) <= 16 else format_number_as_ds(float(t)) for t in texts]


def _common(source: DicomSource) -> Dataset:
    """Return what all slices share; the patient's name only decides on the character set."""
    from pydicom import Dataset

    first, name = source.first, patient_name(source)
    common = Dataset()
    for keyword in _SHARED_UIDS:
        setattr(common, keyword, _uid(first, keyword))
    common.PatientName = ""
    for keyword, longest in _TEXT.items():
        text = _text(first, keyword)
        text = text if len(text) <= longest or keyword == "PatientID" else ""
        if text or keyword in _ALWAYS:
            setattr(common, keyword, text)
    _add_deidentification(common, first)
    if not all(str(element.value).isascii() for element in common) or not name.isascii():
        common.SpecificCharacterSet = "ISO_IR 192"
    for keyword in ("PatientBirthDate", "StudyDate"):
        setattr(common, keyword, _matching(first, keyword, _DATE))
    common.StudyTime = _matching(first, "StudyTime", _TIME)
    common.PatientSex = _matching(first, "PatientSex", re.compile("[MFO]"))
    common.Modality = _plain(first, "Modality")
    common.Rows = common.Columns = 1  # as highdicom gets them; frames are put in afterwards
    common.PixelSpacing = list(source.spacing)
    common.ImageOrientationPatient = list(source.orientation)
    _add_history(common, first)
    return common


def _add_history(common: Dataset, first: Dataset) -> None:
    """Take over that pixels were compressed lossily."""
    if _plain(first, "LossyImageCompression") == "01":
        common.LossyImageCompression = "01"
        for keyword in ("LossyImageCompressionRatio", "LossyImageCompressionMethod"):
            if _plain(first, keyword):
                setattr(common, keyword, _plain(first, keyword).split("\\"))


def _add_deidentification(common: Dataset, first: Dataset) -> None:
    """Take over that identity was removed, if the source says how, as it must (PS3.3 C.7.1.1)."""
    methods = [text for text in _texts(first, "DeidentificationMethod") if 0 < len(text) <= 64]
    if methods:
        common.DeidentificationMethod = methods
    if "DeidentificationMethodCodeSequence" in first:
        common.DeidentificationMethodCodeSequence = first.DeidentificationMethodCodeSequence
    removed = _plain(first, "PatientIdentityRemoved")
    said_how = methods or "DeidentificationMethodCodeSequence" in common
    if removed == "NO" or (removed == "YES" and said_how):
        common.PatientIdentityRemoved = removed


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


def _texts(header: Dataset, keyword: str) -> list[str]:
    """Return the values of an attribute that may have several, as `_text` does one."""
    plain = _plain(header, keyword)
    if plain.isascii() and "\x1b" not in plain:
        return [value.strip() for value in plain.split("\\")]
    values = header.get(keyword) or ""
    return [values] if isinstance(values, str) else [str(value) for value in values]
