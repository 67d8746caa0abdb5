"""The table of formats in which scans are stored: how each is recognised, probed and read.

A further format of volume files needs a reader and an entry in `VOLUME_FORMATS`. Stored indexes are
then made anew, since `scanloom.io.index.storage` compares the suffixes of all formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scanloom.core import DICOM, Gaps, Grid, ReadOptions, Reason, ScanError, Series, counted
from scanloom.io.scan import Scan
from scanloom.io.volumes.itk import ITK_SUFFIXES, itk_companions, parse_itk
from scanloom.io.volumes.mgh import MGH_SUFFIXES, parse_mgh
from scanloom.io.volumes.nifti import NIFTI_SUFFIXES, PAIR_SUFFIXES, nifti_companions, parse_nifti
from scanloom.io.volumes.raw_voxels import ParseHeader, read_raw_volume
from scanloom.io.voxel_values import VOXEL_LIMIT_BYTES, voxel_limit

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

    def count(self, files: Sequence[Path], options: ReadOptions) -> int:
        """Return the number of volumes; errors as those of the header in `read`."""
        return self.parse(files, 0, options.orientation, voxel_limit(options)).layout.volumes

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

    def count(self, files: Sequence[Path], _options: ReadOptions) -> int:
        from scanloom.io.dicom.series import count_dicom_volumes

        return count_dicom_volumes(files)

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


# --- series by their headers ----------------------------------------------------------------------

MAX_VOLUMES = 10_000
"""Volumes of a series or file that are counted; time points are far fewer."""


def count_volumes(series: Series, options: ReadOptions = ReadOptions()) -> int:
    """Return the number of volumes in a series or file, of which `phase` selects one.

    Each volume may still be refused when it is probed or read, such as one with missing slices.

    Raises
    ------
    ScanError
        If the headers can't be read or describe no volumes; as `check_neighbours`.
    """
    check_neighbours(series, options.gaps)
    return min(FORMATS[series.kind].count(series.files, options), MAX_VOLUMES)


def is_single_volume(series: Series, options: ReadOptions) -> bool:
    """Return whether a series gives a volume without the choice of one."""
    try:
        probe(series, None, options)
    except ScanError:
        return False
    return True


def unused_options(series: Series, phase: int | None, options: ReadOptions) -> tuple[str, ...]:
    """Return which options the headers of a series override, as sentences without a full stop.

    An option that agrees with the headers is left out.
    """
    sentences = []
    if options.modality and series.modality not in (None, options.modality):
        stated = f"the headers state {series.modality}"
        sentences.append(f"`--modality {options.modality}` was not used: {stated}")
    given = options.orientation
    if given:
        with suppress(ScanError):  # the headers state no axes
            codes = probe(series, phase, replace(options, orientation=None))[0].axis_codes
            if codes != given:
                sentences.append(f"`--orientation {given}` was not used: the scan states {codes}")
    return tuple(sentences)


def probe(
    series: Series,
    phase: int | None = None,
    options: ReadOptions = ReadOptions(),
    limit: int | None = None,
) -> tuple[Grid, np.dtype[Any]]:
    """Return the grid of a series and its voxel type after rescale; see `VolumeFormat.probe`.

    Raises
    ------
    ScanError
        As reading the scan would raise for its headers, and as `check_neighbours`.
    """
    outline = FORMATS[series.kind].probe(series.files, phase, options, limit)
    check_neighbours(series, options.gaps)
    return outline


def check_neighbours(series: Series, gaps: Gaps) -> None:
    """Refuse a series beside which files can't be read, unless missing slices are accepted.

    The rest looks complete, also where its first or last slices are lost.

    Raises
    ------
    ScanError
        SLICES_UNREADABLE.
    """
    if series.beside and gaps == "refuse":
        raise neighbours_error(series.beside)


def neighbours_error(count: int) -> ScanError:
    """Return the error for a series beside which so many files can't be read."""
    detail = f"slices may be missing: {counted(count, 'file')} beside its slices can't be used"
    return ScanError(Reason.SLICES_UNREADABLE, detail)
