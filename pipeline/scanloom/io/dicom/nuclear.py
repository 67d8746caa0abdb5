"""Multi-frame objects without functional groups: nuclear medicine counts its frames in vectors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from scanloom.io.dicom import tags
from scanloom.io.dicom.headers import Header
from scanloom.io.dicom.slices import Slice, plain_text, single_slice, to_float

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


def vector_slices(header: Header, dataset: Dataset) -> list[Slice]:
    """Return the frames of an object that has no functional groups.

    Reconstructed slices lie one behind the other (DICOM PS3.3 C.8.4.15): the first one's place is
    that of the detector, SpacingBetweenSlices with its sign goes along the normal, and SliceVector
    says which frame is which slice, from 1. Where this is not given, one slice without a position
    stands for all frames.

    Parameters
    ----------
    header : Header
        Of the object.
    dataset : Dataset
        Its elements.
    """
    whole = single_slice(header)
    lost = replace(whole, position=None, multiframe=header.frames > 1, shared=None)
    vectors = {name: _vector(header, dataset, tag) for name, tag in _VECTORS.items()}
    depths = _vector(header, dataset, _SLICES)
    if header.frames == 1 and not depths:
        return [whole]
    position, orientation = _first_place(header, dataset)
    between = _numbers(_raw(dataset, _BETWEEN))
    counted = len(depths) == header.frames and min(depths) == 1
    if not (counted and position and orientation and len(between) == 1):
        return [lost]  # one says it for all: their number is not to be believed either
    normal = np.cross(orientation[:3], orientation[3:])
    return [
        replace(
            lost,
            frame=n,
            position=tuple(map(float, np.array(position) + (depth - 1) * between[0] * normal)),
            orientation=orientation,
            phase=dict(whole.phase)
            | {name: str(v[n]) for name, v in vectors.items() if len(v) == header.frames},
        )
        for n, depth in enumerate(depths)
    ]


def _first_place(
    header: Header, dataset: Dataset
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Return position and orientation of the first slice, of the one detector that has them."""
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
    kind = "<u2" if header.elements.little else ">u2"
    return [int(v) for v in np.frombuffer(raw[: len(raw) // 2 * 2], kind)]


def _raw(dataset: Dataset, tag: int) -> bytes:
    value = dataset.get_item(tag).value if tag in dataset else b""
    return value if isinstance(value, bytes) else b""


def _numbers(raw: bytes) -> tuple[float, ...]:
    try:
        numbers = tuple(map(to_float, plain_text(raw).split("\\")))
    except ValueError:
        return ()
    return numbers if all(map(math.isfinite, numbers)) else ()
