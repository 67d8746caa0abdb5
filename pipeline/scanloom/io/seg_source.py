"""What a DICOM SEG takes over from the series that it lies on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from scanloom.io.dataset_text import matching_text, plain_text, valid_uid
from scanloom.io.dicom.decimal_strings import decimals
from scanloom.io.scan import SHARED_UIDS, DicomSource

if TYPE_CHECKING:
    from pydicom import Dataset

_SINGLE_FRAME = "1.2.840.10008.5.1.4.1.1.2"
"""CT image: highdicom takes single images, in any order."""
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
        One whose `can_refer` is true.
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
        date = matching_text(first, f"{kind}Date", _DATE)
        if date:
            return date, matching_text(first, f"{kind}Time", _TIME) or _NO_TIME
    return _NO_DATE, _NO_TIME


def patient_name(source: DicomSource) -> str:
    """Return the patient's name as the series has it."""
    return _text(source.first, "PatientName")


def _common(source: DicomSource) -> Dataset:
    """Return what all slices share; the patient's name only decides on the character set."""
    from pydicom import Dataset

    first, name = source.first, patient_name(source)
    common = Dataset()
    for keyword in SHARED_UIDS:
        setattr(common, keyword, valid_uid(first, keyword))
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
        setattr(common, keyword, matching_text(first, keyword, _DATE))
    common.StudyTime = matching_text(first, "StudyTime", _TIME)
    common.PatientSex = matching_text(first, "PatientSex", re.compile("[MFO]"))
    common.Modality = plain_text(first, "Modality")
    common.Rows = common.Columns = 1  # as highdicom gets them; frames are put in afterwards
    common.PixelSpacing = list(source.spacing)
    common.ImageOrientationPatient = list(source.orientation)
    _add_history(common, first)
    return common


def _add_history(common: Dataset, first: Dataset) -> None:
    """Take over that pixels were compressed lossily."""
    if plain_text(first, "LossyImageCompression") == "01":
        common.LossyImageCompression = "01"
        for keyword in ("LossyImageCompressionRatio", "LossyImageCompressionMethod"):
            if plain_text(first, keyword):
                setattr(common, keyword, plain_text(first, keyword).split("\\"))


def _add_deidentification(common: Dataset, first: Dataset) -> None:
    """Take over that identity was removed, if the source says how, as it must (PS3.3 C.7.1.1)."""
    methods = [text for text in _texts(first, "DeidentificationMethod") if 0 < len(text) <= 64]
    if methods:
        common.DeidentificationMethod = methods
    if "DeidentificationMethodCodeSequence" in first:
        common.DeidentificationMethodCodeSequence = first.DeidentificationMethodCodeSequence
    removed = plain_text(first, "PatientIdentityRemoved")
    said_how = methods or "DeidentificationMethodCodeSequence" in common
    if removed == "NO" or (removed == "YES" and said_how):
        common.PatientIdentityRemoved = removed


def _text(header: Dataset, keyword: str) -> str:
    """Return text of any character set; plain ASCII without converting it, see `plain_text`."""
    plain = plain_text(header, keyword)
    if plain.isascii() and "\x1b" not in plain:  # ISO 2022 escapes to others by plain bytes
        return plain
    return str(header.get(keyword) or "")


def _texts(header: Dataset, keyword: str) -> list[str]:
    """Return the values of an attribute that may have several, as `_text` does one."""
    plain = plain_text(header, keyword)
    if plain.isascii() and "\x1b" not in plain:
        return [value.strip() for value in plain.split("\\")]
    values = header.get(keyword) or ""
    return [values] if isinstance(values, str) else [str(value) for value in values]
