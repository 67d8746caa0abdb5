"""Files of a case: one writer for each kind, with its read-back and its memory.

A new writer of a file on request takes three edits: a module in `scanloom.io.extras` that names,
writes and checks the file, its `Writer` in `WRITERS`, and its name and description in `EXTRAS` of
`scanloom.options`. Command line, workflow schema and recipes follow from `EXTRAS`. A writer that
always runs is in `WRITERS` only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from scanloom.cards.card import CONTRAST, HEAD, ModelCard, shared_modality
from scanloom.cards.graph import known_errors
from scanloom.core import (
    Flag,
    Grid,
    Outputs,
    Reason,
    ScanError,
    Segmentation,
    Volume,
)
from scanloom.engine.machine.lean_imports import show_modules
from scanloom.io.extras.nifti import IMAGE, MASKS, UNCERTAINTY
from scanloom.io.extras.radiomics import RADIOMICS
from scanloom.io.extras.rtstruct import RTSTRUCT
from scanloom.io.extras.segnrrd import SEGNRRD
from scanloom.io.extras.sr import SR
from scanloom.io.extras.surface import SURFACE
from scanloom.io.output import file_names
from scanloom.io.output.case_folder import CaseContent, Writer
from scanloom.io.output.measurements import write_measurements
from scanloom.io.readback.case import (
    check_dicom_segs,
    check_label_maps,
    check_measurements,
    check_names,
)
from scanloom.io.scan import DicomSource
from scanloom.io.write.nifti import write_label_maps
from scanloom.options import EXTRAS

_PICTURE_BYTES = 112 * 1024**2
"""The preview with its fonts, and the cells of its shaded views."""
_FRAME_GROUP_BYTES = 32 * 1024
"""Functional groups of a DICOM SEG frame as pydicom holds them."""
_STRUCTURE_MM = 200.0
"""Extent of a structure along the stack, on average over a whole-body model."""
_LONG_STRUCTURES = 8
"""Number of structures that may each extend through the whole stack."""


def writers_of(outputs: Outputs, left_out: Collection[str] = ()) -> tuple[Writer, ...]:
    """Return the writers that run for these outputs, without those whose names are `left_out`."""
    excluded = {*left_out, *(EXTRAS.keys() - set(outputs.also))}
    return tuple(writer for writer in WRITERS if writer.name not in excluded)


def check_packages(outputs: Outputs) -> None:
    """Check that the packages are installed that the writers for these outputs need.

    Raises
    ------
    ScanError
        NOT_INSTALLED, with the command that installs them.
    """
    for writer in writers_of(outputs):
        show_modules(*writer.modules)
        if any(find_spec(module) is None for module in writer.modules):
            detail = (
                f"{EXTRAS[writer.name]} ({writer.name}) need: pip install 'scanloom[{writer.name}]'"
            )
            raise ScanError(Reason.NOT_INSTALLED, detail)


def write_files(folder: Path, content: CaseContent, writers: Sequence[Writer]) -> None:
    """Write all files of a case, each writer in a thread of its own.

    A writer that reads the files of another, which is before it in `writers`, waits for that one.
    The error of a failed writer, the first in their order, is raised when all have ended.
    """
    active = [writer for writer in writers if writer.expected(content)]
    show_modules(*(module for writer in active for module in writer.modules))
    futures: dict[str, Future[None]] = {}
    with ThreadPoolExecutor(max(1, len(active))) as pool:
        for writer in active:
            before = futures.get(writer.after)
            futures[writer.name] = pool.submit(_write_after, before, writer, folder, content)
    for future in futures.values():
        future.result()


def _write_after(
    before: Future[None] | None, writer: Writer, folder: Path, content: CaseContent
) -> None:
    if before is not None:
        before.result()
    writer.write(folder, content)


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


def _read_label_maps(folder: Path, content: CaseContent) -> None:
    content.counts.update(check_label_maps(folder, content.segmentations, content.scan.source))


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
    if Flag.BURNED_IN in content.flags:
        return set()
    return {file_names.PREVIEW, file_names.THUMBNAIL}


def _write_preview(folder: Path, content: CaseContent) -> None:
    from scanloom.review.preview.content import About, choose_content
    from scanloom.review.preview.page import draw_page, draw_thumbnail

    errors = known_errors(content.cards, content.case.relations, content.present)
    about = About(
        case_id=content.case.id,
        assumed_modality=shared_modality(content.cards),
        # the one to expect first of each model: all would take more room than the legend
        limitations=tuple(texts[0] for texts in errors.values() if texts),
    )
    drawn = choose_content(content.scan.volume, content.segmentations, content.measurements, about)
    draw_page(drawn, content.flags, folder / file_names.PREVIEW)
    draw_thumbnail(drawn, folder / file_names.THUMBNAIL)


def conditions_of(volume: Volume, cards: Sequence[ModelCard]) -> frozenset[str]:
    """Return `HEAD` and `CONTRAST` if known errors of models depend on them, and a CT has them."""
    conditions = {each.where for card in cards for each in card.limitations} & {HEAD, CONTRAST}
    if not conditions:
        return frozenset()
    from scanloom.review.preview.slicing import View, find_body, is_in_hounsfield

    hounsfield = is_in_hounsfield(volume, shared_modality(cards))
    body = find_body(volume, View(volume.grid), hounsfield)
    met = {where for where, here in ((HEAD, body.head), (CONTRAST, body.enhanced)) if here}
    return frozenset(met & conditions)


WRITERS = (
    Writer("dicom_seg", _seg_files, _write_segs, _read_segs, _seg_bytes),
    Writer(
        "label_maps",
        _label_map_files,
        lambda folder, content: write_label_maps(folder, content.segmentations, content.scan),
        _read_label_maps,
    ),
    MASKS,
    IMAGE,
    UNCERTAINTY,
    SEGNRRD,
    RTSTRUCT,
    SR,
    SURFACE,
    Writer(
        "measurements",
        lambda _: {file_names.MEASUREMENTS_CSV, file_names.MEASUREMENTS_JSON},
        lambda folder, content: write_measurements(folder, content.measurements),
        lambda folder, content: check_measurements(
            folder, content.counts, content.scan.volume, content.case.relations
        ),
    ),
    RADIOMICS,
    Writer("preview", _preview_files, _write_preview, memory=lambda *_: _PICTURE_BYTES),
)
"""All writers. Measurements and features are read back after the label maps, with which they are
compared; a writer is after the one that it waits for."""
