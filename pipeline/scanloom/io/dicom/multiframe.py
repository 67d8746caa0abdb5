"""Split multi-frame objects into slices by their functional groups, or by frame vectors.

A frame's own groups take precedence over the shared groups, and those over the object itself
(DICOM PS3.3 C.7.6.16). The order of the frames has no meaning.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scanloom.core import Reason, ScanError
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

_SHARED, _PER_FRAME = 0x52009229, 0x52009230
_GROUPS = (
    0x00209170,  # UnassignedSharedConvertedAttributesSequence
    0x00209171,  # UnassignedPerFrameConvertedAttributesSequence
    0x00209111,  # FrameContentSequence
    0x00209113,  # PlanePositionSequence
    0x00209116,  # PlaneOrientationSequence
    0x00289110,  # PixelMeasuresSequence
    0x00289145,  # PixelValueTransformationSequence
    0x00189325,  # CTXRayDetailsSequence
    0x00189329,  # CTImageFrameTypeSequence
    0x00189226,  # MRImageFrameTypeSequence
    0x00189751,  # PETFrameTypeSequence
    0x00189042,  # MRReceiveCoilSequence
    0x00189112,  # MRTimingAndRelatedParametersSequence
    0x00189114,  # MREchoSequence
    0x00189115,  # MRModifierSequence
    0x00189117,  # MRDiffusionSequence
    0x00189118,  # CardiacSynchronizationSequence
    0x00209310,  # TemporalPositionSequence
)
"""Functional groups that are read (PS3.3 C.7.6.16.2); later ones override earlier ones."""
_NESTED_GROUPS = (0x00189076,)
"""DiffusionGradientDirectionSequence, within MRDiffusionSequence."""

_POSITION, _ORIENTATION, _SPACING = 0x00200032, 0x00200037, 0x00280030
_INTERCEPT, _SLOPE, _RESCALE_TYPE = 0x00281052, 0x00281053, 0x00281054
_FRAME_TYPE, _TECHNIQUE = 0x00089007, 0x00089207
_RENDERING_TECHNIQUES = ("MAX_IP", "MIN_IP", "VOLUME_RENDER", "SURFACE_RENDER")
_CURVED_TECHNIQUE = "CURVED_MPR"
"""VolumeBasedCalculationTechnique (PS3.3 C.8.16.2.1.3). VolumetricProperties is no help: Siemens
marks any EPI as DISTORTED."""
_TEXT_TAGS = {
    "StackID": 0x00209056,
    "EchoTime": 0x00180081,
    "EchoNumbers": 0x00180086,
    "AcquisitionNumber": 0x00200012,
    "TemporalPositionIdentifier": 0x00200100,
    "TriggerTime": 0x00181060,
    "AcquisitionTime": 0x00189074,  # FrameAcquisitionDateTime
    "ImageType": _FRAME_TYPE,
    "VolumeBasedCalculationTechnique": _TECHNIQUE,
}
_DOUBLE_TAGS = {
    "EchoTime": 0x00189082,  # EffectiveEchoTime
    "DiffusionBValue": 0x00189087,
    "DiffusionGradientOrientation": 0x00189089,
    "TriggerTime": 0x00209153,  # NominalCardiacTriggerDelayTime
    "TemporalPositionTimeOffset": 0x0020930D,
}
_INTEGER_TAGS = {
    "AcquisitionNumber": 0x00209156,  # FrameAcquisitionNumber
    "TemporalPositionIdentifier": 0x00209128,  # TemporalPositionIndex
}
_DIMENSION_INDEX_VALUES = 0x00209157
_SPATIAL_POINTERS = (
    0x00209057,
    _POSITION,
    0x00201041,
    0x00209301,
    0x00209113,
    _ORIENTATION,
    0x00209116,
)
"""Dimension pointers along which the slice position changes, or the orientation."""

_CONCATENATION, _PART, _PARTS = 0x00209161, 0x00209162, 0x00209163

_TagValues = Mapping[int, bytes]


def multiframe_slices(headers: Sequence[Header]) -> list[Slice]:
    """Return all frames of a series' multi-frame objects; `frame_reason` then rejects some.

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
        try:
            with quiet():
                slices += _frames(header, dataset)
                uid = _raw(dataset, _CONCATENATION).strip(b" \0")
                if uid:
                    number, total = (_integer(header, _raw(dataset, t)) for t in (_PART, _PARTS))
                    concatenations[uid][number] = total
        except (OSError, *PARSE_ERRORS) as exc:  # pydicom raises OSError for truncated data
            detail = f"the functional groups can't be parsed ({type(exc).__name__})"
            raise ScanError(Reason.DAMAGED, detail) from exc
    for numbers in concatenations.values():  # PS3.3 C.7.6.16.1
        total = max(*numbers.values(), *numbers)
        if total > len(numbers):
            detail = f"only {len(numbers)} of the {total} parts of a concatenation are present"
            raise ScanError(Reason.TRUNCATED, detail)
    return slices


def _frames(header: Header, dataset: Dataset) -> list[Slice]:
    """Return the frames of one object."""
    groups = _items(dataset, _PER_FRAME)
    if not groups:
        return vector_slices(header, dataset)
    if len(groups) != header.frames:
        raise ScanError(Reason.DAMAGED, f"{header.frames} frames, but groups for {len(groups)}")
    from_object = {_TECHNIQUE: _raw(dataset, _TECHNIQUE)}
    shared = from_object | _attributes(_items(dataset, _SHARED)[:1])
    dimensions = _non_spatial_dimensions(dataset)
    return [
        _slice(header, n, shared | _attributes([group]), dimensions, group)
        for n, group in enumerate(groups)
    ]


def frame_reason(frame: Slice) -> Reason | None:
    """Return why a frame is not a slice of a volume; None if it may be one."""
    if "LOCALIZER" in frame.phase.get("ImageType", "").split("\\")[2:]:
        return Reason.LOCALIZER
    technique = frame.phase.get("VolumeBasedCalculationTechnique", "")
    if technique in _RENDERING_TECHNIQUES:
        return Reason.PROJECTION
    return Reason.DERIVED if technique == _CURVED_TECHNIQUE else None


def _slice(
    header: Header, n: int, attributes: _TagValues, dimensions: Sequence[int], group: Dataset
) -> Slice:
    """Return one frame as a slice.

    Parameters
    ----------
    header : Header
        Header of the object.
    n : int
        Frame number, from 0.
    attributes : mapping of int to bytes
        Raw values of the frame by tag.
    dimensions : sequence of int
        Indices of the non-spatial dimensions in DimensionIndexValues.
    group : pydicom.Dataset
        Functional groups of the frame.
    """
    slope, intercept = (_number(attributes, tag) for tag in (_SLOPE, _INTERCEPT))
    rescale_type = plain_text(attributes.get(_RESCALE_TYPE, b"")).upper() or header.rescale_type
    has_rescale = slope is not None or intercept is not None
    if not has_rescale:
        slope, intercept, has_rescale = header.slope, header.intercept, header.rescale_given
    return Slice(
        header=header,
        frame=n,
        position=_numbers(attributes.get(_POSITION, b""), 3),
        orientation=_numbers(attributes.get(_ORIENTATION, b""), 6) or header.orientation,
        spacing=_numbers(attributes.get(_SPACING, b""), 2) or header.spacing,
        slope=math.nan if slope is None else slope,
        intercept=math.nan if intercept is None else intercept,
        rescaled=rescale_kind(has_rescale, rescale_type),
        hounsfield=in_hounsfield(header, has_rescale, rescale_type),
        phase=_phase(header, attributes, dimensions),
        multiframe=True,
        group=group,
    )


def _phase(header: Header, attributes: _TagValues, dimensions: Sequence[int]) -> dict[str, str]:
    little = header.elements.little
    phase = {}
    for name, tag in _TEXT_TAGS.items():
        phase[name] = plain_text(attributes.get(tag, b""))
    for name, tag in _DOUBLE_TAGS.items():
        phase[name] = doubles(attributes.get(tag, b""), little=little) or phase.get(name, "")
    for name, tag in _INTEGER_TAGS.items():
        if tag in attributes:
            phase[name] = str(_integer(header, attributes[tag]))
    for attribute in MEANING:
        raw = next((value for tag in attribute.tags if (value := attributes.get(tag))), b"")
        if raw and attribute.name not in phase:
            phase[attribute.name] = as_text(raw, little=little)
    raw = attributes.get(_DIMENSION_INDEX_VALUES, b"")
    indices = [_integer(header, raw[n : n + 4]) for n in range(0, len(raw), 4)]
    phase["DimensionIndexValues"] = "\\".join(
        str(indices[n]) for n in dimensions if n < len(indices)
    )
    return {**header_phase(header)} | {name: value for name, value in phase.items() if value}


def _integer(header: Header, raw: bytes) -> int:
    return int.from_bytes(raw, "little" if header.elements.little else "big")


def _non_spatial_dimensions(dataset: Dataset) -> list[int]:
    """Return the indices of the dimensions other than position and orientation."""
    dimensions = []
    for n, item in enumerate(_items(dataset, 0x00209222)):
        pointer = item.get("DimensionIndexPointer")
        if pointer is not None and int(pointer) not in _SPATIAL_POINTERS:
            dimensions.append(n)
    return dimensions


def _attributes(groups: Iterable[Dataset]) -> dict[int, bytes]:
    """Return all raw values of the functional groups that are read, by tag."""
    values: dict[int, bytes] = {}
    for group in groups:
        for tag in _GROUPS:
            for item in _items(group, tag)[:1]:
                values |= _raw_values(item)
                for nested_tag in _NESTED_GROUPS:
                    for nested_item in _items(item, nested_tag)[:1]:
                        values |= _raw_values(nested_item)
    return values


def _raw_values(item: Dataset) -> dict[int, bytes]:
    return {int(tag): raw for tag in item.keys() if (raw := _raw(item, int(tag)))}  # noqa: SIM118


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
        numbers = tuple(map(to_float, plain_text(raw).split("\\")))
    except ValueError:
        numbers = ()
    # An invalid value must not be replaced by the shared group's or the object's
    return numbers if len(numbers) == count else (math.nan,) * count


def _number(attributes: _TagValues, tag: int) -> float | None:
    numbers = _numbers(attributes.get(tag, b""), 1)
    return numbers[0] if numbers else None
