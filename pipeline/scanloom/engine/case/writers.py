"""Files of a case: one writer for each kind, with its read-back and its memory.

A new writer is a module in `scanloom.io` that writes its files, a check in
`scanloom.io.readback.case`, and one entry of `WRITERS`. If it runs only on request, its name is
added to `scanloom.core.options.Extra`; the command line and the schema of workflows follow from
that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from scanloom.cards.card import ModelCard
from scanloom.core import Case, Flag, Grid, Measurement, Outputs, Segmentation
from scanloom.core.options import Extra
from scanloom.io.output import file_names
from scanloom.io.output.measurements import write_measurements
from scanloom.io.readback.case import (
    Counts,
    check_dicom_segs,
    check_image,
    check_label_maps,
    check_masks,
    check_measurements,
    check_names,
)
from scanloom.io.scan import DicomSource, Scan
from scanloom.io.system.parallel import run_parallel
from scanloom.io.write.nifti import write_image
from scanloom.io.write.results import write_label_maps, write_masks

PREVIEW = "preview.png"

_PICTURE_BYTES = 64 * 1024**2
"""The preview with its fonts."""
_FRAME_GROUP_BYTES = 32 * 1024
"""Functional groups of a DICOM SEG frame as pydicom holds them."""
_STRUCTURE_MM = 200.0
"""Extent of a structure along the stack, on average over a whole-body model."""
_LONG_STRUCTURES = 8
"""Number of structures that may each extend through the whole stack."""


@dataclass(frozen=True, eq=False)
class CaseContent:
    """Content of a case folder, which writers write and read back.

    Parameters
    ----------
    case : Case
        Outputs, and the recipe that DICOM UIDs are derived from.
    scan : Scan
        Volume and source.
    segmentations : sequence of Segmentation
        One for each model, with the requested structures.
    measurements : sequence of Measurement
        Of all structures.
    flags : sequence of Flag
        Of the case.
    counts : dict
        Voxels of each (model, label), filled in when the label maps are read back.
    """

    case: Case
    scan: Scan
    segmentations: Sequence[Segmentation]
    measurements: Sequence[Measurement] = ()
    flags: Sequence[Flag] = ()
    counts: Counts = field(default_factory=dict)

    @property
    def models(self) -> list[str]:
        """Names of the models, in order."""
        return [s.model for s in self.segmentations]


def _nothing(*_: object) -> None:
    """Read nothing back."""


def _no_bytes(*_: object) -> int:
    return 0


@dataclass(frozen=True)
class Writer:
    """Writer of one kind of file.

    Parameters
    ----------
    name : str
        A name of `Extra` if it runs only on request.
    expected : callable
        Return the relative names of the files that it writes for a content; none if it does not
        apply.
    write : callable
        Write them into the folder. Writers run concurrently.
    read_back : callable
        Compare them with the content; raise WRITE_MISMATCH at the first difference. Runs in the
        order of `WRITERS`.
    memory : callable
        Estimate the bytes that it holds, from the scan's grid, the models' cards and the outputs.
    """

    name: str
    expected: Callable[[CaseContent], set[str]]
    write: Callable[[Path, CaseContent], None]
    read_back: Callable[[Path, CaseContent], None] = _nothing
    memory: Callable[[Grid, Sequence[ModelCard], Outputs], int] = _no_bytes


def writers_of(outputs: Outputs) -> tuple[Writer, ...]:
    """Return the writers that run for these outputs."""
    optional = set(get_args(Extra)) - set(outputs.also)
    return tuple(writer for writer in WRITERS if writer.name not in optional)


def write_files(folder: Path, content: CaseContent, writers: Sequence[Writer]) -> None:
    """Write all files of a case, each writer in a thread of its own."""
    active = [writer for writer in writers if writer.expected(content)]
    run_parallel(*(_task(writer, folder, content) for writer in active))


def read_back(folder: Path, content: CaseContent, writers: Sequence[Writer]) -> None:
    """Compare all files of a case with their content.

    Raises
    ------
    ScanError
        WRITE_MISMATCH at the first difference.
    """
    expected = [(writer, writer.expected(content)) for writer in writers]
    check_names(folder, {name for _, files in expected for name in files})
    for writer, files in expected:
        if files:
            writer.read_back(folder, content)


def estimate_writers(grid: Grid, cards: Sequence[ModelCard], outputs: Outputs) -> int:
    """Return the bytes that the writers of a case hold together."""
    copy = grid.shape[0] * grid.shape[1] * grid.shape[2] if grid.sheared else 0
    return copy + sum(writer.memory(grid, cards, outputs) for writer in writers_of(outputs))


def _task(writer: Writer, folder: Path, content: CaseContent) -> Callable[[], None]:
    return lambda: writer.write(folder, content)


def _stems(segmentation: Segmentation) -> tuple[file_names.Stem, ...]:
    """Return the stems of file names: a sheared scan has a rectangular copy."""
    return ("segmentation", "segmentation_rect") if segmentation.grid.sheared else ("segmentation",)


# --- label maps -----------------------------------------------------------------------------------


def _label_map_files(content: CaseContent) -> set[str]:
    files = {
        file_names.label_map_name(stem, s.model, content.models, n)
        for s in content.segmentations
        for stem in _stems(s)
        for n in range(len(s.layers))
    }
    return {*files, file_names.SEGMENTS}


def _write_label_maps(folder: Path, content: CaseContent) -> None:
    write_label_maps(folder, content.segmentations, content.scan)


def _read_label_maps(folder: Path, content: CaseContent) -> None:
    content.counts.update(check_label_maps(folder, content.segmentations, content.scan.source))


# --- measurements ---------------------------------------------------------------------------------


def _measurement_files(_: CaseContent) -> set[str]:
    return {file_names.MEASUREMENTS_CSV, file_names.MEASUREMENTS_JSON}


def _write_measurements(folder: Path, content: CaseContent) -> None:
    write_measurements(folder, content.measurements)


def _read_measurements(folder: Path, content: CaseContent) -> None:
    check_measurements(folder, content.counts, content.scan.volume)


# --- DICOM SEG ------------------------------------------------------------------------------------


def _seg_files(content: CaseContent) -> set[str]:
    if not isinstance(content.scan.source, DicomSource) or not content.scan.source.can_refer:
        return set()
    labelmap = content.case.outputs.seg == "labelmap"
    return {
        file_names.seg_name(stem, s.model, content.models, n)
        for s in content.segmentations
        for stem in _stems(s)
        for n in range(len(s.layers) if labelmap else 1)
    }


def _write_segs(folder: Path, content: CaseContent) -> None:
    from scanloom.io.write.dicom_seg import write_segs

    if isinstance(content.scan.source, DicomSource):
        for segmentation in content.segmentations:
            write_segs(folder, segmentation, content.scan.source, content.case, content.models)


def _read_segs(folder: Path, content: CaseContent) -> None:
    if isinstance(content.scan.source, DicomSource):
        check_dicom_segs(folder, content.segmentations, content.scan.source, content.case)


def _seg_bytes(grid: Grid, cards: Sequence[ModelCard], outputs: Outputs) -> int:
    """Return the bytes of the frames of one model."""
    plane, slices = grid.shape[0] * grid.shape[1], grid.shape[2]
    if outputs.seg == "labelmap":
        return plane * slices // 4 + slices * _FRAME_GROUP_BYTES  # RLE
    frames = max((_frames(grid, card) for card in cards), default=0)
    return frames * (plane // 8 + _FRAME_GROUP_BYTES)


def _frames(grid: Grid, card: ModelCard) -> int:
    """Return the likely number of frames of a BINARY DICOM SEG: slices of each structure."""
    count, slices = len(card.structures), grid.shape[2]
    extent = min(slices, max(1, round(_STRUCTURE_MM / grid.spacing[2])))
    return min(count, _LONG_STRUCTURES) * slices + max(0, count - _LONG_STRUCTURES) * extent


# --- preview --------------------------------------------------------------------------------------


def _preview_files(content: CaseContent) -> set[str]:
    return set() if Flag.BURNED_IN in content.flags else {PREVIEW}


def _write_preview(folder: Path, content: CaseContent) -> None:
    from scanloom.review.preview.preview import draw_preview

    draw_preview(
        content.scan.volume,
        content.segmentations,
        content.measurements,
        content.flags,
        folder / PREVIEW,
    )


def _preview_bytes(*_: object) -> int:
    return _PICTURE_BYTES


# --- on request -----------------------------------------------------------------------------------


def _image_files(_: CaseContent) -> set[str]:
    return {file_names.IMAGE}


def _write_image(folder: Path, content: CaseContent) -> None:
    write_image(content.scan.volume, content.scan.source, folder / file_names.IMAGE)


def _read_image(folder: Path, content: CaseContent) -> None:
    check_image(folder, content.scan)


def _mask_files(content: CaseContent) -> set[str]:
    return {
        file_names.mask_name(structure.label, s.model, content.models)
        for s in content.segmentations
        for structure in s.structures
    }


def _write_masks(folder: Path, content: CaseContent) -> None:
    write_masks(folder, content.segmentations, content.scan)


def _read_masks(folder: Path, content: CaseContent) -> None:
    check_masks(folder, content.segmentations, content.scan.source)


def _mask_bytes(grid: Grid, *_: object) -> int:
    return grid.shape[0] * grid.shape[1] * grid.shape[2]


WRITERS = (
    Writer("dicom_seg", _seg_files, _write_segs, _read_segs, _seg_bytes),
    Writer("label_maps", _label_map_files, _write_label_maps, _read_label_maps),
    Writer("masks", _mask_files, _write_masks, _read_masks, _mask_bytes),
    Writer("image", _image_files, _write_image, _read_image),
    Writer("measurements", _measurement_files, _write_measurements, _read_measurements),
    Writer("preview", _preview_files, _write_preview, memory=_preview_bytes),
)
"""All writers. Measurements are read back after the label maps, which they are compared with."""
