"""The study that all benchmarks share, drawn once into the cache: DICOM, NIfTI and bundles."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from meter import cache
from phantom import draw_labels, draw_scan, phantom, write_dicom, write_nifti

SHAPE = (512, 512, 300)
SPACING = (0.7, 0.7, 1.0)  # mm
STRUCTURES = 25


@dataclass(frozen=True)
class Study:
    """The folder of a drawn scan and the bundles that label it."""

    folder: Path

    @property
    def dicom(self) -> Path:
        """Folder of uncompressed slices."""
        return self.folder / "dicom"

    @property
    def nifti(self) -> Path:
        """The same scan, compressed."""
        return self.folder / "scan.nii.gz"

    def bundle(self, back: str) -> Path:
        """Return the bundle whose "scores" or "labels" are brought back."""
        return self.folder / f"ellipsoids-{back}"


def study(slices: int = SHAPE[2], structures: int = STRUCTURES, across: int = SHAPE[0]) -> Study:
    """Return the study of so many slices, each of `across` x `across` pixels, and structures.

    It is drawn if it is not in the cache.
    """
    from model import save_bundle

    name = f"{slices}-slices-{structures}-structures"
    folder = cache("studies", name if across == SHAPE[0] else f"{across}-pixels-{name}")
    drawn_study = Study(folder)
    if (folder / "whole").is_file():
        for back in ("scores", "labels"):  # anew: cheap, and the network may be another
            save_bundle(drawn_study.bundle(back), structures, back)
        return drawn_study
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shape = (across, across, slices)
    extent = tuple(n * s for n, s in zip(shape, SPACING, strict=True))
    drawn = phantom((extent[0], extent[1], extent[2]), structures)
    scan = draw_scan(drawn, draw_labels(drawn, SPACING, shape))
    write_dicom(scan, SPACING, drawn_study.dicom)
    write_nifti(scan, SPACING, drawn_study.nifti)
    for back in ("scores", "labels"):
        save_bundle(drawn_study.bundle(back), structures, back)
    (folder / "whole").touch()
    return drawn_study
