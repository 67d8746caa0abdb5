"""Writes the scan as it was read, `image.nii.gz`, and reads it back."""

from __future__ import annotations

from pathlib import Path

from scanloom.io.output.case_folder import CaseContent, Writer
from scanloom.io.readback.nifti import check_voxels
from scanloom.io.write.nifti import write_image

_FILE = "image.nii.gz"


def _expected(_: CaseContent) -> set[str]:
    return {_FILE}


def _write(folder: Path, content: CaseContent) -> None:
    write_image(content.scan.volume, content.scan.source, folder / _FILE)


def _read_back(folder: Path, content: CaseContent) -> None:
    volume = content.scan.volume
    check_voxels(folder, _FILE, volume.array, volume.grid, content.scan.source)


IMAGE = Writer("image", _expected, _write, _read_back)
