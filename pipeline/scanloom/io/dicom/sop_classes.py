"""Classify DICOM objects: which may be slices of a volume, and why others are not.

The header alone decides: SOP class, ImageType, SeriesType, colour and modality.
"""

from __future__ import annotations

from functools import lru_cache

from scanloom.core import Reason
from scanloom.io.dicom import tags, uids
from scanloom.io.dicom.header.header import Header

_ENHANCED_VOLUMES = (
    uids.ENHANCED_CT_IMAGE_STORAGE,
    uids.LEGACY_CONVERTED_ENHANCED_CT_IMAGE_STORAGE,
    uids.ENHANCED_MR_IMAGE_STORAGE,
    uids.LEGACY_CONVERTED_ENHANCED_MR_IMAGE_STORAGE,
    uids.LEGACY_CONVERTED_ENHANCED_PET_IMAGE_STORAGE,
    uids.ENHANCED_PET_IMAGE_STORAGE,
    uids.X_RAY_3D_ANGIOGRAPHIC_IMAGE_STORAGE,
    uids.X_RAY_3D_CRANIOFACIAL_IMAGE_STORAGE,
    uids.OPHTHALMIC_TOMOGRAPHY_IMAGE_STORAGE,
)
_ENHANCED = (*_ENHANCED_VOLUMES, uids.ENHANCED_MR_COLOR_IMAGE_STORAGE)
_VOLUMES = (
    uids.CT_IMAGE_STORAGE,
    uids.MR_IMAGE_STORAGE,
    uids.POSITRON_EMISSION_TOMOGRAPHY_IMAGE_STORAGE,
    uids.NUCLEAR_MEDICINE_IMAGE_STORAGE,
    *_ENHANCED_VOLUMES,
)
_PROJECTIONS = (
    uids.COMPUTED_RADIOGRAPHY_IMAGE_STORAGE,  # with digital radiography and mammography below it
    uids.X_RAY_ANGIOGRAPHIC_IMAGE_STORAGE,
    uids.X_RAY_RADIOFLUOROSCOPIC_IMAGE_STORAGE,
    uids.BREAST_TOMOSYNTHESIS_IMAGE_STORAGE,
    uids.BREAST_PROJECTION_X_RAY_IMAGE_STORAGE_FOR_PRESENTATION,
    uids.BREAST_PROJECTION_X_RAY_IMAGE_STORAGE_FOR_PROCESSING,
    uids.RT_IMAGE_STORAGE,
)
_SECONDARY_CAPTURES = (uids.SECONDARY_CAPTURE_IMAGE_STORAGE,)
_NOT_IMAGES = (
    uids.MR_SPECTROSCOPY_STORAGE,
    uids.RAW_DATA_STORAGE,  # with registrations, segmentations and tractography below it
    uids.REAL_WORLD_VALUE_MAPPING_STORAGE,
    uids.SURFACE_SCAN_FAMILY,
    uids.STRUCTURED_REPORT_FAMILY,
    uids.PRESENTATION_STATE_FAMILY,
    uids.ENCAPSULATED_DOCUMENT_FAMILY,
    uids.WAVEFORM_FAMILY,
    uids.PARAMETRIC_MAP_STORAGE,
    uids.RT_DOSE_STORAGE,
    uids.RT_STRUCTURE_SET_STORAGE,
    uids.RT_PLAN_STORAGE,
    uids.RT_ION_PLAN_STORAGE,
)
_REFORMATS = frozenset(
    ("REFORMATTED", "MPR", "CPR", "CURVED", "CURVED_MPR", "CSA MPR", "CSA RESAMPLED", "RESAMPLED")
)
_RENDERINGS = frozenset(
    (
        *("PROJECTION IMAGE", "MIP", "MINIP", "MAX_IP", "MIN_IP", "CSA MIP"),
        *("VRT", "SSD", "VOLUME_RENDER", "SURFACE_RENDER"),
    )
)
"""Values of ImageType from the third on: those of PS3.3 C.8.3.1.1.1 and C.8.16.2.1.4, and common
private ones."""
_REPROJECTION = "REPROJECTION"
"""Second value of SeriesType: views of a PET volume from all sides (PS3.3 C.8.9.1.1.1)."""
_GE_PEPOLAR_SEQUENCE = "epi_pepolar"
_GE_FORWARD_POLARITY = 0.0
"""GE's user data 12 of an epi_pepolar series in which the rows of all volumes stand as the header
describes them."""
_MODALITIES = ("CT", "MR", "PT")


def rejection_reason(header: Header) -> Reason | None:
    """Return why an object is not a slice of a volume; None if it may be one.

    The order matters: a colour secondary capture is reported as a secondary capture.
    """
    sop_class, is_volume = header.sop_class, _is_class(header.sop_class, _VOLUMES)
    # Without pixels, a CT, MR or PET file was cut off, which makes its series TRUNCATED
    if _is_class(sop_class, _NOT_IMAGES) or (header.pixels is None and not is_volume):
        return Reason.NOT_AN_IMAGE
    if _is_class(sop_class, _SECONDARY_CAPTURES):
        return Reason.SECONDARY_CAPTURE
    if _is_class(sop_class, _PROJECTIONS):
        return Reason.PROJECTION
    if header.samples > 1 or (header.photometric and "MONOCHROME" not in header.photometric):
        return Reason.COLOR
    if not _RENDERINGS.isdisjoint(header.image_type[2:]) or _is_planar_nuclear(header):
        return Reason.PROJECTION
    if _REPROJECTION in header.elements.text(tags.SERIES_TYPE).upper().split("\\"):
        return Reason.PROJECTION
    if "LOCALIZER" in header.image_type[2:]:  # PS3.3 C.8.2.1.1.1, value 3
        return Reason.LOCALIZER
    known = is_volume or header.modality in _MODALITIES
    if known or (header.position is not None and header.orientation is not None):
        return None
    return Reason.NOT_AN_IMAGE


def is_image_class(sop_class: str) -> bool:
    """Return whether objects of a SOP class may be images; of an unknown class, they may."""
    return not _is_class(sop_class, _NOT_IMAGES)


_KINDS = {
    Reason.COLOR: "colour image",
    Reason.DERIVED: "derived image",
    Reason.LOCALIZER: "localiser",
    Reason.PROJECTION: "projection",
}
"""Kinds of objects whose class may be that of slices."""
_NOT_IN_PYDICOM = "object of a class that is private or newer than pydicom"


def object_name(header: Header) -> str:
    """Return the kind of an object that is not a slice, such as "RT Structure Set"."""
    from pydicom.uid import UID

    if _is_class(header.sop_class, _VOLUMES):
        reason = rejection_reason(header)
        return _KINDS.get(reason, "object without pixels") if reason else "slice"
    name = UID(header.sop_class).name
    return name.partition(" Storage")[0] if name != header.sop_class else _NOT_IN_PYDICOM


def is_truncated_header(header: Header) -> bool:
    """Return whether a file ended before its series, or even its SOP class, was complete."""
    if header.pixels is not None or (header.modality and header.series_uid):
        return False
    return any(sop_class.startswith(header.sop_class) for sop_class in _VOLUMES)


def is_multiframe(header: Header) -> bool:
    """Return whether a file holds several frames, or is of a class that may."""
    return header.frames != 1 or header.sop_class in _ENHANCED


def may_lack_geometry(header: Header) -> bool:
    """Return whether a multi-frame class leaves positions in the patient out of some objects.

    Only the frames show it: most tomographies of the eye are located on a photograph of its fundus.
    """
    return _is_class(header.sop_class, (uids.OPHTHALMIC_TOMOGRAPHY_IMAGE_STORAGE,))


def has_reversed_rows(header: Header) -> bool:
    """Return whether rows may be reversed: GE's epi_pepolar with a polarity that is not forward."""
    if _GE_PEPOLAR_SEQUENCE not in header.elements.text(tags.GE_PULSE_SEQUENCE_NAME).lower():
        return False
    try:
        return float(header.elements.text(tags.GE_USER_DATA_12)) != _GE_FORWARD_POLARITY
    except ValueError:
        return True


def is_derived(header: Header) -> bool:
    """Return whether a slice was computed from other slices, which are the better source."""
    return header.image_type[0] == "DERIVED" and not _REFORMATS.isdisjoint(header.image_type[2:])


@lru_cache(1024)
def _is_class(sop_class: str, classes: tuple[str, ...]) -> bool:
    """Return whether a SOP class is one of `classes` or below one in the tree of UIDs."""
    return any(sop_class == root or sop_class.startswith(root + ".") for root in classes)


def _is_planar_nuclear(header: Header) -> bool:
    """Return whether a nuclear image is not made of reconstructed slices (PS3.3 C.8.4.9.1.1)."""
    is_nuclear = _is_class(header.sop_class, (uids.NUCLEAR_MEDICINE_IMAGE_STORAGE,))
    kind = header.image_type[2:3]
    return is_nuclear and bool(kind) and not kind[0].startswith("RECON")
