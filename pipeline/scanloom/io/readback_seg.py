"""DICOM SEG, decoded by plain pydicom and laid on the patient by its own positions.

Neither the order of frames nor the images that they refer to are believed: each frame's place
comes from ImagePositionPatient, ImageOrientationPatient and PixelSpacing (PS3.3 C.7.6.2.1.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Case, Code, Grid, Layer, Segmentation, Structure
from scanloom.core.world import LPS_TO_RAS
from scanloom.io import names
from scanloom.io.readback_elements import Elements, item_of, items_of, numbers_of, text_of
from scanloom.io.readback_slices import HALF, holds, mismatch
from scanloom.io.scan import DicomSource, SourceSlice

if TYPE_CHECKING:
    from pydicom import Dataset

PLACED = 0.2
"""Voxels between a frame and its slice: a regular grid fits the slices of a real scan so well."""

SIDEWAYS = 0.15
"""mm by which a source image may lie beside the grid in its plane: more is no stack."""

TURNED = 1e-3
"""Share of its way by which a row of a source image may leave the grid's: cosines of 3 decimals."""

SAME_STEP = 1e-8
"""mm between the steps of a frame and of its source image: rounding of decimal strings."""

NEAR = 0.01
"""mm between a frame and the source image itself: a position has at least two decimals."""

_SHARED, _PER_FRAME = 0x52009229, 0x52009230
_DERIVATION, _SOURCE_IMAGE, _SOP_INSTANCE = 0x00089124, 0x00082112, 0x00081155
_FRAME_NUMBER = 0x00081160
_PLANE, _POSITION = 0x00209113, 0x00200032
_TURN, _COSINES = 0x00209116, 0x00200037
_MEASURES, _SPACING = 0x00289110, 0x00280030
_IDENTITY, _SEGMENT = 0x0062000A, 0x0062000B


@dataclass(frozen=True, eq=False)
class _Frame:
    """One decoded frame.

    Parameters
    ----------
    pixels : (rows, columns) array
        0 and 1 in a BINARY, segment numbers in a LABELMAP.
    segment : int
        0 in a LABELMAP, whose frames hold all segments.
    position : (3,) array
        Of its first pixel, LPS mm.
    index : (3,) array
        The same on the segmentation's grid, may be fractions.
    images : list of (str, int or None)
        SOPInstanceUID and frame number of the source images that it refers to.
    """

    pixels: NDArray[Any]
    segment: int
    position: NDArray[np.float64]
    index: NDArray[np.float64]
    images: list[tuple[str, int | None]]


def check_segs(
    folder: Path,
    segmentation: Segmentation,
    source: DicomSource,
    case: Case,
    models: Sequence[str],
) -> None:
    """Compare a model's DICOM SEG with its label maps.

    Raises
    ------
    ScanError
        WRITE_MISMATCH.
    """
    model, grid, layers = segmentation.model, segmentation.grid, segmentation.layers
    labelmap = case.outputs.seg == "labelmap"
    for n, group in enumerate([(layer,) for layer in layers] if labelmap else [layers]):
        path = folder / names.seg_name("segmentation", model, models, n)
        dataset = _read(path, source, labelmap=labelmap)
        _check_frames(dataset, group, grid, source)
        if grid.sheared:
            path = folder / names.seg_name("segmentation_rect", model, models, n)
            dataset = _read(path, source, labelmap=labelmap)
            _check_frames(dataset, group, grid, None)


def _read(path: Path, source: DicomSource, *, labelmap: bool) -> Dataset:
    import pydicom

    dataset = pydicom.dcmread(path)
    if dataset.SegmentationType != ("LABELMAP" if labelmap else "BINARY"):
        raise mismatch("the DICOM SEG is of another type")
    for name in ("StudyInstanceUID", "FrameOfReferenceUID"):
        if dataset[name].value != source.first[name].value:
            raise mismatch(f"the DICOM SEG has another {name}")
    return dataset


def _check_frames(
    dataset: Dataset, layers: Sequence[Layer], grid: Grid, source: DicomSource | None
) -> None:
    """Compare every frame with the slice at its place; what no frame holds must be empty.

    Frames of `source` lie on its images, pixel on pixel; others by nearest neighbour.
    """
    segments = _segments(dataset, [s for layer in layers for s in layer.structures])
    holder = {s.number: layer.labels for layer in layers for s in layer.structures}
    found = dict.fromkeys(segments, 0)
    seen = set()
    for frame in _frames(dataset, grid, source):
        k = round(float(frame.index[2]))
        key = (frame.segment, k)
        if not 0 <= k < grid.shape[2] or abs(frame.index[2] - k) > PLACED or key in seen:
            raise mismatch("a frame of the DICOM SEG lies between the slices")
        seen.add(key)
        place = -frame.index[[1, 0]]
        if source is not None:
            _check_reference(frame, source.slices[k])
            _check_beside(frame, grid)
            place = np.zeros(2)
        structure = segments[frame.segment]
        labels = layers[0].labels if structure is None else holder[structure.number]
        plane = labels[:, :, k].T
        meant = plane if structure is None else plane == structure.number
        if not holds(frame.pixels, meant, place, HALF):
            raise mismatch("a frame of the DICOM SEG holds other voxels than its slice")
        found[frame.segment] += int(np.count_nonzero(meant))
    # No frame can hold more of a structure than there is: equal sums are equal counts
    if sum(found.values()) != sum(_expected(layer.labels, source) for layer in layers):
        raise mismatch("the DICOM SEG lacks frames")


def _expected(labels: NDArray[Any], source: DicomSource | None) -> int:
    """Count the voxels that have to stand in frames: slices without a source image have none."""
    planes = labels.T
    if source is None or None not in source.slices:
        return int(np.count_nonzero(planes))
    real = (plane for plane, one in zip(planes, source.slices, strict=True) if one is not None)
    return sum(int(np.count_nonzero(plane)) for plane in real)


def _segments(dataset: Dataset, structures: Sequence[Structure]) -> dict[int, Structure | None]:
    """Return what the number of a frame's segment stands for: None, in a LABELMAP, for all."""
    by_label = {s.label: s for s in structures}
    labelmap = dataset.SegmentationType == "LABELMAP"
    found: dict[int, Structure] = {}
    for item in dataset.SegmentSequence:
        if labelmap and item.SegmentNumber == 0:  # the background
            continue
        structure = by_label.get(item.SegmentLabel)
        if structure is None or not _codes_agree(item, structure):
            raise mismatch("the DICOM SEG names or codes another structure")
        if labelmap and item.SegmentNumber != structure.number:
            raise mismatch("the DICOM SEG numbers its structures otherwise")
        found[int(item.SegmentNumber)] = structure
    if sorted(s.label for s in found.values()) != sorted(by_label):
        raise mismatch("the DICOM SEG has other structures")
    return {0: None} if labelmap else dict(found)


def _codes_agree(item: Dataset, structure: Structure) -> bool:
    kind = item.SegmentedPropertyTypeCodeSequence[0]
    modifiers = kind.get("SegmentedPropertyTypeModifierCodeSequence") or []
    pairs = [
        (item.SegmentedPropertyCategoryCodeSequence[0], structure.category),
        (kind, structure.type),
        (modifiers[0] if modifiers else None, structure.laterality),
    ]
    return all(_code(written) == meant for written, meant in pairs)


def _code(item: Dataset | None) -> Code | None:
    if item is None:
        return None
    return Code(item.CodeValue, item.CodingSchemeDesignator, item.CodeMeaning)


def _frames(dataset: Dataset, grid: Grid, source: DicomSource | None) -> Iterator[_Frame]:
    """Decode frame after frame; where it lies comes from its own functional groups."""
    shared = item_of(_sequence(dataset, _SHARED))
    groups = items_of(_sequence(dataset, _PER_FRAME))
    if len(groups) != dataset.NumberOfFrames:
        raise mismatch("the DICOM SEG has other frames than it says")
    positions = np.array([numbers_of(item_of(g[_PLANE])[_POSITION]) for g in groups])
    indices = grid.index(positions * LPS_TO_RAS)
    previous: tuple[memoryview, memoryview] | None = None
    pixels = _pixels(dataset)
    for group, position, index, plane in zip(groups, positions, indices, pixels, strict=True):
        whole = shared | group
        if previous != (whole[_TURN], whole[_MEASURES]):
            previous = whole[_TURN], whole[_MEASURES]
            _check_directions(_directions(whole), grid, source)
        segment = item_of(whole[_IDENTITY])[_SEGMENT] if _IDENTITY in whole else b"\0"
        number = int.from_bytes(segment, "little")
        yield _Frame(plane, number, position, index, _images(group))


def _sequence(dataset: Dataset, tag: int) -> memoryview:
    """Return a sequence as it stands in the file."""
    value = dataset.get_item(tag).value
    if not isinstance(value, bytes):
        raise mismatch("the DICOM SEG is laid out otherwise")
    return memoryview(value)


def _directions(group: Elements) -> NDArray[np.float64]:
    """Return the steps (2, 3) to the next pixel of a row and to the next row, LPS mm."""
    cosines = np.array(numbers_of(item_of(group[_TURN])[_COSINES]))
    rows, columns = numbers_of(item_of(group[_MEASURES])[_SPACING])
    return np.array([cosines[:3] * columns, cosines[3:] * rows])


def _check_directions(
    directions: NDArray[np.float64], grid: Grid, source: DicomSource | None
) -> None:
    """Compare the way along a row with I and the way down a column with J, to the far corner.

    Frames of `source` have the very steps of its images, which the grid may have made orthonormal.
    """
    steps = np.linalg.solve(grid.affine[:3, :3], (directions * LPS_TO_RAS).T).T
    size = np.array(grid.shape[:2])[:, None]
    drift = np.abs(steps - np.eye(3)[:2]) * size
    if (drift > PLACED + (0 if source is None else TURNED * size)).any():
        raise mismatch("the frames of the DICOM SEG have other directions or spacing")
    if source is not None and np.abs(directions - _steps(source)).max() > SAME_STEP:
        raise mismatch("the frames of the DICOM SEG are turned against their source images")


def _steps(source: DicomSource) -> NDArray[np.float64]:
    """Return what `_directions` does, of the source images."""
    rows, columns = map(float, source.spacing)
    cosines = np.array(source.orientation, dtype=np.float64)
    return np.array([cosines[:3] * columns, cosines[3:] * rows])


def _pixels(dataset: Dataset) -> Iterator[NDArray[Any]]:
    """Return frames one by one, never all at once."""
    from pydicom.pixels import iter_pixels

    if dataset.BitsAllocated != 1:
        yield from iter_pixels(dataset)
        return
    rows, columns = dataset.Rows, dataset.Columns
    size, packed = rows * columns, np.frombuffer(dataset.PixelData, np.uint8)
    stored = -(-size * dataset.NumberOfFrames // 8)
    if len(packed) != stored + stored % 2:  # PS3.5 8.1: an even number of bytes
        raise mismatch("the DICOM SEG has another number of pixels than it says")
    for n in range(dataset.NumberOfFrames):
        # PS3.5 8.1.1: bit after bit, the lowest first; a frame may begin within a byte
        begin, end = n * size, (n + 1) * size
        bits = np.unpackbits(packed[begin // 8 : -(-end // 8)], bitorder="little")
        yield bits[begin % 8 : begin % 8 + size].reshape(rows, columns).view(np.bool_)


def _images(group: Elements) -> list[tuple[str, int | None]]:
    return [
        (text_of(image[_SOP_INSTANCE]), _frame_number(image))
        for derivation in items_of(group.get(_DERIVATION, memoryview(b"")))
        for image in items_of(derivation.get(_SOURCE_IMAGE, memoryview(b"")))
    ]


def _frame_number(image: Elements) -> int | None:
    return int(text_of(image[_FRAME_NUMBER])) if _FRAME_NUMBER in image else None


def _check_beside(frame: _Frame, grid: Grid) -> None:
    """Refuse a frame that lies further beside the grid than the images of a stack may."""
    limits = np.maximum(PLACED, SIDEWAYS / np.array(grid.spacing[:2]))
    if (np.abs(frame.index[:2]) > limits).any():
        raise mismatch("a frame of the DICOM SEG lies beside its slice")


def _check_reference(frame: _Frame, image: SourceSlice | None) -> None:
    """Refuse a frame that lies beside its source image, or refers to another one."""
    if image is None:
        raise mismatch("a frame of the DICOM SEG stands for an interpolated slice")
    apart = np.abs(frame.position - np.array(image.position, float)).max()
    if apart > NEAR:
        raise mismatch("a frame of the DICOM SEG lies beside its source image")
    if frame.images != [(image.sop_instance, image.frame)]:
        raise mismatch("a frame of the DICOM SEG refers to another source image")
