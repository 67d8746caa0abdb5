"""Rows of the crosswalk for the series of an index."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from scanloom.core import ScanError
from scanloom.io.index.build import Index
from scanloom.io.index.storage import IndexedSeries
from scanloom.io.output.crosswalk import (
    MAX_HEADERS_READ,
    SourceRecord,
    add_sources,
    common_path,
    known_ids,
    path_text,
    source_from_series,
)
from scanloom.io.output.private import private_folder
from scanloom.io.system.archives import MEMBER_SEPARATOR

BATCH_ROWS = 50_000
"""Rows that are collected before they are written: an archive may have a million series."""


def source_from_index(index: Index, indexed: IndexedSeries) -> SourceRecord:
    """Return the source of a series in an index, case or not; see `source_from_series`.

    From archives, only the files that are read for the patient's ID are unpacked.
    """
    paths = {index.table.entries[n].path.split(MEMBER_SEPARATOR)[0] for n in indexed.files}
    try:
        series = index.as_series(indexed._replace(files=indexed.files[:MAX_HEADERS_READ]))
        source = source_from_series(series, indexed.id)
    except ScanError:  # it cannot be unpacked, which is the series' reason in the index
        source = SourceRecord(
            id=indexed.id,
            kind=indexed.kind,
            path="",
            files=0,
            study_uid=indexed.study_uid,
            series_uid=indexed.series_uid,
        )
    return replace(source, path=path_text(common_path(paths)), files=len(indexed.files))


def record_series(out: Path, fingerprint: str, index: Index, ids: Iterable[str]) -> None:
    """Add the series of an index that have one of these IDs and are not in the crosswalk yet.

    Parameters
    ----------
    out : Path
        The output folder.
    fingerprint : str
        Fingerprint of the key.
    index : Index
        All series that were found. Series without an ID are left out.
    ids : iterable of str
        The IDs of the series to add.

    Raises
    ------
    ScanError
        KEY_MISMATCH; OUTPUT_UNWRITABLE if the crosswalk cannot be read.
    OSError
        If the crosswalk cannot be written.
    """
    requested = set(ids) - known_ids(out) - {""}
    missing = (indexed for indexed in index.series if indexed.id in requested)
    while batch := list(itertools.islice(missing, BATCH_ROWS)):
        sources = [source_from_index(index, indexed) for indexed in batch]
        with private_folder(out, fingerprint) as private:
            add_sources(private, sources)
