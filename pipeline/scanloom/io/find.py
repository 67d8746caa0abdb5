"""What lies at a path: DICOM series and volume files, found by content."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from scanloom.core import MODALITIES, Reason, ScanError, Series
from scanloom.io.dicom.headers import SHELF, Header, quiet, read_headers
from scanloom.io.dicom.kinds import skip_reason
from scanloom.io.itk import ITK_SUFFIXES, itk_files
from scanloom.io.nifti import NIFTI_SUFFIXES, nifti_files

SHOWN_DIGITS = 8
"""How much of a UID is shown where a person has to choose."""


def find_series(path: Path) -> tuple[Series, ...]:
    """Find the scans at a path.

    Parameters
    ----------
    path : Path
        A folder with DICOM files (searched with all folders below it; volume files count where
        it has no DICOM), one DICOM file (it stands for its series in its folder), or a volume
        file: .nii, .nii.gz, .hdr, .nrrd, .nhdr, .mha, .mhd.

    Returns
    -------
    tuple of Series
        At least one; the same order on every machine, the largest first.

    Raises
    ------
    ScanError
        NOT_FOUND, UNREADABLE; where there is no scan NO_IMAGES, or the reason why all that is
        there was skipped, if it is one.
    """
    if not path.exists():
        raise ScanError(Reason.NOT_FOUND, f"nothing at {path}")
    if path.is_dir():
        files = _files_below(path)
        found, skipped = _dicom_series(files)
        if not found and not skipped:
            found = [s for s in map(_volume_file, files) if s is not None]
    else:
        volume = _volume_file(path)
        found, skipped = ([volume], Counter()) if volume else _series_of(path)
    if found:
        return tuple(
            sorted(found, key=lambda s: (-len(s.files), s.study_uid, s.series_uid, s.files))
        )
    if len(skipped) == 1:
        [(reason, count)] = skipped.items()
        raise ScanError(reason, f"{count} DICOM files, none of them a slice of a volume")
    detail = ", ".join(
        f"{count} {reason.code}"
        for reason, count in sorted(skipped.items(), key=lambda item: item[0].value)
    )
    raise ScanError(Reason.NO_IMAGES, f"no scan at {path}" + (f" ({detail})" if detail else ""))


def choose_series(found: Sequence[Series], wanted: str | None = None) -> Series:
    """Return the one series that is meant.

    Parameters
    ----------
    found : sequence of Series
        As `find_series` gave it.
    wanted : str or None
        SeriesInstanceUID, or the number in the list, from 1; None if there is but one.

    Raises
    ------
    ScanError
        SERIES_AMBIGUOUS with the list and what to type; SERIES_UNKNOWN.
    """
    if wanted is None:
        if len(found) == 1:
            return found[0]
        detail = f"{len(found)} series: {_listed(found)}. Type --series 1, or a whole UID"
        raise ScanError(Reason.SERIES_AMBIGUOUS, detail)
    matching = [s for s in found if s.series_uid and s.series_uid == wanted.strip()]
    if not matching and wanted.strip().isdecimal() and 1 <= int(wanted) <= len(found):
        matching = [found[int(wanted) - 1]]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ScanError(Reason.SERIES_AMBIGUOUS, f"{_listed(found)}. Type the number")
    raise ScanError(Reason.SERIES_UNKNOWN, f"there are {len(found)}: {_listed(found)}")


def _listed(found: Sequence[Series]) -> str:
    """Return the list for a person to choose from: no description, which may name a patient."""
    lines = []
    for number, series in enumerate(found, 1):
        uid = f", UID ...{series.series_uid[-SHOWN_DIGITS:]}" if series.series_uid else ""
        kind = series.modality or series.kind
        lines.append(f"{number}: {kind}, {len(series.files)} files{uid}")
    return "; ".join(lines)


def _files_below(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted; links to folders are not followed."""
    files: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=_raise_unreadable):
        folders.sort()
        files.extend(Path(root, name) for name in sorted(names))
    return [file for file in files if file.is_file()]


def _raise_unreadable(error: OSError) -> None:
    detail = f"a folder can't be listed ({type(error).__name__})"
    raise ScanError(Reason.UNREADABLE, detail) from error


def _volume_file(path: Path) -> Series | None:
    """Return the series that a volume file is, None if its name says that it is none."""
    name = path.name.lower()
    if name.endswith(NIFTI_SUFFIXES):
        return Series("nifti", nifti_files(path))
    if name.endswith(ITK_SUFFIXES):
        return Series("itk", itk_files(path))
    return None


def _series_of(path: Path) -> tuple[list[Series], Counter[Reason]]:
    """Return the series of one DICOM file, from the folder it lies in."""
    [header] = read_headers([path])
    if header is None:
        return [], Counter()
    if isinstance(header, ScanError):
        raise header
    reason = skip_reason(header)
    if reason is not None:
        return [], Counter([reason])
    beside = [file for file in sorted(path.parent.iterdir()) if file.is_file()]
    found, skipped = _dicom_series(beside)
    return [s for s in found if path in s.files], skipped


def _dicom_series(files: Sequence[Path]) -> tuple[list[Series], Counter[Reason]]:
    """Group slices by study and series; count what is no slice.

    Damaged files make a series of their own, which can't be read: they might belong to any.
    """
    groups: dict[tuple[str, str, str], list[Header]] = {}
    damaged: dict[Path, list[Path]] = {}
    skipped: Counter[Reason] = Counter()
    for path, header in zip(files, read_headers(files), strict=True):
        if isinstance(header, ScanError):
            damaged.setdefault(path.parent, []).append(path)
            continue
        if header is None:
            continue
        reason = skip_reason(header)
        if reason is not None:
            skipped[reason] += 1
            continue
        place = "" if header.series_uid else str(path.parent)
        groups.setdefault((header.study_uid, header.series_uid, place), []).append(header)
    for headers in groups.values():
        SHELF.put(headers)
    with quiet():
        series = [_as_series(headers) for headers in groups.values()]
    return series + [Series("dicom", tuple(paths)) for paths in damaged.values()], skipped


def _as_series(headers: Sequence[Header]) -> Series:
    first = headers[0]
    return Series(
        kind="dicom",
        files=tuple(h.path for h in headers),
        study_uid=first.study_uid,
        series_uid=first.series_uid,
        modality=first.modality if first.modality in MODALITIES else None,
        description=_description(first),
    )


def _description(header: Header) -> str:
    """Return SeriesDescription; what is not plain ASCII is decoded by pydicom."""
    raw = header.elements.raw(0x0008103E)
    if raw.isascii() and b"\x1b" not in raw:  # ISO 2022 escapes to others by plain bytes
        return raw.decode("ascii").strip(" \0")
    return str(header.read_dataset().get("SeriesDescription", "") or "")
