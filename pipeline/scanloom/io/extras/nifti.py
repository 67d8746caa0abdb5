"""NIfTI files on request: the scan as it was read, a mask for each structure, uncertainty maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import ModelCard
from scanloom.core import Grid, Outputs
from scanloom.core.segmentation import UNCERTAINTY_STEPS
from scanloom.io.output.case_folder import CaseContent, Writer
from scanloom.io.output.file_names import SCAN_COPY, mask_name, uncertainty_name
from scanloom.io.readback.nifti import check_voxels
from scanloom.io.write.nifti import LABEL, write_nifti

Image = tuple[str, Callable[[], NDArray[Any]], Grid]
"""File name, voxels (I, J, K), which are made when they are needed, and their grid."""


def _writer(
    name: str,
    images: Callable[[CaseContent], Iterator[Image]],
    slope: float = 1.0,
    bytes_per_voxel: int = 0,
    intent: int = 0,
) -> Writer:
    """Return the writer of some images; voxels mean `slope` times their number.

    An image takes `bytes_per_voxel` of memory, besides the arrays of the case; `intent` as of
    `write_nifti`.
    """

    def expected(content: CaseContent) -> set[str]:
        return {file for file, *_ in images(content)}

    def write(folder: Path, content: CaseContent) -> None:
        for file, voxels, grid in images(content):
            (folder / file).parent.mkdir(exist_ok=True)
            write_nifti(voxels(), grid, content.scan.source, folder / file, slope, intent)

    def read_back(folder: Path, content: CaseContent) -> None:
        for file, voxels, grid in images(content):
            check_voxels(folder, file, voxels(), grid, content.scan.source, slope=slope)

    def memory(grid: Grid, cards: Sequence[ModelCard], outputs: Outputs) -> int:
        return math.prod(grid.shape) * bytes_per_voxel

    return Writer(name, expected, write, read_back, memory)


def _image(content: CaseContent) -> Iterator[Image]:
    volume = content.scan.volume
    yield SCAN_COPY, lambda: volume.array, volume.grid


def _masks(content: CaseContent) -> Iterator[Image]:
    for segmentation in content.segmentations:
        for layer in segmentation.layers:
            for structure in layer.structures:
                name = mask_name(structure.label, segmentation.model, content.models)
                mask = partial(np.equal, layer.labels, structure.number)
                yield name, mask, segmentation.grid


def _uncertainty(content: CaseContent) -> Iterator[Image]:
    for segmentation in content.segmentations:
        maps = segmentation.uncertainty.maps() if segmentation.uncertainty is not None else ()
        for kind, values in maps:
            name = uncertainty_name(kind, segmentation.model, content.models)
            yield name, partial(np.asarray, values), segmentation.grid


IMAGE = _writer("image", _image)
MASKS = _writer("masks", _masks, bytes_per_voxel=1, intent=LABEL)
UNCERTAINTY = _writer("uncertainty", _uncertainty, 1 / UNCERTAINTY_STEPS)
