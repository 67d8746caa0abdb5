"""Read a scan: one door for all formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

from scanloom.core import Flag, Gaps, Nan, ScanError, Series, Volume
from scanloom.core.volume import MODALITIES
from scanloom.io.find import find_series
from scanloom.io.formats import FORMATS
from scanloom.io.limits import VOXEL_LIMIT
from scanloom.io.ranking import ALL, Preference, Reading, select_series
from scanloom.io.scan import Scan
from scanloom.io.values import rounding_flags

GAPS, NAN = get_args(Gaps), get_args(Nan)


def load_volume(
    path: str | Path,
    *,
    series: str | None = None,
    phase: int | None = None,
    gaps: Gaps = "refuse",
    nan: Nan = "refuse",
    orientation: str | None = None,
    modality: str | None = None,
    max_bytes: int | None = None,
    archives: bool = False,
) -> Volume:
    """Read the one scan at a path.

    Parameters
    ----------
    path : str or Path
        A DICOM folder or file, a volume file (NIfTI, Analyze, NRRD, MetaImage, MGH), a zip or tar
        archive, a DICOMDIR, or a glob pattern: see docs/reading.md.
    series : str or None
        Which one, where there are several: its UID, its number in the list that the error
        SERIES_AMBIGUOUS shows, or "best": see `scanloom.io.ranking`.
    phase : int or None
        Which volume of a file or series that holds several, from 0. In a DICOM series the order
        is that of what tells them apart, ascending: stack, time point, echo, b-value,
        acquisition, image type; else how they were made, times, and what docs/reading.md lists.
    gaps : "refuse" or "interpolate"
        What to do about missing slices of an otherwise regular DICOM stack.
    nan : "refuse" or "padding"
        What to do about voxels that are no numbers (NaN), in NIfTI, NRRD and MetaImage: "padding"
        makes them air (-1024 HU) in a CT, else the smallest value of the scan.
    orientation : str or None
        Axis codes such as "RAS", for a file that does not say; only then used.
    modality : str or None
        "CT", "MR", "PT" or "NM", for a file that does not say; "CT" also means Hounsfield units.
    max_bytes : int or None
        Largest size of the voxels, decoded; None for 4 GiB. More is TOO_LARGE, told from headers.
    archives : bool
        Whether archives inside a folder are looked into.

    Returns
    -------
    Volume
        Values after rescale, on a grid in RAS mm.

    Raises
    ------
    ScanError
        If the scan can't be read for sure; its `code` says why.
    ValueError
        For an option that does not exist.
    """
    _check_options(gaps, nan, modality)
    if series == ALL:
        raise ValueError('one volume is read: series must be a UID, a number, "best" or None')
    wanted = Preference(modality=modality)
    [chosen] = select_series(
        find_series(Path(path), archives=archives),
        series,
        wanted,
        Reading(phase, gaps, orientation),
    )
    scan = read_scan(
        chosen,
        phase=phase,
        gaps=gaps,
        nan=nan,
        orientation=orientation,
        modality=modality,
        max_bytes=max_bytes,
    )
    return scan.volume


def read_scan(
    series: Series,
    *,
    phase: int | None = None,
    gaps: Gaps = "refuse",
    nan: Nan = "refuse",
    orientation: str | None = None,
    modality: str | None = None,
    max_bytes: int | None = None,
) -> Scan:
    """Read a series that was found, with what writers must know of its source.

    Parameters are those of `load_volume`.

    Raises
    ------
    ScanError
        If the scan can't be read for sure.
    ValueError
        For an option that does not exist.
    """
    _check_options(gaps, nan, modality)
    limit = VOXEL_LIMIT if max_bytes is None else max_bytes
    try:
        scan = FORMATS[series.kind].read(
            series.files,
            phase=phase,
            orientation=orientation,
            modality=modality,
            gaps=gaps,
            nan=nan,
            limit=limit,
        )
    except ScanError as error:
        if not series.lost:
            raise
        detail = f"{error.detail}; {series.lost} files beside its slices can't be read"
        raise ScanError(error.reason, detail) from error
    if series.lost:
        scan = _with_flags(scan, (Flag.FILES_LOST,))
    return _with_flags(scan, rounding_flags(scan.volume.array, scan.volume.array.dtype))


def _with_flags(scan: Scan, flags: tuple[Flag, ...]) -> Scan:
    if not flags:
        return scan
    return replace(scan, volume=replace(scan.volume, flags=(*scan.volume.flags, *flags)))


def _check_options(gaps: str, nan: str, modality: str | None) -> None:
    if gaps not in GAPS:
        raise ValueError(f"gaps must be one of {GAPS}, got {gaps!r}")
    if nan not in NAN:
        raise ValueError(f"nan must be one of {NAN}, got {nan!r}")
    if modality is not None and modality not in MODALITIES:
        raise ValueError(f"modality must be one of {MODALITIES} or None, got {modality!r}")
