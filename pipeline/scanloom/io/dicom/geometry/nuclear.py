"""Multi-frame objects without functional groups: nuclear medicine, with frame index vectors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import tags, uids
from scanloom.io.dicom.geometry.slices import Slice, decode_text, parse_decimal, single_slice
from scanloom.io.dicom.header.header import Header

if TYPE_CHECKING:
    from pydicom import Dataset

_DETECTORS, _SLICES, _BETWEEN = (
    tags.DETECTOR_INFORMATION_SEQUENCE,
    tags.SLICE_VECTOR,
    tags.SPACING_BETWEEN_SLICES,
)
_POSITION, _ORIENTATION = tags.IMAGE_POSITION_PATIENT, tags.IMAGE_ORIENTATION_PATIENT
_VECTORS = {
    "EnergyWindowVector": tags.ENERGY_WINDOW_VECTOR,
    "DetectorVector": tags.DETECTOR_VECTOR,
    "PhaseVector": tags.PHASE_VECTOR,
    "RRIntervalVector": tags.RR_INTERVAL_VECTOR,
    "TimeSlotVector": tags.TIME_SLOT_VECTOR,
    "TimeSliceVector": tags.TIME_SLICE_VECTOR,
}


_OF_ONE_FRAME = (
    uids.CT_IMAGE_STORAGE,
    uids.MR_IMAGE_STORAGE,
    uids.POSITRON_EMISSION_TOMOGRAPHY_IMAGE_STORAGE,
)


def vector_slices(header: Header, dataset: Dataset) -> list[Slice]:
    """Return the frames of an object that has no functional groups.

    Reconstructed slices are stacked along the normal (DICOM PS3.3 C.8.4.15). The detector holds
    the position of the first slice, SpacingBetweenSlices is signed, and SliceVector holds the
    slice number of each frame, from 1. If any of this is missing, one slice without a position
    is returned for all frames.

    Parameters
    ----------
    header : Header
        Header of the object.
    dataset : Dataset
        Data set of the object.

    Raises
    ------
    ScanError
        HEADER_CONTRADICTS if the class of the object has one frame.
    """
    template = single_slice(header)
    unplaced = replace(template, position=None, multiframe=header.frames > 1, shared=None)
    vectors = {name: _vector(header, dataset, tag) for name, tag in _VECTORS.items()}
    slice_numbers = _vector(header, dataset, _SLICES)
    if header.frames == 1 and not slice_numbers:
        return [template]
    position, orientation = _first_geometry(header, dataset)
    spacing = _numbers(_raw(dataset, _BETWEEN))
    has_slice_numbers = len(slice_numbers) == header.frames and min(slice_numbers) == 1
    if header.frames > 1 and header.sop_class in _OF_ONE_FRAME:
        detail = "a file holds several frames, but its class has one, with a single position"
        raise ScanError(Reason.HEADER_CONTRADICTS, detail)
    if not (has_slice_numbers and position and orientation and len(spacing) == 1):
        return [unplaced]  # a single one: the number of frames is not reliable either
    normal = np.cross(orientation[:3], orientation[3:])
    return [
        replace(
            unplaced,
            frame=n,
            position=tuple(
                map(float, np.array(position) + (slice_number - 1) * spacing[0] * normal)
            ),
            orientation=orientation,
            phase=dict(template.phase)
            | {name: str(v[n]) for name, v in vectors.items() if len(v) == header.frames},
        )
        for n, slice_number in enumerate(slice_numbers)
    ]


def _first_geometry(
    header: Header, dataset: Dataset
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Return the position (LPS mm) and orientation of the first slice.

    A single detector's values override the object's; with several detectors, return two None.
    """
    detectors = dataset[_DETECTORS].value if _DETECTORS in dataset else None
    if not detectors:
        return header.position, header.orientation
    if len(detectors) > 1:
        return None, None
    position, orientation = (_numbers(_raw(detectors[0], t)) for t in (_POSITION, _ORIENTATION))
    return (
        position if len(position) == 3 else header.position,
        orientation if len(orientation) == 6 else header.orientation,
    )


def _vector(header: Header, dataset: Dataset, tag: int) -> list[int]:
    raw = _raw(dataset, tag)
    dtype = "<u2" if header.elements.little else ">u2"
    return [int(value) for value in np.frombuffer(raw[: len(raw) // 2 * 2], dtype)]


def _raw(dataset: Dataset, tag: int) -> bytes:
    value = dataset.get_item(tag).value if tag in dataset else b""
    return value if isinstance(value, bytes) else b""


def _numbers(raw: bytes) -> tuple[float, ...]:
    try:
        numbers = tuple(map(parse_decimal, decode_text(raw).split("\\")))
    except ValueError:
        return ()
    return numbers if all(map(math.isfinite, numbers)) else ()
