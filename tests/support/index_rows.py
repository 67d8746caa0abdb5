"""What an index says."""

from __future__ import annotations

from typing import Any

from scanloom.io.index.build import Index


def index_rows(index: Index) -> list[Any]:
    """Return all that an index says, file by file and series by series, whatever its parts."""
    files = [
        (file.entry, file.outcome, file.reason, file.series and file.series.id, info)
        for file, info in zip(index.files(), index.infos(), strict=True)
    ]
    all_series = [
        (one._replace(files=(), pieces=()), one.n_files, list(index.paths_of(one)))
        for one in index.series
    ]
    return [files, all_series, index.counts(), index.reasons]
