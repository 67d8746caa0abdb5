"""The table of formats in which scans are stored: how each is recognised, probed and read.

A further format of volume files needs a reader and an entry in `VOLUME_FORMATS`. Stored indexes are
then made anew, since `scanloom.io.index.storage` compares the suffixes of all formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scanloom.core import DICOM, Grid, ReadOptions, Reason, ScanError
from scanloom.io.scan import Scan
from scanloom.io.volumes.itk import ITK_SUFFIXES, itk_companions, parse_itk
from scanloom.io.volumes.mgh import MGH_SUFFIXES, parse_mgh
from scanloom.io.volumes.nifti import NIFTI_SUFFIXES, PAIR_SUFFIXES, nifti_companions, parse_nifti
from scanloom.io.volumes.raw_voxels import ParseHeader, read_raw_volume
from scanloom.io.voxel_values import VOXEL_LIMIT_BYTES

EMPTY_FILE = "the file is empty"
"""Detail of TRUNCATED."""


def _only_itself(path: Path) -> tuple[Path, ...]:
    return (path,)


@dataclass(frozen=True)
class VolumeFormat:
    """A format of volume files, whose voxels are plain numbers.

    Parameters
    ----------
    name : str
        The `kind` of its series, also in the index and the crosswalk.
    suffixes : tuple of str
        Lower-case suffixes of the files that stand for a volume.
    parse : ParseHeader
    companions : callable
        Returns all files of a volume, the header first.
    detached_suffixes : tuple of str
        Those of `suffixes` whose voxels may be in other files: only for them `companions` is
        called.
    """

    name: str
    suffixes: tuple[str, ...]
    parse: ParseHeader
    companions: Callable[[Path], tuple[Path, ...]] = _only_itself
    detached_suffixes: tuple[str, ...] = ()

    def probe(
        self,
        files: Sequence[Path],
        phase: int | None = None,
        options: ReadOptions = ReadOptions(),
        limit: int | None = None,
    ) -> tuple[Grid, np.dtype[Any]]:
        """Return grid of a volume and type of its voxels after rescale, from the header.

        Parameters and errors are those of `read`; a larger volume than `limit`, in bytes, is
        TOO_LARGE, by default than `VOXEL_LIMIT_BYTES`.
        """
        _check_not_empty(files[0])
        largest = VOXEL_LIMIT_BYTES if limit is None else limit
        raw = self.parse(files, phase, options.orientation, largest)
        return raw.grid, raw.layout.value_dtype

    def read(
        self, files: Sequence[Path], phase: int | None = None, options: ReadOptions = ReadOptions()
    ) -> Scan:
        """Read one volume. Options that do not apply to the format are ignored.

        Parameters
        ----------
        files : sequence of Path
            The files of the series; of a volume file, the header first.
        phase : int or None
            As in `scanloom.load_volume`.
        options : ReadOptions

        Raises
        ------
        ScanError
            If the scan cannot be read with certainty; its `code` is the reason.
        """
        _check_not_empty(files[0])
        return read_raw_volume(self.parse, files, phase, options)


def _check_not_empty(path: Path) -> None:
    """Refuse an empty file (TRUNCATED), such as that of a copy that was cut off."""
    with suppress(OSError):
        if path.is_file() and path.stat().st_size == 0:
            raise ScanError(Reason.TRUNCATED, EMPTY_FILE)


class _DicomFormat:
    """DICOM, recognised by content; as `VolumeFormat`."""

    name = DICOM
    suffixes = detached_suffixes = ()
    companions = staticmethod(_only_itself)

    def probe(
        self,
        files: Sequence[Path],
        phase: int | None = None,
        options: ReadOptions = ReadOptions(),
        limit: int | None = None,
    ) -> tuple[Grid, np.dtype[Any]]:
        """Without `limit`, the size is not checked."""
        from scanloom.io.dicom.series import dicom_outline

        return dicom_outline(files, phase, options.gaps, limit)

    def read(
        self, files: Sequence[Path], phase: int | None = None, options: ReadOptions = ReadOptions()
    ) -> Scan:
        from scanloom.io.dicom.series import read_dicom

        return read_dicom(files, phase, options)


VOLUME_FORMATS = (
    VolumeFormat("nifti", NIFTI_SUFFIXES, parse_nifti, nifti_companions, PAIR_SUFFIXES),
    VolumeFormat("itk", ITK_SUFFIXES, parse_itk, itk_companions, ITK_SUFFIXES),
    VolumeFormat("mgh", MGH_SUFFIXES, parse_mgh),
)
"""Formats of volume files, recognised by suffix."""
FORMATS: dict[str, VolumeFormat | _DicomFormat] = {
    entry.name: entry for entry in (_DicomFormat(), *VOLUME_FORMATS)
}
"""All formats by the `kind` of their series."""
VOLUME_SUFFIXES = tuple(suffix for entry in VOLUME_FORMATS for suffix in entry.suffixes)


def format_by_suffix(name: str) -> str | None:
    """Return the name of the format of a volume file by its suffix, None for other files."""
    lower = name.lower()
    if not lower.endswith(VOLUME_SUFFIXES):
        return None
    return next(entry.name for entry in VOLUME_FORMATS if lower.endswith(entry.suffixes))
