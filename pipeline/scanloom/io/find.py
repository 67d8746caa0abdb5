"""What lies at a path: DICOM series and volume files, found by content."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from scanloom.core import DICOM, MODALITIES, Reason, ScanError, Series
from scanloom.io.archives import IN_ARCHIVE, is_archive
from scanloom.io.dicom.elements import unpack_elements
from scanloom.io.dicom.headers import SHELF, make_header, quiet
from scanloom.io.dicom.kinds import is_derived
from scanloom.io.dicom.planes import NATIVE
from scanloom.io.formats import FORMATS
from scanloom.io.lost import DicomFiles, LostFiles
from scanloom.io.sandbox import warm_up
from scanloom.io.survey import Look, look_at, series_description
from scanloom.io.unpack import SCRATCH
from scanloom.io.walk import Entry, list_files, stamp_of

FAILED = frozenset(reason.code for reason in Reason if reason.outcome == "failed")
SHOWN_DIGITS = 8
"""How much of a UID is shown where a person has to choose."""


@dataclass
class Group:
    """Files of one series, by their places in the list of what was found.

    Parameters
    ----------
    kind : str
        Its format: a name of `scanloom.io.formats.FORMATS`.
    study, series : str
        UIDs; empty where there are none.
    members : list of int
        Those that may be slices.
    skipped : list of int
        Those of the same series that are none; a series of such files alone is skipped.
    damaged : bool
        Whether these are DICOM files that can't be read.
    """

    kind: str
    study: str = ""
    series: str = ""
    members: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    damaged: bool = False


def find_series(
    path: Path | str, out: Path | None = None, *, archives: bool = False
) -> tuple[Series, ...]:
    """Find the scans at a path.

    Parameters
    ----------
    path : Path or str
        A folder (searched with all folders below it), a DICOM file (it stands for its series in
        its folder), a volume file (NIfTI, Analyze, NRRD, MetaImage, MGH), a zip or tar archive,
        a DICOMDIR, or a glob pattern.
    out : Path or None
        The output folder of who asks, whose results are no scans.
    archives : bool
        Whether archives in a folder are looked into.

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
    entries = list_files([path], out=out, archives=archives)
    looks = _looks(entries)
    wanted = ""
    if _is_one_file(path) and looks[0].kind and not looks[0].reason:
        wanted = entries[0].path
        dicom = looks[0].kind == DICOM
        parts = _beside(wanted) if dicom else _parts(entries[0], looks[0])
        entries = list_files([part for part in parts if os.path.lexists(part)])
        looks = _looks(entries)
    groups = group_files(entries, looks)
    lost = LostFiles(
        entries,
        lambda n: (look := looks[n]).reason in FAILED and not look.packed,
        (
            DicomFiles(
                group.study or group.series, group.members or group.skipped, bool(group.members)
            )
            for group in groups
            if group.kind == DICOM and not group.damaged
        ),
    )
    found = [
        replace(
            make_series(group, entries, looks),
            lost=_lost_beside(group, entries, lost),
        )
        for group in groups
        if group.members and (not wanted or _holds(group, entries, wanted))
    ]
    if not found:
        raise _nothing(entries, looks)
    return tuple(sorted(found, key=lambda s: (-len(s.files), s.study_uid, s.series_uid, s.files)))


def group_files(entries: Sequence[Entry], looks: Sequence[Look]) -> list[Group]:
    """Group files into series, in the order of their first files.

    Damaged DICOM files make a series of their own in each folder, which can't be read: they might
    belong to any. Series without UID are told apart by folder.
    """
    groups: dict[tuple[str, ...], Group] = {}
    partners = _partners(entries, looks)
    voxels = {part for parts in partners.values() for part in parts}
    for n, (entry, look) in enumerate(zip(entries, looks, strict=True)):
        if not look.kind or n in voxels:
            continue
        if look.kind != DICOM:
            group = groups.setdefault((look.kind, str(n)), Group(look.kind))
            group.members.extend([n, *partners.get(n, ())])
            continue
        place = "" if look.series else os.path.dirname(entry.path)  # noqa: PTH120
        damaged = "damaged" if look.reason and not look.packed else ""
        key = (DICOM, look.study, look.series, place, damaged)
        if key not in groups:
            groups[key] = Group(DICOM, look.study, look.series, damaged=bool(damaged))
        group = groups[key]
        (group.skipped if look.packed and look.reason else group.members).append(n)
    return list(groups.values())


def make_series(group: Group, entries: Sequence[Entry], looks: Sequence[Look]) -> Series:
    """Return a group as what readers take; packed files are unpacked for it."""
    stamp = stamp_of(entries[n] for n in group.members)
    try:
        files = tuple(
            SCRATCH.plain(entries[n].path, gzipped=looks[n].gzipped) for n in group.members
        )
    except ScanError:  # who reads the series says so; others are not stopped
        packed = tuple(Path(SCRATCH.place(entries[n].path)) for n in group.members)
        return Series(group.kind, packed, group.study, group.series, stamp=stamp)
    if group.kind != DICOM:
        return Series(group.kind, files, stamp=stamp)
    pairs = zip(files, (looks[n] for n in group.members), strict=True)
    headers = [
        make_header(file, unpack_elements(look.packed)) for file, look in pairs if look.packed
    ]
    if len(headers) < len(files):
        return Series(DICOM, files, stamp=stamp)
    SHELF.put(headers)
    if not all(header.syntax in NATIVE for header in headers):
        warm_up()  # the helper that decodes, beside what comes before
    modality = headers[0].modality
    with quiet():
        return Series(
            kind=DICOM,
            files=files,
            study_uid=group.study,
            series_uid=group.series,
            modality=modality if modality in MODALITIES else None,
            description=series_description(headers[0]),
            derived=all(map(is_derived, headers)),
            stamp=stamp,
        )


def choose_series(found: Sequence[Series], wanted: str | None = None) -> Series:
    """Return the one series that is meant.

    Parameters
    ----------
    found : sequence of Series
        As `find_series` gave it.
    wanted : str or None
        SeriesInstanceUID, or the number in the list, from 1; None if there is but one, leaving
        out those that were computed from others.

    Raises
    ------
    ScanError
        SERIES_AMBIGUOUS with the list and what to type; SERIES_UNKNOWN; DERIVED if all that is
        there was computed from other slices.
    """
    if wanted is None:
        original = [s for s in found if not s.derived]
        if len(original) == 1:
            return original[0]
        if not original:
            raise ScanError(Reason.DERIVED, f"{_listed(found)}. Type --series 1, or a whole UID")
        detail = f"{len(found)} series: {_listed(found)}. Type --series 1, best or all"
        raise ScanError(Reason.SERIES_AMBIGUOUS, detail)
    matching = [s for s in found if s.series_uid and s.series_uid == wanted.strip()]
    if not matching and wanted.strip().isdecimal() and 1 <= int(wanted) <= len(found):
        matching = [found[int(wanted) - 1]]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ScanError(Reason.SERIES_AMBIGUOUS, f"{_listed(found)}. Type the number")
    raise ScanError(Reason.SERIES_UNKNOWN, f"there are {len(found)}: {_listed(found)}")


def look_results(
    entries: Sequence[Entry], before: Sequence[Look | None]
) -> tuple[list[Look | None], dict[int, str]]:
    """Return what is known of files before they are opened, and where those lie that must be.

    Parameters
    ----------
    entries : sequence of Entry
    before : sequence of Look or None
        What was seen of each file an earlier time.

    Returns
    -------
    list of Look or None
        Archives are unpacked for files that must be opened; of one that can't be, its files have
        the reason.
    dict of int to str
        Of each that is None, the place where it can be opened.
    """
    failed: dict[str, ScanError] = {}
    looks: list[Look | None] = []
    places: dict[int, str] = {}
    for n, (entry, look) in enumerate(zip(entries, before, strict=True)):
        archive = entry.path.partition(IN_ARCHIVE)[0]
        if entry.reason is not None:
            look = Look("", reason=entry.reason.code)
        elif look is None and archive not in failed:
            try:
                places[n] = SCRATCH.place(entry.path)
            except ScanError as error:
                failed[archive] = error
        if look is None and archive in failed:
            look = Look("", reason=failed[archive].code, detail=failed[archive].detail)
        looks.append(look)
    return looks, places


def _looks(entries: Sequence[Entry]) -> list[Look]:
    """Return what each file is."""
    known, places = look_results(entries, [None] * len(entries))
    looked = iter(look_at(list(places.values())))
    return [look or next(looked) for look in known]


def _is_one_file(path: Path | str) -> bool:
    name = Path(path).name.upper()
    return os.path.isfile(path) and not is_archive(path) and name != "DICOMDIR"  # noqa: PTH113


def _beside(path: str) -> list[str]:
    """Return the files in the folder of one, itself first."""
    folder = os.path.dirname(path)  # noqa: PTH120
    try:
        with os.scandir(folder) as items:
            beside = sorted(item.path for item in items if item.is_file())
    except OSError:
        beside = []
    return [path, *(b for b in beside if b != path and not is_archive(b) and b[-8:] != "DICOMDIR")]


def _lost_beside(group: Group, entries: Sequence[Entry], lost: LostFiles) -> int:
    """Return how many files that can't be read may be slices of a series."""
    if group.kind != DICOM:
        return 0
    return lost.of(group.study or group.series, (entries[n].path for n in group.members))


def _holds(group: Group, entries: Sequence[Entry], path: str) -> bool:
    return any(entries[n].path == path for n in group.members)


def _partners(entries: Sequence[Entry], looks: Sequence[Look]) -> dict[int, list[int]]:
    """Return which header of a volume belongs to which files of voxels."""
    parts = {
        n: _parts(entries[n], look)[1:]
        for n, look in enumerate(looks)
        if look.kind and look.kind != DICOM
    }
    parts = {n: some for n, some in parts.items() if some}
    if not parts:
        return {}
    places = {entry.path: n for n, entry in enumerate(entries)}
    return {n: [places[part] for part in some if part in places] for n, some in parts.items()}


def _parts(entry: Entry, look: Look) -> list[str]:
    """Return the files of a volume: itself, and what holds the voxels if that is another one."""
    volume_format = FORMATS[look.kind]
    if not entry.path.lower().endswith(volume_format.detached_suffixes):
        return [entry.path]
    try:
        file = SCRATCH.plain(entry.path)
    except ScanError:  # its archive can't be unpacked any more: who reads the series says so
        return [entry.path]
    parts = (os.path.relpath(part, file.parent) for part in volume_format.companions(file)[1:])
    return [entry.path, *(_join(entry.path, part) for part in parts)]


def _join(path: str, name: str) -> str:
    """Return the path of a file beside another one, or below, in an archive too."""
    folder, mark, member = path.partition(IN_ARCHIVE)
    if mark:
        return folder + mark + member[: member.rfind("/") + 1] + name
    return os.path.join(os.path.dirname(path), name)  # noqa: PTH118, PTH120


def _nothing(entries: Sequence[Entry], looks: Sequence[Look]) -> ScanError:
    """Return why there is no scan: the one reason, or NO_IMAGES with all of them."""
    lost = [entry.reason for entry in entries if entry.reason is not None]
    failed = [reason for reason in lost if reason.outcome == "failed"]
    if len(entries) == 1 and failed:
        return ScanError(failed[0], "what was named can't be used")
    for entry, look in zip(entries, looks, strict=True):
        if IN_ARCHIVE in entry.path and look.detail and not look.kind:
            return ScanError(Reason[look.reason], look.detail)  # the archive can't be unpacked
    skipped = Counter(look.reason for look in looks if look.packed and look.reason)
    skipped.update(look.reason for look in looks if look.reason == Reason.UNREADABLE.code)
    if len(skipped) == 1:
        [(code, count)] = skipped.items()
        return ScanError(Reason[code], f"{count} files, none of them a slice of a volume")
    detail = ", ".join(
        f"{count} {code}"
        for code, count in sorted(skipped.items(), key=lambda i: Reason[i[0]].value)
    )
    return ScanError(Reason.NO_IMAGES, "no scan at this path" + (f" ({detail})" if detail else ""))


def _listed(found: Sequence[Series]) -> str:
    """Return the list for a person to choose from: no description, which may name a patient."""
    lines = []
    for number, series in enumerate(found, 1):
        uid = f", UID ...{series.series_uid[-SHOWN_DIGITS:]}" if series.series_uid else ""
        kind = f"{series.modality or series.kind}{' (derived)' if series.derived else ''}"
        lines.append(f"{number}: {kind}, {len(series.files)} files{uid}")
    return "; ".join(lines)
