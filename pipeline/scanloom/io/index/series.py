"""Scans at a path: DICOM series and volume files, recognised by their content."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from scanloom.core import DICOM, MODALITIES, Reason, ScanError, Series
from scanloom.io.dicom.header.elements import decode_elements
from scanloom.io.dicom.header.header import Header, HeaderCache, pydicom_muted
from scanloom.io.dicom.pixels.frame import NATIVE_TRANSFER_SYNTAXES
from scanloom.io.dicom.sop_classes import is_derived, object_name
from scanloom.io.formats import EMPTY_FILE, FORMATS, VOLUME_FORMATS
from scanloom.io.index.inspection import FileInfo, inspect_files, series_description, series_number
from scanloom.io.index.missing_files import DicomFiles, LostFiles, UnreadableFiles
from scanloom.io.index.walk import FileEntry, list_files, stamp_of
from scanloom.io.output.single_file import is_result
from scanloom.io.session import current_session
from scanloom.io.system.archives import MEMBER_SEPARATOR, archive_kind, is_archive
from scanloom.io.system.regular_files import special_file_name
from scanloom.io.system.sandbox import start_sandbox
from scanloom.io.system.unpacking import UnpackedFiles

FAILED_REASONS = frozenset(reason.code for reason in Reason if reason.outcome == "failed")
"""Codes of the reasons that count as failures."""


@dataclass
class SeriesFiles:
    """Files of one series, as indices into the list of file entries.

    Parameters
    ----------
    kind : str
        Name of the format in `scanloom.io.formats.FORMATS`.
    study, series : str
        UIDs; empty if absent.
    members : list of int
        Files that may be slices.
    skipped : list of int
        Files of the same series that are not slices; a series of such files alone is skipped.
    damaged : bool
        Whether these are DICOM files that can't be read.
    elsewhere : bool
        Whether a file of its voxels is not among the entries.
    """

    kind: str
    study: str = ""
    series: str = ""
    members: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    damaged: bool = False
    elsewhere: bool = False


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
        The caller's output folder; results in it are not scans.
    archives : bool
        Whether to search archives inside folders.

    Returns
    -------
    tuple of Series
        At least one; the same order on every machine, the largest first.

    Raises
    ------
    ScanError
        NOT_FOUND or UNREADABLE; without a scan, NO_IMAGES, or the reason for which all files
        were skipped if they share one.
    """
    _check_file(path)
    entries = list_files([path], out=out, archives=archives)
    infos = _inspect(entries)
    requested = ""
    if _is_single_file(path) and infos[0].kind and not infos[0].reason:
        requested = entries[0].path
        if infos[0].kind == DICOM:
            candidates = _with_folder(requested)
        else:
            candidates = _volume_files(entries[0], infos[0])
        entries = list_files([file for file in candidates if os.path.lexists(file)])
        infos = _inspect(entries)
    groups = group_files(entries, infos)
    grouped = {n for group in groups for n in (*group.members, *group.skipped)}

    def fault_of(n: int) -> str:
        is_foreign = infos[n].reason == Reason.NOT_AN_IMAGE.code and n not in grouped
        is_damaged = infos[n].reason in FAILED_REASONS and not infos[n].packed
        return infos[n].reason if is_foreign or is_damaged else ""

    def faults() -> Iterator[tuple[FileEntry, str]]:
        return ((entry, fault_of(n)) for n, entry in enumerate(entries))

    unreadable = UnreadableFiles(
        faults,
        lambda: (
            DicomFiles(
                group.study or group.series,
                [entries[n].path for n in group.members or group.skipped],
                bool(group.members),
            )
            for group in groups
            if group.kind == DICOM and not group.damaged
        ),
        faults,
    )
    scans = [
        replace(make_series(group, entries, infos), **_lost(group, entries, unreadable)._asdict())
        for group in groups
        if group.members
        and (not requested or any(entries[n].path == requested for n in group.members))
    ]
    if not scans:
        raise _no_scan_error(entries, infos)
    if not requested:
        scans = [  # a label map that `segment -o` wrote is derived from the scan beside it
            replace(scan, derived=True) if scan.kind != DICOM and is_result(scan.files[0]) else scan
            for scan in scans
        ]
    return tuple(sorted(scans, key=lambda s: (-len(s.files), s.study_uid, s.series_uid, s.files)))


def group_files(entries: Sequence[FileEntry], infos: Sequence[FileInfo]) -> list[SeriesFiles]:
    """Group files into series, in the order of their first files.

    The damaged DICOM files of a folder form a series of their own, which can't be read: they may
    belong to any series. Series without a UID are distinguished by folder.
    """
    groups: dict[tuple[str, ...], SeriesFiles] = {}
    voxel_files = _voxel_files(entries, infos)
    detached = {n for files in voxel_files.values() for n in files if n is not None}
    for n, (entry, info) in enumerate(zip(entries, infos, strict=True)):
        if not info.kind or n in detached:
            continue
        if info.kind != DICOM:
            group = groups.setdefault((info.kind, str(n)), SeriesFiles(info.kind))
            voxels = voxel_files.get(n, [])
            group.members.extend([n, *(voxel for voxel in voxels if voxel is not None)])
            group.elsewhere = None in voxels
            continue
        folder = "" if info.series else os.path.dirname(entry.path)
        damaged = "damaged" if info.reason and not info.packed else ""
        key = (DICOM, info.study, info.series, folder, damaged)
        if key not in groups:
            groups[key] = SeriesFiles(DICOM, info.study, info.series, damaged=bool(damaged))
        group = groups[key]
        (group.skipped if info.packed and info.reason else group.members).append(n)
    return list(groups.values())


def make_series(
    group: SeriesFiles, entries: Sequence[FileEntry], infos: Sequence[FileInfo]
) -> Series:
    """Return the `Series` of a group; its compressed files and archive members are unpacked."""
    session = current_session()
    unpacked = session.cache(UnpackedFiles)
    stamp = stamp_of(entries[n] for n in group.members)
    try:
        files = tuple(
            unpacked.readable_file(entries[n].path, gzipped=infos[n].gzipped) for n in group.members
        )
    except ScanError:  # reading this series will raise it; the other series are not affected
        compressed = tuple(Path(unpacked.readable_path(entries[n].path)) for n in group.members)
        return Series(group.kind, compressed, group.study, group.series, stamp=stamp)
    if group.kind != DICOM:
        return Series(group.kind, files, stamp=stamp)
    pairs = zip(files, (infos[n] for n in group.members), strict=True)
    headers = [Header(file, decode_elements(info.packed)) for file, info in pairs if info.packed]
    if len(headers) < len(files):
        return Series(DICOM, files, stamp=stamp)
    session.cache(HeaderCache).put(headers)
    if not all(header.syntax in NATIVE_TRANSFER_SYNTAXES for header in headers):
        start_sandbox()  # the decoder process starts while this one continues
    modality = headers[0].modality
    with pydicom_muted():
        return Series(
            kind=DICOM,
            files=files,
            study_uid=group.study,
            series_uid=group.series,
            modality=modality if modality in MODALITIES else None,
            number=series_number(headers[0]),
            description=series_description(headers[0]),
            derived=all(map(is_derived, headers)),
            stamp=stamp,
        )


def known_infos(
    entries: Sequence[FileEntry], stored: Sequence[FileInfo | None]
) -> tuple[list[FileInfo | None], dict[int, str]]:
    """Separate files whose type is known without opening them from those that must be opened.

    Parameters
    ----------
    entries : sequence of FileEntry
    stored : sequence of FileInfo or None
        Result of an earlier inspection of each file, or None.

    Returns
    -------
    list of FileInfo or None
        None for files that must be opened. If the archive of such a file can't be unpacked, the
        file has the reason of the archive.
    dict of int to str
        Path at which each file that must be opened can be read; archives are unpacked for it.
    """
    scratch = current_session().cache(UnpackedFiles)
    failed: dict[str, ScanError] = {}
    infos: list[FileInfo | None] = []
    paths: dict[int, str] = {}
    for n, (entry, info) in enumerate(zip(entries, stored, strict=True)):
        archive = entry.path.partition(MEMBER_SEPARATOR)[0]
        if entry.reason is not None:
            info = FileInfo("", reason=entry.reason.code)
        elif info is None and archive not in failed:
            try:
                paths[n] = scratch.readable_path(entry.path)
            except ScanError as error:
                failed[archive] = error
        if info is None and archive in failed:
            info = FileInfo("", reason=failed[archive].code, detail=failed[archive].detail)
        infos.append(info)
    return infos, paths


def _inspect(entries: Sequence[FileEntry]) -> list[FileInfo]:
    known, paths = known_infos(entries, [None] * len(entries))
    inspected = iter(inspect_files(list(paths.values())))
    return [info or next(inspected) for info in known]


def _check_file(path: Path | str) -> None:
    """Refuse a path to a pipe, socket or device (NO_IMAGES), or to an empty file (TRUNCATED)."""
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return
    name = special_file_name(state.st_mode)
    if name:
        raise ScanError(Reason.NO_IMAGES, f"this is a {name}, not a file or folder", str(path))
    if stat.S_ISREG(state.st_mode) and state.st_size == 0:
        reason = Reason.DAMAGED if is_archive(path) else Reason.TRUNCATED
        raise ScanError(reason, EMPTY_FILE, str(path))


def _is_single_file(path: Path | str) -> bool:
    name = Path(path).name.upper()
    return os.path.isfile(path) and not is_archive(path) and name != "DICOMDIR"


def _with_folder(path: str) -> list[str]:
    """Return a file and the other files of its folder, without archives and DICOMDIRs.

    Each is there once, as in a folder that is searched: links to one of them are left out.
    """
    folder = os.path.dirname(path)
    home, known = os.path.realpath(folder), {os.path.realpath(path)}
    try:
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda e: (e.is_symlink(), e.path))  # files before links
    except OSError:
        return [path]
    files = []
    for entry in entries:
        is_link = entry.is_symlink()
        target = os.path.realpath(entry.path) if is_link else os.path.join(home, entry.name)
        if target not in known and _may_be_file(entry):
            known.add(target)
            files.append(entry.path)
    return [path, *(f for f in sorted(files) if not is_archive(f) and f[-8:] != "DICOMDIR")]


def _may_be_file(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a file, or one that can't be read, such as a loop of links."""
    try:
        return entry.is_file()
    except OSError:
        return True


def _lost(
    group: SeriesFiles, entries: Sequence[FileEntry], unreadable: UnreadableFiles
) -> LostFiles:
    """Return how many unreadable files may be slices of a series."""
    if group.kind != DICOM:
        return LostFiles()
    return unreadable.of(group.study or group.series, (entries[n].path for n in group.members))


def _voxel_files(
    entries: Sequence[FileEntry], infos: Sequence[FileInfo]
) -> dict[int, list[int | None]]:
    """Map each volume header with detached voxels to the files that hold them, by index.

    None stands for a file that is not among the entries.
    """
    detached = {
        n: files
        for n, info in enumerate(infos)
        if info.kind not in ("", DICOM) and (files := _volume_files(entries[n], info)[1:])
    }
    if not detached:
        return {}
    indices = {entry.path: n for n, entry in enumerate(entries)}
    return {n: list(map(indices.get, files)) for n, files in detached.items()}


def _volume_files(entry: FileEntry, info: FileInfo) -> list[str]:
    """Return the files of a volume: the header, then the files of detached voxels."""
    volume_format = FORMATS[info.kind]
    if not entry.path.lower().endswith(volume_format.detached_suffixes):
        return [entry.path]
    try:
        header = current_session().cache(UnpackedFiles).readable_file(entry.path)
    except ScanError:  # the archive can't be unpacked any more: reading the series will raise it
        return [entry.path]
    names = (os.path.relpath(file, header.parent) for file in volume_format.companions(header)[1:])
    return [entry.path, *(_relative_to(entry.path, name) for name in names)]


def _relative_to(path: str, name: str) -> str:
    """Return the path of `name` in the folder of another file, which may be an archive member."""
    archive, separator, member = path.partition(MEMBER_SEPARATOR)
    if separator:
        return archive + separator + member[: member.rfind("/") + 1] + name
    return os.path.join(os.path.dirname(path), name)


def _no_scan_error(entries: Sequence[FileEntry], infos: Sequence[FileInfo]) -> ScanError:
    """Return why no scan was found: the only reason, or NO_IMAGES with a count of each reason."""
    reasons = [entry.reason for entry in entries if entry.reason is not None]
    failed = [reason for reason in reasons if reason.outcome == "failed"]
    if len(entries) == 1 and failed:
        return ScanError(failed[0], _unusable(entries[0].path, failed[0]), entries[0].path)
    for entry, info in zip(entries, infos, strict=True):
        if MEMBER_SEPARATOR in entry.path and info.detail and not info.kind:
            archive = entry.path.split(MEMBER_SEPARATOR)[0]
            return ScanError(Reason[info.reason], info.detail, archive)
    skipped = Counter(info.reason for info in infos if info.packed and info.reason)
    skipped.update(info.reason for info in infos if info.reason == Reason.UNREADABLE.code)
    if len(skipped) == 1:
        return ScanError(Reason[next(iter(skipped))], _objects(infos))
    if not skipped:
        single = len(entries) == 1 and len(infos) == 1
        nothing = "neither a DICOM file nor named as a volume file" if single else "no scan here"
        header = single and _header_beside(entries[0].path)
        give = f": give its header, the {header} file of the same name" if header else ""
        return ScanError(Reason.NO_IMAGES, f"{nothing}{give}")
    return ScanError(Reason.NO_IMAGES, f"no scan here, but {_objects(infos)}")


def _header_beside(path: str) -> str:
    """Return the suffix of the header beside a file that is named like its voxels, or nothing."""
    stem, _ = os.path.splitext(path.removesuffix(".gz"))
    suffixes = (suffix for each in VOLUME_FORMATS for suffix in each.detached_suffixes)
    return next((suffix for suffix in suffixes if os.path.isfile(stem + suffix)), "")


def _unusable(path: str, reason: Reason) -> str:
    """Return a sentence about a file that can't be listed, such as an archive that was cut off."""
    if reason is Reason.UNREADABLE:
        if os.path.islink(path):
            return "a link to a file that is missing, or that permissions hide"
        return "permission is missing, or the disk has a fault"
    kind = archive_kind(path)
    if kind is None:
        return "a DICOMDIR that can't be read" if reason is Reason.DAMAGED else "it can't be used"
    if reason in (Reason.DAMAGED, Reason.TRUNCATED):
        return f"this {kind.name} archive is incomplete or damaged"
    return f"this {kind.name} archive can't be unpacked"


def _objects(infos: Sequence[FileInfo]) -> str:
    """Return a sentence about the objects that are not slices, with a count of each kind."""
    names: Counter[str] = Counter()
    for info in infos:
        if info.reason == Reason.UNREADABLE.code:
            names["unreadable file"] += 1
        elif info.packed and info.reason:
            header = Header("", decode_elements(info.packed))
            names[object_name(header)] += 1
    if names.total() == 1:
        return f"this is not a slice of a volume, but: {next(iter(names))}"
    listed = ", ".join(f"{count} x {name}" for name, count in names.most_common())
    return f"{names.total()} files that are not slices of a volume: {listed}"
