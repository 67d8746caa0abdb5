"""Inspection of files and description of series, from headers alone.

`inspect_files` classifies files one by one, `describe_files` describes one series, and
`inspect_chunk` does both in one pass, for large archives in worker processes
(`scanloom.io.index.workers`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scanloom.core import DICOM, MODALITIES, Grid, ReadOptions, Reason, ScanError, Series, blame
from scanloom.io.dicom import tags
from scanloom.io.dicom.header.elements import EncodedElements, decode_elements
from scanloom.io.dicom.header.header import Header, pydicom_muted, read_header, read_headers
from scanloom.io.dicom.pixels.frame import NATIVE_TRANSFER_SYNTAXES
from scanloom.io.dicom.sop_classes import is_derived, is_truncated_header, rejection_reason
from scanloom.io.formats import FORMATS, format_by_suffix, probe

logger = logging.getLogger(__name__)

MAX_INTEGER_DIGITS = 12
"""Length of an integer string (PS3.5 6.2); Python refuses to parse thousands of damaged digits."""
_OBLIQUE_COSINE = 0.8
"""A slice normal that is more than 37 degrees from every axis is oblique."""
_PLANES = ("sagittal", "coronal", "axial")


class FileInfo(NamedTuple):
    """Result of inspecting one file.

    Parameters
    ----------
    kind : str
        Name of the format in `scanloom.io.formats.FORMATS`; empty if the file is not an image.
    gzipped : bool
        Whether the file is a gzip-compressed DICOM file.
    study, series : str
        UIDs of a DICOM file.
    reason : str
        Code of the reason for which it is not part of a volume; empty if it may be.
    detail : str
    packed : EncodedElements or None
        `Elements.packed` of a DICOM file.
    """

    kind: str
    gzipped: bool = False
    study: str = ""
    series: str = ""
    reason: str = ""
    detail: str = ""
    packed: EncodedElements | None = None


_NO_IMAGE = FileInfo("", reason=Reason.NOT_AN_IMAGE.code)
_TRUNCATED = FileInfo(
    DICOM, reason=Reason.TRUNCATED.code, detail="a file ends before its header does"
)


class SeriesInfo(NamedTuple):
    """Metadata of a series. Texts are from closed lists, except `date` and the last three fields.

    Parameters
    ----------
    reason : str
        Code of the reason for which the series gives no volume; empty if it gives one.
    detail : str
    shape : tuple of int
        (I, J, K); empty without a volume, as is `spacing`.
    spacing : tuple of float
        mm.
    plane : str
        Plane of the slices: "axial", "coronal", "sagittal" or "oblique".
    modality, body_part : str
        Empty if the headers do not have them; "OTHER" for body parts outside the list.
    date : str
        Date and time of series or acquisition; sorts chronologically.
    number : int
        SeriesNumber; -1 if absent.
    contrast : bool
    image_type, kernel, description : str
        As in the headers; values of ImageType are joined by a backslash.
    """

    reason: str = ""
    detail: str = ""
    shape: tuple[int, ...] = ()
    spacing: tuple[float, ...] = ()
    plane: str = ""
    modality: str = ""
    body_part: str = ""
    date: str = ""
    number: int = -1
    contrast: bool = False
    image_type: str = ""
    kernel: str = ""
    description: str = ""


class ChunkInfo(NamedTuple):
    """Inspection results of some files, and descriptions of the series that they form.

    Parameters
    ----------
    infos : list of FileInfo
        One for each file.
    series : list of (indices, SeriesInfo)
        Indices of the series' files in `infos`.
    """

    infos: list[FileInfo]
    series: list[tuple[tuple[int, ...], SeriesInfo]]


def inspect_files(paths: Sequence[str]) -> list[FileInfo]:
    """Inspect files. Volume files are recognised by name, DICOM files by content."""
    with pydicom_muted():
        return [_inspect(path)[0] for path in paths]


def inspect_chunk(files: Sequence[tuple[str, int]]) -> ChunkInfo:
    """Inspect files, and describe their series while the headers are in memory.

    Parameters
    ----------
    files : sequence of (path, bytes)
        All files of a folder should be in one call: a series that is split over several calls
        has to be described again.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    headers: list[Header | None] = []
    infos = []
    with pydicom_muted():
        for n, (path, _) in enumerate(files):
            info, header = _inspect(path)
            infos.append(info)
            headers.append(header)
            if header is not None and not info.reason:
                folder = "" if info.series else os.path.dirname(path)
                groups.setdefault((info.study, info.series, folder), []).append(n)
        series = [
            (
                tuple(members),
                _describe_headers(
                    [h for n in members if (h := headers[n])], [files[n][1] for n in members]
                ),
            )
            for members in groups.values()
        ]
    return ChunkInfo(infos, series)


def _inspect(path: str) -> tuple[FileInfo, Header | None]:
    if kind := format_by_suffix(path):
        return FileInfo(kind), None
    header = read_header(path)
    if header is None:
        return _NO_IMAGE, None
    if isinstance(header, ScanError):
        kind = "" if header.reason is Reason.UNREADABLE else DICOM
        return FileInfo(kind, reason=header.code, detail=header.detail), None
    if is_truncated_header(header):
        return _TRUNCATED, None
    reason = rejection_reason(header)
    info = FileInfo(
        kind=DICOM,
        gzipped=header.elements.gzipped,
        study=header.study_uid,
        series=header.series_uid,
        reason="" if reason is None else reason.code,
        packed=header.elements.packed(),
    )
    return info, header


def describe_files(
    kind: str, paths: Sequence[str], packed: Sequence[EncodedElements]
) -> SeriesInfo:
    """Describe one series.

    Parameters
    ----------
    kind : str
        Name of the format in `scanloom.io.formats.FORMATS`.
    paths : sequence of str
        Its files.
    packed : sequence of EncodedElements
        Encoded elements of each file of a DICOM series.
    """
    try:
        with pydicom_muted():
            if kind == DICOM:
                pairs = zip(paths, packed, strict=True)
                return _describe_headers([Header(f, decode_elements(p)) for f, p in pairs])
            return _with_grid(SeriesInfo(), FORMATS[kind].probe(tuple(map(Path, paths)))[0])
    except ScanError as error:
        return SeriesInfo(reason=error.code, detail=error.detail)


def describe_as_read(
    series: Series, phase: int | None = None, options: ReadOptions = ReadOptions()
) -> SeriesInfo:
    """Describe a series as it is when read with these options."""
    info, headers = SeriesInfo(modality=series.modality or ""), []
    try:
        if series.kind == DICOM:
            headers = [h for h in read_headers(series.files) if isinstance(h, Header)]
            with pydicom_muted():
                info = _attributes(headers[0]) if headers else info
        return _checked(info, headers, probe(series, phase, options)[0])
    except ScanError as error:
        return info._replace(reason=error.code, detail=error.detail)


def _describe_headers(headers: Sequence[Header], sizes: Sequence[int] = ()) -> SeriesInfo:
    """Describe a DICOM series; an error becomes its reason and does not affect other series.

    `sizes` are the file sizes in bytes; without them, each file is queried.
    """
    from scanloom.io.dicom.series import probe_headers

    info = _attributes(headers[0])
    reason = rejection_reason(headers[0])  # None for slices: they are not mixed with other objects
    if reason is not None:
        return info._replace(reason=reason.code)
    try:
        grid = probe_headers(headers)
    except ScanError as error:
        return info._replace(reason=error.code, detail=error.detail)
    except Exception as error:  # foreign data; a bug of scanloom is INTERNAL in the index
        logger.debug("series not described", exc_info=True)
        fault = blame(error)
        return info._replace(reason=fault.code, detail=fault.detail)
    return _checked(info, headers, grid, sizes)


def _checked(
    info: SeriesInfo, headers: Sequence[Header], grid: Grid, sizes: Sequence[int] = ()
) -> SeriesInfo:
    """Add the grid to a description, or the reason TRUNCATED or DERIVED."""
    truncated = sum(map(_is_truncated, headers, sizes or map(_file_size, headers)))
    if truncated:
        detail = f"{truncated} of {len(headers)} files end in the middle of their pixels"
        return info._replace(reason=Reason.TRUNCATED.code, detail=detail)
    if headers and all(map(is_derived, headers)):
        info = info._replace(reason=Reason.DERIVED.code)
    return _with_grid(info, grid)


def _is_truncated(header: Header, size: int) -> bool:
    """Return whether a file of native pixel data is too small for the pixels it describes."""
    pixels = header.pixels
    if pixels is None or pixels.length is None or header.syntax not in NATIVE_TRANSFER_SYNTAXES:
        return False
    if header.elements.gzipped:
        return False
    bits = header.frames * header.rows * header.columns * header.format.allocated
    return 8 * min(pixels.length, size - pixels.offset) < bits


def _file_size(header: Header) -> int:
    """Return the size of a file in bytes; a missing file counts as complete until it is read."""
    try:
        return os.stat(header.path_string).st_size
    except OSError:
        return sys.maxsize


def _with_grid(info: SeriesInfo, grid: Grid) -> SeriesInfo:
    # The normal of the slices, which gantry tilt does not change
    normal = np.cross(grid.affine[:3, 0], grid.affine[:3, 1])
    cosines = np.abs(normal) / np.linalg.norm(normal)
    is_oblique = cosines.max() < _OBLIQUE_COSINE
    return info._replace(
        shape=tuple(map(int, grid.shape)),
        spacing=tuple(round(float(mm), 6) for mm in grid.spacing),
        plane="oblique" if is_oblique else _PLANES[int(cosines.argmax())],
    )


def _attributes(header: Header) -> SeriesInfo:
    text = header.elements.text
    date = text(tags.SERIES_DATE) or text(tags.ACQUISITION_DATE) or text(tags.STUDY_DATE)
    return SeriesInfo(
        modality=header.modality if header.modality in MODALITIES else "",
        body_part=body_part(text(tags.BODY_PART_EXAMINED)),
        date=date + (text(tags.SERIES_TIME) or text(tags.ACQUISITION_TIME)),
        number=series_number(header),
        contrast=bool(text(tags.CONTRAST_BOLUS_AGENT)),
        image_type="\\".join(header.image_type),
        kernel=text(tags.CONVOLUTION_KERNEL),
        description=series_description(header).encode("utf-8", "replace").decode(),
    )


def series_number(header: Header) -> int:
    """Return SeriesNumber; -1 if it is absent or damaged."""
    text = header.elements.text(tags.SERIES_NUMBER)
    return int(text) if text.isdigit() and len(text) <= MAX_INTEGER_DIGITS else -1


def series_description(header: Header) -> str:
    """Return SeriesDescription; a value that is not plain ASCII is decoded by pydicom."""
    raw = header.elements.raw(tags.SERIES_DESCRIPTION)
    if raw.isascii() and b"\x1b" not in raw:  # ISO 2022 escape sequences are ASCII bytes too
        return raw.decode("ascii").strip(" \0")
    try:
        return header.decoded("SeriesDescription")
    except ScanError:
        return ""


# --- body parts -----------------------------------------------------------------------------------
# Closed list of body parts: the defined terms of BodyPartExamined (DICOM PS3.16 Annex L).

OTHER_BODY_PART = "OTHER"
"""Stands for a body part outside the list, since free text may contain anything."""

_DEFINED_TERMS = """
ABDOMEN ABDOMENPELVIS ADRENAL ANKLE ANUS AORTA ARM ARTERY AXILLA BACK BLADDER BRACHIOCEPHALIC
BRAIN BREAST BRONCHUS BUTTOCK CALCANEUS CALF CAROTID CEREBELLUM CEREBRUM CERVIX CHEEK CHEST
CHESTABDOMEN CHESTABDPELVIS CLAVICLE COCCYX COLON CSPINE CTSPINE DUODENUM EAR ELBOW ESOPHAGUS
EXTREMITY EYE EYELID FACE FEMUR FINGER FOOT FOREARM GALLBLADDER GENITALS HAND HEAD HEADNECK
HEART HIP HUMERUS IAC ILEUM ILIUM JAW JEJUNUM KIDNEY KNEE LARYNX LEG LIVER LSPINE LSSPINE LUNG
MANDIBLE MAXILLA MEDIASTINUM MOUTH NECK NECKCHEST NECKCHESTABDOMEN NECKCHESTABDPELV NOSE
OPTICCANAL ORBIT OVARY PANCREAS PARASTERNAL PAROTID PATELLA PELVIS PENIS PHARYNX PHANTOM
PROSTATE RADIUS RECTUM RIB SCALP SCAPULA SCLERA SCROTUM SELLA SHOULDER SINUS SIJOINT SKULL
SPINALCORD SPINE SPLEEN SSPINE STERNUM STOMACH SUBMANDIBULAR TESTIS THIGH THUMB THYMUS THYROID
TIBIA TLSPINE TMJ TOE TONGUE TRACHEA TSPINE ULNA URETER URETHRA UTERUS VAGINA VULVA WHOLEBODY
WRIST ZYGOMA
"""
_TERMS = frozenset(_DEFINED_TERMS.split())
_SYNONYMS = {
    "THORAX": "CHEST",
    "SKULLBRAIN": "BRAIN",
    "TAP": "CHESTABDPELVIS",
    "CAP": "CHESTABDPELVIS",
    "LOWEREXTREMITY": "EXTREMITY",
    "UPPEREXTREMITY": "EXTREMITY",
    "BODY": "WHOLEBODY",
}


def body_part(text: str) -> str:
    """Return the defined term for a BodyPartExamined value; empty if the value is empty."""
    letters = "".join(c for c in text.upper() if c.isalpha())
    if not letters:
        return OTHER_BODY_PART if text.strip() else ""
    term = _SYNONYMS.get(letters, letters)
    return term if term in _TERMS else OTHER_BODY_PART
