"""The table of formats in which scans are stored: how each is recognised, probed and read.

A further format of volume files needs a reader and an entry in `VOLUME_FORMATS`. Stored indexes are
then made anew, since `scanloom.io.index.storage` compares the suffixes of all formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from scanloom.core import DICOM, Gaps, Grid, Nan, Reason, ScanError
from scanloom.io.scan import Scan
from scanloom.io.volumes.itk import ITK_SUFFIXES, itk_companions, parse_itk
from scanloom.io.volumes.mgh import MGH_SUFFIXES, parse_mgh
from scanloom.io.volumes.nifti import NIFTI_SUFFIXES, PAIR_SUFFIXES, nifti_companions, parse_nifti
from scanloom.io.volumes.raw_voxels import ParseHeader, read_raw_volume
from scanloom.io.voxel_values import VOXEL_LIMIT_BYTES


class ProbeFunction(Protocol):
    """Return grid and voxel type of a series from its headers; errors as for `ReadFunction`."""

    def __call__(
        self,
        files: Sequence[Path],
        *,
        phase: int | None = None,
        orientation: str | None = None,
        gaps: Gaps = "refuse",
        limit: int | None = None,
    ) -> tuple[Grid, np.dtype[Any]]:
        """Return grid and voxel type after rescale; parameters are those of `ReadFunction`.

        Without `limit`, the largest size is that of each format's own.
        """


class ReadFunction(Protocol):
    """Read one volume of a series. A format ignores the options that do not apply to it."""

    def __call__(
        self,
        files: Sequence[Path],
        *,
        phase: int | None = None,
        orientation: str | None = None,
        modality: str | None = None,
        gaps: Gaps = "refuse",
        nan: Nan = "refuse",
        limit: int = VOXEL_LIMIT_BYTES,
    ) -> Scan:
        """Return the volume and its source.

        Parameters
        ----------
        files : sequence of Path
            The files of the series; of a volume file, the header first.
        phase, orientation, modality, gaps, nan
            As in `scanloom.load_volume`.
        limit : int
            Largest size of the decoded voxels in bytes.

        Raises
        ------
        ScanError
            If the scan cannot be read with certainty; its `code` is the reason.
        """


EMPTY_FILE = "the file is empty"
"""Detail of TRUNCATED."""


def _only_itself(path: Path) -> tuple[Path, ...]:
    return (path,)


@dataclass(frozen=True)
class VolumeFormat:
    """A format in which scans are stored.

    Parameters
    ----------
    name : str
        The `kind` of its series, also in the index and the crosswalk.
    suffixes : tuple of str
        Lower-case suffixes of the files that stand for a volume; empty for DICOM, which is
        recognised by content.
    probe : ProbeFunction
    read : ReadFunction
    companions : callable
        Returns all files of a volume, the header first.
    detached_suffixes : tuple of str
        Those of `suffixes` whose voxels may be in other files: only for them `companions` is
        called.
    """

    name: str
    suffixes: tuple[str, ...]
    probe: ProbeFunction
    read: ReadFunction
    companions: Callable[[Path], tuple[Path, ...]] = _only_itself
    detached_suffixes: tuple[str, ...] = ()


def raw_format(
    name: str,
    suffixes: tuple[str, ...],
    parse: ParseHeader,
    companions: Callable[[Path], tuple[Path, ...]] = _only_itself,
    detached_suffixes: tuple[str, ...] = (),
) -> VolumeFormat:
    """Return the format of volume files with plain numbers for voxels.

    Parameters are those of `VolumeFormat`; `parse` replaces `probe` and `read`.
    """

    def probe(
        files: Sequence[Path],
        *,
        phase: int | None = None,
        orientation: str | None = None,
        gaps: Gaps = "refuse",  # not used
        limit: int | None = None,
    ) -> tuple[Grid, np.dtype[Any]]:
        largest = VOXEL_LIMIT_BYTES if limit is None else limit
        _check_not_empty(files[0])
        return parse(files, phase, orientation, largest).outline

    def read(
        files: Sequence[Path],
        *,
        phase: int | None = None,
        orientation: str | None = None,
        modality: str | None = None,
        gaps: Gaps = "refuse",  # not used
        nan: Nan = "refuse",
        limit: int = VOXEL_LIMIT_BYTES,
    ) -> Scan:
        _check_not_empty(files[0])
        return read_raw_volume(parse, files, phase, orientation, modality, nan, limit)

    return VolumeFormat(name, suffixes, probe, read, companions, detached_suffixes)


def _check_not_empty(path: Path) -> None:
    """Refuse an empty file, such as that of a copy that was cut off; others are left to the parser.

    Raises
    ------
    ScanError
        TRUNCATED.
    """
    with suppress(OSError):
        if path.is_file() and path.stat().st_size == 0:
            raise ScanError(Reason.TRUNCATED, EMPTY_FILE)


def _probe_dicom(
    files: Sequence[Path],
    *,
    phase: int | None = None,
    orientation: str | None = None,  # not used
    gaps: Gaps = "refuse",
    limit: int | None = None,
) -> tuple[Grid, np.dtype[Any]]:
    from scanloom.io.dicom.series import dicom_outline

    return dicom_outline(files, phase, gaps, limit)


def _read_dicom(
    files: Sequence[Path],
    *,
    phase: int | None = None,
    orientation: str | None = None,  # not used
    modality: str | None = None,
    gaps: Gaps = "refuse",
    nan: Nan = "refuse",  # not used: voxels are integers
    limit: int = VOXEL_LIMIT_BYTES,
) -> Scan:
    from scanloom.io.dicom.series import read_dicom

    return read_dicom(files, modality=modality, phase=phase, gaps=gaps, limit=limit)


VOLUME_FORMATS = (
    raw_format("nifti", NIFTI_SUFFIXES, parse_nifti, nifti_companions, PAIR_SUFFIXES),
    raw_format("itk", ITK_SUFFIXES, parse_itk, itk_companions, ITK_SUFFIXES),
    raw_format("mgh", MGH_SUFFIXES, parse_mgh),
)
"""Formats of volume files, recognised by suffix."""
FORMATS = {
    entry.name: entry
    for entry in (VolumeFormat(DICOM, (), _probe_dicom, _read_dicom), *VOLUME_FORMATS)
}
"""All formats by the `kind` of their series."""
VOLUME_SUFFIXES = tuple(suffix for entry in VOLUME_FORMATS for suffix in entry.suffixes)


def format_by_suffix(name: str) -> str | None:
    """Return the name of the format of a volume file by its suffix, None for other files."""
    lower = name.lower()
    if not lower.endswith(VOLUME_SUFFIXES):
        return None
    return next(entry.name for entry in VOLUME_FORMATS if lower.endswith(entry.suffixes))
