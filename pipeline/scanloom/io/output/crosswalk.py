"""The crosswalk `OUT/private/crosswalk.parquet`: the sources of case ids.

A row records the source of a case. A scan that was found under two paths has two rows, the newest
last. The table identifies patients: it is for the holders of the key, and leaves the private folder
only on request.

A large table is not written anew for each case: rows are appended to `crosswalk.jsonl`, as
`scanloom.io.output.growing_table` says, until a run ends at the latest. Rows that a process left
twice count once.
"""

from __future__ import annotations

import itertools
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from scanloom.core import DICOM, Reason, ScanError, Series
from scanloom.io.dataset_text import decoded_text
from scanloom.io.formats import VOLUME_SUFFIXES
from scanloom.io.output.growing_table import (
    GROUP_ROWS,
    append_lines,
    file_size,
    file_state,
    read_both,
    read_lines,
    write_groups,
)
from scanloom.io.output.lookup import LastValues, Lookup, ValueSets
from scanloom.io.output.parquet_file import open_parquet, read_errors
from scanloom.io.output.private import CROSSWALK, CROSSWALK_LINES, PRIVATE, write_private
from scanloom.io.session import current_session
from scanloom.io.system.archives import ARCHIVE_SUFFIXES
from scanloom.io.system.regular_files import open_regular_file
from scanloom.io.system.unpacking import UnpackedFiles

if TYPE_CHECKING:
    import pyarrow as pa


MAX_HEADERS_READ = 8
"""Files of a series that are searched for the patient's id before it is left empty."""
CHEAP_BYTES = 1 << 16
"""Size up to which the table is written anew for each case: some hundred rows."""

MAX_LINES_BYTES = 1 << 24
"""Size of the lines at which they become part of a table of any size: they are read as objects."""
_IDS_AT_ONCE = 20_000
"""Ids that are looked up together."""
_Filter = tuple[str, Sequence[str]]
"""A column, and the values that rows are to have in it."""

_HEADER_COLUMNS = {
    "patient_id": "PatientID",
    "patient_name": "PatientName",
    "accession_number": "AccessionNumber",
    "study_date": "StudyDate",
    "series_number": "SeriesNumber",
    "series_description": "SeriesDescription",
}
"""Keywords of DICOM attributes, by column."""


@dataclass(frozen=True)
class SourceRecord:
    r"""The source of a case. All fields but the first two can name a patient.

    Parameters
    ----------
    id : str
        The case id.
    kind : str
        A name of `scanloom.io.formats.FORMATS`.
    path : str
        Absolute path of a volume file or its header, or the innermost folder of all slices. Bytes
        that are not valid UTF-8 are written as `\xNN`.
    files : int
        Number of files.
    folder : str
        Name of the case's folder in `OUT/cases/`; empty for a case without a result.
    study_uid, series_uid, patient_id, patient_name, accession_number, study_date, series_number,
    series_description : str
        Values of the DICOM header; empty if missing, and for other formats.
    phase : str
        Number of the volume in a series with several, from 0; else empty, as in older rows.
    """

    id: str
    kind: str
    path: str
    files: int
    folder: str = ""
    study_uid: str = ""
    series_uid: str = ""
    patient_id: str = ""
    patient_name: str = ""
    accession_number: str = ""
    study_date: str = ""
    series_number: str = ""
    series_description: str = ""
    phase: str = ""


COLUMNS = tuple(field.name for field in fields(SourceRecord))


def source_from_series(series: Series, case_id: str, phase: int | None = None) -> SourceRecord:
    """Return the source of a series, or of a volume of it (`phase`).

    For DICOM, the header of one readable file is read.
    """
    attributes = _header_attributes(series.files) if series.kind == DICOM else {}
    return SourceRecord(
        id=case_id,
        kind=series.kind,
        path=path_text(source_path(series)),
        files=len(series.files),
        study_uid=series.study_uid,
        series_uid=series.series_uid,
        phase="" if phase is None else str(phase),
        **attributes,
    )


def source_path(series: Series) -> str:
    """Return the absolute path of a volume file or its header, or the innermost folder of slices.

    It is the file if a DICOM series has a single one. For unpacked files, the path of the
    compressed file or archive is used.
    """
    scratch = current_session().cache(UnpackedFiles)
    files = series.files if series.kind == DICOM else series.files[:1]
    paths = {os.path.abspath(scratch.origin(file)) for file in files}  # noqa: PTH100  # keep links
    return os.path.commonpath(paths)


def add_sources(private: Path, sources: Sequence[SourceRecord]) -> None:
    """Add rows to the crosswalk of a private folder that is locked (`private_folder`).

    A row replaces an older row of the same id and path. If a row names no case folder, the one of
    an older row of the same id is kept.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the existing crosswalk can't be read: it is never overwritten.
    OSError
        If the crosswalk can't be written.
    """
    table, lines = file_size(private / CROSSWALK), file_size(private / CROSSWALK_LINES)
    if table <= CHEAP_BYTES or lines >= min(table, MAX_LINES_BYTES):
        gather_sources(private, sources)
    else:
        append_lines(private / CROSSWALK_LINES, map(asdict, sources))


def gather_sources(private: Path, sources: Sequence[SourceRecord] = ()) -> None:
    """Write the table of a locked private folder anew, with the rows that were appended, and more.

    Nothing is written if no row is new. Raises as `add_sources`.
    """
    table, lines, added = private / CROSSWALK, private / CROSSWALK_LINES, list(sources)
    with suppress(FileNotFoundError), open_regular_file(lines) as file:
        added = [*_appended(file), *added]
    before = _rows(_read_table(table, COLUMNS, _of(added))) if added else ()
    after = _with_added(before, added)
    if after != before:
        kept = _kept(table, COLUMNS, added)
        tables = itertools.chain(kept, [_table(after)])
        write_private(table, lambda draft: write_groups(draft, _table([]).schema, tables))
    lines.unlink(missing_ok=True)  # after the table has them


def find_sources(
    out: Path, ids: Sequence[str], column: Literal["id", "folder"] = "id"
) -> tuple[SourceRecord, ...]:
    """Return the rows of OUT's crosswalk that have one of these ids, or folders, oldest first.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the crosswalk can't be read.
    """
    return _rows(_read(out, include=(column, ids)))


def source_rows(out: Path, ids: pa.Array, columns: Sequence[str]) -> pa.Table:
    """Return columns of the rows with one of these ids (N,); of all rows if these are many.

    The ids are values of the first column: of `id`, or `folder`.
    """
    is_few = len(ids) < GROUP_ROWS
    return _read(out, columns, (columns[0], ids.to_pylist()) if is_few else None)


def sources_of_study(out: Path, study_uid: str) -> tuple[SourceRecord, ...]:
    """Return the rows of OUT's crosswalk of a study, by its StudyInstanceUID, oldest first.

    Errors as `find_sources`.
    """
    return _rows(_read(out, include=("study_uid", [study_uid])))


def known_ids(out: Path) -> Set[str]:
    """Return all ids of OUT's crosswalk: a million take 30 MB.

    Errors as `find_sources`.
    """
    ids = _read(out, ("id",)).column("id")
    return LastValues(ids, ids).keys()


def unrecorded_ids(out: Path, places: Callable[[], Iterable[tuple[str, str]]]) -> set[str]:
    """Return those of many ids whose scans are not found by OUT's crosswalk.

    It does not have them, or the newest row of one names neither a path of its scan nor a folder
    above it: files were moved.

    Parameters
    ----------
    out : Path
    places : callable
        Return the ids, each with the path of a scan, as in `SourceRecord`; called again for each
        pass over them. A scan may lie at several paths.
    """
    import pyarrow as pa

    first = [name for name, _ in itertools.islice(places(), _IDS_AT_ONCE + 1)]
    include: _Filter | None = ("id", first) if len(first) <= _IDS_AT_ONCE else None
    table = _read(out, ("id", "path"), include)
    newest_first = table.take(pa.array(range(len(table) - 1, -1, -1), pa.int64()))
    lookup, paths = Lookup(newest_first.column("id")), newest_first.column("path")

    def ids_by_whether_found() -> Iterator[tuple[str, bool]]:
        left = iter(places())
        while batch := list(itertools.islice(left, _IDS_AT_ONCE)):
            rows = lookup.first_rows([name for name, _ in batch])
            recorded = paths.take(pa.array(rows, mask=rows < 0)).to_pylist()
            for (name, path), there in zip(batch, recorded, strict=True):
                yield name, there is not None and _is_at_or_below(path, there)

    unrecorded = {name for name, is_found in ids_by_whether_found() if not is_found}
    if unrecorded:  # copies may be where it says
        unrecorded.difference_update(name for name, is_found in ids_by_whether_found() if is_found)
    return unrecorded


def _is_at_or_below(path: str, above: str) -> bool:
    return path == above or path.startswith(os.path.join(above, ""))  # noqa: PTH118  # of many


def sources_by_folder(out: Path) -> dict[str, SourceRecord]:
    """Return the last row of each case, by the name of its folder in `OUT/cases/`, or else its id.

    Errors as `find_sources`.
    """
    rows = _rows(_read(out))
    return {row.folder or row.id: row for row in latest_by_id(rows).values()}


def case_folders(out: Path) -> Mapping[str, str]:
    """Return the folder names in `OUT/cases/` of the cases with a result, by id.

    Errors as `find_sources`.
    """
    with_result = _with_result(out)
    return LastValues(with_result.column("id"), with_result.column("folder"))


def renamed_folders(out: Path) -> Mapping[str, str]:
    """Return as `case_folders` those that may have other names than the ids of their cases.

    Errors as `find_sources`.
    """
    from pyarrow import compute

    rows = _with_result(out)
    renamed = rows.filter(compute.not_equal(rows.column("id"), rows.column("folder")))
    of_renamed = rows.filter(compute.is_in(rows.column("id"), renamed.column("id")))
    return LastValues(of_renamed.column("id"), of_renamed.column("folder"))


def _with_result(out: Path) -> pa.Table:
    from pyarrow import compute

    table = _read(out, ("id", "folder"))
    return table.filter(compute.not_equal(table.column("folder"), ""))


def ids_by_volume_file(out: Path) -> Mapping[str, set[str]]:
    """Return the case ids of each volume file, by its path, as they were last recorded.

    A volume of several files has the path of its header.

    Errors as `find_sources`.
    """
    import pyarrow as pa
    from pyarrow import compute

    table = _read(out, ("id", "path", "kind"))
    volumes = table.filter(compute.not_equal(table.column("kind"), DICOM))
    lookup = Lookup(volumes.column("id"))
    is_last = [lookup.rows(name)[-1] == row for row, name in enumerate(lookup)]
    last = volumes.filter(pa.array(is_last, pa.bool_()))
    return ValueSets(last.column("path"), last.column("id"))


def ids_of_volumes(out: Path) -> Mapping[tuple[str, str], set[str]]:
    """Return the case ids of the volumes of each series with several, by study and series UID.

    They are few. Errors as `find_sources`.
    """
    from pyarrow import compute

    table = _read(out, ("id", "study_uid", "series_uid", "phase"))
    ids = defaultdict[tuple[str, str], set[str]](set)
    for row in table.filter(compute.not_equal(table.column("phase"), "")).to_pylist():
        ids[row["study_uid"], row["series_uid"]].add(row["id"])
    return ids


def latest_by_id(sources: Iterable[SourceRecord]) -> dict[str, SourceRecord]:
    """Return the last row of each id."""
    return {row.id: row for row in sources}


def stamp(out: Path) -> tuple[object, ...]:
    """Return a value that changes when the crosswalk does."""
    states = (file_state(out / PRIVATE / name) for name in (CROSSWALK, CROSSWALK_LINES))
    return tuple(s and (s.st_ino, s.st_mtime_ns, s.st_size) for s in states)


def _read(out: Path, columns: Sequence[str] = COLUMNS, include: _Filter | None = None) -> pa.Table:
    """Return columns of the crosswalk: of all rows, or of those with some values in a column."""
    import pyarrow as pa

    table = out / PRIVATE / CROSSWALK

    def read(lines: BinaryIO | None) -> pa.Table:
        if lines is None:
            return _read_table(table, columns, include)
        added = list(_appended(lines))
        after = _with_added(_rows(_read_table(table, COLUMNS, _of(added))), added)
        newest = _filtered(_table(after), include).select(list(columns))
        return pa.concat_tables([*_kept(table, columns, added, include), newest])

    try:
        return read_both(out / PRIVATE / CROSSWALK_LINES, read)
    except OSError as exc:
        raise _unreadable(CROSSWALK_LINES, exc) from exc


def _read_table(path: Path, columns: Sequence[str], include: _Filter | None) -> pa.Table:
    """Return columns of the table alone, a group of rows at a time if only some are wanted."""
    import pyarrow as pa

    groups = _groups(path, columns, include)
    return pa.concat_tables([_table([]).select(list(columns)), *groups])


def _groups(
    path: Path, columns: Sequence[str], include: _Filter | None, exclude: _Filter | None = None
) -> Iterator[pa.Table]:
    """Yield columns of the table, a group of rows at a time, without those that have others."""
    import pyarrow as pa
    from pyarrow import compute

    if not path.exists():
        return
    schema = _table([]).schema
    try:
        with open_regular_file(path) as plain, open_parquet(plain) as file:
            for n in range(file.num_row_groups):
                if include is not None:
                    keys = file.read_row_group(n, [include[0]], use_threads=False)
                    if not _filtered(keys, include).num_rows:
                        continue
                names = {
                    *columns,
                    *(each[0] for each in (include, exclude) if each is not None),
                }
                rows = _filtered(file.read_row_group(n, sorted(names), use_threads=False), include)
                if exclude is not None:
                    rows = rows.filter(compute.invert(_holds(rows, *exclude)))
                if "phase" in columns and tuple(file.schema_arrow.names) == COLUMNS[:-1]:
                    # of a version before
                    rows = rows.append_column("phase", pa.repeat("", len(rows)))
                rows = rows.select(list(columns))
                yield rows.cast(pa.schema([schema.field(name) for name in columns]))
    except read_errors() as exc:
        raise _unreadable(CROSSWALK, exc) from exc


def _filtered(table: pa.Table, include: _Filter | None) -> pa.Table:
    return table if include is None else table.filter(_holds(table, *include))


def _unreadable(name: str, error: Exception) -> ScanError:
    detail = (
        f"{PRIVATE}/{name} can't be read ({type(error).__name__}) and is not overwritten: "
        "move it aside, and the next run makes a new one from the scans that it finds"
    )
    return ScanError(Reason.OUTPUT_UNWRITABLE, detail)


def _appended(file: BinaryIO) -> Iterator[SourceRecord]:
    """Yield the rows that were appended; not the half of one that is being written."""
    try:
        yield from (SourceRecord(**row) for row in read_lines(file))
    except (OSError, ValueError, TypeError) as exc:
        raise _unreadable(CROSSWALK_LINES, exc) from exc


def _of(added: Sequence[SourceRecord]) -> _Filter:
    return "id", [row.id for row in added]


def _kept(
    table: Path,
    columns: Sequence[str],
    added: Sequence[SourceRecord],
    include: _Filter | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of the table whose ids were not added again, a group at a time."""
    return _groups(table, columns, include, _of(added) if added else None)


def _with_added(
    before: Sequence[SourceRecord], added: Sequence[SourceRecord]
) -> tuple[SourceRecord, ...]:
    """Return the table's rows of the ids of added ones, with these, see `add_sources`."""
    folders = {row.id: row.folder for row in before if row.folder}
    after = {(row.id, row.path): row for row in before}
    for row in added:
        folders[row.id] = row.folder or folders.get(row.id, "")
        after.pop((row.id, row.path), None)  # the newest row comes last
        after[row.id, row.path] = replace(row, folder=folders[row.id])
    return tuple(after.values())


def _holds(table: pa.Table, column: str, values: Sequence[str]) -> pa.ChunkedArray:
    """Return a mask of the rows that have one of some values in a column."""
    import pyarrow as pa
    from pyarrow import compute

    return compute.is_in(table.column(column), value_set=pa.array(values, pa.string()))


def _rows(table: pa.Table) -> tuple[SourceRecord, ...]:
    return tuple(SourceRecord(**row) for row in table.to_pylist())


def _table(rows: Sequence[SourceRecord]) -> pa.Table:
    import pyarrow as pa

    types = {f.name: pa.int64() if f.type == "int" else pa.string() for f in fields(SourceRecord)}
    columns = {name: [getattr(row, name) for row in rows] for name in types}
    return pa.table(columns, pa.schema(types.items()))


def _header_attributes(files: Sequence[Path]) -> dict[str, str]:
    """Return the patient's attributes from the first readable header; empty if no file has any."""
    from pydicom import dcmread

    from scanloom.io.dicom.header.header import pydicom_muted

    with pydicom_muted():
        for path in files[:MAX_HEADERS_READ]:
            try:
                tags: list[Any] = list(_HEADER_COLUMNS.values())
                header = dcmread(path, specific_tags=tags, stop_before_pixels=True, force=True)
                values = {name: header.get(tag) for name, tag in _HEADER_COLUMNS.items()}
                attributes = {name: _text(decoded_text(value)) for name, value in values.items()}
            except Exception:  # noqa: BLE001, S112 the reader of the scan reports the error
                continue
            if any(attributes.values()):
                return attributes
    return {}


def path_text(path: str) -> str:
    """Return a path as it is stored in the crosswalk; see `SourceRecord`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _text(text: str) -> str:
    """Return text that UTF-8 can encode, without the NULs that pad header values."""
    return text.replace("\0", "").strip().encode("utf-8", "backslashreplace").decode()


# --- names of case folders from sources, on request -----------------------------------------------

MAX_NAME_BYTES = 80
"""Maximum length of a name in bytes of UTF-8: file systems allow 255, and other programs append to
names."""
_ID_CHARACTERS = 6
"""Characters of the id that distinguish cases of the same name."""

_EXTENSIONS = {
    "dcm",
    "img",
    *(name for suffix in (*VOLUME_SUFFIXES, *ARCHIVE_SUFFIXES) for name in suffix[1:].split(".")),
}
_SUFFIXES = re.compile(rf"(\.({'|'.join(sorted(_EXTENSIONS))}))+$", re.IGNORECASE)
_DEVICES = re.compile(r"con|prn|aux|nul|(com|lpt)\d", re.IGNORECASE)  # reserved on Windows


def folder_name(source: SourceRecord, taken: Iterable[str]) -> str:
    """Return a name for a case folder that identifies the source of the case.

    Parameters
    ----------
    source : SourceRecord
        The name is made of PatientID and series number of a DICOM series; of the file or folder
        name for other formats, or if PatientID is empty.
    taken : iterable of str
        The names of other cases. Case is ignored, as on some file systems.

    Returns
    -------
    str
        Letters and digits of any script, "-" and "_". The end of the id is appended if the name is
        taken. If no valid character remains, the id is the name.
    """
    if source.patient_id:
        name = safe_file_name(f"{source.patient_id} {source.series_number}")
    else:
        name = os.path.basename(source.path)  # noqa: PTH119  # escaped, no path
        name = safe_file_name(_SUFFIXES.sub("", name))
    used = {folder.casefold() for folder in taken}
    for candidate in (name, f"{name}-{source.id[-_ID_CHARACTERS:]}"):
        if name and candidate.casefold() not in used:
            return candidate
    return source.id


def safe_file_name(text: str) -> str:
    """Return a text as a file name that is safe on any system; may be empty."""
    text = unicodedata.normalize("NFC", text)
    name = re.sub(r"[^\w-]+", "_", text).strip("_-")
    short = name.encode()[:MAX_NAME_BYTES].decode("utf-8", "ignore").strip("_-")
    return f"{short}_" if _DEVICES.fullmatch(short) else short
