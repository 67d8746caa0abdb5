"""Writes DICOM SEG with highdicom: BINARY (one file per model) or LABELMAP (one file per layer).

Segment numbers. LABELMAP keeps `Structure.number`. BINARY must count from 1 without a gap (PS3.3
C.8.20.2): if the structures' numbers have gaps, segments are renumbered in the same order. In
both, SegmentLabel is the structure's label, which never changes and is the key to `segments.json`;
SegmentDescription is its human-readable name.

Frames. Only slices with labelled voxels are stored. An empty segmentation keeps one empty frame per
segment, of the first slice, since a SEG without frames is not allowed.

UIDs and dates. highdicom generates new UIDs at each write; here the same content gives the same
bytes. UIDs are hashes of everything in the file (the UIDs of the source images, the segments, the
geometry, the encoded frames, the transfer syntax, the dates) and of the recipe, so that different
contents never share a UID.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Case, Code, Grid, Layer, Segmentation, Structure
from scanloom.core.grid import LPS_TO_RAS
from scanloom.io.dicom.decimal_strings import decimal_strings
from scanloom.io.output import file_names
from scanloom.io.scan import DicomSource
from scanloom.io.write.dicom_seg_frames import (
    Pixels,
    SegFile,
    SegFrame,
    binary_frames,
    encode_dataset,
    functional_groups,
    rle_frames,
)
from scanloom.io.write.dicom_seg_references import (
    content_datetime,
    patient_name,
    refer_to_frames,
    reference_headers,
)
from scanloom.ops.rectify import rectangular_grid, rectangular_labels
from scanloom.ops.run_length import counts_by_slice
from scanloom.version import __version__

if TYPE_CHECKING:
    from pydicom import Dataset

FIRST_SERIES_NUMBER = 900
"""SeriesNumber of the first model; each model has two (its own grid, the rectangular grid)."""

_BUFFER_BYTES = 1 << 22  # written at once: file systems take few large pieces faster than many


@dataclass(frozen=True, eq=False)
class _Series:
    """Properties that all files of one SEG series share."""

    segmentation: Segmentation
    source: DicomSource
    headers: list[Dataset]
    case: Case
    stem: file_names.Stem
    number: int

    @property
    def labelmap(self) -> bool:
        return self.case.outputs.seg == "labelmap"

    @property
    def rectangular(self) -> bool:
        return self.stem == "segmentation_rect"


def read_standard() -> None:
    """Let highdicom read its tables of the standard, 23 MB of JSON, as it does once per process."""
    import highdicom as hd
    from pydicom.uid import SegmentationStorage

    uid = _uid("standard")
    hd.SOPClass(uid, uid, 1, uid, SegmentationStorage, 1, "SEG", manufacturer="scanloom")


def write_segs(
    folder: Path,
    segmentation: Segmentation,
    source: DicomSource,
    case: Case,
    models: Sequence[str],
) -> tuple[Path, ...]:
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

    Returns
    -------
    tuple of Path
        The written files.
    """
    (folder / "dicom").mkdir(exist_ok=True)
    headers = reference_headers(source, _slice_distance(segmentation.grid))
    number = FIRST_SERIES_NUMBER + 2 * list(models).index(segmentation.model)
    series = [_Series(segmentation, source, headers, case, "segmentation", number)]
    if segmentation.grid.sheared:
        upright = _rectangular(segmentation)
        series.append(_Series(upright, source, headers, case, "segmentation_rect", number + 1))
    date_time = _now() if case.outputs.dates == "now" else content_datetime(source)
    paths = []
    for seg_series in series:
        files = _encode(seg_series)
        for file in files:
            file.dataset.PatientName = patient_name(source)
        _assign_stable_uids(files, date_time, case.recipe)
        for n, file in enumerate(files):
            path = folder / file_names.seg_name(seg_series.stem, segmentation.model, models, n)
            with path.open("wb", buffering=_BUFFER_BYTES) as out:
                file.save(out)
            paths.append(path)
    return tuple(paths)


def _slice_distance(grid: Grid) -> float:
    """Return the distance between neighbouring slices along their normal in mm."""
    normal = np.cross(grid.affine[:3, 0], grid.affine[:3, 1])
    return float(abs(normal @ grid.affine[:3, 2]) / np.linalg.norm(normal))


def _rectangular(segmentation: Segmentation) -> Segmentation:
    """Return a sheared segmentation on the rectangular grid."""
    grid = segmentation.grid
    layers = tuple(
        Layer(rectangular_labels(layer.labels, grid), layer.structures)
        for layer in segmentation.layers
    )
    return Segmentation(segmentation.model, layers, rectangular_grid(grid), segmentation.version)


def _encode(series: _Series) -> list[SegFile]:
    """Return the files of a series, with the UIDs and dates of highdicom."""
    layers = series.segmentation.layers
    if series.labelmap:
        return [_labelmap_file(series, layer, n) for n, layer in enumerate(layers, 1)]
    return [_binary_file(series)]


def _planes(labels: NDArray[Any]) -> NDArray[Any]:
    """Return labels (I, J, K) as slices of rows and columns (K, J, I), a view."""
    return np.asarray(labels.transpose(2, 1, 0))


def _slices_with_image(series: _Series, planes: NDArray[Any]) -> NDArray[Any]:
    """Return the slices that have a source image; on the rectangular grid, all slices."""
    if series.rectangular or len(series.headers) == len(planes):
        return planes
    return np.asarray(planes[[image is not None for image in series.source.slices]])


def _labelmap_file(series: _Series, layer: Layer, instance: int) -> SegFile:
    """Return a LABELMAP with all structures of a layer."""
    planes = _slices_with_image(series, _planes(layer.labels))
    filled = np.asarray(counts_by_slice(planes.T)[:, 1:].any(axis=1))
    structures = sorted(layer.structures, key=lambda s: s.number)
    dataset = _headers(series, filled, structures, instance)
    templates = _groups_by_slice(dataset, series)
    frames = [SegFrame(planes, 0, 0, k) for k in templates]
    return _seg_file(dataset, frames, templates, rle_frames(frames))


def _binary_file(series: _Series) -> SegFile:
    """Return a BINARY with all structures of all layers, segment by segment."""
    layers = series.segmentation.layers
    stacks = [_slices_with_image(series, _planes(layer.labels)) for layer in layers]
    counts = [counts_by_slice(planes.T) for planes in stacks]
    filled = np.any([c[:, 1:].any(axis=1) for c in counts], axis=0)
    structures = sorted((s for layer in layers for s in layer.structures), key=lambda s: s.number)
    layer_of = {s.number: n for n, layer in enumerate(layers) for s in layer.structures}
    dataset = _headers(series, filled, structures, 1)
    dataset.SegmentsOverlap = "YES" if _overlap(stacks) else "NO"
    templates = _groups_by_slice(dataset, series)
    frames = [
        SegFrame(stacks[n], s.number, segment, k)
        for segment, s in enumerate(structures, 1)
        for n in (layer_of[s.number],)
        for k in templates
        if not filled.any() or (s.number < counts[n].shape[1] and counts[n][k, s.number])
    ]
    return _seg_file(dataset, frames, templates, binary_frames(frames))


def _seg_file(
    dataset: Dataset,
    frames: Sequence[SegFrame],
    templates: dict[int, Dataset],
    pixels: Pixels,
) -> SegFile:
    """Return a file with these frames in place of the single pixels of `dataset`."""
    dataset.NumberOfFrames = len(frames)
    dataset.Rows, dataset.Columns = frames[0].planes.shape[1:]
    groups = functional_groups(frames, templates)
    del dataset.PixelData, dataset.PerFrameFunctionalGroupsSequence
    return SegFile(dataset, groups, pixels)


def _groups_by_slice(dataset: Dataset, series: _Series) -> dict[int, Dataset]:
    """Return the functional groups of highdicom's frames by slice index, in highdicom's order.

    There is one frame per stored slice.
    """
    slice_at = {tuple(map(float, p)): k for k, p in enumerate(_positions(series))}
    templates = {}
    for item in dataset.PerFrameFunctionalGroupsSequence:
        position = item.PlanePositionSequence[0].ImagePositionPatient
        templates[slice_at[tuple(map(float, position))]] = item
    return templates


def _overlap(stacks: Sequence[NDArray[Any]]) -> bool:
    """Return whether a voxel is labelled in more than one of several stacks (K, J, I)."""
    if len(stacks) == 1:
        return False
    return any(
        (np.count_nonzero([plane != 0 for plane in planes], axis=0) > 1).any()
        for planes in zip(*stacks, strict=True)
    )


def _headers(
    series: _Series, filled: NDArray[np.bool_], structures: Sequence[Structure], instance: int
) -> Dataset:
    """Return highdicom's dataset, with a frame of a single pixel for each slice that is not empty.

    `_seg_file` replaces the frames and their functional groups.
    """
    import highdicom as hd
    from pydicom.uid import ExplicitVRLittleEndian, RLELossless

    model, labelmap = series.segmentation.model, series.labelmap
    numbers = [s.number for s in structures] if labelmap else range(1, len(structures) + 1)
    dtype = np.uint8 if max(numbers) < 256 else np.uint16
    # A frame wider than the source's tells highdicom that locations are not preserved
    width = 2 if series.rectangular else 1
    pixels = np.where(filled, numbers[0], 0).astype(dtype)[:, None, None].repeat(width, axis=2)
    pixels = pixels if filled.any() else pixels[:1]
    dataset = hd.seg.Segmentation(
        source_images=series.headers,
        pixel_array=pixels,
        segmentation_type="LABELMAP" if labelmap else "BINARY",
        segment_descriptions=[
            _description(series, s, n) for s, n in zip(structures, numbers, strict=True)
        ],
        series_instance_uid=_uid("series"),
        series_number=series.number,
        sop_instance_uid=_uid("instance"),
        instance_number=instance,
        manufacturer="scanloom",
        manufacturer_model_name="scanloom",
        software_versions=__version__,
        device_serial_number="0",
        transfer_syntax_uid=RLELossless if labelmap else ExplicitVRLittleEndian,
        content_label="SEGMENTATION",
        content_description=model,
        series_description=_long_string(
            f"scanloom {model}{', rectangular' if series.rectangular else ''}"
        ),
        **_placement(series, len(pixels)),
    )
    refer_to_frames(dataset, series.source)
    return dataset


def _placement(series: _Series, slices: int) -> dict[str, Any]:
    """Return highdicom's arguments for the geometry of the first `slices` slices.

    Empty if highdicom takes the geometry from the source images.
    """
    import highdicom as hd

    grid, headers = series.segmentation.grid, series.headers
    if not series.rectangular and slices == len(headers):
        return {}
    orientation = headers[0].ImageOrientationPatient
    if series.rectangular:
        columns = grid.affine[:3, :2] * LPS_TO_RAS[:, None]  # RAS to LPS
        cosines = columns / np.linalg.norm(columns, axis=0)
        orientation = decimal_strings([*cosines[:, 0], *cosines[:, 1]])
    positions = _positions(series)[:slices]
    return {
        "plane_positions": [hd.PlanePositionSequence("PATIENT", p) for p in positions],
        "plane_orientation": hd.PlaneOrientationSequence("PATIENT", orientation),
        "pixel_measures": hd.PixelMeasuresSequence(
            pixel_spacing=headers[0].PixelSpacing,
            slice_thickness=headers[0].SliceThickness,
            spacing_between_slices=headers[0].SpacingBetweenSlices,
        ),
    }


def _positions(series: _Series) -> list[Any]:
    """Return ImagePositionPatient of each slice, LPS mm."""
    if not series.rectangular:
        return [h.ImagePositionPatient for h in series.headers]
    grid = series.segmentation.grid
    world = grid.world([(0, 0, k) for k in range(grid.shape[2])]) * LPS_TO_RAS
    return [decimal_strings(p) for p in world]


def _description(series: _Series, structure: Structure, number: int) -> Dataset:
    import highdicom as hd
    from pydicom.sr.codedict import codes

    segmentation, source = series.segmentation, series.headers[0].SeriesInstanceUID
    description = hd.seg.SegmentDescription(
        segment_number=number,
        segment_label=structure.label,
        segmented_property_category=_coded(structure.category),
        segmented_property_type=_coded(structure.type),
        algorithm_type="SEMIAUTOMATIC" if segmentation.corrected else "AUTOMATIC",
        algorithm_identification=hd.AlgorithmIdentificationSequence(
            name=segmentation.model,
            version=_long_string(segmentation.version or "unknown"),
            family=codes.cid7162.ArtificialIntelligence,
            parameters={"changes": segmentation.changes} if segmentation.changes else None,
        ),
        tracking_id=structure.label,
        tracking_uid=_uid(
            "tracking", source, series.case.recipe, segmentation.model, structure.label
        ),
        display_color=hd.color.CIELabColor.from_rgb(*structure.color),
    )
    note = " (experimental)" if structure.experimental else ""
    description.SegmentDescription = f"{structure.name}{note}"[:1024]
    if structure.laterality is not None:
        kind = description.SegmentedPropertyTypeCodeSequence[0]
        kind.SegmentedPropertyTypeModifierCodeSequence = [_coded(structure.laterality)]
    return description


def _coded(code: Code) -> Any:
    import highdicom as hd

    return hd.sr.CodedConcept(code.value, code.scheme, code.meaning)


def _assign_stable_uids(files: Sequence[SegFile], date_time: tuple[str, str], recipe: str) -> None:
    """Set the dates of the files of one series, and UIDs that depend on their content alone."""
    for dataset in (file.dataset for file in files):
        for kind in ("Content", "Series", "InstanceCreation"):
            setattr(dataset, f"{kind}Date", date_time[0])
            setattr(dataset, f"{kind}Time", date_time[1])
        for item in dataset.get("ContributingEquipmentSequence") or []:
            item.ContributionDateTime = "".join(date_time)
        dataset.ContentCreatorName = ""  # type 2: must be present; no person drew the segments
        _set_uids(dataset, _uid("series"), _uid("instance"), _uid("dimensions"))
    contents = [_digest(file) for file in files]
    series = _uid("series", recipe, *contents)
    for file, content in zip(files, contents, strict=True):
        instance = _uid("instance", recipe, series, content)
        _set_uids(file.dataset, series, instance, _uid("dimensions", recipe, series, content))


def _set_uids(dataset: Dataset, series: str, instance: str, dimensions: str) -> None:
    dataset.SeriesInstanceUID = series
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = instance
    for item in (*dataset.DimensionOrganizationSequence, *dataset.DimensionIndexSequence):
        item.DimensionOrganizationUID = dimensions


def _digest(file: SegFile) -> str:
    """Return the SHA-256 of a file's content."""
    syntax = file.dataset.file_meta.TransferSyntaxUID
    digest = hashlib.sha256(syntax.encode() + encode_dataset(file.dataset))
    for chunk in file.tail:
        digest.update(chunk)
    return digest.hexdigest()


def _uid(*texts: str) -> str:
    """Return a UID made of a 128-bit hash of texts (PS3.5 B.2: 2.25 and an integer)."""
    digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=16, person=b"scanloom")
    return f"2.25.{int.from_bytes(digest.digest(), 'big')}"


def _now() -> tuple[str, str]:
    """Return the current local date and time (DA, TM)."""
    now = datetime.now().astimezone()
    return now.strftime("%Y%m%d"), now.strftime("%H%M%S.%f")


def _long_string(text: str) -> str:
    """Truncate a text to the 64 characters of an LO."""
    return text[:64]
