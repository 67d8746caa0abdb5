"""Rows of the crosswalk for the series of an index."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from scanloom.core import ScanError
from scanloom.io.archives import IN_ARCHIVE
from scanloom.io.crosswalk import (
    LOOKED_AT,
    Source,
    add_sources,
    common_path,
    known_ids,
    path_text,
    source_of,
)
from scanloom.io.index import Index
from scanloom.io.index_file import IndexedSeries
from scanloom.io.private import private_folder

BATCH_ROWS = 50_000
"""Rows that are collected before they are written: an archive may have a million series."""


def source_of_indexed(index: Index, indexed: IndexedSeries) -> Source:
    """Return the source of a series in an index, which need not be a case; see `source_of`.

    From archives, only the files that are read for the patient's ID are unpacked.
    """
    paths = {index.rows.entries[n].path.split(IN_ARCHIVE)[0] for n in indexed.files}
    try:
        series = index.as_series(indexed._replace(files=indexed.files[:LOOKED_AT]))
        source = source_of(series, indexed.id)
    except ScanError:  # it cannot be unpacked, which is the series' reason in the index
        source = Source(
            id=indexed.id,
            kind=indexed.kind,
            path="",
            files=0,
            study_uid=indexed.study_uid,
            series_uid=indexed.series_uid,
        )
    return replace(source, path=path_text(common_path(paths)), files=len(indexed.files))


def remember_series(out: Path, fingerprint: str, index: Index, ids: Iterable[str]) -> None:
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
        sources = [source_of_indexed(index, indexed) for indexed in batch]
        with private_folder(out, fingerprint) as private:
            add_sources(private, sources)
