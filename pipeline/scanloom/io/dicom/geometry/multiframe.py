"""Split multi-frame objects into slices by their functional groups, or by frame vectors.

A functional group is shared or of single frames, never both (DICOM PS3.3 C.7.6.16): values that
differ contradict each other. Those of groups take precedence over the object itself. The order of
the frames has no meaning.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import tags, uids
from scanloom.io.dicom.geometry.slices import (
    Slice,
    decode_text,
    doubles_as_text,
    gives_hounsfield,
    header_volume_attributes,
    normalized_rescale_type,
    parse_decimal,
    single_slice,
    untyped_as_text,
)
from scanloom.io.dicom.header.elements import resolve_private_blocks
from scanloom.io.dicom.header.header import Header, parsing
from scanloom.io.dicom.slice_attributes import SLICE_ATTRIBUTES
from scanloom.io.dicom.sop_classes import may_lack_geometry

if TYPE_CHECKING:
    from pydicom import Dataset


_GROUPS = (
    tags.UNASSIGNED_SHARED_CONVERTED_ATTRIBUTES_SEQUENCE,
    tags.UNASSIGNED_PER_FRAME_CONVERTED_ATTRIBUTES_SEQUENCE,
    tags.FRAME_CONTENT_SEQUENCE,
    tags.PLANE_POSITION_SEQUENCE,
    tags.PLANE_ORIENTATION_SEQUENCE,
    tags.PIXEL_MEASURES_SEQUENCE,
    tags.PIXEL_VALUE_TRANSFORMATION_SEQUENCE,
    tags.CONTRAST_BOLUS_USAGE_SEQUENCE,
    tags.CT_X_RAY_DETAILS_SEQUENCE,
    tags.CT_IMAGE_FRAME_TYPE_SEQUENCE,
    tags.MR_IMAGE_FRAME_TYPE_SEQUENCE,
    tags.PET_FRAME_TYPE_SEQUENCE,
    tags.MR_RECEIVE_COIL_SEQUENCE,
    tags.MR_TIMING_AND_RELATED_PARAMETERS_SEQUENCE,
    tags.MR_ECHO_SEQUENCE,
    tags.MR_MODIFIER_SEQUENCE,
    tags.MR_IMAGING_MODIFIER_SEQUENCE,
    tags.MR_ARTERIAL_SPIN_LABELING_SEQUENCE,
    tags.CT_RECONSTRUCTION_SEQUENCE,
    tags.PET_RECONSTRUCTION_SEQUENCE,
    tags.MR_DIFFUSION_SEQUENCE,
    tags.CARDIAC_SYNCHRONIZATION_SEQUENCE,
    tags.TEMPORAL_POSITION_SEQUENCE,
)
"""Functional groups that are read (PS3.3 C.7.6.16.2); later ones override earlier ones."""
_OF_SEVERAL_SOURCES = (tags.CT_X_RAY_DETAILS_SEQUENCE, tags.CT_RECONSTRUCTION_SEQUENCE)
"""Groups with an item for each X-ray source or energy, of which the first is read."""
_NESTED_GROUPS = (tags.DIFFUSION_GRADIENT_DIRECTION_SEQUENCE,)
"""DiffusionGradientDirectionSequence, within MRDiffusionSequence."""

_POSITION, _ORIENTATION = tags.IMAGE_POSITION_PATIENT, tags.IMAGE_ORIENTATION_PATIENT
_TECHNIQUE = tags.VOLUME_BASED_CALCULATION_TECHNIQUE
_RENDERING_TECHNIQUES = ("MAX_IP", "MIN_IP", "VOLUME_RENDER", "SURFACE_RENDER")
_CURVED_TECHNIQUE = "CURVED_MPR"
"""VolumeBasedCalculationTechnique (PS3.3 C.8.16.2.1.3). VolumetricProperties is no help: Siemens
marks any EPI as DISTORTED."""
_TEXT_TAGS = {
    "StackID": tags.STACK_ID,
    "EchoTime": tags.ECHO_TIME,
    "EchoNumbers": tags.ECHO_NUMBERS,
    "AcquisitionNumber": tags.ACQUISITION_NUMBER,
    "TemporalPositionIdentifier": tags.TEMPORAL_POSITION_IDENTIFIER,
    "TriggerTime": tags.TRIGGER_TIME,
    "AcquisitionTime": tags.FRAME_ACQUISITION_DATE_TIME,
    "ImageType": tags.FRAME_TYPE,
    "VolumeBasedCalculationTechnique": _TECHNIQUE,
}
_DOUBLE_TAGS = {
    "EchoTime": tags.EFFECTIVE_ECHO_TIME,
    "DiffusionBValue": tags.DIFFUSION_B_VALUE,
    "DiffusionGradientOrientation": tags.DIFFUSION_GRADIENT_ORIENTATION,
    "TriggerTime": tags.NOMINAL_CARDIAC_TRIGGER_DELAY_TIME,
    "TemporalPositionTimeOffset": tags.TEMPORAL_POSITION_TIME_OFFSET,
}
_INTEGER_TAGS = {
    "AcquisitionNumber": tags.FRAME_ACQUISITION_NUMBER,
    "TemporalPositionIdentifier": tags.TEMPORAL_POSITION_INDEX,
}
_SPATIAL_POINTERS = (
    tags.IN_STACK_POSITION_NUMBER,
    _POSITION,
    tags.SLICE_LOCATION,
    tags.IMAGE_POSITION_VOLUME,
    tags.PLANE_POSITION_SEQUENCE,
    _ORIENTATION,
    tags.PLANE_ORIENTATION_SEQUENCE,
)
"""Dimension pointers along which the slice position changes, or the orientation."""

_TagValues = Mapping[int, bytes]


def multiframe_slices(headers: Sequence[Header]) -> list[Slice]:
    """Return all frames of multi-frame objects; `frame_rejection_reason` then rejects some.

    Raises
    ------
    ScanError
        DAMAGED if the functional groups can't be parsed or do not match the number of frames;
        TRUNCATED if parts of a concatenation are missing.
    """
    slices: list[Slice] = []
    concatenations: dict[bytes, dict[int, int]] = defaultdict(dict)
    for header in headers:
        dataset = header.read_dataset()
        with parsing("the functional groups"):
            slices += _frames(header, dataset)
            uid = _raw(dataset, tags.CONCATENATION_UID).strip(b" \0")
            if uid:
                number, total = (
                    _integer(header, _raw(dataset, tag))
                    for tag in (tags.IN_CONCATENATION_NUMBER, tags.IN_CONCATENATION_TOTAL_NUMBER)
                )
                concatenations[uid][number] = total
    for numbers in concatenations.values():  # PS3.3 C.7.6.16.1
        stated = max(numbers.values())  # 0 if no part states it; a concatenation has at least two
        total = max(stated or 2, *numbers)
        if total > len(numbers):
            detail = f"only {len(numbers)} of the {total} parts of a concatenation are present"
            raise ScanError(Reason.TRUNCATED, detail)
    return slices


def _frames(header: Header, dataset: Dataset) -> list[Slice]:
    """Return the frames of one object."""
    groups = _items(dataset, tags.PER_FRAME_FUNCTIONAL_GROUPS_SEQUENCE)
    if not groups:
        return vector_slices(header, dataset)
    if len(groups) != header.frames:
        raise ScanError(Reason.DAMAGED, f"{header.frames} frames, but groups for {len(groups)}")
    shared_groups = _items(dataset, tags.SHARED_FUNCTIONAL_GROUPS_SEQUENCE)
    shared_items = [_attributes(item) for item in shared_groups]
    shared = {
        tag: _agreed(item[tag] for item in shared_items if tag in item)
        for tag in _GROUPS
        if any(tag in item for item in shared_items)
    }
    of_object = {_TECHNIQUE: _raw(dataset, _TECHNIQUE)}
    dimensions = _non_spatial_dimensions(dataset)
    slices = []
    for n, group in enumerate(groups):
        own = _attributes(group)
        for tag in shared.keys() & own.keys():
            common, values = shared[tag], own[tag]
            if any(not _is_same(common[t], values[t]) for t in common.keys() & values.keys()):
                detail = "a functional group is shared and also of a frame, with different values"
                raise ScanError(Reason.HEADER_CONTRADICTS, detail)
        attributes = dict(of_object)
        # The frame's own groups last: they override the shared ones, and both the object
        for values in (*shared.values(), *own.values()):
            attributes |= values
        slices.append(_slice(header, n, attributes, dimensions, group))
    return slices


def _is_same(first: bytes, second: bytes) -> bool:
    """Return whether two raw values are the same text or bytes, or the same decimal numbers."""
    if first.strip(b" \0") == second.strip(b" \0"):
        return True
    try:
        numbers = [tuple(map(parse_decimal, decode_text(v).split("\\"))) for v in (first, second)]
    except ValueError:
        return False
    return numbers[0] == numbers[1]


def frame_rejection_reason(frame: Slice) -> Reason | None:
    """Return why a frame is not a slice of a volume; None if it may be one."""
    if frame.position is None and may_lack_geometry(frame.header):
        return Reason.NOT_AN_IMAGE
    if "LOCALIZER" in frame.phase.get("ImageType", "").split("\\")[2:]:
        return Reason.LOCALIZER
    technique = frame.phase.get("VolumeBasedCalculationTechnique", "")
    if technique in _RENDERING_TECHNIQUES:
        return Reason.PROJECTION
    return Reason.DERIVED if technique == _CURVED_TECHNIQUE else None


def _slice(
    header: Header, n: int, attributes: _TagValues, dimensions: Sequence[int], group: Dataset
) -> Slice:
    """Return frame `n` of an object as a slice.

    `attributes` are raw values of the frame by tag, `dimensions` the indices of the non-spatial
    dimensions in DimensionIndexValues, `group` the functional groups of the frame.
    """
    slope = _number(attributes, tags.RESCALE_SLOPE)
    intercept = _number(attributes, tags.RESCALE_INTERCEPT)
    own_type = decode_text(attributes.get(tags.RESCALE_TYPE, b"")).upper()
    rescale_type = own_type or header.rescale_type
    has_rescale = slope is not None or intercept is not None
    if not has_rescale:
        slope, intercept, has_rescale = header.slope, header.intercept, header.rescale_given
    return Slice(
        header=header,
        frame=n,
        position=_numbers(attributes.get(_POSITION, b""), 3),
        orientation=_numbers(attributes.get(_ORIENTATION, b""), 6) or header.orientation,
        spacing=_numbers(attributes.get(tags.PIXEL_SPACING, b""), 2) or header.spacing,
        slope=math.nan if slope is None else slope,
        intercept=math.nan if intercept is None else intercept,
        rescaled=normalized_rescale_type(has_rescale, rescale_type),
        hounsfield=gives_hounsfield(header, has_rescale, rescale_type),
        phase=_phase(header, attributes, dimensions),
        multiframe=True,
        group=group,
    )


def _phase(header: Header, attributes: _TagValues, dimensions: Sequence[int]) -> dict[str, str]:
    little = header.elements.little
    phase = {}
    # Functional groups name some attributes twice. Attributes of enhanced objects override those
    # of single-frame objects, which conversions leave behind
    for name, tag in _TEXT_TAGS.items():
        phase[name] = decode_text(attributes.get(tag, b""))
    for name, tag in _DOUBLE_TAGS.items():
        phase[name] = doubles_as_text(attributes.get(tag, b""), little=little) or phase.get(
            name, ""
        )
    for name, tag in _INTEGER_TAGS.items():
        if tag in attributes:
            phase[name] = str(_integer(header, attributes[tag]))
    for attribute in SLICE_ATTRIBUTES:
        raw = next((value for tag in attribute.tags if (value := attributes.get(tag))), b"")
        if raw and attribute.name not in phase:
            phase[attribute.name] = untyped_as_text(raw, little=little)
    raw = attributes.get(tags.DIMENSION_INDEX_VALUES, b"")
    indices = [_integer(header, raw[n : n + 4]) for n in range(0, len(raw), 4)]
    phase["DimensionIndexValues"] = "\\".join(
        str(indices[n]) for n in dimensions if n < len(indices)
    )
    return {**header_volume_attributes(header)} | {
        name: value for name, value in phase.items() if value
    }


def _integer(header: Header, raw: bytes) -> int:
    return int.from_bytes(raw, "little" if header.elements.little else "big")


def _non_spatial_dimensions(dataset: Dataset) -> list[int]:
    """Return the indices of the dimensions other than position and orientation."""
    dimensions = []
    for n, item in enumerate(_items(dataset, tags.DIMENSION_INDEX_SEQUENCE)):
        pointer = item.get("DimensionIndexPointer")
        if pointer is not None and int(pointer) not in _SPATIAL_POINTERS:
            dimensions.append(n)
    return dimensions


def _attributes(groups: Dataset) -> dict[int, dict[int, bytes]]:
    """Return all raw values of the functional groups that are read, by group and tag."""
    attributes = {}
    for tag in _GROUPS:
        items = _items(groups, tag)
        if not items:
            continue
        if tag == tags.CONTRAST_BOLUS_USAGE_SEQUENCE:
            attributes[tag] = {tags.CONTRAST_BOLUS_AGENT_ADMINISTERED: _agents_administered(items)}
            continue
        if tag in _OF_SEVERAL_SOURCES:
            items = items[:1]
        values = _agreed(map(_raw_values, items))
        for nested_tag in _NESTED_GROUPS:
            nested = (nested_item for item in items for nested_item in _items(item, nested_tag))
            values |= _agreed(map(_raw_values, nested))
        attributes[tag] = values
    return attributes


def _agents_administered(items: Sequence[Dataset]) -> bytes:
    """Return the numbers of the contrast agents that a frame has, of an item for each; or NO."""
    numbers = {
        str(item.get("ContrastBolusAgentNumber", ""))
        for item in items
        if decode_text(_raw(item, tags.CONTRAST_BOLUS_AGENT_ADMINISTERED)).upper() == "YES"
    }
    return "\\".join(sorted(numbers) or ["NO"]).encode() or b"YES"


def _agreed(items: Iterable[dict[int, bytes]]) -> dict[int, bytes]:
    """Return the values of the only item that a functional group may have (PS3.3 C.7.6.16).

    Several items with different values are HEADER_CONTRADICTS.
    """
    agreed: dict[int, bytes] = {}
    for values in items:
        if any(agreed.get(tag, value) != value for tag, value in values.items()):
            detail = "a functional group has several items that differ"
            raise ScanError(Reason.HEADER_CONTRADICTS, detail)
        agreed |= values
    return agreed


def _raw_values(item: Dataset) -> dict[int, bytes]:
    """Return all raw values of an item, whose private creators are its own (PS3.5 7.8.1)."""
    raw_values = {int(tag): raw for tag in item.keys() if (raw := _raw(item, int(tag)))}  # noqa: SIM118  # tags
    values, contradicting = resolve_private_blocks(raw_values)
    if contradicting:
        detail = "private elements of a functional group contradict each other"
        raise ScanError(Reason.HEADER_CONTRADICTS, detail)
    return values


def _items(dataset: Dataset, tag: int) -> list[Dataset]:
    if tag not in dataset:
        return []
    value = dataset[tag].value
    return list(value) if value else []


def _raw(dataset: Dataset, tag: int) -> bytes:
    """Return the raw bytes of a value; empty for sequences and missing elements."""
    if tag not in dataset:
        return b""
    value: Any = dataset.get_item(tag).value
    return value if isinstance(value, bytes) else b""


def _numbers(raw: bytes, count: int) -> tuple[float, ...] | None:
    if not raw.strip(b" \0"):
        return None
    try:
        numbers = tuple(map(parse_decimal, decode_text(raw).split("\\")))
    except ValueError:
        numbers = ()
    # An invalid value must not be replaced by the shared group's or the object's
    return numbers if len(numbers) == count else (math.nan,) * count


def _number(attributes: _TagValues, tag: int) -> float | None:
    numbers = _numbers(attributes.get(tag, b""), 1)
    return numbers[0] if numbers else None


# --- frame vectors: nuclear medicine, without functional groups -----------------------------------

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

    Raises
    ------
    ScanError
        HEADER_CONTRADICTS if the class of the object has one frame; DAMAGED if their number is
        not a number.
    """
    if not header.frames:
        raise ScanError(Reason.DAMAGED, "NumberOfFrames is not a number")
    template = single_slice(header)
    unplaced = replace(template, position=None, multiframe=header.frames > 1, shared=None)
    vectors = {name: _vector(header, dataset, tag) for name, tag in _VECTORS.items()}
    slice_numbers = _vector(header, dataset, tags.SLICE_VECTOR)
    if header.frames == 1 and not slice_numbers:
        return [template]
    position, orientation = _first_geometry(header, dataset)
    spacing = _finite_numbers(_raw(dataset, tags.SPACING_BETWEEN_SLICES), 1)
    has_slice_numbers = len(slice_numbers) == header.frames and min(slice_numbers) == 1
    if header.frames > 1 and header.sop_class in _OF_ONE_FRAME:
        detail = "a file holds several frames, but its class has one, with a single position"
        raise ScanError(Reason.HEADER_CONTRADICTS, detail)
    if not (has_slice_numbers and position and orientation and spacing):
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
    detectors = _items(dataset, tags.DETECTOR_INFORMATION_SEQUENCE)
    if not detectors:
        return header.position, header.orientation
    if len(detectors) > 1:
        return None, None
    return (
        _finite_numbers(_raw(detectors[0], _POSITION), 3) or header.position,
        _finite_numbers(_raw(detectors[0], _ORIENTATION), 6) or header.orientation,
    )


def _vector(header: Header, dataset: Dataset, tag: int) -> list[int]:
    raw = _raw(dataset, tag)
    dtype = "<u2" if header.elements.little else ">u2"
    return [int(value) for value in np.frombuffer(raw[: len(raw) // 2 * 2], dtype)]


def _finite_numbers(raw: bytes, count: int) -> tuple[float, ...] | None:
    numbers = _numbers(raw, count)
    return numbers if numbers and all(map(math.isfinite, numbers)) else None
