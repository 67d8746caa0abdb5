"""Attributes and references that a DICOM SEG takes over from its source series."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from scanloom.io.dataset_text import matching_text, plain_text, valid_uid
from scanloom.io.dicom.decimal_strings import decimal_strings
from scanloom.io.scan import SHARED_UIDS, DicomSource

if TYPE_CHECKING:
    from pydicom import Dataset

_SINGLE_FRAME = "1.2.840.10008.5.1.4.1.1.2"
"""SOP class of CT images: highdicom accepts single-frame images in any order."""
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
"""Attributes that a derived object shares with its source (PS3.3 C.7), and their maximum lengths.

No others are copied: invalid values in other attributes of the source would make the SEG invalid.
"""

_TYPE_2 = frozenset(("PatientID", "StudyID", "AccessionNumber", "ReferringPhysicianName"))
"""Type 2: present, and empty if unknown. highdicom adds PositionReferenceIndicator likewise."""


def reference_headers(source: DicomSource, distance: float) -> list[Dataset]:
    """Return a header for each slice that has a source image, for highdicom.

    The headers have only the attributes that a DICOM SEG takes over. Text is decoded and becomes
    UTF-8 if it is not ASCII. Invalid values (a date, a StudyID that is too long) are left empty,
    except PatientID, which is copied unchanged. The patient's name is left out, since highdicom
    would show it in a warning; see `patient_name`.

    Frames of a multi-frame object are presented as single images with placeholder UIDs, which
    `refer_to_frames` replaces by the true ones.

    Parameters
    ----------
    source : DicomSource
        Images that a SEG can refer to (its `can_refer` is true).
    distance : float
        Between neighbouring slices in mm. It is used as SliceThickness too: the slices of a segment
        have neither gaps nor overlaps, even if those of the scan have.
    """
    from pydicom import Dataset

    common = _common(source)
    common.SliceThickness = common.SpacingBetweenSlices = decimal_strings([distance])[0]
    references = []
    for n, image in enumerate(image for image in source.slices if image is not None):
        reference = Dataset()
        reference.update(common)
        reference.SOPClassUID, reference.SOPInstanceUID = image.sop_class, image.sop_instance
        if image.frame is not None:
            reference.SOPClassUID, reference.SOPInstanceUID = _SINGLE_FRAME, _placeholder_uid(n)
        reference.ImagePositionPatient = list(image.position)
        references.append(reference)
    return references


def refer_to_frames(dataset: Dataset, source: DicomSource) -> None:
    """Replace placeholder UIDs by the UIDs and frame numbers of multi-frame objects.

    A frame of the segmentation refers to an object and a frame in it (PS3.3 C.7.6.16.2.6); the
    lists of all source images name each object once.
    """
    images = [image for image in source.slices if image is not None]
    frames = {
        _placeholder_uid(n): image for n, image in enumerate(images) if image.frame is not None
    }
    if not frames:
        return
    for group in dataset.PerFrameFunctionalGroupsSequence:
        for derivation in group.get("DerivationImageSequence") or []:
            for reference in derivation.SourceImageSequence:
                frame = frames.get(reference.ReferencedSOPInstanceUID)
                if frame is not None:
                    reference.ReferencedSOPClassUID = frame.sop_class
                    reference.ReferencedSOPInstanceUID = frame.sop_instance
                    reference.ReferencedFrameNumber = frame.frame
    objects = {image.sop_instance: image.sop_class for image in images}
    dataset.SourceImageSequence = _references(objects)
    dataset.ReferencedSeriesSequence[0].ReferencedInstanceSequence = _references(objects)


def _placeholder_uid(n: int) -> str:
    return f"2.25.{n + 1}"


def _references(objects: Mapping[str, str]) -> list[Dataset]:
    """Return items that refer to objects, given as SOPInstanceUID to SOPClassUID."""
    from pydicom import Dataset

    items = []
    for sop_instance, sop_class in objects.items():
        item = Dataset()
        item.ReferencedSOPClassUID, item.ReferencedSOPInstanceUID = sop_class, sop_instance
        items.append(item)
    return items


def content_datetime(source: DicomSource) -> tuple[str, str]:
    """Return the date and time (DA, TM) of the series' content; 1970 if the series has no date."""
    first = source.first
    for kind in ("Content", "Acquisition", "Series", "Study"):
        date = matching_text(first, f"{kind}Date", _DATE)
        if date:
            return date, matching_text(first, f"{kind}Time", _TIME) or _NO_TIME
    return _NO_DATE, _NO_TIME


def patient_name(source: DicomSource) -> str:
    """Return the PatientName of the series."""
    return _text(source.first, "PatientName")


def _common(source: DicomSource) -> Dataset:
    """Return the header that all slices share.

    The patient's name is not in it, but is considered in the choice of the character set.
    """
    from pydicom import Dataset

    first, name = source.first, patient_name(source)
    common = Dataset()
    for keyword in SHARED_UIDS:
        setattr(common, keyword, valid_uid(first, keyword))
    common.PatientName = ""
    for keyword, max_length in _TEXT.items():
        text = _text(first, keyword)
        text = text if len(text) <= max_length or keyword == "PatientID" else ""
        if text or keyword in _TYPE_2:
            setattr(common, keyword, text)
    _add_deidentification(common, first)
    if not all(str(element.value).isascii() for element in common) or not name.isascii():
        common.SpecificCharacterSet = "ISO_IR 192"
    for keyword in ("PatientBirthDate", "StudyDate"):
        setattr(common, keyword, matching_text(first, keyword, _DATE))
    common.StudyTime = matching_text(first, "StudyTime", _TIME)
    common.PatientSex = matching_text(first, "PatientSex", re.compile("[MFO]"))
    common.Modality = plain_text(first, "Modality")
    common.Rows = common.Columns = 1  # highdicom gets frames of one pixel
    common.PixelSpacing = list(source.spacing)
    common.ImageOrientationPatient = list(source.orientation)
    _add_lossy_compression(common, first)
    return common


def _add_lossy_compression(common: Dataset, first: Dataset) -> None:
    """Copy the attributes of a lossy compression of the pixels."""
    if plain_text(first, "LossyImageCompression") == "01":
        common.LossyImageCompression = "01"
        for keyword in ("LossyImageCompressionRatio", "LossyImageCompressionMethod"):
            if plain_text(first, keyword):
                setattr(common, keyword, plain_text(first, keyword).split("\\"))


def _add_deidentification(common: Dataset, first: Dataset) -> None:
    """Copy the attributes of a de-identification.

    PatientIdentityRemoved YES requires the method (PS3.3 C.7.1.1): without it, it is not copied.
    """
    methods = [text for text in _texts(first, "DeidentificationMethod") if 0 < len(text) <= 64]
    if methods:
        common.DeidentificationMethod = methods
    if "DeidentificationMethodCodeSequence" in first:
        common.DeidentificationMethodCodeSequence = first.DeidentificationMethodCodeSequence
    removed = plain_text(first, "PatientIdentityRemoved")
    has_method = methods or "DeidentificationMethodCodeSequence" in common
    if removed == "NO" or (removed == "YES" and has_method):
        common.PatientIdentityRemoved = removed


def _text(header: Dataset, keyword: str) -> str:
    """Return text of any character set; ASCII is not converted, see `plain_text`."""
    plain = plain_text(header, keyword)
    if plain.isascii() and "\x1b" not in plain:  # ISO 2022 encodes other sets in ASCII bytes
        return plain
    return str(header.get(keyword) or "")


def _texts(header: Dataset, keyword: str) -> list[str]:
    """Return the values of a multi-valued attribute, each converted as by `_text`."""
    plain = plain_text(header, keyword)
    if plain.isascii() and "\x1b" not in plain:
        return [value.strip() for value in plain.split("\\")]
    values = header.get(keyword) or ""
    return [values] if isinstance(values, str) else [str(value) for value in values]
