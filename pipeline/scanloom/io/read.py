"""Read a scan of any format."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from scanloom.core import (
    Flag,
    Gaps,
    Grid,
    Nan,
    ReadOptions,
    ScanError,
    Series,
    Volume,
    counted,
    printable,
)
from scanloom.core.errors import check_type, in_python
from scanloom.core.paths import given_path
from scanloom.io.formats import FORMATS, check_neighbours, probe, unused_options
from scanloom.io.index.ranking import ALL, Preference, select_series
from scanloom.io.index.series import find_series
from scanloom.io.output.crosswalk import source_path
from scanloom.io.scan import Scan
from scanloom.io.session import current_session, read_session
from scanloom.io.system.unpacking import UnpackedFiles
from scanloom.io.voxel_values import rounding_flags, voxel_limit
from scanloom.options import check_values


def load_volume(
    path: str | Path,
    *,
    series: str | int | None = None,
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
    series : str, int or None
        Series to read if there are several: its UID; its number in the list of the error
        SERIES_AMBIGUOUS, which is not its SeriesNumber; its name in that list, or a part of it that
        no other name has; or "best" of all; see `scanloom.io.index.ranking`.
    phase : int or None
        Index, from 0, of the volume in a file or series with several. In a DICOM series they are
        sorted by the attribute that distinguishes them: stack, time point, echo, b-value,
        acquisition or image type; else by protocol, times and the others in docs/reading.md.
    gaps : "refuse" or "interpolate"
        Handling of missing slices of an otherwise regular DICOM stack.
    nan : "refuse" or "padding"
        Handling of NaN voxels in volume files: "padding" replaces them by air (-1024 HU) in a
        CT, else by the smallest value of the scan.
    orientation : str or None
        Axis codes such as "RAS"; used only for a file without an orientation. Warns if a file
        states another one.
    modality : str or None
        "CT", "MR", "PT" or "NM"; used only for a file without a modality, as `orientation` is. "CT"
        also means Hounsfield units.
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
        If an option has an unknown value, or the path is empty.
    TypeError
        If the path is no path, or a number no number.
    """
    check_type(phase, (Integral, NoneType), "phase must be a whole number")
    check_type(max_bytes, (int, NoneType), "max_bytes must be a whole number")
    axes = orientation.strip().upper() if isinstance(orientation, str) else orientation
    options = ReadOptions(gaps, nan, axes, modality, max_bytes)  # type: ignore[arg-type]  # checked
    check_values(options)
    if series == ALL:
        raise ValueError('only one volume is read: series must be a UID, a number, "best" or None')
    try:
        with read_session():  # unpacked files of many archives would fill the disk
            [chosen] = select_series(
                find_series(given_path(path, "path"), archives=archives),
                None if series is None else str(series),
                Preference(modality=modality),
                options,
                phase,
            )
            for unused in unused_options(chosen, phase, options):
                warnings.warn(in_python(unused), stacklevel=2)
            return read_scan(chosen, options, phase=phase).volume
    except ScanError as error:
        if error.private:
            error.add_note(error.private)  # shown below the message where it ends a program
        raise


def read_scan(
    series: Series, options: ReadOptions = ReadOptions(), *, phase: int | None = None
) -> Scan:
    """Read a series, with the properties of its source that writers need.

    Parameters
    ----------
    series : Series
        The scan.
    options : ReadOptions
        How it is read.
    phase : int or None
        Index of the volume, from 0, if the series holds several.

    Raises
    ------
    ScanError
        If the scan cannot be read with certainty.
    ValueError
        If an option has an unknown value.
    """
    check_values(options)
    with _unreadable_neighbours(series):
        scan = FORMATS[series.kind].read(series.files, phase, options)
        check_neighbours(series, options.gaps)  # faults of its own slices come first
    if series.unreadable:
        scan = _with_flags(scan, (Flag.FILES_LOST,))
    return _with_flags(scan, rounding_flags(scan.volume.array, scan.volume.array.dtype))


def read_outline(
    series: Series, options: ReadOptions, *, phase: int | None
) -> tuple[Grid, np.dtype[Any]]:
    """Return the grid of the volume that `read_scan` would return, and the type of its voxels.

    Parameters and errors are those of `read_scan`, for the faults that headers show.
    """
    check_values(options)
    with _unreadable_neighbours(series):
        return probe(series, phase, options, voxel_limit(options))


@contextmanager
def _unreadable_neighbours(series: Series) -> Iterator[None]:
    """Add to an error the path of the scan, and the number of its unreadable neighbours."""
    try:
        yield
    except ScanError as error:
        detail = error.detail
        if series.unreadable:
            detail = f"{detail}. {_advice_on_neighbours(series)}"
        raise ScanError(error.reason, detail, _subject(series, error.private)) from error


def _advice_on_neighbours(series: Series) -> str:
    """Return the advice about the unreadable files next to the slices of a series."""
    closed = series.unreadable - series.damaged
    sentences = []
    if closed:
        sentences.append(
            f"{counted(closed, 'file')} next to its slices can't be read: check permissions, "
            "disk and links"
        )
    if series.damaged:
        are = "is" if series.damaged == 1 else "are"
        sentences.append(
            f"{counted(series.damaged, 'file')} next to its slices {are} damaged: copy or export "
            "the folder again"
        )
    return ". ".join(sentences)


def _subject(series: Series, file: str) -> str:
    """Return the path of a file of a series, or of all its files, with its description."""
    if file:
        return str(current_session().cache(UnpackedFiles).origin(Path(file)))
    path = source_path(series)
    return f"{path} ({printable(series.description)})" if series.description else path


def _with_flags(scan: Scan, flags: tuple[Flag, ...]) -> Scan:
    if not flags:
        return scan
    flags = tuple(dict.fromkeys((*scan.volume.flags, *flags)))
    return replace(scan, volume=replace(scan.volume, flags=flags))
