"""Measurements, files and pictures of a segmentation in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scanloom.core import Flag, Measurement, Segmentation, Volume
from scanloom.core.errors import check_type

_SAME_POSITION_MM = 0.01


def measure(segmentation: Segmentation, volume: Volume) -> tuple[Measurement, ...]:
    """Return the measurements of all structures, as a case has them."""
    from scanloom.cards.check import check_measurement
    from scanloom.ops.measure import measure
    from scanloom.ops.uncertainty import add_uncertainty

    _check_scan(segmentation, volume)
    ranges, labels = segmentation.reference_ranges, segmentation.labels
    flags = _flags(segmentation, volume)
    return tuple(
        replace(m, flags=(*m.flags, *check_measurement(m, ranges, labels), *flags))
        for m in add_uncertainty(measure(segmentation, volume), segmentation)
    )


def preview(segmentation: Segmentation, volume: Volume, path: Path) -> None:
    """Draw the preview of a scan with its structures."""
    from scanloom.review.preview.page import draw_preview

    if path.suffix.lower() != ".png":
        raise ValueError(f"the file must end in .png, got {path.name!r}")
    _check_scan(segmentation, volume)
    flags = _flags(segmentation, volume)
    draw_preview(volume, [segmentation], measure(segmentation, volume), flags, path)


def _check_scan(segmentation: Segmentation, volume: Volume) -> None:
    """Refuse another scan than the one that was segmented, as far as its grid tells."""
    check_type(
        volume, Volume, "volume must be the scan that was segmented, as load_volume reads it"
    )
    if not segmentation.grid.matches(volume.grid, _SAME_POSITION_MM):
        raise ValueError("the volume has another grid than the scan that was segmented")


def _flags(segmentation: Segmentation, volume: Volume) -> tuple[Flag, ...]:
    return tuple(dict.fromkeys((*volume.flags, *segmentation.flags)))


def save(segmentation: Segmentation, path: Path, label: str | None) -> None:
    """Write a label map, or the mask of a structure, as NIfTI."""
    from scanloom.io.scan import GridOnlySource
    from scanloom.io.write.nifti import LABEL, write_nifti

    if not path.name.endswith(".nii.gz"):
        raise ValueError(f"the file must end in .nii.gz, got {path.name!r}")
    voxels = segmentation.single_layer().labels if label is None else segmentation[label]
    write_nifti(voxels, segmentation.grid, GridOnlySource(), path, intent=LABEL)
