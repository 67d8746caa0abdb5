"""Writes DICOM SEG: BINARY (one file per model) or LABELMAP (one file per layer).

Segment numbers. LABELMAP keeps `Structure.number`. BINARY must count from 1 without a gap (PS3.3
C.8.20.2): if the structures' numbers have gaps, segments are renumbered in the same order. In
both, SegmentLabel is the structure's label, which never changes and is the key to `segments.json`;
SegmentDescription is its human-readable name.

Frames. Only slices with labelled voxels are stored. An empty segmentation keeps one empty frame per
segment, of the first slice, since a SEG without frames is not allowed. Frames are encoded directly
from label maps: a mask for every frame and a pydicom object for every element of its functional
groups would take most of the time. Groups that the frames of a slice share are encoded once; those
of its segments differ in two numbers only. The frames of a BINARY may take more memory than the
scan: they are made as they are hashed, and again as they are written, a few at a time.

UIDs and dates. The same content gives the same bytes. UIDs are hashes of everything in the file
(the UIDs of the source images, the segments, the geometry, the encoded frames, the transfer syntax,
the dates) and of the recipe, so that different contents never share a UID.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Case, Code, Layer, Reason, ScanError, Segmentation, Structure
from scanloom.core.grid import LPS_TO_RAS
from scanloom.io.dataset_text import decimal_strings, valid_uid
from scanloom.io.dicom import tags
from scanloom.io.dicom.uids import EXPLICIT_VR_LITTLE_ENDIAN, RLE_LOSSLESS
from scanloom.io.output import file_names
from scanloom.io.scan import DicomSource
from scanloom.io.write.derived_dicom import (
    ITEM,
    add_lossy_compression,
    algorithm_item,
    code_item,
    description_of,
    encode_dataset,
    encode_element,
    encode_elements,
    encode_sequence,
    hashed_uid,
    make_item,
    new_object,
    reference_item,
    set_dates,
    type_item,
    written_datetime,
)
from scanloom.ops.rectify import rectangular_grid, rectangular_labels
from scanloom.ops.run_length import counts_by_slice

if TYPE_CHECKING:
    from pydicom import Dataset

_UNDEFINED = b"\xff\xff\xff\xff"
_MAX_LENGTH = 2**32 - 2
"""Bytes of an element with a stated length."""
_SEQUENCE_END = b"\xfe\xff\xdd\xe0\x00\x00\x00\x00"
_SOURCE, _SEGMENTS = slice(0x0008_1000, 0x0020_0000), slice(0x0028_0000, None)
"""Tags of source images, patient and equipment, and those of pixels and segments."""

Planes = NDArray[Any]
"""Labels (K, J, I): slices of rows and columns."""
Chunk = bytes | memoryview


@dataclass(frozen=True, eq=False)
class SegFrame:
    """One frame to be encoded.

    Parameters
    ----------
    planes : (K, J, I) array
        Labels of all slices.
    number : int
        Number of the frame's structure in `planes`; 0 in a LABELMAP, whose frames contain all
        structures.
    segment : int
        SegmentNumber in the file; 0 in a LABELMAP.
    slice : int
        Index of the frame's slice in `planes`.
    """

    planes: Planes
    number: int
    segment: int
    slice: int


@dataclass(frozen=True)
class Pixels:
    """The value of PixelData.

    Parameters
    ----------
    length : int
        In bytes.
    chunks : callable
        Returns an iterator over the bytes.
    """

    length: int
    chunks: Callable[[], Iterator[Chunk]]


@dataclass(frozen=True, eq=False)
class SegFile:
    """A DICOM SEG: a dataset without frames, and the frames as encoded bytes.

    Parameters
    ----------
    dataset : Dataset
        All elements but PerFrameFunctionalGroupsSequence and PixelData.
    groups : bytes
        The items of PerFrameFunctionalGroupsSequence, explicit little endian.
    pixels : Pixels
        The value of PixelData.
    """

    dataset: Dataset
    groups: bytes
    pixels: Pixels

    @property
    def tail(self) -> Iterator[Chunk]:
        """The two encoded elements at the end of the file (PS3.5 7.1.2, A.4)."""
        yield struct.pack("<HH2s2xI", 0x5200, 0x9230, b"SQ", len(self.groups))
        yield self.groups
        encapsulated = self.dataset.file_meta.TransferSyntaxUID.is_encapsulated
        length = _UNDEFINED if encapsulated else struct.pack("<I", self.pixels.length)
        yield struct.pack("<HH2s2x", 0x7FE0, 0x0010, b"OB") + length
        yield from self.pixels.chunks()
        if encapsulated:
            yield _SEQUENCE_END

    @property
    def head(self) -> bytes:
        """The encoded elements before the tail; those without UIDs of this file are encoded once.

        The UIDs are hashes of all elements, so that all are needed before these are set and after.
        """
        source, segments = self._without_uids
        first, between = slice(None, _SOURCE.start), slice(_SOURCE.stop, _SEGMENTS.start)
        return b"".join((self._encoded(first), source, self._encoded(between), segments))

    @cached_property
    def _without_uids(self) -> tuple[bytes, bytes]:
        return self._encoded(_SOURCE), self._encoded(_SEGMENTS)

    def _encoded(self, tags: slice) -> bytes:
        """Return the encoded elements of a range of tags, in the data set's characters."""
        characters = self.dataset.get("SpecificCharacterSet", "ISO_IR 6")
        return encode_elements(self.dataset[tags], characters)

    @property
    def meta(self) -> Dataset:
        """The file meta information, of a data set without elements."""
        meta = make_item()
        meta.file_meta = self.dataset.file_meta
        return meta

    def save(self, file: BinaryIO) -> None:
        """Write the file."""
        from pydicom import dcmwrite

        dcmwrite(file, self.meta, enforce_file_format=True)
        file.write(self.head)
        for chunk in self.tail:
            file.write(chunk)


def binary_frames(frames: Sequence[SegFrame]) -> Pixels:
    """Return the frames of a BINARY, one bit per pixel (PS3.5 8.1.1), padded to an even length.

    Raises
    ------
    ScanError
        TOO_LARGE beyond 4 GiB.
    """
    size = math.prod(frames[0].planes.shape[1:])
    length = -(-size * len(frames) // 8)
    padding = b"\0" * (length % 2)
    if length > _MAX_LENGTH:
        detail = "a BINARY DICOM SEG of more than 4 GiB: request one of type labelmap"
        raise ScanError(Reason.TOO_LARGE, detail)
    return Pixels(length + len(padding), lambda: _packed_frames(frames, padding))


def _packed_frames(frames: Sequence[SegFrame], padding: bytes) -> Iterator[Chunk]:
    """Yield the bits of frames, of as few at once as fill whole bytes."""
    rows, columns = frames[0].planes.shape[1:]
    together = 8 // math.gcd(rows * columns, 8)
    masks = np.empty((together, rows, columns), np.bool_)
    for first in range(0, len(frames), together):
        batch = frames[first : first + together]
        for frame, mask in zip(batch, masks, strict=False):
            np.equal(frame.planes[frame.slice], frame.number, out=mask)
        yield memoryview(np.packbits(masks[: len(batch)], bitorder="little"))
    yield padding


def rle_frames(frames: Sequence[SegFrame]) -> Pixels:
    """Return the frames of a LABELMAP, run-length encoded and encapsulated (PS3.5 A.4, G)."""
    from pydicom.encaps import encapsulate
    from pydicom.pixels.encoders import RLELosslessEncoder

    rows, columns = frames[0].planes.shape[1:]
    bits = 8 * frames[0].planes.itemsize
    encoded = [
        RLELosslessEncoder.encode(
            np.ascontiguousarray(frame.planes[frame.slice]),
            rows=rows,
            columns=columns,
            samples_per_pixel=1,
            number_of_frames=1,
            bits_allocated=bits,
            bits_stored=bits,
            pixel_representation=0,
            photometric_interpretation="MONOCHROME2",
        )
        for frame in frames
    ]
    value = bytes(encapsulate(encoded))
    return Pixels(len(value), lambda: iter((value,)))


def encode_groups(
    frames: Sequence[SegFrame],
    derivations: Mapping[int, bytes],
    positions: Mapping[int, bytes],
    *,
    shared_segment: bool,
) -> bytes:
    """Return the items of PerFrameFunctionalGroupsSequence, one per frame.

    Parameters
    ----------
    frames : sequence of SegFrame
        In their order in the file.
    derivations, positions : mapping of int to bytes
        The encoded DerivationImageSequence and PlanePositionSequence of each stored slice, in the
        order of their dimension indices, which count from 1.
    shared_segment : bool
        Whether all frames are of one segment, which the shared functional groups name.
    """
    index_of = {k: n for n, k in enumerate(positions, 1)}
    items = []
    for frame in frames:
        index, segment = struct.pack("<I", index_of[frame.slice]), b""
        if frame.segment:
            index = struct.pack("<I", frame.segment) + index
        if frame.segment and not shared_segment:
            number = struct.pack("<HH2sHH", 0x0062, 0x000B, b"US", 2, frame.segment)
            segment = encode_sequence(0x0062, 0x000A, number)
        values = struct.pack("<HH2sH", 0x0020, 0x9157, b"UL", len(index)) + index
        content = encode_sequence(0x0020, 0x9111, values)
        # In the order of their tags
        groups = b"".join((derivations[frame.slice], content, positions[frame.slice], segment))
        items.append(ITEM + struct.pack("<I", len(groups)) + groups)
    return b"".join(items)


# --- the data set ---------------------------------------------------------------------------------

FIRST_SERIES_NUMBER = 900
"""SeriesNumber of the first model; each model has two (its own grid, the rectangular grid)."""

_BINARY_STORAGE = "1.2.840.10008.5.1.4.1.1.66.4"
_LABELMAP_STORAGE = "1.2.840.10008.5.1.4.1.1.66.7"
_BUFFER_BYTES = 1 << 22  # written at once: file systems take few large pieces faster than many
_SPACING_TOLERANCE, _NORMAL_TOLERANCE = 1e-2, 1e-3
"""Frames are a regular stack if their distances differ by 1 % at most, and if the cosine between
the stack's direction and the normal is 0.999 at least: highdicom's reader has the same limits."""


@dataclass(frozen=True, eq=False)
class _Series:
    """Properties that all files of one SEG series share.

    `thickness` is the distance of slices along their normal in mm, a decimal string. It is
    SliceThickness too: the slices of a segment have neither gaps nor overlaps, even if those of the
    scan have.
    """

    segmentation: Segmentation
    source: DicomSource
    case: Case
    stem: file_names.Stem
    number: int
    thickness: str

    @property
    def labelmap(self) -> bool:
        return self.case.outputs.seg == "labelmap"

    @property
    def rectangular(self) -> bool:
        return self.stem == "segmentation_rect"

    @cached_property
    def positions(self) -> list[Sequence[str] | None]:
        """ImagePositionPatient of each slice, LPS mm; None without an image or rectangular grid."""
        if not self.rectangular:
            return [image.position if image else None for image in self.source.slices]
        grid = self.segmentation.grid
        indices = [(0, 0, k) for k in range(grid.shape[2])]
        return [decimal_strings(position) for position in grid.world(indices) * LPS_TO_RAS]

    def depths_and_positions(
        self, slices: Iterable[int]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return distances of slices along their normal, (N,), and positions, (N, 3), LPS mm.

        The normal points against row times column, as highdicom orders frames: then slices, rows
        and columns are right-handed in the order of array indices.
        """
        cosines = np.array(self.source.orientation, np.float64)
        normal = np.cross(cosines[3:], cosines[:3])
        positions = np.array([self.positions[k] for k in slices], np.float64)
        return positions @ (normal / np.linalg.norm(normal)), positions


def write_segs(
    folder: Path, segmentation: Segmentation, source: DicomSource, case: Case, models: Sequence[str]
) -> None:
    """Write a model's DICOM SEG; for a sheared scan, also on the rectangular grid.

    Parameters
    ----------
    folder : Path
        The case folder; files are written to its subfolder `dicom/`.
    segmentation : Segmentation
        On the grid of the source: I along a row of pixels, J down a column, K across slices.
    source : DicomSource
        Images that the SEG can refer to (its `can_refer` is true).
    case : Case
        Its outputs select the type of SEG; its recipe enters the UIDs.
    models : sequence of str
        All models of the case, which the file names depend on.
    """
    (folder / "dicom").mkdir(exist_ok=True)
    number = FIRST_SERIES_NUMBER + 2 * list(models).index(segmentation.model)
    affine = segmentation.grid.affine
    normal = np.cross(affine[:3, 0], affine[:3, 1])
    [thickness] = decimal_strings([abs(normal @ affine[:3, 2]) / np.linalg.norm(normal)])
    series = [_Series(segmentation, source, case, "segmentation", number, thickness)]
    if segmentation.grid.sheared:
        upright = _rectangular(segmentation)
        series.append(_Series(upright, source, case, "segmentation_rect", number + 1, thickness))
    date_time = written_datetime(source, case)
    for seg_series in series:
        layers = seg_series.segmentation.layers
        if seg_series.labelmap:
            files = [_labelmap_file(seg_series, layer, n) for n, layer in enumerate(layers, 1)]
        else:
            files = [_binary_file(seg_series)]
        _set_dates_and_uids(files, date_time, case.recipe)
        for n, file in enumerate(files):
            path = folder / file_names.seg_name(seg_series.stem, segmentation.model, models, n)
            with path.open("wb", buffering=_BUFFER_BYTES) as out:
                file.save(out)


def _rectangular(segmentation: Segmentation) -> Segmentation:
    """Return a sheared segmentation on the rectangular grid."""
    grid = segmentation.grid
    layers = tuple(
        Layer(rectangular_labels(layer.labels, grid), layer.structures)
        for layer in segmentation.layers
    )
    return replace(segmentation, layers=layers, grid=rectangular_grid(grid), uncertainty=None)


def _labelmap_file(series: _Series, layer: Layer, instance: int) -> SegFile:
    """Return a LABELMAP with all structures of a layer."""
    planes = _planes(layer)
    slices = _stored_slices(series, np.asarray(counts_by_slice(planes.T)[:, 1:].any(axis=1)))
    structures = sorted(layer.structures, key=lambda s: s.number)
    bits = 8 * planes.itemsize  # 16 also for a subset with small numbers, as the labels are
    dataset = _data_set(series, planes.shape, slices, structures, instance)
    dataset.BitsAllocated = dataset.BitsStored = bits
    dataset.HighBit = bits - 1
    dataset.PixelPaddingValue = 0
    dataset.SegmentsOverlap = "NO"
    frames = [SegFrame(planes, 0, 0, k) for k in slices]
    return _seg_file(series, dataset, frames, slices)


def _binary_file(series: _Series) -> SegFile:
    """Return a BINARY with all structures of all layers, segment by segment."""
    layers = series.segmentation.layers
    stacks = [_planes(layer) for layer in layers]
    counts = [counts_by_slice(planes.T) for planes in stacks]
    filled = np.stack([count[:, 1:].any(axis=1) for count in counts])
    slices = _stored_slices(series, np.asarray(filled.any(axis=0)))
    structures = sorted(series.segmentation.structures, key=lambda s: s.number)
    layer_of = {s.number: n for n, layer in enumerate(layers) for s in layer.structures}
    dataset = _data_set(series, stacks[0].shape, slices, structures, 1)
    dataset.BitsAllocated = dataset.BitsStored = 1
    dataset.HighBit = 0
    dataset.SegmentsOverlap = "YES" if _overlap(stacks, slices) else "NO"
    every = [
        SegFrame(stacks[layer_of[s.number]], s.number, segment, k)
        for segment, s in enumerate(structures, 1)
        for k in slices
    ]
    frames = [
        frame
        for frame in every
        for count in (counts[layer_of[frame.number]][frame.slice],)
        if frame.number < len(count) and count[frame.number]
    ]
    return _seg_file(series, dataset, frames or every, slices)


def _planes(layer: Layer) -> NDArray[Any]:
    """Return labels (I, J, K) as slices of rows and columns (K, J, I), a view."""
    return np.asarray(layer.labels.transpose(2, 1, 0))


def _stored_slices(series: _Series, filled: NDArray[np.bool_]) -> list[int]:
    """Return the indices k of the slices that are stored, in the order of frames."""
    slices = [k for k, position in enumerate(series.positions) if position]
    slices = [k for k in slices if filled[k]] or slices[:1]  # a SEG has at least one frame
    depths, _ = series.depths_and_positions(slices)
    return [slices[n] for n in np.argsort(depths)]


def _overlap(stacks: Sequence[NDArray[Any]], slices: Sequence[int]) -> bool:
    """Return whether a voxel of these slices is labelled in several of the stacks (K, J, I)."""
    return len(stacks) > 1 and any(
        (np.count_nonzero([planes[k] != 0 for planes in stacks], axis=0) > 1).any() for k in slices
    )


def _is_regular(series: _Series, slices: Sequence[int]) -> bool:
    """Return whether several slices, in the order of frames, are a stack along their normal."""
    if len(slices) < 2:
        return False
    depths, positions = series.depths_and_positions(slices)
    distances = np.diff(depths)
    cosines = (depths[1:] - depths[0]) / np.linalg.norm(positions[1:] - positions[0], axis=1)
    equal = np.allclose(distances, distances.mean(), rtol=_SPACING_TOLERANCE, atol=0)
    return bool(equal and (cosines > 1 - _NORMAL_TOLERANCE).all())


def _data_set(
    series: _Series,
    shape: tuple[int, ...],
    slices: Sequence[int],
    structures: Sequence[Structure],
    instance: int,
) -> Dataset:
    """Return all elements but those of bits, frames, UIDs and dates (PS3.3 A.51, A.90)."""
    model, labelmap = series.segmentation.model, series.labelmap
    dataset = new_object(
        series.source,
        [series.segmentation],
        _LABELMAP_STORAGE if labelmap else _BINARY_STORAGE,
        RLE_LOSSLESS if labelmap else EXPLICIT_VR_LITTLE_ENDIAN,
        "SEG",
        f"scanloom {model}{', rectangular' if series.rectangular else ''}",
    )
    add_lossy_compression(dataset, series.source.first)
    dataset.SeriesNumber, dataset.InstanceNumber = series.number, instance
    dataset.ImageType = ["DERIVED", "PRIMARY"]
    dataset.ContentLabel, dataset.ContentDescription = "SEGMENTATION", model
    dataset.ContentCreatorName = ""  # type 2: must be present; no person drew the segments
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.PixelRepresentation, dataset.PresentationLUTShape = 0, "IDENTITY"
    dataset.Rows, dataset.Columns = shape[1:]
    dataset.SegmentationType = "LABELMAP" if labelmap else "BINARY"
    numbers = [s.number for s in structures] if labelmap else range(1, len(structures) + 1)
    segments = [_segment(series, s, n) for s, n in zip(structures, numbers, strict=True)]
    dataset.SegmentSequence = (
        [_background(series.segmentation), *segments] if labelmap else segments
    )
    _add_references(dataset, series.source)
    dimensions = (_BY_POSITION,) if labelmap else (_BY_SEGMENT, _BY_POSITION)
    dataset.DimensionOrganizationSequence = [make_item()]
    dataset.DimensionIndexSequence = [make_item(**dimension) for dimension in dimensions]
    if (labelmap or len(structures) == 1) and _is_regular(series, slices):
        dataset.DimensionOrganizationType = "3D"  # frames differ in nothing but their place
    measures = make_item(PixelSpacing=list(series.source.spacing), SliceThickness=series.thickness)
    measures.SpacingBetweenSlices = series.thickness
    orientation = make_item(ImageOrientationPatient=list(series.source.orientation))
    shared = make_item(PlaneOrientationSequence=[orientation], PixelMeasuresSequence=[measures])
    if not labelmap and len(structures) == 1:
        shared.SegmentIdentificationSequence = [make_item(ReferencedSegmentNumber=1)]
    dataset.SharedFunctionalGroupsSequence = [shared]
    return dataset


def _seg_file(
    series: _Series, dataset: Dataset, frames: Sequence[SegFrame], slices: Sequence[int]
) -> SegFile:
    """Return the file of a data set and its frames."""
    dataset.NumberOfFrames = len(frames)
    codes = (
        encode_dataset(make_item(PurposeOfReferenceCodeSequence=[code_item(_PURPOSE)])),
        encode_dataset(make_item(DerivationCodeSequence=[code_item(_DERIVATION)])),
    )
    derivations = {k: _derivation(series, k, codes) for k in slices}
    positions = {k: _position(series.positions[k] or ()) for k in slices}
    shared_segment = "SegmentIdentificationSequence" in dataset.SharedFunctionalGroupsSequence[0]
    groups = encode_groups(frames, derivations, positions, shared_segment=shared_segment)
    return SegFile(
        dataset, groups, rle_frames(frames) if series.labelmap else binary_frames(frames)
    )


def _derivation(series: _Series, k: int, codes: tuple[bytes, bytes]) -> bytes:
    """Return the encoded DerivationImageSequence of a frame; empty without a source image.

    `codes` are those of the purpose of the reference and of the derivation, encoded.
    """
    image = series.source.slices[k]
    if image is None:
        return encode_sequence(0x0008, 0x9124)
    purpose, derivation = codes
    reference = (
        encode_element(0x0008, 0x1150, "UI", image.sop_class),
        encode_element(0x0008, 0x1155, "UI", image.sop_instance),
        b"" if image.frame is None else encode_element(0x0008, 0x1160, "IS", str(image.frame)),
        encode_element(0x0028, 0x135A, "CS", "NO" if series.rectangular else "YES"),
        purpose,
    )
    return encode_sequence(
        0x0008, 0x9124, encode_sequence(0x0008, 0x2112, b"".join(reference)) + derivation
    )


def _position(position: Sequence[str]) -> bytes:
    """Return the encoded PlanePositionSequence of a frame."""
    return encode_sequence(
        0x0020, 0x9113, encode_element(0x0020, 0x0032, "DS", "\\".join(position))
    )


def _add_references(dataset: Dataset, source: DicomSource) -> None:
    """List the source images; a multi-frame object once (PS3.3 C.12.2)."""
    classes = {image.sop_instance: image.sop_class for image in source.slices if image is not None}
    images = [reference_item(sop_class, instance) for instance, sop_class in classes.items()]
    series = make_item(ReferencedInstanceSequence=images)
    series.SeriesInstanceUID = valid_uid(source.first, "SeriesInstanceUID")
    dataset.SourceImageSequence, dataset.ReferencedSeriesSequence = images, [series]


_BY_SEGMENT = {
    "DimensionIndexPointer": tags.REFERENCED_SEGMENT_NUMBER,
    "FunctionalGroupPointer": tags.SEGMENT_IDENTIFICATION_SEQUENCE,
    "DimensionDescriptionLabel": "Referenced Segment Number",
}
_BY_POSITION = {
    "DimensionIndexPointer": tags.IMAGE_POSITION_PATIENT,
    "FunctionalGroupPointer": tags.PLANE_POSITION_SEQUENCE,
    "DimensionDescriptionLabel": "Image Position Patient",
}
"""Dimensions along which frames are ordered (PS3.3 C.7.6.17)."""
_DERIVATION = Code("113076", "DCM", "Segmentation")
_PURPOSE = Code("121322", "DCM", "Source image for image processing operation")
_BACKGROUND = Code("125040", "DCM", "Background")


def _background(segmentation: Segmentation) -> Dataset:
    """Return the segment of number 0, which a LABELMAP describes too (PS3.3 C.8.20.2)."""
    return make_item(
        SegmentNumber=0,
        SegmentLabel="Background",
        SegmentAlgorithmType="SEMIAUTOMATIC" if segmentation.corrected else "AUTOMATIC",
        SegmentAlgorithmName=segmentation.model,
        SegmentedPropertyCategoryCodeSequence=[code_item(_BACKGROUND)],
        SegmentedPropertyTypeCodeSequence=[code_item(_BACKGROUND)],
        RecommendedDisplayCIELabValue=_cielab((0, 0, 0)),
    )


def _segment(series: _Series, structure: Structure, number: int) -> Dataset:
    segmentation = series.segmentation
    segment = _background(segmentation)
    segment.SegmentNumber, segment.SegmentLabel = number, structure.label
    segment.SegmentedPropertyCategoryCodeSequence = [code_item(structure.category)]
    segment.SegmentedPropertyTypeCodeSequence = [type_item(structure)]
    segment.RecommendedDisplayCIELabValue = _cielab(structure.color)
    segment.SegmentDescription = description_of(structure)
    segment.SegmentationAlgorithmIdentificationSequence = [algorithm_item(segmentation)]
    source = valid_uid(series.source.first, "SeriesInstanceUID")
    identity = (source, series.case.recipe, segmentation.model, structure.label)
    segment.TrackingID, segment.TrackingUID = structure.label, hashed_uid("tracking", *identity)
    return segment


def _cielab(color: tuple[int, int, int]) -> list[int]:
    """Return an sRGB colour, 0 to 255, as CIELab (D65) in 16 bits each (PS3.3 C.10.7.1.1)."""
    levels = np.array(color) / 255
    linear = np.where(levels > 0.04045, ((levels + 0.055) / 1.055) ** 2.4, levels / 12.92)
    xyz = _RGB_TO_XYZ @ linear / _WHITE
    x, y, z = np.where(xyz >= (6 / 29) ** 3, np.cbrt(xyz), xyz * 841 / 108 + 4 / 29)
    lightness, a, b = 116 * y - 16, 500 * (x - y), 200 * (y - z)
    return [
        round(value)
        for value in (lightness * 65535 / 100, (a + 128) * 65535 / 255, (b + 128) * 65535 / 255)
    ]


_RGB_TO_XYZ = np.array(
    ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
)
_WHITE = np.array((0.95047, 1.0, 1.08883))


def _set_dates_and_uids(files: Sequence[SegFile], date_time: tuple[str, str], recipe: str) -> None:
    """Set the dates of the files of one series, and UIDs that depend on their content alone."""
    for dataset in (file.dataset for file in files):
        set_dates(dataset, "Content", date_time)
        _set_uids(dataset, hashed_uid("series"), hashed_uid("instance"), hashed_uid("dimensions"))
    contents = [_digest(file) for file in files]
    series = hashed_uid("series", recipe, *contents)
    for file, content in zip(files, contents, strict=True):
        instance = hashed_uid("instance", recipe, series, content)
        _set_uids(file.dataset, series, instance, hashed_uid("dimensions", recipe, series, content))


def _set_uids(dataset: Dataset, series: str, instance: str, dimensions: str) -> None:
    dataset.SeriesInstanceUID = series
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = instance
    for item in (*dataset.DimensionOrganizationSequence, *dataset.DimensionIndexSequence):
        item.DimensionOrganizationUID = dimensions


def _digest(file: SegFile) -> str:
    """Return the SHA-256 of a file's content."""
    syntax = file.dataset.file_meta.TransferSyntaxUID
    digest = hashlib.sha256(syntax.encode() + encode_dataset(file.meta) + file.head)
    for chunk in file.tail:
        digest.update(chunk)
    return digest.hexdigest()
