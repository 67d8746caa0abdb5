"""Writes a mask for each structure, `split/<structure>.nii.gz`, and reads them back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scanloom.core import Grid, Layer
from scanloom.io.output.case_folder import CaseContent, Writer
from scanloom.io.output.file_names import mask_name
from scanloom.io.readback.nifti import check_voxels
from scanloom.io.write.nifti import write_mask


def _masks(content: CaseContent) -> Iterator[tuple[str, Grid, Layer, int]]:
    """Yield the file name, grid, layer and structure number of each mask."""
    for segmentation in content.segmentations:
        for layer in segmentation.layers:
            for structure in layer.structures:
                name = mask_name(structure.label, segmentation.model, content.models)
                yield name, segmentation.grid, layer, structure.number


def _expected(content: CaseContent) -> set[str]:
    return {name for name, *_ in _masks(content)}


def _write(folder: Path, content: CaseContent) -> None:
    (folder / "split").mkdir(exist_ok=True)
    for name, grid, layer, number in _masks(content):
        write_mask(layer, number, grid, content.scan.source, folder / name)


def _read_back(folder: Path, content: CaseContent) -> None:
    for name, grid, layer, number in _masks(content):
        check_voxels(folder, name, layer.labels == number, grid, content.scan.source)


def _memory(grid: Grid, *_: object) -> int:
    """Return the bytes of one mask."""
    return grid.shape[0] * grid.shape[1] * grid.shape[2]


MASKS = Writer("masks", _expected, _write, _read_back, _memory)
