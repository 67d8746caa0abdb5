"""RTSTRUCT on request: the outlines of all structures of a model, one file per model.

Outlines run at half between voxel centres, so that every reader that fills them by the centres of
voxels restores the label map. A hole can't be a contour of its own: readers fill it. It is joined
to its outline by a channel without width, a quarter of a pixel off the rows of centres, where no
reader's scanline runs.

Implicit VR, little endian: in explicit VR a contour above 64 kB does not fit the length field of a
decimal string. Contours are encoded directly: a pydicom object for every element of hundreds of
thousands of contours would take most of the time.

Sheared stacks get none: readers ignore the tilt.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import ModelCard
from scanloom.core import Grid, Outputs, Reason, ScanError, Segmentation, Structure
from scanloom.core.grid import LPS_TO_RAS
from scanloom.io.dataset_text import valid_uid
from scanloom.io.dicom.uids import IMPLICIT_VR_LITTLE_ENDIAN, RT_STRUCTURE_SET_STORAGE
from scanloom.io.output.case_folder import CaseContent, Writer
from scanloom.io.output.file_names import rtstruct_name
from scanloom.io.readback.dicom_seg import (
    MAX_IN_PLANE_SHIFT_MM,
    MAX_OFFSET_VOXELS,
    MAX_ROW_DEVIATION,
    codes_agree,
    parse_text,
    pixel_steps,
)
from scanloom.io.readback.mismatch import count_labels, decoding, mismatch_error
from scanloom.io.scan import DicomSource, Scan, SourceSlice
from scanloom.io.write.derived_dicom import (
    ANATOMY,
    ITEM,
    algorithm_item,
    code_item,
    description_of,
    encode_elements,
    make_item,
    new_object,
    reference_item,
    save_object,
    set_dates,
    type_item,
    written_datetime,
)

if TYPE_CHECKING:
    from pydicom import Dataset

FIRST_SERIES_NUMBER = 800
"""SeriesNumber of the first model's RTSTRUCT."""

_STUDY_CLASS = "1.2.840.10008.3.1.2.3.1"
"""Detached Study Management, retired: what PS3.3 C.8.8.5 has RTReferencedStudySequence name."""
_QUARTERS = 4
"""Points are integers in quarters of a pixel: halves for outlines, quarters for channels."""
_MIN_DECIMALS, _DECIMALS_OF_PIXEL = 4, 3
"""Decimals of a coordinate in mm: 0.1 um, and a thousandth of a pixel."""
_MAX_LENGTH = 2**32 - 2
"""Bytes of an element with a stated length."""
_BYTES_PER_VOXEL = 1
"""Encoded contours: smooth structures take a tenth of it, noise of single voxels several times."""


Chunks = list[bytes]
"""Bytes that follow each other: those of noise are hundreds of megabytes, and never joined."""


def can_write(scan: Scan) -> bool:
    """Return whether a scan can have an RTSTRUCT: DICOM that can be referred to, not sheared."""
    source = scan.source
    return isinstance(source, DicomSource) and source.can_refer and not scan.volume.grid.sheared


# --- outlines -------------------------------------------------------------------------------------


def outlines(mask: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return closed outlines of a mask (J, I) that is not empty, holes joined to them.

    Returns
    -------
    points : (N, 2) array
        Corners along I and J, in quarters of a pixel; (0, 0) is the centre of the first pixel.
        Consecutive corners, also the last and the first of an outline, are not collinear.
    sizes : (M,) array
        Number of corners of each outline.
    """
    from contourpy import FillType, contour_generator

    generator = contour_generator(z=np.pad(mask, 1), fill_type=FillType.ChunkCombinedOffsetOffset)
    filled: Any = generator.filled(0.5, 2)
    [corners], [offsets], [outer] = filled
    # Rings end with their first point again
    last = np.asarray(offsets[1:], np.int64) - 1
    points = np.rint(corners * _QUARTERS).astype(np.int64) - _QUARTERS
    points = np.delete(points, last, axis=0)
    ring_sizes = np.diff(offsets.astype(np.int64)) - 1
    outer_rings = outer[:-1].astype(np.int64)
    if len(outer_rings) == len(ring_sizes):
        sizes = ring_sizes
    else:
        points, sizes = _join_holes(points, ring_sizes, outer_rings)
    return _without_collinear(points, sizes)


def _join_holes(
    points: NDArray[np.int64], ring_sizes: NDArray[np.int64], outer_rings: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return points (N, 2) and sizes of outlines, each with its holes as one closed path.

    The channel of a hole goes from its leftmost crossing of a quarter row to the left, up to the
    next edge. That edge is of the outline, or of a hole of which a crossing lies further left: so
    all channels end at the outline. An edge is at most a pixel long and crosses at most one quarter
    row; the material is on its right if a channel ends there, on its left if one begins there. So
    no edge has two channels.
    """
    starts = np.cumsum(ring_sizes) - ring_sizes
    following = np.arange(1, len(points) + 1)
    following[starts + ring_sizes - 1] = starts
    (x0, y0), (x1, y1) = points.T, points[following].T
    low = np.minimum(y0, y1)
    edges = np.flatnonzero((y0 != y1) & (low % _QUARTERS == 0))
    row = low[edges] + 1
    rise = (y1 - y0)[edges]
    crossing = x0[edges] + (x1 - x0)[edges] * (row - y0[edges]) // rise
    order = np.argsort(row * (crossing.max() + 1) + crossing, kind="stable")
    edges, row, crossing = edges[order], row[order], crossing[order]
    ring = np.repeat(np.arange(len(ring_sizes)), ring_sizes)[edges]
    by_ring = np.argsort(ring * (crossing.max() + 1) + crossing, kind="stable")
    _, leftmost = np.unique(ring[by_ring], return_index=True)  # every ring has crossings
    begin = np.delete(by_ring[leftmost], outer_rings)
    end = begin - 1

    # The path goes by runs of points, each up to an edge with a channel or to the end of its ring
    end_edges, begin_edges = edges[end], edges[begin]
    ring_ends = np.setdiff1d(starts + ring_sizes - 1, np.concatenate((end_edges, begin_edges)))
    last = np.concatenate((end_edges, begin_edges, ring_ends))
    order = np.argsort(last)
    first = np.empty_like(last)
    first[order] = np.concatenate(([0], last[order][:-1] + 1))
    run_from = np.empty(len(points), np.int64)  # by its first point
    run_from[first] = np.arange(len(last))
    next_run = run_from[following[np.concatenate((begin_edges, end_edges, ring_ends))]].tolist()
    path: list[int] = []
    begun = []
    for start in run_from[starts[outer_rings]].tolist():
        begun.append(len(path))
        run = start
        while True:
            path.append(run)
            run = next_run[run]
            if run == start:
                break

    ends = np.stack((crossing[end], row[end]), axis=1)
    begins = np.stack((crossing[begin], row[begin]), axis=1)
    channels = np.stack((ends, begins, begins, ends)).reshape(2, 2, -1, 2).swapaxes(1, 2)
    runs = np.array(path)
    is_channel = runs < 2 * len(begin)
    lengths = (last - first + 1)[runs] + 2 * is_channel
    stops = np.cumsum(lengths)
    index = np.arange(stops[-1]) + np.repeat(first[runs] - stops + lengths, lengths)
    for n in range(2):
        index[stops[is_channel] - 2 + n] = len(points) + 2 * runs[is_channel] + n
    joined = np.concatenate((points, channels.reshape(-1, 2)))[index]
    return joined, np.add.reduceat(lengths, begun)


def _without_collinear(
    points: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return outlines without points on the line between their neighbours, after a diagonal."""
    starts = np.cumsum(sizes) - sizes
    step = np.empty_like(points)  # to the next point
    step[:-1] = points[1:] - points[:-1]
    ends = starts + sizes - 1
    step[ends] = points[starts] - points[ends]
    before = np.empty_like(points)
    before[1:] = step[:-1]
    before[starts] = step[ends]
    corner = before[:, 0] * step[:, 1] != before[:, 1] * step[:, 0]
    points, before = points[corner], before[corner]
    sizes = np.add.reduceat(corner, starts, dtype=np.int64)
    # The first corner follows a diagonal, which every outline has: plastimatch takes a last point
    # with the x and y of the first, in mm, for the same point; in a coronal slice all have one y
    starts = np.cumsum(sizes) - sizes
    diagonals = np.flatnonzero((before != 0).all(axis=1))
    first = diagonals[np.searchsorted(diagonals, starts)] - starts
    offset = np.arange(len(points)) - np.repeat(starts, sizes) + np.repeat(first, sizes)
    return points[np.repeat(starts, sizes) + offset % np.repeat(sizes, sizes)], sizes


# --- the file -------------------------------------------------------------------------------------


def write_rtstruct(folder: Path, segmentation: Segmentation, content: CaseContent) -> None:
    """Write the RTSTRUCT of one model.

    Parameters
    ----------
    folder : Path
        The case folder; the file is written to its subfolder `dicom/`.
    segmentation : Segmentation
        On the grid of the scan.
    content : CaseContent
        Of a scan that `can_write` accepts.
    """
    source, case = content.scan.source, content.case
    if not isinstance(source, DicomSource):
        raise TypeError("RTSTRUCT of a scan that is not DICOM")
    path = folder / rtstruct_name(segmentation.model, content.models)
    path.parent.mkdir(exist_ok=True)
    contours = _encode_contours(segmentation, source)
    structures = _structures(segmentation)
    items = (_item(_region(s, contours.get(s.number, []))) for s in structures)
    regions = _sequence(0x3006, 0x0039, list(itertools.chain.from_iterable(items)))
    number = FIRST_SERIES_NUMBER + content.models.index(segmentation.model)
    head = _head(segmentation, source, structures, number)
    set_dates(head, "StructureSet", written_datetime(source, case))
    tail = _encode(_observations(structures))
    digest = hashlib.sha256(_encode(head) + tail)
    for region in regions:
        digest.update(region)
    save_object(path, head, [*regions, tail], case.recipe, digest.hexdigest())


def _structures(segmentation: Segmentation) -> list[Structure]:
    return sorted(segmentation.structures, key=lambda s: s.number)


def _head(
    segmentation: Segmentation, source: DicomSource, structures: Sequence[Structure], number: int
) -> Dataset:
    """Return all elements before ROIContourSequence but dates and UIDs (PS3.3 A.19)."""
    head = new_object(
        source,
        [segmentation],
        RT_STRUCTURE_SET_STORAGE,
        IMPLICIT_VR_LITTLE_ENDIAN,
        "RTSTRUCT",
        f"scanloom {segmentation.model}, outlines",
    )
    head.OperatorsName, head.SeriesNumber, head.InstanceNumber = "", number, 1
    head.StructureSetLabel, head.StructureSetName = "SEGMENTATION", segmentation.model[:64]
    frame = valid_uid(source.first, "FrameOfReferenceUID")
    images = {(i.sop_instance, i.frame): i for i in source.slices if i is not None}
    series = make_item(ContourImageSequence=[_image_item(image) for image in images.values()])
    series.SeriesInstanceUID = valid_uid(source.first, "SeriesInstanceUID")
    study = reference_item(_STUDY_CLASS, valid_uid(source.first, "StudyInstanceUID"))
    study.RTReferencedSeriesSequence = [series]
    head.ReferencedFrameOfReferenceSequence = [
        make_item(FrameOfReferenceUID=frame, RTReferencedStudySequence=[study])
    ]
    head.StructureSetROISequence = [
        make_item(
            ROINumber=s.number,
            ReferencedFrameOfReferenceUID=frame,
            ROIName=s.label[:64],
            ROIDescription=description_of(s),
            ROIGenerationAlgorithm="SEMIAUTOMATIC" if segmentation.corrected else "AUTOMATIC",
            ROIDerivationAlgorithmIdentificationSequence=[algorithm_item(segmentation)],
        )
        for s in structures
    ]
    return head


def _observations(structures: Sequence[Structure]) -> Dataset:
    """Return all elements behind ROIContourSequence."""
    observations = [
        make_item(
            ObservationNumber=s.number,
            ReferencedROINumber=s.number,
            RTROIInterpretedType="ORGAN" if s.category.value in ANATOMY else "",
            ROIInterpreter="",
            SegmentedPropertyCategoryCodeSequence=[code_item(s.category)],
            RTROIIdentificationCodeSequence=[type_item(s)],
        )
        for s in structures
    ]
    return make_item(RTROIObservationsSequence=observations, ApprovalStatus="UNAPPROVED")


def _image_item(image: SourceSlice) -> Dataset:
    item = reference_item(image.sop_class, image.sop_instance)
    if image.frame is not None:
        item.ReferencedFrameNumber = image.frame
    return item


def _encode_contours(segmentation: Segmentation, source: DicomSource) -> dict[int, list[bytes]]:
    """Return the encoded items of each structure's contours by number, in the order of slices.

    Slices that were interpolated have none.
    """
    from scipy.ndimage import find_objects

    rows, columns = map(float, source.spacing)  # between rows, between columns
    cosines = np.array(source.orientation, np.float64).reshape(2, 3)
    steps = cosines * [[columns], [rows]] / _QUARTERS
    decimals = max(_MIN_DECIMALS, math.ceil(_DECIMALS_OF_PIXEL - math.log10(min(rows, columns))))
    contours: dict[int, list[bytes]] = defaultdict(list)
    for k, image in enumerate(source.slices):
        if image is None:
            continue
        position = np.array(image.position, np.float64)
        head = _encode(make_item(ContourImageSequence=[_image_item(image)]))
        head += _element(0x3006, 0x0042, b"CLOSED_PLANAR")
        for layer in segmentation.layers:
            plane = layer.labels[:, :, k].T
            for number, box in enumerate(find_objects(plane), 1):
                if box is None:
                    continue
                points, sizes = outlines(plane[box] == number)
                points += np.array([box[1].start, box[0].start]) * _QUARTERS
                text, ends = _point_texts(position + points @ steps, decimals)
                begin = 0
                for size, end in zip(
                    sizes.tolist(), ends[np.cumsum(sizes) - 1].tolist(), strict=True
                ):
                    data = text[begin : end - 1]  # without a last backslash
                    begin = end
                    points_of = _counted(size) + _element(0x3006, 0x0050, data)
                    contours[number] += _item([head, points_of])
    return contours


@functools.cache
def _counted(size: int) -> bytes:
    """Return the element with the number of points of a contour."""
    return _element(0x3006, 0x0046, str(size).encode())


def _point_texts(points: NDArray[np.float64], decimals: int) -> tuple[bytes, NDArray[np.int64]]:
    """Return points (N, 3) as decimal strings, each with a backslash, and where each point ends.

    All digits of all points are made at once: to format each number takes several times longer.
    """
    scaled = np.rint(points * 10**decimals).astype(np.int64)
    rest = np.abs(scaled)
    rest = rest.astype(np.min_scalar_type(rest.max()))  # small numbers are divided faster
    whole = max(1, len(str(rest.max())) - decimals)  # digits before the point
    characters = np.empty((*points.shape, whole + decimals + 3), np.uint8)
    kept = np.ones(characters.shape, bool)
    characters[..., 0], kept[..., 0] = ord("-"), scaled < 0
    for n in range(whole):  # no leading zeros, but for units
        kept[..., whole - n] = rest >= 10 ** (decimals + n) if n else True
    columns = [whole + 1 + n for n in range(decimals, 0, -1)] + [*range(whole, 0, -1)]
    for column in columns:
        tenth = rest // 10
        characters[..., column] = rest - 10 * tenth + ord("0")
        rest = tenth
    characters[..., whole + 1], characters[..., -1] = ord("."), ord("\\")
    lengths = kept.sum(axis=(1, 2))
    return characters[kept].tobytes(), np.cumsum(lengths)


def _region(structure: Structure, contours: Chunks) -> Chunks:
    """Return the encoded elements of an item of ROIContourSequence."""
    color = "\\".join(map(str, structure.color)).encode()
    return [
        _element(0x3006, 0x002A, color),
        *(_sequence(0x3006, 0x0040, contours) if contours else []),
        _element(0x3006, 0x0084, str(structure.number).encode()),
    ]


def _element(group: int, element: int, text: bytes) -> bytes:
    """Return an element of text in implicit VR (PS3.5 7.1.3), padded to an even length."""
    text += b" " * (len(text) % 2)
    return struct.pack("<HHI", group, element, len(text)) + text


def _item(chunks: Chunks) -> Chunks:
    """Return an item of a sequence in implicit VR (PS3.5 7.5)."""
    return [ITEM + struct.pack("<I", sum(map(len, chunks))), *chunks]


def _sequence(group: int, element: int, items: Chunks) -> Chunks:
    """Return a sequence of encoded items in implicit VR (PS3.5 7.5).

    Raises
    ------
    ScanError
        TOO_LARGE beyond 4 GiB, as of noise.
    """
    length = sum(map(len, items))
    if length > _MAX_LENGTH:
        raise ScanError(Reason.TOO_LARGE, "outlines of more than 4 GiB: leave rtstruct out")
    return [struct.pack("<HHI", group, element, length), *items]


def _encode(dataset: Dataset) -> bytes:
    """Encode the elements of a part in implicit VR; the head names the character set."""
    return encode_elements(dataset, "ISO_IR 192", implicit=True)


# --- read-back ------------------------------------------------------------------------------------
# Independent of the outlines: the points of the file are filled by an even-odd scanline through the
# centres of voxels, contour by contour, and compared with the label map voxel by voxel.

_PLANE_TOLERANCE_MM = 0.01
"""Largest distance of a contour from the plane of its source image."""

_Elements = dict[int, memoryview]
_ITEM_HEAD, _ELEMENT_HEAD = struct.Struct("<4sI"), struct.Struct("<HHI")


def check_rtstruct(path: Path, segmentation: Segmentation, source: DicomSource) -> None:
    """Compare an RTSTRUCT with the label maps of its model.

    Raises
    ------
    ScanError
        WRITE_MISMATCH.
    """
    import pydicom

    dataset = pydicom.dcmread(path)
    for name in ("StudyInstanceUID", "FrameOfReferenceUID"):
        if dataset[name].value != source.first[name].value:
            raise mismatch_error(f"the RTSTRUCT has a different {name}")
    _check_structures(dataset, _structures(segmentation))
    _check_source(dataset, source)
    _check_corners(segmentation.grid, source)
    encoded = dataset.get_item(0x30060039).value
    if not isinstance(encoded, bytes):
        raise mismatch_error("the RTSTRUCT has a different encoding")
    regions = {int(bytes(region[0x30060084])): region for region in _items(memoryview(encoded))}
    present = np.array([image is not None for image in source.slices])
    slice_of = functools.cache(functools.partial(_slice_of, source=source))
    for layer in segmentation.layers:
        planes = (layer.labels[:, :, k] for k in np.flatnonzero(present))
        voxels = count_labels(planes, layer.labels.dtype)
        for s in layer.structures:
            region = regions.pop(s.number)
            if list(map(int, bytes(region[0x3006002A]).split(b"\\"))) != list(s.color):
                raise mismatch_error("the RTSTRUCT has a different colour for a structure")
            contours = region.get(0x30060040, memoryview(b""))
            filled = _check_contours(contours, layer.labels, s.number, source, slice_of)
            if filled != voxels[s.number]:
                raise mismatch_error(f"the contours of {s.label} have different voxels")
    if regions:
        raise mismatch_error("the RTSTRUCT has different structures")


def _check_structures(dataset: Dataset, structures: Sequence[Structure]) -> None:
    """Compare numbers, labels and codes."""
    written = {int(item.ROINumber): item.ROIName for item in dataset.StructureSetROISequence}
    if written != {s.number: s.label for s in structures}:
        raise mismatch_error("the RTSTRUCT has different structures")
    observed = {int(item.ReferencedROINumber): item for item in dataset.RTROIObservationsSequence}
    if observed.keys() != written.keys():
        raise mismatch_error("the RTSTRUCT has observations of different structures")
    for s in structures:
        [category] = observed[s.number].SegmentedPropertyCategoryCodeSequence
        [kind] = observed[s.number].RTROIIdentificationCodeSequence
        if not codes_agree(category, kind, s):
            raise mismatch_error("the RTSTRUCT has a different code for a structure")


def _check_source(dataset: Dataset, source: DicomSource) -> None:
    """Compare the references to the study, its frame of reference, the series and its images."""
    [referenced] = dataset.ReferencedFrameOfReferenceSequence
    [study] = referenced.RTReferencedStudySequence
    [series] = study.RTReferencedSeriesSequence
    first, frame = source.first, source.first.FrameOfReferenceUID
    frames = {roi.ReferencedFrameOfReferenceUID for roi in dataset.StructureSetROISequence}
    images = {
        (
            item.ReferencedSOPClassUID,
            item.ReferencedSOPInstanceUID,
            item.get("ReferencedFrameNumber"),
        )
        for item in series.ContourImageSequence
    }
    expected = {(i.sop_class, i.sop_instance, i.frame) for i in source.slices if i is not None}
    uids = study.ReferencedSOPInstanceUID, series.SeriesInstanceUID
    if (
        {referenced.FrameOfReferenceUID, *frames} != {frame}
        or uids != (first.StudyInstanceUID, first.SeriesInstanceUID)
        or images != expected
        or len(series.ContourImageSequence) != len(expected)
    ):
        raise mismatch_error("the RTSTRUCT refers to a different source")


def _check_corners(grid: Grid, source: DicomSource) -> None:
    """Compare the first and last pixel of each source image with those of the grid's slice."""
    size = np.array(grid.shape[:2])
    shift = np.maximum(MAX_OFFSET_VOXELS, MAX_IN_PLANE_SHIFT_MM / np.array(grid.spacing[:2]))
    limits = np.append(shift + MAX_ROW_DEVIATION * size, MAX_OFFSET_VOXELS)
    steps = pixel_steps(source)
    for k, image in enumerate(source.slices):
        if image is None:
            continue
        for pixel in (np.zeros(2), size - 1):
            corner = np.array(image.position, np.float64) + pixel @ steps
            [index] = grid.index(corner[None] * LPS_TO_RAS)
            if (np.abs(index - [*pixel, k]) > limits).any():
                raise mismatch_error("source images of the RTSTRUCT are not at their slices")


def _check_contours(
    contours: memoryview,
    labels: NDArray[Any],
    number: int,
    source: DicomSource,
    slice_of: Callable[[bytes], int],
) -> int:
    """Compare the filled contours of each slice with a structure; return the voxels they fill."""
    counts, texts, slices = [], [], []
    for contour in _items(contours):
        if bytes(contour[0x30060042]).rstrip() != b"CLOSED_PLANAR":
            raise mismatch_error("the RTSTRUCT has contours of another kind")
        counts.append(int(bytes(contour[0x30060046])))
        texts.append(contour[0x30060050])
        slices.append(slice_of(bytes(contour[0x30060016])))
    if not counts:
        return 0
    sizes, slice_of_contour = np.array(counts), np.array(slices)
    points = _decimals(b"\\".join(texts)).reshape(-1, 3)
    if sizes.sum() != len(points) or sizes.min() < 3:
        raise mismatch_error("contours of the RTSTRUCT have other numbers of points")
    origins = np.array([i.position if i else [0] * 3 for i in source.slices], np.float64)
    offsets = points - np.repeat(origins[slice_of_contour], sizes, axis=0)
    steps = pixel_steps(source)
    normal = np.cross(*steps)
    if (np.abs(offsets @ normal) > _PLANE_TOLERANCE_MM * np.linalg.norm(normal)).any():
        raise mismatch_error("contours of the RTSTRUCT are beside their images")
    pixels = offsets @ np.linalg.pinv(steps)
    filled = 0
    # All contours of a slice follow each other; else those that come first lack voxels of others
    bounds = np.flatnonzero(np.diff(slice_of_contour, prepend=-1, append=-1))
    of_points = np.concatenate(([0], np.cumsum(sizes)))[bounds]
    for n, (first, last) in enumerate(itertools.pairwise(bounds)):
        of_slice = pixels[of_points[n] : of_points[n + 1]]
        plane = labels[:, :, slices[first]].T
        filled += _check_plane(of_slice, sizes[first:last], plane, number)
    return filled


def _slice_of(encoded: bytes, source: DicomSource) -> int:
    """Return the slice of the image that an encoded reference means."""
    [item] = _items(memoryview(encoded))
    frame = int(parse_text(item[0x00081160])) if 0x00081160 in item else None
    reference = parse_text(item[0x00081150]), parse_text(item[0x00081155]), frame
    for k, image in enumerate(source.slices):
        if image is not None and (image.sop_class, image.sop_instance, image.frame) == reference:
            return k
    raise mismatch_error("a contour of the RTSTRUCT refers to a different image")


def _decimals(text: bytes) -> NDArray[np.float64]:
    """Return decimal strings, all with as many decimals, separated by backslashes.

    As integers they are read several times faster.
    """
    text = text.replace(b" ", b"") + b"\\"
    characters = np.frombuffer(text, np.uint8)
    points, ends = (np.flatnonzero(characters == ord(mark)) for mark in ".\\")
    decimals = int(ends[0] - points[0] - 1)
    if not np.array_equal(points + decimals + 1, ends):
        raise mismatch_error("coordinates of the RTSTRUCT are no decimal strings")
    whole = np.fromstring(text[:-1].translate(None, b"."), np.int64, sep="\\")
    return whole / 10.0**decimals


def _check_plane(
    points: NDArray[np.float64], sizes: NDArray[np.int64], plane: NDArray[Any], number: int
) -> int:
    """Fill the contours of a slice and compare them with a structure.

    Each contour is filled by the even-odd rule; a pixel may be in one contour only.

    Parameters
    ----------
    points : (N, 2) array
        Corners of the contours, in pixels along I and J.
    sizes : (M,) array
        Number of corners of each contour.
    plane : (J, I) array
        Labels of the slice.
    number : int
        The structure's.

    Returns
    -------
    int
        Number of filled pixels.
    """
    ends = np.cumsum(sizes)
    following = np.arange(1, len(points) + 1)
    following[ends - 1] = ends - sizes
    (x0, y0), (x1, y1) = points.T, points[following].T
    # An edge crosses the rows from its lower end, included, to its upper end, excluded
    low, high = np.sort(np.ceil((y0, y1)).astype(np.int64), axis=0)
    edge = np.repeat(np.arange(len(points)), high - low)
    row = np.arange(len(edge)) - np.repeat(np.cumsum(high - low) - high, high - low)
    slope = (x1 - x0)[edge] / (y1 - y0)[edge]
    column = np.ceil(x0[edge] + slope * (row - y0[edge])).astype(np.int64)
    if len(edge) == 0:
        raise mismatch_error("contours of the RTSTRUCT contain no voxel")
    top, left, bottom, right = row.min(), column.min(), row.max() + 1, column.max()
    if top < 0 or left < 0 or bottom > plane.shape[0] or right > plane.shape[1]:
        raise mismatch_error("contours of the RTSTRUCT leave their images")
    height, width = int(bottom - top), int(right - left) + 1
    pixel = (row - top) * width + column - left
    contour = np.repeat(np.arange(len(sizes)), sizes)[edge]
    # Crossings by contour, row and column: the first of a pair begins to fill, the second ends it
    pixel = np.sort(contour * (height * width) + pixel) % (height * width)
    change = np.bincount(pixel[::2], minlength=height * width)
    change -= np.bincount(pixel[1::2], minlength=height * width)
    covered = np.cumsum(change.reshape(height, width), axis=1)[:, :-1]
    if not np.array_equal(covered, plane[top:bottom, left:right] == number):
        raise mismatch_error("the contours of the RTSTRUCT have different voxels")
    return int(covered.sum())


def _items(sequence: memoryview) -> Iterator[_Elements]:
    """Yield the elements of each item of a sequence in implicit VR with explicit lengths."""
    offset = 0
    while offset < len(sequence):
        mark, length = _ITEM_HEAD.unpack_from(sequence, offset)
        start = offset + _ITEM_HEAD.size
        offset = start + length
        if mark != ITEM or offset > len(sequence):
            raise ValueError("an item is missing or truncated")
        yield _elements(sequence[start:offset])


def _elements(item: memoryview) -> _Elements:
    elements, offset, size = {}, 0, len(item)
    while offset < size:
        group, element, length = _ELEMENT_HEAD.unpack_from(item, offset)
        start = offset + _ELEMENT_HEAD.size
        offset = start + length
        if offset > size:
            raise ValueError("an element exceeds its item")
        elements[group << 16 | element] = item[start:offset]
    return elements


# --- the writer -----------------------------------------------------------------------------------


def _files(content: CaseContent) -> set[str]:
    if not can_write(content.scan):
        return set()
    return {rtstruct_name(s.model, content.models) for s in content.segmentations}


def _write(folder: Path, content: CaseContent) -> None:
    for segmentation in content.segmentations:
        write_rtstruct(folder, segmentation, content)


def _read_back(folder: Path, content: CaseContent) -> None:
    for segmentation in content.segmentations:
        if isinstance(content.scan.source, DicomSource):
            path = folder / rtstruct_name(segmentation.model, content.models)
            with decoding("RTSTRUCT"):
                check_rtstruct(path, segmentation, content.scan.source)


def _memory(grid: Grid, cards: Sequence[ModelCard], outputs: Outputs) -> int:
    return 0 if grid.sheared else math.prod(grid.shape) * _BYTES_PER_VOXEL


RTSTRUCT = Writer("rtstruct", _files, _write, _read_back, _memory)
