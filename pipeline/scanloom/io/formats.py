"""The formats of volume files: how each is known, and what reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from scanloom.core import Grid
from scanloom.io.itk import ITK_SUFFIXES, itk_files, itk_outline, read_itk
from scanloom.io.mgh import MGH_SUFFIXES, mgh_files, mgh_outline, read_mgh
from scanloom.io.nifti import NIFTI_SUFFIXES, PAIR_SUFFIXES, nifti_files, nifti_outline, read_nifti
from scanloom.io.scan import Scan

VolumeKind = Literal["nifti", "itk", "mgh"]


class Format(NamedTuple):
    """A format of volume files.

    Parameters
    ----------
    suffixes : tuple of str
        Of the files that stand for a volume.
    parted : tuple of str
        Those of files whose voxels may lie in further files.
    files : callable
        Returns the files of a volume, itself first.
    read, outline : callable
        Return the scan; grid and type, from the header alone.
    """

    suffixes: tuple[str, ...]
    parted: tuple[str, ...]
    files: Callable[[Path], tuple[Path, ...]]
    read: Callable[..., Scan]
    outline: Callable[[Sequence[Path], int | None, str | None], tuple[Grid, np.dtype[Any]]]


FORMATS: dict[VolumeKind, Format] = {
    "nifti": Format(NIFTI_SUFFIXES, PAIR_SUFFIXES, nifti_files, read_nifti, nifti_outline),
    "itk": Format(ITK_SUFFIXES, ITK_SUFFIXES, itk_files, read_itk, itk_outline),
    "mgh": Format(MGH_SUFFIXES, (), mgh_files, read_mgh, mgh_outline),
}
SUFFIXES = tuple(suffix for one in FORMATS.values() for suffix in one.suffixes)


def format_of(name: str) -> VolumeKind | None:
    """Return the format of the volume file with this name, None where it is none."""
    lower = name.lower()
    if not lower.endswith(SUFFIXES):
        return None
    return next(kind for kind, one in FORMATS.items() if lower.endswith(one.suffixes))
