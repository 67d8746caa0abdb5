"""Read a scan of any format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

from scanloom.core import Flag, Gaps, Nan, ScanError, Series, Volume
from scanloom.core.volume import MODALITIES
from scanloom.io.find import find_series
from scanloom.io.formats import FORMATS
from scanloom.io.limits import VOXEL_LIMIT
from scanloom.io.ranking import ALL, Preference, Reading, series_meant
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
        Series to read if there are several: its UID, its number in the list of the error
        SERIES_AMBIGUOUS, or "best"; see `scanloom.io.ranking`.
    phase : int or None
        Index, from 0, of the volume in a file or series with several. In a DICOM series they are
        sorted by the attribute that distinguishes them: stack, time point, echo, b-value,
        acquisition or image type; else by protocol, times and the others in docs/reading.md.
    gaps : "refuse" or "interpolate"
        What to do about missing slices of an otherwise regular DICOM stack.
    nan : "refuse" or "padding"
        What to do about NaN voxels in volume files: "padding" replaces them by air (-1024 HU) in a
        CT, else by the smallest value of the scan.
    orientation : str or None
        Axis codes such as "RAS"; used only for a file without an orientation.
    modality : str or None
        "CT", "MR", "PT" or "NM"; used only for a file without a modality. "CT" also means
        Hounsfield units.
    max_bytes : int or None
        Largest size of the decoded voxels; None for 4 GiB. A larger scan is TOO_LARGE, decided
        from its headers.
    archives : bool
        Whether to search archives inside a folder.

    Returns
    -------
    Volume
        Values after rescale, on a grid in RAS mm.

    Raises
    ------
    ScanError
        If the scan cannot be read with certainty; its `code` is the reason.
    ValueError
        If an option has an unknown value.
    """
    _check_options(gaps, nan, modality)
    if series == ALL:
        raise ValueError('only one volume is read: series must be a UID, a number, "best" or None')
    preference = Preference(modality=modality)
    [chosen] = series_meant(
        find_series(Path(path), archives=archives),
        series,
        preference,
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
    """Read a series, with the properties of its source that writers need.

    Parameters are those of `load_volume`.

    Raises
    ------
    ScanError
        If the scan cannot be read with certainty.
    ValueError
        If an option has an unknown value.
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
        detail = f"{error.detail}; {series.lost} files next to its slices cannot be read"
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
