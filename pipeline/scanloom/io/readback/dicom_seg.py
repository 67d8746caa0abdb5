"""Reads back DICOM SEG files, decoded with pydicom alone.

Neither the order of frames nor their references to images are trusted: the position of each frame
comes from ImagePositionPatient, ImageOrientationPatient and PixelSpacing (PS3.3 C.7.6.2.1.1).
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Case, Code, Grid, Layer, Segmentation, Structure
from scanloom.core.grid import LPS_TO_RAS
from scanloom.io.dicom import tags
from scanloom.io.output import file_names
from scanloom.io.readback.mismatch import contains_only, mismatch_error
from scanloom.io.scan import DicomSource, SourceSlice

if TYPE_CHECKING:
    from pydicom import Dataset


MAX_OFFSET_VOXELS = 0.2
"""Largest distance of a frame from its slice: a regular grid fits the slices of a real scan."""

MAX_IN_PLANE_SHIFT_MM = 0.15
"""Largest in-plane distance of a source image from the grid: images further apart do not form a
stack."""

MAX_ROW_DEVIATION = 1e-3
"""Largest deviation of a source image's row from the grid's row, relative to its length: direction
cosines have at least 3 decimals."""

_STEP_TOLERANCE_MM = 1e-8
"""Largest difference between the pixel steps of a frame and of its source image: rounding of
decimal strings."""

_POSITION_TOLERANCE_MM = 0.01
"""Largest distance between a frame and its source image: a position has at least two decimals."""

_MAX_MEANING = 64
"""Characters of a code's meaning (LO)."""


@dataclass(frozen=True, eq=False)
class _Frame:
    """Index of a frame in the file, its segment (0 in a LABELMAP, for all), and its location."""

    number: int
    segment: int
    location: _FrameLocation


@dataclass(frozen=True, eq=False)
class _FrameLocation:
    """Position and source images, which the frames of a slice share.

    Parameters
    ----------
    position : (3,) array
        Position of the first pixel, LPS mm.
    index : (3,) array
        Fractional index of that position on the segmentation's grid.
    images : list of (str, int or None)
        SOPInstanceUID and frame number of the source images that the frames refer to.
    """

    position: NDArray[np.float64]
    index: NDArray[np.float64]
    images: list[tuple[str, int | None]]


def check_segs(
    folder: Path, segmentation: Segmentation, source: DicomSource, case: Case, models: Sequence[str]
) -> None:
    """Compare a model's DICOM SEG with its label maps.

    Raises
    ------
    ScanError
        WRITE_MISMATCH.
    """
    model, grid, layers = segmentation.model, segmentation.grid, segmentation.layers
    labelmap = case.outputs.seg == "labelmap"
    for n, stored in enumerate([(layer,) for layer in layers] if labelmap else [layers]):
        path = folder / file_names.seg_name("segmentation", model, models, n)
        dataset = _read(path, source, labelmap=labelmap)
        _check_frames(dataset, stored, grid, source)
        if grid.sheared:
            path = folder / file_names.seg_name("segmentation_rect", model, models, n)
            dataset = _read(path, source, labelmap=labelmap)
            _check_frames(dataset, stored, grid, None)


def _read(path: Path, source: DicomSource, *, labelmap: bool) -> Dataset:
    import pydicom

    with path.open("rb") as file:
        dataset = pydicom.dcmread(file, stop_before_pixels=not labelmap)
        if not labelmap:
            check_pixels_follow(file, dataset)
    if dataset.SegmentationType != ("LABELMAP" if labelmap else "BINARY"):
        raise mismatch_error("the DICOM SEG has a different SegmentationType")
    for name in ("StudyInstanceUID", "FrameOfReferenceUID"):
        if dataset[name].value != source.first[name].value:
            raise mismatch_error(f"the DICOM SEG has a different {name}")
    images = {image.sop_instance for image in source.slices if image is not None}
    [series] = dataset.ReferencedSeriesSequence
    referenced = {item.ReferencedSOPInstanceUID for item in series.ReferencedInstanceSequence}
    if series.SeriesInstanceUID != source.first.SeriesInstanceUID or referenced != images:
        raise mismatch_error("the DICOM SEG refers to a different series")
    return dataset


def _check_frames(
    dataset: Dataset, layers: Sequence[Layer], grid: Grid, source: DicomSource | None
) -> None:
    """Compare every frame with its slice of the labels; slices without a frame must be empty.

    With `source`, the pixels of a frame coincide with those of a source image. Without it, a frame
    is on the rectangular grid, and its pixels are nearest neighbours of the labels.
    """
    segments = _segments(dataset, [s for layer in layers for s in layer.structures])
    labels_of = {s.number: layer.labels for layer in layers for s in layer.structures}
    voxels = dict.fromkeys(segments, 0)
    # Slice by slice: the labels of a slice stay in the processor's cache for all its frames
    frames = sorted(_frames_of_slices(dataset, grid, source).items(), key=lambda item: item[0][1])
    decoded = iter_frames(dataset, [frame.number for _, frame in frames])
    for ((_, k), frame), pixels in zip(frames, decoded, strict=True):
        structure = segments[frame.segment]
        labels = layers[0].labels if structure is None else labels_of[structure.number]
        plane = labels[:, :, k].T
        expected = plane if structure is None else plane == structure.number
        if not _contains_only(frame, pixels, expected, aligned=source is not None):
            raise mismatch_error(
                "a frame of the DICOM SEG contains different voxels than its slice"
            )
        voxels[frame.segment] += int(np.count_nonzero(expected))
    # A frame cannot contain more of a structure than its slice: equal sums imply equal counts
    if sum(voxels.values()) != sum(_stored_voxels(layer.labels, source) for layer in layers):
        raise mismatch_error("frames of the DICOM SEG are missing")


def _frames_of_slices(
    dataset: Dataset, grid: Grid, source: DicomSource | None
) -> dict[tuple[int, int], _Frame]:
    """Return all frames by segment number and slice, after checking where they are."""
    # Frames of one slice share their location, which is checked once
    slice_of = functools.cache(lambda location: _checked_slice(location, grid, source))
    frames: dict[tuple[int, int], _Frame] = {}
    for frame in _frames(dataset, grid, source):
        if frames.setdefault((frame.segment, slice_of(frame.location)), frame) is not frame:
            raise mismatch_error("a frame of the DICOM SEG is repeated")
    return frames


def _contains_only(frame: _Frame, pixels: Pixels, expected: NDArray[Any], *, aligned: bool) -> bool:
    """Return whether a frame contains the pixels of a slice and no others.

    `aligned` frames have their first pixel at that of the slice, others at their index.
    """
    origin = np.zeros(2) if aligned else -frame.location.index[[1, 0]]
    if isinstance(pixels, Bits):
        if aligned and pixels.equals(expected):
            return True
        pixels = pixels.unpack()
    return contains_only(pixels, expected, origin)


def _stored_voxels(labels: NDArray[Any], source: DicomSource | None) -> int:
    """Count the labelled voxels that frames must contain: in slices that have a source image."""
    planes = labels.T
    if source is None or None not in source.slices:
        return int(np.count_nonzero(planes))
    pairs = zip(planes, source.slices, strict=True)
    return sum(int(np.count_nonzero(plane)) for plane, image in pairs if image is not None)


def _segments(dataset: Dataset, structures: Sequence[Structure]) -> dict[int, Structure | None]:
    """Return the structure of each segment number of a frame.

    In a LABELMAP, frames have the number 0, which stands for all structures (None).
    """
    by_label = {s.label: s for s in structures}
    labelmap = dataset.SegmentationType == "LABELMAP"
    segments: dict[int, Structure] = {}
    for item in dataset.SegmentSequence:
        if labelmap and item.SegmentNumber == 0:  # the background
            continue
        structure = by_label.get(item.SegmentLabel)
        category = item.SegmentedPropertyCategoryCodeSequence[0]
        kind = item.SegmentedPropertyTypeCodeSequence[0]
        if structure is None or not codes_agree(category, kind, structure):
            raise mismatch_error("the DICOM SEG has a different label or code for a structure")
        if labelmap and item.SegmentNumber != structure.number:
            raise mismatch_error("the DICOM SEG has a different number for a structure")
        segments[int(item.SegmentNumber)] = structure
    if sorted(s.label for s in segments.values()) != sorted(by_label):
        raise mismatch_error("the DICOM SEG has different structures")
    return {0: None} if labelmap else dict(segments)


def codes_agree(category: Dataset, kind: Dataset, structure: Structure) -> bool:
    """Return whether the items of category and type, with its modifier, are of a structure."""
    modifiers = kind.get("SegmentedPropertyTypeModifierCodeSequence") or []
    pairs = [
        (category, structure.category),
        (kind, structure.type),
        (modifiers[0] if modifiers else None, structure.laterality),
    ]
    return all(_same_code(written, expected) for written, expected in pairs)


def _same_code(item: Dataset | None, code: Code | None) -> bool:
    """Return whether an item has this code, with as much of its meaning as fits (LO)."""
    if item is None or code is None:
        return item is code
    value = item.get("CodeValue") or item.LongCodeValue
    written = (value, item.CodingSchemeDesignator, item.CodeMeaning)
    return written == (code.value, code.scheme, code.meaning[:_MAX_MEANING].rstrip())


def _frames(dataset: Dataset, grid: Grid, source: DicomSource | None) -> Iterator[_Frame]:
    """Yield the frames by their functional groups, without pixels."""
    shared = only_item(_sequence(dataset, tags.SHARED_FUNCTIONAL_GROUPS_SEQUENCE))
    groups = sequence_items(_sequence(dataset, tags.PER_FRAME_FUNCTIONAL_GROUPS_SEQUENCE))
    if len(groups) != dataset.NumberOfFrames:
        raise mismatch_error("NumberOfFrames of the DICOM SEG does not match its frames")
    # Frames of one slice have the same bytes, which are parsed once
    location_of = functools.cache(lambda plane, images: _location_of(plane, images, grid))
    previous: tuple[memoryview, memoryview] | None = None
    for n, group in enumerate(groups):
        merged = shared | group
        plane = merged[tags.PLANE_ORIENTATION_SEQUENCE], merged[tags.PIXEL_MEASURES_SEQUENCE]
        if previous != plane:
            previous = plane
            orientation, measures = map(only_item, plane)
            cosines = parse_decimals(orientation[tags.IMAGE_ORIENTATION_PATIENT])
            spacing = parse_decimals(measures[tags.PIXEL_SPACING])
            _check_directions(_steps(cosines, spacing), grid, source)
            _check_distance(measures, grid)
        number = 0
        if segment := merged.get(tags.SEGMENT_IDENTIFICATION_SEQUENCE):
            number = int.from_bytes(only_item(segment)[tags.REFERENCED_SEGMENT_NUMBER], "little")
        location = location_of(
            bytes(group[tags.PLANE_POSITION_SEQUENCE]),
            bytes(group.get(tags.DERIVATION_IMAGE_SEQUENCE, b"")),
        )
        yield _Frame(n, number, location)


def _sequence(dataset: Dataset, tag: int) -> memoryview:
    """Return the encoded bytes of a sequence."""
    value = dataset.get_item(tag).value
    if not isinstance(value, bytes):
        raise mismatch_error("the DICOM SEG has a different encoding")
    return memoryview(value)


def pixel_steps(source: DicomSource) -> NDArray[np.float64]:
    """Return the steps (2, 3) to the next pixel in a row and to the next row, LPS mm."""
    return _steps([*map(float, source.orientation)], [*map(float, source.spacing)])


def _steps(cosines: Sequence[float], spacing: Sequence[float]) -> NDArray[np.float64]:
    rows, columns = spacing  # between rows, between columns
    return np.array([np.array(cosines[:3]) * columns, np.array(cosines[3:]) * rows])


def _check_directions(steps: NDArray[np.float64], grid: Grid, source: DicomSource | None) -> None:
    """Compare the pixel steps (2, 3) of frames with the grid's I and J, up to the far corner.

    With `source`, they must equal those of its images, which the grid may have made orthonormal.
    """
    index_steps = np.linalg.solve(grid.affine[:3, :3], (steps * LPS_TO_RAS).T).T
    size = np.array(grid.shape[:2])[:, None]
    drift = np.abs(index_steps - np.eye(3)[:2]) * size
    tolerance = MAX_OFFSET_VOXELS + (0 if source is None else MAX_ROW_DEVIATION * size)
    if (drift > tolerance).any():
        raise mismatch_error("the frames of the DICOM SEG have different directions or spacing")
    if source is None:
        return
    if np.abs(steps - pixel_steps(source)).max() > _STEP_TOLERANCE_MM:
        raise mismatch_error("the frames of the DICOM SEG are rotated against their source images")


def _check_distance(measures: Elements, grid: Grid) -> None:
    """Compare thickness and distance of slices, by which readers space frames, with the grid's."""
    distance = grid.voxel_volume / np.linalg.norm(np.cross(*grid.affine[:3, :2].T))
    for tag in (tags.SLICE_THICKNESS, tags.SPACING_BETWEEN_SLICES):
        if not np.allclose(parse_decimals(measures[tag]), distance, rtol=1e-6, atol=0):
            raise mismatch_error("the frames of the DICOM SEG have a different distance")


def _location_of(plane: bytes, derivations: bytes, grid: Grid) -> _FrameLocation:
    """Return the location of a PlanePositionSequence and a DerivationImageSequence."""
    position = np.array(parse_decimals(only_item(memoryview(plane))[tags.IMAGE_POSITION_PATIENT]))
    [index] = grid.index(position[None] * LPS_TO_RAS)
    images = []
    for derivation in sequence_items(memoryview(derivations)):
        for image in sequence_items(derivation.get(tags.SOURCE_IMAGE_SEQUENCE, memoryview(b""))):
            number = image.get(tags.REFERENCED_FRAME_NUMBER)
            frame = None if number is None else int(parse_text(number))
            images.append((parse_text(image[tags.REFERENCED_SOP_INSTANCE_UID]), frame))
    return _FrameLocation(position, index, images)


def _checked_slice(location: _FrameLocation, grid: Grid, source: DicomSource | None) -> int:
    """Return the slice at which frames are; refuse frames between slices or beside their image."""
    k = round(float(location.index[2]))
    if not 0 <= k < grid.shape[2] or abs(location.index[2] - k) > MAX_OFFSET_VOXELS:
        raise mismatch_error("a frame of the DICOM SEG is not at a slice")
    if source is not None:
        _check_reference(location, source.slices[k])
        limits = np.maximum(MAX_OFFSET_VOXELS, MAX_IN_PLANE_SHIFT_MM / np.array(grid.spacing[:2]))
        if (np.abs(location.index[:2]) > limits).any():
            raise mismatch_error("a frame of the DICOM SEG is shifted against its slice")
    return k


def _check_reference(location: _FrameLocation, image: SourceSlice | None) -> None:
    """Refuse frames that are not at their source image, or that refer to a different image."""
    if image is None:
        raise mismatch_error("a frame of the DICOM SEG belongs to an interpolated slice")
    distance = np.abs(location.position - np.array(image.position, float)).max()
    if distance > _POSITION_TOLERANCE_MM:
        raise mismatch_error("a frame of the DICOM SEG is shifted against its source image")
    if location.images != [(image.sop_instance, image.frame)]:
        raise mismatch_error("a frame of the DICOM SEG refers to a different source image")


# --- pixels ---------------------------------------------------------------------------------------
# The frames of a BINARY may take more memory than the scan: they are read from the file one by one.

_PIXELS_HEADER = struct.Struct("<HH2s2xI")
"""Tag, VR and length of PixelData, explicit little endian (PS3.5 7.1.2)."""


@dataclass(frozen=True, eq=False)
class Bits:
    """The bits of a frame of a BINARY.

    Parameters
    ----------
    packed : (N,) uint8 array
        The bytes that contain the frame.
    begin : int
        Bits of the first byte that belong to the frame before.
    shape : (rows, columns)
        Shape of the frame.
    """

    packed: NDArray[np.uint8]
    begin: int
    shape: tuple[int, int]

    def unpack(self) -> NDArray[np.bool_]:
        """Return the pixels (rows, columns)."""
        # PS3.5 8.1.1: bits are stored from the lowest
        bits = np.unpackbits(self.packed, bitorder="little")
        size = self.shape[0] * self.shape[1]
        return bits[self.begin : self.begin + size].reshape(self.shape).view(np.bool_)

    def equals(self, mask: NDArray[np.bool_]) -> bool:
        """Return whether the frame has the shape and the pixels of a mask."""
        if mask.shape != self.shape or self.begin or mask.size % 8:
            return np.array_equal(self.unpack(), mask)
        # Whole bytes are compared packed: an eighth of the memory
        return np.array_equal(self.packed, np.packbits(mask, bitorder="little"))


Pixels = Bits | NDArray[Any]
"""Bits of a frame of a BINARY; pixels (rows, columns) of a LABELMAP, which are segment numbers."""


def iter_frames(dataset: Dataset, order: Sequence[int]) -> Iterator[Pixels]:
    """Yield the pixels of frames in this order; they are decoded one at a time, to limit memory."""
    from pydicom.pixels import iter_pixels

    if dataset.BitsAllocated != 1:
        decoded = iter_pixels(dataset)  # without numbers of frames, all fragments are parsed
        if list(order) == sorted(order):
            yield from decoded
        else:
            frames = list(decoded)
            yield from (frames[n] for n in order)
        return
    rows, columns = dataset.Rows, dataset.Columns
    size = rows * columns
    with Path(dataset.filename).open("rb", buffering=0) as file:
        start = _start_of_pixels(file, size * dataset.NumberOfFrames)
        for n in order:
            begin, end = n * size, (n + 1) * size  # PS3.5 8.1.1: a frame may begin within a byte
            file.seek(start + begin // 8)
            packed = np.frombuffer(file.read(-(-end // 8) - begin // 8), np.uint8)
            yield Bits(packed, begin % 8, (rows, columns))


def check_pixels_follow(file: BinaryIO, dataset: Dataset) -> None:
    """Check that PixelData begins where a file was read up to, and ends with the file."""
    begin = file.tell()
    start = _start_of_pixels(file, dataset.Rows * dataset.Columns * dataset.NumberOfFrames)
    if start != begin + _PIXELS_HEADER.size:
        raise mismatch_error("PixelData does not follow the header of the DICOM SEG")


def _start_of_pixels(file: BinaryIO, bits: int) -> int:
    """Return the offset of so many bits in a file that ends with them, as PixelData."""
    length = -(-bits // 8)
    length += length % 2  # PS3.5 8.1: an even number of bytes
    start = file.seek(0, os.SEEK_END) - length
    file.seek(max(0, start - _PIXELS_HEADER.size))
    header = _PIXELS_HEADER.pack(0x7FE0, 0x0010, b"OB", length)
    if file.read(_PIXELS_HEADER.size) != header:
        raise mismatch_error("the length of PixelData in the DICOM SEG does not match its frames")
    return start


# --- elements -------------------------------------------------------------------------------------
# The frames of a DICOM SEG have some twenty elements each; as objects of a library they cost more
# than all voxels. Only explicit little endian with explicit lengths is parsed (PS3.5 7.1.2, 7.5.1):
# scanloom's own files use no other encoding.

_ITEM_TAG = b"\xfe\xff\x00\xe0"
_LONG_VRS = frozenset((b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR"))
_LONG_VRS |= {b"UT", b"UV"}
_SHORT_HEADER = struct.Struct("<HH2sH")
_LONG_LENGTH = struct.Struct("<I")

Elements = dict[int, memoryview]
"""Encoded values by tag."""


def sequence_items(sequence: memoryview) -> list[Elements]:
    """Return the elements of each item of a sequence.

    Raises
    ------
    ValueError, struct.error
        If the sequence has another encoding or is truncated.
    """
    items, offset = [], 0
    while offset < len(sequence):
        (length,) = _LONG_LENGTH.unpack_from(sequence, offset + 4)
        start = offset + 8
        if sequence[offset : offset + 4] != _ITEM_TAG or start + length > len(sequence):
            raise ValueError("an item is missing or truncated")
        items.append(_elements(sequence[start : start + length]))
        offset = start + length
    return items


def only_item(sequence: memoryview) -> Elements:
    """Return the elements of the only item of a sequence.

    Raises
    ------
    ValueError, struct.error
        If the sequence does not have exactly one item, has another encoding or is truncated.
    """
    [item] = sequence_items(sequence)
    return item


def parse_decimals(value: memoryview) -> list[float]:
    """Parse decimal strings (DS)."""
    return [float(text) for text in bytes(value).split(b"\\")]


def parse_text(value: memoryview) -> str:
    """Return ASCII text without its padding."""
    return bytes(value).decode("ascii").strip(" \0")


def _elements(item: memoryview) -> Elements:
    elements, offset = {}, 0
    while offset < len(item):
        group, element, vr, length = _SHORT_HEADER.unpack_from(item, offset)
        offset += 8
        if vr in _LONG_VRS:
            (length,) = _LONG_LENGTH.unpack_from(item, offset)
            offset += 4
        if offset + length > len(item):
            raise ValueError("an element exceeds its item")
        elements[group << 16 | element] = item[offset : offset + length]
        offset += length
    return elements
