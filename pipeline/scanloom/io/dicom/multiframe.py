"""The frames of multi-frame objects as slices: what stands in functional groups, or in vectors.

A frame's group decides, else the group that all frames share, else the object itself (DICOM PS3.3
C.7.6.16). The order of frames says nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import tags
from scanloom.io.dicom.headers import Header, quiet
from scanloom.io.dicom.meaning import MEANING
from scanloom.io.dicom.nuclear import vector_slices
from scanloom.io.dicom.odd_header import PARSE_ERRORS
from scanloom.io.dicom.slices import (
    Slice,
    as_text,
    doubles,
    header_phase,
    in_hounsfield,
    plain_text,
    rescale_kind,
    to_float,
)

if TYPE_CHECKING:
    from pydicom import Dataset

_SHARED, _PER_FRAME = (
    tags.SHARED_FUNCTIONAL_GROUPS_SEQUENCE,
    tags.PER_FRAME_FUNCTIONAL_GROUPS_SEQUENCE,
)
_GROUPS = (
    tags.UNASSIGNED_SHARED_CONVERTED_ATTRIBUTES_SEQUENCE,
    tags.UNASSIGNED_PER_FRAME_CONVERTED_ATTRIBUTES_SEQUENCE,
    tags.FRAME_CONTENT_SEQUENCE,
    tags.PLANE_POSITION_SEQUENCE,
    tags.PLANE_ORIENTATION_SEQUENCE,
    tags.PIXEL_MEASURES_SEQUENCE,
    tags.PIXEL_VALUE_TRANSFORMATION_SEQUENCE,
    tags.CT_X_RAY_DETAILS_SEQUENCE,
    tags.CT_IMAGE_FRAME_TYPE_SEQUENCE,
    tags.MR_IMAGE_FRAME_TYPE_SEQUENCE,
    tags.PET_FRAME_TYPE_SEQUENCE,
    tags.MR_RECEIVE_COIL_SEQUENCE,
    tags.MR_TIMING_AND_RELATED_PARAMETERS_SEQUENCE,
    tags.MR_ECHO_SEQUENCE,
    tags.MR_MODIFIER_SEQUENCE,
    tags.MR_DIFFUSION_SEQUENCE,
    tags.CARDIAC_SYNCHRONIZATION_SEQUENCE,
    tags.TEMPORAL_POSITION_SEQUENCE,
)
"""Groups (PS3.3 C.7.6.16.2) of which something is used; later ones win over earlier ones."""
_INNER = (tags.DIFFUSION_GRADIENT_DIRECTION_SEQUENCE,)
"""DiffusionGradientDirectionSequence, within MRDiffusionSequence."""

_POSITION, _ORIENTATION, _SPACING = (
    tags.IMAGE_POSITION_PATIENT,
    tags.IMAGE_ORIENTATION_PATIENT,
    tags.PIXEL_SPACING,
)
_INTERCEPT, _SLOPE, _RESCALE_TYPE = tags.RESCALE_INTERCEPT, tags.RESCALE_SLOPE, tags.RESCALE_TYPE
_FRAME_TYPE, _TECHNIQUE = tags.FRAME_TYPE, tags.VOLUME_BASED_CALCULATION_TECHNIQUE
_RENDERED = ("MAX_IP", "MIN_IP", "VOLUME_RENDER", "SURFACE_RENDER")
_CURVED = "CURVED_MPR"
"""Volume based calculation techniques (PS3.3 C.8.16.2.1.3). Volumetric properties don't tell:
Siemens calls any EPI DISTORTED."""
_TEXTS = {
    "StackID": tags.STACK_ID,
    "EchoTime": tags.ECHO_TIME,
    "EchoNumbers": tags.ECHO_NUMBERS,
    "AcquisitionNumber": tags.ACQUISITION_NUMBER,
    "TemporalPositionIdentifier": tags.TEMPORAL_POSITION_IDENTIFIER,
    "TriggerTime": tags.TRIGGER_TIME,
    "AcquisitionTime": tags.FRAME_ACQUISITION_DATE_TIME,
    "ImageType": _FRAME_TYPE,
    "VolumeBasedCalculationTechnique": _TECHNIQUE,
}
_DOUBLES = {
    "EchoTime": tags.EFFECTIVE_ECHO_TIME,
    "DiffusionBValue": tags.DIFFUSION_B_VALUE,
    "DiffusionGradientOrientation": tags.DIFFUSION_GRADIENT_ORIENTATION,
    "TriggerTime": tags.NOMINAL_CARDIAC_TRIGGER_DELAY_TIME,
    "TemporalPositionTimeOffset": tags.TEMPORAL_POSITION_TIME_OFFSET,
}
_WHOLES = {
    "AcquisitionNumber": tags.FRAME_ACQUISITION_NUMBER,
    "TemporalPositionIdentifier": tags.TEMPORAL_POSITION_INDEX,
}
_INDICES = tags.DIMENSION_INDEX_VALUES
_IN_STACK = (
    tags.IN_STACK_POSITION_NUMBER,
    _POSITION,
    tags.SLICE_LOCATION,
    tags.IMAGE_POSITION_VOLUME,
    tags.PLANE_POSITION_SEQUENCE,
    _ORIENTATION,
    tags.PLANE_ORIENTATION_SEQUENCE,
)
"""Dimensions along which places change: position in stack, position, location, direction."""

_CONCATENATION, _PART, _PARTS = (
    tags.CONCATENATION_UID,
    tags.IN_CONCATENATION_NUMBER,
    tags.IN_CONCATENATION_TOTAL_NUMBER,
)

Attributes = Mapping[int, bytes]


def multiframe_slices(headers: Sequence[Header]) -> list[Slice]:
    """Return the frames of the multi-frame objects of a series; for some, `frame_reason`.

    Raises
    ------
    ScanError
        DAMAGED if the number of frames is not that of the groups; TRUNCATED where parts of a
        concatenation are missing.
    """
    slices: list[Slice] = []
    parts: dict[bytes, dict[int, int]] = defaultdict(dict)
    for header in headers:
        dataset = header.read_dataset()
        try:
            with quiet():
                slices += _frames(header, dataset)
                uid = _raw(dataset, _CONCATENATION).strip(b" \0")
                if uid:
                    number, total = (_whole(header, _raw(dataset, t)) for t in (_PART, _PARTS))
                    parts[uid][number] = total
        except (OSError, *PARSE_ERRORS) as exc:  # pydicom raises OSError for what is cut off
            detail = f"the functional groups can't be parsed ({type(exc).__name__})"
            raise ScanError(Reason.DAMAGED, detail) from exc
    for numbers in parts.values():  # PS3.3 C.7.6.16.1
        total = max(*numbers.values(), *numbers)
        if total > len(numbers):
            detail = f"{len(numbers)} of the {total} parts of a concatenation"
            raise ScanError(Reason.TRUNCATED, detail)
    return slices


def _frames(header: Header, dataset: Dataset) -> list[Slice]:
    """Return the frames of one object."""
    groups = _items(dataset, _PER_FRAME)
    if not groups:
        return vector_slices(header, dataset)
    if len(groups) != header.frames:
        raise ScanError(Reason.DAMAGED, f"{header.frames} frames, and groups for {len(groups)}")
    own = {_TECHNIQUE: _raw(dataset, _TECHNIQUE)}
    shared = own | _attributes(_items(dataset, _SHARED)[:1])
    others = _other_dimensions(dataset)
    return [
        _slice(header, n, shared | _attributes([group]), others, group)
        for n, group in enumerate(groups)
    ]


def frame_reason(one: Slice) -> Reason | None:
    """Return why a frame is no slice of a volume, by what it says itself; None if it may be one."""
    if "LOCALIZER" in one.phase.get("ImageType", "").split("\\")[2:]:
        return Reason.LOCALIZER
    technique = one.phase.get("VolumeBasedCalculationTechnique", "")
    if technique in _RENDERED:
        return Reason.PROJECTION
    return Reason.DERIVED if technique == _CURVED else None


def _slice(
    header: Header, n: int, attributes: Attributes, others: Sequence[int], group: Dataset
) -> Slice:
    """Return one frame; `others` are the dimensions that are no places."""
    slope, intercept = (_number(attributes, tag) for tag in (_SLOPE, _INTERCEPT))
    kind = plain_text(attributes.get(_RESCALE_TYPE, b"")).upper() or header.rescale_type
    given = slope is not None or intercept is not None
    if not given:
        slope, intercept, given = header.slope, header.intercept, header.rescale_given
    return Slice(
        header=header,
        frame=n,
        position=_numbers(attributes.get(_POSITION, b""), 3),
        orientation=_numbers(attributes.get(_ORIENTATION, b""), 6) or header.orientation,
        spacing=_numbers(attributes.get(_SPACING, b""), 2) or header.spacing,
        slope=math.nan if slope is None else slope,
        intercept=math.nan if intercept is None else intercept,
        rescaled=rescale_kind(given, kind),
        hounsfield=in_hounsfield(header, given, kind),
        phase=_phase(header, attributes, others),
        multiframe=True,
        group=group,
    )


def _phase(header: Header, attributes: Attributes, others: Sequence[int]) -> dict[str, str]:
    little = header.elements.little
    found = {}
    for name, tag in _TEXTS.items():
        found[name] = plain_text(attributes.get(tag, b""))
    for name, tag in _DOUBLES.items():
        found[name] = doubles(attributes.get(tag, b""), little=little) or found.get(name, "")
    for name, tag in _WHOLES.items():
        if tag in attributes:
            found[name] = str(_whole(header, attributes[tag]))
    for attribute in MEANING:
        raw = next((value for tag in attribute.tags if (value := attributes.get(tag))), b"")
        if raw and attribute.name not in found:
            found[attribute.name] = as_text(raw, little=little)
    raw = attributes.get(_INDICES, b"")
    indices = [_whole(header, raw[n : n + 4]) for n in range(0, len(raw), 4)]
    found["DimensionIndexValues"] = "\\".join(str(indices[n]) for n in others if n < len(indices))
    return {**header_phase(header)} | {name: value for name, value in found.items() if value}


def _whole(header: Header, raw: bytes) -> int:
    return int.from_bytes(raw, "little" if header.elements.little else "big")


def _other_dimensions(dataset: Dataset) -> list[int]:
    """Return which of DimensionIndexValues count something else than places."""
    others = []
    for n, item in enumerate(_items(dataset, tags.DIMENSION_INDEX_SEQUENCE)):
        pointer = item.get("DimensionIndexPointer")
        if pointer is not None and int(pointer) not in _IN_STACK:
            others.append(n)
    return others


def _attributes(groups: Iterable[Dataset]) -> dict[int, bytes]:
    """Return all values in the groups that are used, as bytes."""
    found: dict[int, bytes] = {}
    for group in groups:
        for tag in _GROUPS:
            for item in _items(group, tag)[:1]:
                found |= _leaves(item)
                for inner in _INNER:
                    for deeper in _items(item, inner)[:1]:
                        found |= _leaves(deeper)
    return found


def _leaves(item: Dataset) -> dict[int, bytes]:
    return {int(tag): raw for tag in item.keys() if (raw := _raw(item, int(tag)))}  # noqa: SIM118


def _items(dataset: Dataset, tag: int) -> list[Dataset]:
    if tag not in dataset:
        return []
    value = dataset[tag].value
    return list(value) if value else []


def _raw(dataset: Dataset, tag: int) -> bytes:
    """Return the bytes of a value, unconverted; nothing for sequences."""
    if tag not in dataset:
        return b""
    value: Any = dataset.get_item(tag).value
    return value if isinstance(value, bytes) else b""


def _numbers(raw: bytes, count: int) -> tuple[float, ...] | None:
    if not raw.strip(b" \0"):
        return None
    try:
        numbers = tuple(map(to_float, plain_text(raw).split("\\")))
    except ValueError:
        numbers = ()
    # What is there and makes no sense is not to be replaced by what stands elsewhere
    return numbers if len(numbers) == count else (math.nan,) * count


def _number(attributes: Attributes, tag: int) -> float | None:
    found = _numbers(attributes.get(tag, b""), 1)
    return found[0] if found else None
