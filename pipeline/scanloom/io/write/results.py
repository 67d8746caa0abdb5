"""Label maps of a case in NIfTI, and `segments.json`, which names their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scanloom.core import Code, Segmentation, Structure
from scanloom.io.output import file_names
from scanloom.io.output.json_file import write_document
from scanloom.io.scan import GridOnlySource, Scan
from scanloom.io.write.nifti import LABEL, write_nifti
from scanloom.ops.rectify import rectangular_grid, rectangular_labels


def write_label_maps(folder: Path, segmentations: Sequence[Segmentation], scan: Scan) -> None:
    """Write the label maps of all models, and `segments.json`, into a case folder.

    Parameters
    ----------
    folder : Path
        The case folder being built.
    segmentations : sequence of Segmentation
        One for each model, with the requested structures.
    scan : Scan
        The scan whose geometry they have.
    """
    models = [s.model for s in segmentations]
    write_document(folder / file_names.SEGMENTS, segments_json(segmentations))
    for segmentation in segmentations:
        model, grid = segmentation.model, segmentation.grid
        for n, layer in enumerate(segmentation.layers):
            name = file_names.label_map_name("segmentation", model, models, n)
            write_nifti(layer.labels, grid, scan.source, folder / name, intent=LABEL)
            if grid.sheared:
                labels, rectangular = rectangular_labels(layer.labels, grid), rectangular_grid(grid)
                name = file_names.label_map_name("segmentation_rect", model, models, n)
                write_nifti(labels, rectangular, GridOnlySource(), folder / name, intent=LABEL)


def segments_json(segmentations: Sequence[Segmentation]) -> dict[str, Any]:
    """Return the structures of each label map, by their numbers."""
    models = [s.model for s in segmentations]
    return {
        "files": [
            {
                "file": file_names.label_map_name("segmentation", s.model, models, n),
                "model": s.model,
                "structures": [_structure(structure) for structure in layer.structures],
            }
            for s in segmentations
            for n, layer in enumerate(s.layers)
        ]
    }


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
