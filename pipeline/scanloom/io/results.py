"""All result files of a case: label maps, their legend, DICOM SEG, and what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scanloom.core import Case, Code, Flag, Layer, Segmentation, Structure
from scanloom.io import names
from scanloom.io.beside import run_beside
from scanloom.io.json_file import write_json
from scanloom.io.scan import DicomSource, ItkSource, Scan
from scanloom.io.write_nifti import write_image, write_label_map, write_mask
from scanloom.ops.rectangular import rectangular, rectangular_labels


def write_results(
    folder: Path,
    segmentations: Sequence[Segmentation],
    scan: Scan,
    case: Case,
    flags: Sequence[Flag],
) -> None:
    """Write everything that holds voxels, and `segments.json`, into a case folder.

    Parameters
    ----------
    folder : Path
        Being built; its name is not looked at.
    segmentations : sequence of Segmentation
        One a model, with the structures that were asked for.
    scan : Scan
        Whose geometry they have.
    case : Case
        What is wanted, and the recipe that goes into the UIDs.
    flags : sequence of Flag
        Of the case; with SEG_NOT_POSSIBLE no DICOM SEG is written.
    """
    models = [s.model for s in segmentations]

    def label_maps() -> None:
        for segmentation in segmentations:
            _write_label_maps(folder, segmentation, scan, models)
            if case.outputs.split:
                _write_masks(folder, segmentation, scan, models)
        if case.outputs.image:
            write_image(scan.volume, scan.source, folder / names.IMAGE)

    def segs() -> None:
        if isinstance(scan.source, DicomSource) and Flag.SEG_NOT_POSSIBLE not in flags:
            from scanloom.io.write_seg import write_segs

            for segmentation in segmentations:
                write_segs(folder, segmentation, scan.source, case, models)

    write_json(folder / names.SEGMENTS, segments_json(segmentations))
    run_beside(segs, label_maps)


def segments_json(segmentations: Sequence[Segmentation]) -> dict[str, Any]:
    """Return which number is what in which label map."""
    models = [s.model for s in segmentations]
    return {
        "schema": 1,
        "files": [
            {
                "file": names.label_map_name("segmentation", s.model, models, n),
                "model": s.model,
                "structures": [_structure(structure) for structure in layer.structures],
            }
            for s in segmentations
            for n, layer in enumerate(s.layers)
        ],
    }


def _write_label_maps(
    folder: Path, segmentation: Segmentation, scan: Scan, models: Sequence[str]
) -> None:
    for n, layer in enumerate(segmentation.layers):
        name = names.label_map_name("segmentation", segmentation.model, models, n)
        write_label_map(layer, segmentation.grid, scan.source, folder / name)
        if segmentation.grid.sheared:
            labels = rectangular_labels(layer.labels, segmentation.grid)
            name = names.label_map_name("segmentation_rect", segmentation.model, models, n)
            grid = rectangular(segmentation.grid)
            write_label_map(Layer(labels, layer.structures), grid, ItkSource(), folder / name)


def _write_masks(
    folder: Path, segmentation: Segmentation, scan: Scan, models: Sequence[str]
) -> None:
    (folder / "split").mkdir(exist_ok=True)
    for layer in segmentation.layers:
        for structure in layer.structures:
            path = folder / names.split_name(structure.label, segmentation.model, models)
            write_mask(layer, structure.number, segmentation.grid, scan.source, path)


def _structure(structure: Structure) -> dict[str, Any]:
    return {
        "number": structure.number,
        "label": structure.label,
        "name": structure.name,
        "category": _code(structure.category),
        "type": _code(structure.type),
        "laterality": _code(structure.laterality) if structure.laterality else None,
        "color": list(structure.color),
        "experimental": structure.experimental,
    }


def _code(code: Code) -> dict[str, str]:
    return {"value": code.value, "scheme": code.scheme, "meaning": code.meaning}
