"""The crosswalk `OUT/private/crosswalk.parquet`: the sources of case ids.

A row records the source of a case. A scan that was found under two paths has two rows, the newest
last. The table identifies patients: it is for the holders of the key, and leaves the private folder
only on request.

A large table is not written anew for each case: rows are appended to `crosswalk.jsonl` until these
are as many as the table's, or a run ends. Then they become part of the table, and the file of lines
is removed. Whoever reads takes both; a process that died in between left rows twice, which count
once.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from scanloom.core import DICOM, Reason, ScanError, Series
from scanloom.io.formats import VOLUME_SUFFIXES
from scanloom.io.output.private import CROSSWALK, CROSSWALK_LINES, PRIVATE, write_private
from scanloom.io.session import current_session
from scanloom.io.system.archives import ARCHIVE_SUFFIXES
from scanloom.io.system.atomic_write import append_synced, cut_half_line, fsync_path
from scanloom.io.system.regular_files import open_link_free, open_regular_file
from scanloom.io.system.unpacking import UnpackedFiles

if TYPE_CHECKING:
    import pyarrow as pa


MAX_HEADERS_READ = 8
"""Files of a series that are searched for the patient's id before it is left empty."""
CHEAP_BYTES = 1 << 16
"""Size up to which the table is written anew for each case: some hundred rows."""

GROUP_ROWS = 100_000
"""Rows of the table that are read at a time when some are looked up."""
_Wanted = tuple[str, Sequence[str]]
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
        Absolute path of the file, or of the innermost folder that contains all files. Bytes that
        are not valid UTF-8 are written as `\xNN`.
    files : int
        Number of files.
    folder : str
        Name of the case's folder in `OUT/cases/`; empty for a case without a result.
    study_uid, series_uid, patient_id, patient_name, accession_number, study_date, series_number,
    series_description : str
        Values of the DICOM header; empty if missing, and for other formats.
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


COLUMNS = tuple(field.name for field in fields(SourceRecord))


def source_from_series(series: Series, case_id: str) -> SourceRecord:
    """Return the source of a series. For DICOM, the header of one readable file is read."""
    attributes = _header_attributes(series.files) if series.kind == DICOM else {}
    return SourceRecord(
        id=case_id,
        kind=series.kind,
        path=path_text(common_parent(series.files)),
        files=len(series.files),
        study_uid=series.study_uid,
        series_uid=series.series_uid,
        **attributes,
    )


def common_parent(files: Sequence[Path]) -> str:
    """Return the absolute path of the only file, or of the innermost folder of all files.

    For unpacked files, the path of the compressed file or archive is used.
    """
    scratch = current_session().cache(UnpackedFiles)
    return common_path({scratch.origin(file) for file in files})


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
    table, lines = _size(private / CROSSWALK), _size(private / CROSSWALK_LINES)
    if table <= CHEAP_BYTES or lines >= table:
        gather_sources(private, sources)
    else:
        _append(private / CROSSWALK_LINES, sources)


def gather_sources(private: Path, sources: Sequence[SourceRecord] = ()) -> None:
    """Write the table of a locked private folder anew, with the rows that were appended, and more.

    Nothing is written if no row is new. Raises as `add_sources`.
    """
    lines, added = private / CROSSWALK_LINES, list(sources)
    with suppress(FileNotFoundError), open_regular_file(lines) as file:
        added = [*_appended(file), *added]
    if added:
        table = _read_table(private / CROSSWALK)
        updated = _with_rows(table, added)
        if updated is not table:
            from pyarrow import parquet

            write_private(
                private / CROSSWALK,
                lambda path: parquet.write_table(updated, path, row_group_size=GROUP_ROWS),
            )
    lines.unlink(missing_ok=True)  # after the table has them


def find_sources(out: Path, ids: Sequence[str]) -> tuple[SourceRecord, ...]:
    """Return the rows of OUT's crosswalk that have one of these ids, oldest first.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the crosswalk can't be read.
    """
    return _rows(_read(out, wanted=("id", ids)))


def source_rows(out: Path, ids: Sequence[str]) -> pa.Table:
    """Return what `find_sources` does as a table, with `COLUMNS`; many rows are cheap so."""
    return _read(out, wanted=("id", ids))


def sources_of_study(out: Path, study_uid: str) -> tuple[SourceRecord, ...]:
    """Return the rows of OUT's crosswalk of a study, by its StudyInstanceUID, oldest first.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the crosswalk can't be read.
    """
    return _rows(_read(out, wanted=("study_uid", [study_uid])))


def known_ids(out: Path) -> set[str]:
    """Return all ids of OUT's crosswalk.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the crosswalk can't be read.
    """
    return set(_read(out, ("id",)).column("id").to_pylist())


def sources_by_folder(out: Path) -> dict[str, SourceRecord]:
    """Return the last row of each case with a result, by the name of its folder in `OUT/cases/`.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the crosswalk can't be read.
    """
    rows = _rows(_read(out))
    return {row.folder or row.id: row for row in latest_by_id(rows).values()}


def case_folders(out: Path) -> dict[str, str]:
    """Return the folder names in `OUT/cases/` of the cases with a result, by id.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the crosswalk can't be read.
    """
    table = _read(out, ("id", "folder"))
    rows = zip(table.column("id").to_pylist(), table.column("folder").to_pylist(), strict=True)
    return {case_id: folder for case_id, folder in rows if folder}


def ids_by_volume_file(out: Path) -> dict[str, set[str]]:
    """Return the case ids of each volume file, by its path, as they were last recorded.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the crosswalk can't be read.
    """
    from pyarrow import compute

    table, ids = _read(out), dict[str, set[str]]()
    volumes = table.filter(compute.not_equal(table.column("kind"), DICOM))
    for row in latest_by_id(_rows(volumes)).values():
        if row.files == 1:
            ids.setdefault(row.path, set()).add(row.id)
    return ids


def latest_by_id(sources: Iterable[SourceRecord]) -> dict[str, SourceRecord]:
    """Return the last row of each id."""
    return {row.id: row for row in sources}


def stamp(out: Path) -> tuple[object, ...]:
    """Return a value that changes when the crosswalk does."""
    states = (_state(out / PRIVATE / name) for name in (CROSSWALK, CROSSWALK_LINES))
    return tuple(s and (s.st_ino, s.st_mtime_ns, s.st_size) for s in states)


def _read(out: Path, columns: Sequence[str] = COLUMNS, wanted: _Wanted | None = None) -> pa.Table:
    """Return columns of the crosswalk: of all rows, or of those with some values in a column."""
    table, lines = (out / PRIVATE / name for name in (CROSSWALK, CROSSWALK_LINES))
    while True:
        try:
            appended = open_regular_file(lines)
        except (FileNotFoundError, NotADirectoryError):
            return _read_table(table, columns, wanted)
        except OSError as exc:
            raise _unreadable(CROSSWALK_LINES, exc) from exc
        with appended:
            # The lines first: what leaves them meanwhile is in the table by then
            added = list(_appended(appended))
            rows = _read_table(table, COLUMNS, wanted)
            # While it is open, no other file has its inode
            if _identity(os.fstat(appended.fileno())) == _identity(_state(lines)):
                return _filtered(_with_rows(rows, added), wanted).select(list(columns))


def _read_table(
    path: Path, columns: Sequence[str] = COLUMNS, wanted: _Wanted | None = None
) -> pa.Table:
    """Return columns of the table alone, a group of rows at a time if only some are wanted."""
    import pyarrow as pa
    from pyarrow import parquet

    empty = _table([]).select(list(columns))
    if not path.exists():
        return empty
    try:
        # Threads would gain nothing, and Arrow's pools now and then abort a process that ends soon
        with open_regular_file(path) as plain, parquet.ParquetFile(plain, pre_buffer=False) as file:
            parts = [
                _filtered(file.read_row_group(n, list(columns), use_threads=False), wanted)
                for n in range(file.num_row_groups)
                if wanted is None
                or _filtered(
                    file.read_row_group(n, [wanted[0]], use_threads=False), wanted
                ).num_rows
            ]
            return pa.concat_tables(
                [empty, *(part.select(list(columns)).cast(empty.schema) for part in parts)]
            )
    except (OSError, KeyError, ValueError, pa.ArrowException) as exc:
        raise _unreadable(CROSSWALK, exc) from exc


def _filtered(table: pa.Table, wanted: _Wanted | None) -> pa.Table:
    return table if wanted is None else table.filter(_holds(table, *wanted))


def _unreadable(name: str, error: Exception) -> ScanError:
    detail = (
        f"{PRIVATE}/{name} can't be read ({type(error).__name__}) and is not overwritten: "
        "move it aside, and the next run makes a new one from the scans that it finds"
    )
    return ScanError(Reason.OUTPUT_UNWRITABLE, detail)


def _append(path: Path, sources: Sequence[SourceRecord]) -> None:
    """Append rows as lines; half a line of a process that died is cut off."""
    text = "".join(f"{json.dumps(asdict(row), ensure_ascii=False)}\n" for row in sources)
    is_new = not path.exists()
    descriptor = open_link_free(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = cut_half_line(descriptor)
        append_synced(descriptor, text.encode(), size)
    finally:
        os.close(descriptor)
    if is_new:
        fsync_path(path.parent)


def _appended(file: BinaryIO) -> Iterator[SourceRecord]:
    """Yield the rows that were appended; not the half of one that is being written."""
    try:
        for line in file:
            if line.endswith(b"\n"):
                yield SourceRecord(**json.loads(line))
    except (OSError, ValueError, TypeError) as exc:
        raise _unreadable(CROSSWALK_LINES, exc) from exc


def _with_rows(table: pa.Table, added: Sequence[SourceRecord]) -> pa.Table:
    """Return a table with more rows, see `add_sources`; the table itself if none is new."""
    import pyarrow as pa

    before = tuple[SourceRecord, ...]()
    if table.num_rows:  # else it is the first case of OUT: importing pyarrow.compute takes 0.03 s
        from pyarrow import compute

        affected = _holds(table, "id", [row.id for row in added])
        before = _rows(table.filter(affected))
        others = table.filter(compute.invert(affected))
    else:
        others = table
    folders = {row.id: row.folder for row in before if row.folder}
    after = {(row.id, row.path): row for row in before}
    for row in added:
        folders[row.id] = row.folder or folders.get(row.id, "")
        after.pop((row.id, row.path), None)  # the newest row comes last
        after[row.id, row.path] = replace(row, folder=folders[row.id])
    if tuple(after.values()) == before:
        return table
    return pa.concat_tables([others, _table(list(after.values()))])


def _size(path: Path) -> int:
    state = _state(path)
    return 0 if state is None else state.st_size


def _state(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _identity(state: os.stat_result | None) -> object:
    return None if state is None else (state.st_dev, state.st_ino)


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
                attributes = {name: _text(str(value or "")) for name, value in values.items()}
            except Exception:  # noqa: BLE001, S112 the reader of the scan reports the error
                continue
            if any(attributes.values()):
                return attributes
    return {}


def common_path(paths: Iterable[Path | str]) -> str:
    """Return the only path, or the innermost folder that contains all paths; absolute."""
    return os.path.commonpath([os.path.abspath(path) for path in paths])  # noqa: PTH100 keep links


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
        name = safe_file_name(_file_name(source))
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


def _file_name(source: SourceRecord) -> str:
    """Return the name of the source's file or folder, without suffixes."""
    return _SUFFIXES.sub("", os.path.basename(source.path))  # noqa: PTH119 escaped, not a path
