"""The list of a server, kept for the next one: it is shown while the folders are compared with it.

`private/list.parquet` has a row for each case, in the order of review: what filters and searches
look at, and of which folder and revisions that was made; of cases with verdicts, the result also.
What all rows were compared with stands beside them. Nothing in it is believed for good: the
folders are compared with it, and what a row shows is read from its folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from scanloom.io.output.growing_table import GROUP_ROWS, write_groups
from scanloom.io.output.layout import CASES
from scanloom.io.output.parquet_file import open_parquet, read_errors
from scanloom.io.output.private import PRIVATE, write_private
from scanloom.io.system.regular_files import open_regular_file
from scanloom.review.outliers import Cohort
from scanloom.review.server.rows import CaseRows
from scanloom.review.verdicts.verdict import Seen
from scanloom.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa

LIST = "list.parquet"
"""The list in `OUT/private/`."""
_ABOUT, _SUM = b"scanloom.list", b"scanloom.crc32"
"""Keys of the metadata: as JSON the version that wrote it, the inode of the folder of cases,
modalities and models, what the rows were compared with, and names of cases that could not be read;
the CRC-32 of that: only rows have checksums."""


class StoredList:
    """A list as it was stored.

    Parameters
    ----------
    rows : CaseRows
    table : pyarrow.Table
        What is stored beside the rows.
    cohort : Cohort
        What the cases were compared with.
    damaged : set of str
        Names of cases that could not be read.
    """

    def __init__(self, rows: CaseRows, table: pa.Table, cohort: Cohort, damaged: set[str]) -> None:
        self.rows, self.cohort, self.damaged = rows, cohort, damaged
        self.names = self.rows.names
        self.looks: NDArray[np.int64] = table["look"].to_numpy()
        """Of the folder of each case (N,)."""
        self._seen, self._revised = (table[name].combine_chunks() for name in ("seen", "revised"))

    def revised(self) -> dict[str, int]:
        """Return the looks of the revisions that there were, by the name of their case."""
        indices = np.flatnonzero(self._revised.is_valid().to_numpy(zero_copy_only=False)).tolist()
        return {self.names[index]: self._revised[index].as_py() for index in indices}

    def seen(self, name: str) -> Seen | None:
        """Return the result of a case with verdicts; None if it was not stored."""
        index = self.names.first_row(name)
        text = None if index is None else self._seen[index].as_py()
        if text is None:
            return None
        recipe, labels = json.loads(text)
        return Seen(recipe, labels)


def read_list(out: Path) -> StoredList | None:
    """Return the list that was stored; None without one that can be read, of this folder."""
    with (
        suppress(*read_errors()),
        open_regular_file(out / PRIVATE / LIST) as plain,
        open_parquet(plain) as file,
    ):
        metadata = file.schema_arrow.metadata or {}
        about = metadata[_ABOUT]
        version, inode, modalities, models, cohort, damaged = json.loads(about)
        is_ours = version == __version__ and inode == (out / CASES).stat().st_ino
        if is_ours and int(metadata[_SUM]) == crc32(about):
            table = file.read(use_threads=False)
            rows = CaseRows.from_table(table, modalities, models)
            return StoredList(rows, table, Cohort.from_json(cohort), set(damaged))
    return None


def remove_list(out: Path) -> None:
    """Remove the stored list, if there is one that can be removed."""
    with suppress(OSError):
        (out / PRIVATE / LIST).unlink()


def store_list(
    out: Path,
    rows: CaseRows,
    cohort: Cohort,
    damaged: set[str],
    looks: Mapping[str, int],
    revised: Mapping[str, int],
    seen: Mapping[str, Seen],
) -> None:
    """Store a list for the next server; where it can't be written, the one before stays.

    Parameters
    ----------
    looks, revised : mapping
        Looks of the folder of each case, and of its revisions if it has any.
    seen : mapping
        The results of the cases with verdicts.
    """
    import pyarrow as pa

    if not (out / PRIVATE).is_dir():
        return

    def groups() -> Iterator[pa.Table]:
        for batch in table.to_batches(max_chunksize=GROUP_ROWS):
            names = batch.column("name").to_pylist()
            results = (seen.get(name) for name in names)
            texts = [None if s is None else json.dumps([s.recipe, dict(s.labels)]) for s in results]
            columns = (
                pa.array([looks.get(name, 0) for name in names], pa.int64()),
                pa.array([revised.get(name) for name in names], pa.int64()),
                pa.array(texts, pa.string()),
            )
            yield pa.Table.from_arrays([*batch.columns, *columns], schema=schema)

    with suppress(*read_errors()):
        of_cases = (out / CASES).stat().st_ino
        table, *values = rows.as_table()
        of_list = [__version__, of_cases, *values, cohort.as_json(), sorted(damaged)]
        about = json.dumps(of_list).encode()
        metadata = {_ABOUT: about, _SUM: str(crc32(about)).encode()}
        further = pa.schema({"look": pa.int64(), "revised": pa.int64(), "seen": pa.string()})
        schema = pa.schema([*table.schema, *further], metadata)
        write_private(out / PRIVATE / LIST, lambda draft: write_groups(draft, schema, groups()))
