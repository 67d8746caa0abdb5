"""Which DICOM objects are slices of a volume, and why the others are not."""

from __future__ import annotations

from functools import lru_cache

from scanloom.core import Reason
from scanloom.io.dicom import tags
from scanloom.io.dicom.headers import Header

_STORAGE = "1.2.840.10008.5.1.4.1.1."
_VOLUMES = ("2", "2.1", "2.2", "4", "4.1", "4.4", "128", "128.1", "130", "20", "13.1.1", "13.1.2")
"""CT, enhanced and legacy converted CT; the same of MR and PET; nuclear medicine; volumes that were
made of X-ray projections: angiographic and craniofacial."""
_ENHANCED = ("2.1", "2.2", "4.1", "4.3", "4.4", "128.1", "130", "13.1.1", "13.1.2")
_PROJECTIONS = ("1", "12.1", "12.2", "13.1.3", "13.1.4", "13.1.5", "481.1")
"""Radiography, mammography, angiography, fluoroscopy, tomosynthesis, portal images."""
_CAPTURES = ("7",)
_NO_PICTURES = (
    "4.2",
    "66",
    "67",
    "68",
    "88",
    "11",
    "104",
    "9",
    "30",
    "481.2",
    "481.3",
    "481.5",
    "481.8",
)
"""Spectra, segmentations, registrations, surfaces, reports, presentation states, documents,
waveforms, parametric maps, radiotherapy dose, structures and plans."""
_NUCLEAR = ("20",)
_REFORMATS = frozenset(
    ("REFORMATTED", "MPR", "CPR", "CURVED", "CURVED_MPR", "CSA MPR", "CSA RESAMPLED", "RESAMPLED")
)
_RENDERINGS = frozenset(
    (
        *("PROJECTION IMAGE", "MIP", "MINIP", "MAX_IP", "MIN_IP", "CSA MIP"),
        *("VRT", "SSD", "VOLUME_RENDER", "SURFACE_RENDER"),
    )
)
"""ImageType from its third value on, as in PS3.3 C.8.3.1.1.1 and C.8.16.2.1.4, and as usual."""
_SERIES_TYPE = tags.SERIES_TYPE
_REPROJECTION = "REPROJECTION"
"""Second value of SeriesType: views of a PET volume from all sides (PS3.3 C.8.9.1.1.1)."""
_GE_SEQUENCE, _GE_USER_12 = tags.GE_PULSE_SEQUENCE_NAME, tags.GE_USER_DATA_12
_PEPOLAR = "epi_pepolar"
_FORWARD = 0.0
"""User data 12 of GE's epi_pepolar where the rows of all volumes stand as the header says."""
_MODALITIES = ("CT", "MR", "PT")


def skip_reason(header: Header) -> Reason | None:
    """Return why an object is no slice of a volume, None if it may be one.

    The order matters: a colour secondary capture is told as a secondary capture.
    """
    if _is_class(header, _NO_PICTURES) or _has_no_picture(header):
        return Reason.NOT_AN_IMAGE
    if _is_class(header, _CAPTURES):
        return Reason.SECONDARY_CAPTURE
    if _is_class(header, _PROJECTIONS):
        return Reason.PROJECTION
    if header.samples > 1 or (header.photometric and "MONOCHROME" not in header.photometric):
        return Reason.COLOR
    if not _RENDERINGS.isdisjoint(header.image_type[2:]) or _is_scintigram(header):
        return Reason.PROJECTION
    if _REPROJECTION in header.elements.text(_SERIES_TYPE).upper().split("\\"):
        return Reason.PROJECTION
    if "LOCALIZER" in header.image_type[2:]:  # PS3.3 C.8.2.1.1.1, value 3
        return Reason.LOCALIZER
    known = _is_class(header, _VOLUMES) or header.modality in _MODALITIES
    if known or (header.position is not None and header.orientation is not None):
        return None
    return Reason.NOT_AN_IMAGE


def ends_early(header: Header) -> bool:
    """Whether a file ended before it said of which series it is, or what it is at all."""
    if header.pixels is not None or (header.modality and header.series_uid):
        return False
    return any(f"{_STORAGE}{tail}".startswith(header.sop_class) for tail in _VOLUMES)


def is_multiframe(header: Header) -> bool:
    """Whether a file holds several frames, or is of a class that may."""
    return header.frames != 1 or header.sop_class.removeprefix(_STORAGE) in _ENHANCED


def has_reversed_rows(header: Header) -> bool:
    """Whether rows may stand in reverse: GE's epi_pepolar with a polarity that is not forward."""
    if _PEPOLAR not in header.elements.text(_GE_SEQUENCE).lower():
        return False
    try:
        return float(header.elements.text(_GE_USER_12)) != _FORWARD
    except ValueError:
        return True


def is_derived(header: Header) -> bool:
    """Whether it was computed from other slices, which are the better source."""
    return header.image_type[0] == "DERIVED" and not _REFORMATS.isdisjoint(header.image_type[2:])


def _is_class(header: Header, classes: tuple[str, ...]) -> bool:
    """Whether the SOP class is one of `classes` or of the family below it."""
    return _is_one_of(header.sop_class, classes)


@lru_cache(1024)
def _is_one_of(sop_class: str, classes: tuple[str, ...]) -> bool:
    if not sop_class.startswith(_STORAGE):
        return False
    tail = sop_class.removeprefix(_STORAGE)
    return any(tail == c or tail.startswith(c + ".") for c in classes)


def _is_scintigram(header: Header) -> bool:
    """Whether a nuclear image says that it is none of reconstructed slices (PS3.3 C.8.4.9.1.1)."""
    words = header.image_type[2:3]
    return _is_class(header, _NUCLEAR) and bool(words) and not words[0].startswith("RECON")


def _has_no_picture(header: Header) -> bool:
    """Whether there are no pixels, and not because a CT, MR or PET file was cut off."""
    return header.pixels is None and not _is_class(header, _VOLUMES)
