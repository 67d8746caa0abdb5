"""Sources of the file ids in a manifest, for the holders of the key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scanloom.engine.results.tables import MANIFEST, manifest_file_id
from scanloom.io.identity import key_fingerprint
from scanloom.io.index.build import stored_index
from scanloom.io.output.crosswalk import SourceRecord, find_sources, latest_by_id, path_text

if TYPE_CHECKING:
    from scanloom.io.index.build import Index


def find_files(out: Path, ids: Collection[str], key: bytes) -> tuple[tuple[int, SourceRecord], ...]:
    """Return the copy's number, as in the manifest, and the source of files by their ids.

    The index of the output folder tells their paths; a file is opened only if it has no
    SOPInstanceUID, and only among the files of the same series.

    Parameters
    ----------
    out : Path
        The output folder.
    ids : collection of str
        File ids; those that the manifest lacks are passed over.
    key : bytes
        The key of the ids.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the crosswalk can't be read.
    """
    series_ids = _series_of(out / f"{MANIFEST}.parquet", ids)
    index = stored_index(out, key_fingerprint(key)) if series_ids else None
    if index is None:
        return ()
    series = latest_by_id(find_sources(out, sorted(series_ids)))
    copies: Counter[str] = Counter()
    sources = []
    for file, path, kind, series_id in _files(index, series_ids, key):
        copies[file] += 1
        if file in ids:
            of_series = series.get(series_id, SourceRecord("", kind, "", 1))
            record = replace(of_series, id=file, path=path_text(path), files=1, folder="")
            sources.append((copies[file], record))
    return tuple(sources)


def is_in_manifest(out: Path, ids: Collection[str]) -> bool:
    """Return whether the manifest of an output folder has files with one of these ids."""
    return bool(_series_of(out / f"{MANIFEST}.parquet", ids))


def _series_of(manifest: Path, ids: Collection[str]) -> set[str]:
    """Return the ids of the series of files, empty for files of none, as the manifest gives them.

    An unreadable manifest has none: `verify` names it.
    """
    import pyarrow as pa
    from pyarrow import compute, parquet

    try:
        table = parquet.read_table(manifest, columns=["file", "case"])
    except (OSError, pa.ArrowException):
        return set()
    matching = compute.is_in(table.column("file"), value_set=pa.array(sorted(ids), pa.string()))
    return set(table.filter(matching).column("case").to_pylist())


def _files(
    index: Index, series_ids: Collection[str], key: bytes
) -> Iterator[tuple[str, str, str, str]]:
    """Yield the id, path and kind of the files of some series, and the id of their series."""
    rows = index.table
    for entry, look, number in zip(rows.entries, rows.infos(), rows.series_numbers, strict=True):
        series_id = rows.series[number].id if number >= 0 else ""
        if series_id in series_ids:
            yield manifest_file_id(entry.path, look.packed, key), entry.path, look.kind, series_id
