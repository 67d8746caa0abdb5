"""Measurements, files and pictures of a segmentation in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scanloom.core import Flag, Measurement, Segmentation, Volume


def measure(segmentation: Segmentation, volume: Volume) -> tuple[Measurement, ...]:
    """Return the measurements of all structures, as a case has them."""
    from scanloom.cards.check import check_measurement
    from scanloom.ops.measure import measure
    from scanloom.ops.uncertainty import add_uncertainty

    ranges, labels = segmentation.reference_ranges, segmentation.labels
    flags = _flags(segmentation, volume)
    return tuple(
        replace(m, flags=(*m.flags, *check_measurement(m, ranges, labels), *flags))
        for m in add_uncertainty(measure(segmentation, volume), segmentation)
    )


def preview(segmentation: Segmentation, volume: Volume, path: Path) -> None:
    """Draw the preview of a scan with its structures."""
    from scanloom.review.preview.page import draw_preview

    flags = _flags(segmentation, volume)
    draw_preview(volume, [segmentation], measure(segmentation, volume), flags, path)


def _flags(segmentation: Segmentation, volume: Volume) -> tuple[Flag, ...]:
    return tuple(dict.fromkeys((*volume.flags, *segmentation.flags)))


def save(segmentation: Segmentation, path: Path, label: str | None) -> None:
    """Write a label map, or the mask of a structure, as NIfTI."""
    from scanloom.io.scan import GridOnlySource
    from scanloom.io.write.nifti import LABEL, write_nifti

    if not path.name.endswith(".nii.gz"):
        raise ValueError(f"the file must end in .nii.gz, got {path.name!r}")
    if label is None:
        voxels = segmentation.single_layer().labels
    else:
        voxels = segmentation.layer_of(label).labels == segmentation.structure(label).number
    write_nifti(voxels, segmentation.grid, GridOnlySource(), path, intent=LABEL)
