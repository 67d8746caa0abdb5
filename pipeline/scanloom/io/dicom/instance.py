"""`Instance`: what a DICOM file that was received is, and whether it is whole."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import tags, uids
from scanloom.io.dicom.header.elements import Elements
from scanloom.io.dicom.header.header import read_elements
from scanloom.io.dicom.header.parser import READ_SIZES_BYTES, UnusualHeaderError, meta_end

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Instance:
    """The UIDs of a DICOM object. All but the class are checked: they may become names of files.

    Parameters
    ----------
    sop_class, uid : str
        SOPClassUID and SOPInstanceUID.
    study, series : str
        StudyInstanceUID and SeriesInstanceUID.
    """

    sop_class: str
    uid: str
    study: str
    series: str

    def __post_init__(self) -> None:
        for name in ("uid", "study", "series"):
            if not uids.is_uid(getattr(self, name)):
                raise ValueError(f"{name} is no UID")


def read_instance(path: Path) -> Instance:
    """Read the UIDs of a file with a meta header, as the network delivered it.

    Raises
    ------
    OSError
        If the file can't be read.
    ScanError
        DAMAGED if its data set can't be parsed, or a UID is missing or malformed; TRUNCATED if it
        ends before its pixels do. The end of a deflated data set is not looked for.
    """
    elements = read_elements(path)
    if elements is None:
        raise ScanError(Reason.DAMAGED, "it is not a DICOM file")
    try:
        instance = Instance(
            elements.text(tags.SOP_CLASS_UID),
            elements.text(tags.SOP_INSTANCE_UID),
            elements.text(tags.STUDY_INSTANCE_UID),
            elements.text(tags.SERIES_INSTANCE_UID),
        )
    except ValueError as exc:
        raise ScanError(Reason.DAMAGED, "a UID is missing or malformed") from exc
    if not _has_all_pixels(path, elements):
        raise ScanError(Reason.TRUNCATED, "it ends before its pixels do")
    return instance


def same_object(first_path: Path, second_path: Path) -> bool:
    """Return whether two files have the same data set, in the same transfer syntax.

    What else their meta headers say, such as the sender, does not matter.

    Raises
    ------
    OSError
        If one can't be read.
    """
    with first_path.open("rb") as first, second_path.open("rb") as second:
        ends = []
        for file in (first, second):
            try:
                start, syntax = meta_end(file.read(READ_SIZES_BYTES[0]))
            except (UnusualHeaderError, struct.error):
                start, syntax = 0, b""
            size = file.seek(0, os.SEEK_END)
            file.seek(start)
            ends.append((size - start, syntax.rstrip(b"\0 ")))
        if ends[0] != ends[1]:
            return False
        while chunk := first.read(_CHUNK_BYTES):
            if chunk != second.read(_CHUNK_BYTES):
                return False
    return True


def _has_all_pixels(path: Path, elements: Elements) -> bool:
    """Return whether a file goes on to the end of its pixels; True for one without pixels."""
    pixels, deflated = elements.pixels, uids.DEFLATED_EXPLICIT_VR_LITTLE_ENDIAN
    if pixels is None or elements.syntax == deflated:
        return True
    if pixels.length is not None:
        return pixels.offset + pixels.length <= path.stat().st_size
    with path.open("rb") as file:
        file.seek(pixels.offset)
        while len(head := file.read(8)) == 8:  # fragments (PS3.5 A.4), always little endian
            group, element, length = struct.unpack("<HHI", head)
            tag = group << 16 | element
            if tag != tags.ITEM:
                return bool(tag == tags.SEQUENCE_DELIMITATION_ITEM)
            file.seek(length, 1)
    return False
