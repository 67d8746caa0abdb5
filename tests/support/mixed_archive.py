"""An archive of tiny scans of many kinds in many folders, so that its index has many parts."""

from __future__ import annotations

import shutil
from pathlib import Path

import nibabel as nib
import numpy as np

from support import engine_models as em
from support.write_dicom import Words, noise, write_series

FIRST = 3000
"""The brightest voxel of scan n is FIRST + n."""


def draw_mixed_archive(root: Path, scans: int) -> None:
    """Draw scans of which each has a folder, some also a second one far from it."""
    for n in range(scans):
        _draw(root / f"{n:03d}", root / f"{'xyz'[n % 3]} {n:03d}", n)


def _draw(here: Path, elsewhere: Path, n: int) -> None:
    kind, brightest, study = n % 12, FIRST + n, f"study {n}"
    if kind == 1:  # a series of two parts
        _move(_series(here, brightest, slices=6)[3:], elsewhere)
    elif kind == 2:  # a file of its study that can't be read
        _series(here / "1", brightest, study=study)
        _damage(_series(here / "2", brightest, name=f"damaged {n}", study=study))
    elif kind == 3:  # one between the two folders of a series
        files = _series(here / "1", brightest, slices=6)
        _move(files[3:], here / "3")
        (here / "2").mkdir()
        (here / "2" / files[0].name).write_bytes(files[0].read_bytes()[:700])
    elif kind == 4:  # another series of the same id
        _series(here, brightest)
        _series(elsewhere, brightest + 1000, name=str(brightest))
    elif kind == 5:  # one of another study, with the same UID
        _series(here, brightest)
        _series(elsewhere, brightest + 1000, name=str(brightest), study="another study")
    elif kind == 6:
        _volume(here / "one.nii", brightest)
        _volume(elsewhere / "copy.nii", brightest)
    elif kind == 7:
        _series(here, em.RAISE, name=f"raises {n}")
    elif kind == 8:
        _series(here, brightest)[1].unlink()
    elif kind == 9:
        _series(here, brightest, modality="MR" if n % 24 == 9 else "CT")
        (here / "notes.txt").write_text("no image")
        (here / "junk.dcm").write_bytes(b"\0" * 128 + b"DICM" + b"\0" * 40)
    elif kind == 10:
        _series(here, brightest)
        shutil.copytree(here, elsewhere)
    else:
        _series(here, brightest)


def _series(
    folder: Path,
    brightest: int,
    *,
    name: str = "",
    study: str = "",
    slices: int = 4,
    modality: str = "CT",
) -> list[Path]:
    stored = noise((12, 10, slices), brightest) % 900
    stored[3:6, 3:6, 1 : slices - 1] = brightest + 1024
    seed = name or str(brightest)
    # No pictures, which take most of the time
    words = Words(modality, seed, study or f"study of {seed}", {"BurnedInAnnotation": "YES"})
    return write_series(folder, stored, words=words)


def _volume(path: Path, brightest: int) -> None:
    values = np.full((12, 10, 4), -1000, np.int16)
    values[3:6, 3:6, 1:3] = brightest
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(values, np.eye(4)), path)


def _move(files: list[Path], folder: Path) -> None:
    folder.mkdir(parents=True)
    for file in files:
        file.rename(folder / file.name)


def _damage(files: list[Path]) -> None:
    for file in files[1:]:
        file.unlink()
    files[0].write_bytes(files[0].read_bytes()[:700])
