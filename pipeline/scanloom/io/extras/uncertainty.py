"""Writes maps of uncertainty, `entropy.nii.gz` and `disagreement.nii.gz`, and reads them back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from scanloom.core import Grid
from scanloom.core.segmentation import UNCERTAINTY_STEPS
from scanloom.io.output.case_folder import CaseContent, Writer
from scanloom.io.output.file_names import uncertainty_name
from scanloom.io.readback.nifti import check_voxels
from scanloom.io.write.nifti import write_scaled


def _maps(content: CaseContent) -> Iterator[tuple[str, NDArray[Any], Grid]]:
    """Yield file name, array and grid of each map."""
    for segmentation in content.segmentations:
        if segmentation.uncertainty is not None:
            for kind, values in segmentation.uncertainty.maps():
                name = uncertainty_name(kind, segmentation.model, content.models)
                yield name, values, segmentation.grid


def _expected(content: CaseContent) -> set[str]:
    return {name for name, *_ in _maps(content)}


def _write(folder: Path, content: CaseContent) -> None:
    for name, values, grid in _maps(content):
        write_scaled(values, 1 / UNCERTAINTY_STEPS, grid, content.scan.source, folder / name)


def _read_back(folder: Path, content: CaseContent) -> None:
    for name, values, grid in _maps(content):
        check_voxels(folder, name, values, grid, content.scan.source, slope=1 / UNCERTAINTY_STEPS)


UNCERTAINTY = Writer("uncertainty", _expected, _write, _read_back)
