"""The crosswalk: which source an id stands for, in `OUT/private/crosswalk.parquet`.

A row says where a case was found. The same scan found at two places has two rows, the newest last.
It holds identity: it is for those who hold the key, and never leaves the private folder unasked.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scanloom.core import DICOM, Reason, ScanError, Series
from scanloom.io.archives import IN_ARCHIVE
from scanloom.io.private import CROSSWALK, PRIVATE, private_folder, write_private
from scanloom.io.regular import open_regular
from scanloom.io.session import current_session

if TYPE_CHECKING:
    import pyarrow as pa

    from scanloom.io.index import Index
    from scanloom.io.index_file import IndexedSeries

LOOKED_AT = 8
"""Files of a series that are tried for the patient's id before it is left empty."""
AT_ONCE = 50_000
"""Rows that are made before they are written: an archive may have a million series."""

_WORDS = {
    "patient_id": "PatientID",
    "patient_name": "PatientName",
    "accession_number": "AccessionNumber",
    "study_date": "StudyDate",
    "series_number": "SeriesNumber",
    "series_description": "SeriesDescription",
}
"""What is taken from a DICOM header, by column."""


@dataclass(frozen=True)
class Source:
    r"""Where a case comes from. All but the first two fields can name a patient.

    Parameters
    ----------
    id : str
        The case id.
    kind : str
        A name of `scanloom.io.formats.FORMATS`.
    path : str
        The file, or the folder that holds all files; absolute. Bytes that are no UTF-8 stand as
        `\xNN`.
    files : int
        How many there are.
    folder : str
        The case's folder in `OUT/cases/`; empty for a case without a result.
    study_uid, series_uid, patient_id, patient_name, accession_number, study_date, series_number,
    series_description : str
        As the header says; empty where it doesn't, and for other kinds than DICOM.
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


COLUMNS = tuple(field.name for field in fields(Source))


def source_of(series: Series, case_id: str) -> Source:
    """Return where a series comes from; the header of one readable file is read for it."""
    words = _words(series.files) if series.kind == DICOM else {}
    return Source(
        id=case_id,
        kind=series.kind,
        path=_path_text(common_place(series.files)),
        files=len(series.files),
        study_uid=series.study_uid,
        series_uid=series.series_uid,
        **words,
    )


def common_place(files: Sequence[Path]) -> str:
    """Return the one file, or the innermost folder that holds all files; absolute.

    For what was unpacked, the packed file or archive counts.
    """
    scratch = current_session().scratch
    return _common({scratch.origin(file) for file in files})


def source_of_indexed(index: Index, one: IndexedSeries) -> Source:
    """Return where a series of an index comes from, `source_of` for what no case was made of.

    Of what is packed no more is unpacked than the files that are tried for the patient's id.
    """
    paths = {index.rows.entries[n].path.split(IN_ARCHIVE)[0] for n in one.files}
    try:
        series = index.as_series(one._replace(files=one.files[:LOOKED_AT]))
        words = _words(series.files) if one.kind == DICOM else {}
    except ScanError:  # it can't be unpacked, which is its reason
        words = {}
    return Source(
        id=one.id,
        kind=one.kind,
        path=_path_text(_common(paths)),
        files=len(one.files),
        study_uid=one.study_uid,
        series_uid=one.series_uid,
        **words,
    )


def remember_series(out: Path, fingerprint: str, index: Index, those: Iterable[str]) -> None:
    """Add the series of an index that have one of these ids and are not in the crosswalk yet.

    Parameters
    ----------
    out : Path
        The output folder.
    fingerprint : str
        Of the key.
    index : Index
        All series that were found; those without an id can't be asked for.
    those : iterable of str
        The ids that are wanted.

    Raises
    ------
    ScanError
        KEY_MISMATCH; OUTPUT_UNWRITABLE if the crosswalk can't be read.
    OSError
        If it can't be written.
    """
    wanted = set(those) - known_ids(out) - {""}
    missing = (one for one in index.series if one.id in wanted)
    while batch := list(itertools.islice(missing, AT_ONCE)):
        sources = [source_of_indexed(index, one) for one in batch]
        with private_folder(out, fingerprint) as private:
            add_sources(private, sources)


def add_sources(private: Path, sources: Sequence[Source]) -> None:
    """Add rows to the crosswalk of a private folder that is locked (`private_folder`).

    A row takes the place of an older one of the same id and path. A case keeps the folder it has:
    an empty one does not overwrite it.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the crosswalk that is there can't be read: it is never written over.
    OSError
        If it can't be written.
    """
    table = _read(private / CROSSWALK)
    concerned = _with_ids(table, [row.id for row in sources])
    before = _rows(table.filter(concerned))
    folders = {row.id: row.folder for row in before if row.folder}
    added = [_in_folder(row, folders.get(row.id, "")) for row in sources]
    after = {(row.id, row.path): row for row in before}
    for row in added:
        after.pop((row.id, row.path), None)  # the newest stands last
        after[row.id, row.path] = row
    if tuple(after.values()) != before:
        import pyarrow as pa
        from pyarrow import compute, parquet

        others = table.filter(compute.invert(concerned))
        whole = pa.concat_tables([others, _table(list(after.values()))])
        write_private(private / CROSSWALK, lambda draft: parquet.write_table(whole, draft))


def find_sources(out: Path, ids: Sequence[str]) -> tuple[Source, ...]:
    """Return the rows of OUT's crosswalk that have one of these ids, oldest first.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if it can't be read.
    """
    path = out / PRIVATE / CROSSWALK
    if not path.exists():
        return ()
    table = _read(path)
    return _rows(table.filter(_with_ids(table, ids)))


def known_ids(out: Path) -> set[str]:
    """Return all ids of OUT's crosswalk.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if it can't be read.
    """
    path = out / PRIVATE / CROSSWALK
    return set(_read(path).column("id").to_pylist()) if path.exists() else set()


def case_folders(out: Path) -> dict[str, str]:
    """Return the name of the folder in `OUT/cases/` of each case that has one, by id.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the crosswalk can't be read.
    """
    path = out / PRIVATE / CROSSWALK
    if not path.exists():
        return {}
    table = _read(path)
    named = zip(table.column("id").to_pylist(), table.column("folder").to_pylist(), strict=True)
    return {case_id: folder for case_id, folder in named if folder}


def volume_files(out: Path) -> dict[str, set[str]]:
    """Return the ids of the cases that were found last in a volume file, by its path.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the crosswalk can't be read.
    """
    path = out / PRIVATE / CROSSWALK
    found: dict[str, set[str]] = {}
    if path.exists():
        from pyarrow import compute

        table = _read(path)
        volumes = table.filter(compute.not_equal(table.column("kind"), DICOM))
        for row in newest(_rows(volumes)).values():
            if row.files == 1:
                found.setdefault(row.path, set()).add(row.id)
    return found


def newest(sources: Iterable[Source]) -> dict[str, Source]:
    """Return one row an id: where it was found last."""
    return {row.id: row for row in sources}


def _read(path: Path) -> pa.Table:
    import pyarrow as pa
    from pyarrow import parquet

    if not path.exists():
        return _table([])
    try:
        with open_regular(path) as plain, parquet.ParquetFile(plain) as file:
            return file.read().select(list(COLUMNS)).cast(_table([]).schema)
    except (OSError, KeyError, ValueError, pa.ArrowException) as exc:
        detail = (
            f"{PRIVATE}/{CROSSWALK} can't be read ({type(exc).__name__}). It is not written over: "
            "move it aside, and the next run makes a new one of the scans that it finds"
        )
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail) from exc


def _with_ids(table: pa.Table, ids: Sequence[str]) -> pa.ChunkedArray:
    """Return which rows have one of the ids."""
    import pyarrow as pa
    from pyarrow import compute

    return compute.is_in(table.column("id"), value_set=pa.array(ids, pa.string()))


def _rows(table: pa.Table) -> tuple[Source, ...]:
    return tuple(Source(**row) for row in table.to_pylist())


def _table(rows: Sequence[Source]) -> pa.Table:
    import pyarrow as pa

    types = {f.name: pa.int64() if f.type == "int" else pa.string() for f in fields(Source)}
    columns = {name: [getattr(row, name) for row in rows] for name in types}
    return pa.table(columns, pa.schema(types.items()))


def _in_folder(row: Source, folder: str) -> Source:
    return row if row.folder or not folder else replace(row, folder=folder)


def _words(files: Sequence[Path]) -> dict[str, str]:
    """Return what the first readable header says of the patient; empty words if none does."""
    from pydicom import dcmread

    from scanloom.io.dicom.headers import quiet

    with quiet():
        for path in files[:LOOKED_AT]:
            try:
                tags: list[Any] = list(_WORDS.values())
                header = dcmread(path, specific_tags=tags, stop_before_pixels=True, force=True)
                words = {name: header.get(word) for name, word in _WORDS.items()}
                found = {name: _text(str(word or "")) for name, word in words.items()}
            except Exception:  # noqa: BLE001, S112 whatever is wrong with it, its reader says
                continue
            if any(found.values()):
                return found
    return {}


def _common(paths: Iterable[Path | str]) -> str:
    return os.path.commonpath([os.path.abspath(path) for path in paths])  # noqa: PTH100 links stay


def _path_text(path: str) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _text(text: str) -> str:
    """Return text that can be written as UTF-8, without the NULs that pad headers."""
    return text.replace("\0", "").strip().encode("utf-8", "backslashreplace").decode()
