"""Whether the tables of an output folder say what its cases do, and CSV what Parquet does."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Container, Iterator
from contextlib import suppress
from io import TextIOWrapper
from operator import itemgetter
from pathlib import Path
from typing import Any

from scanloom.core import ScanError
from scanloom.engine.collect import (
    BATCH,
    MANIFEST,
    MEASUREMENT_COLUMNS,
    MEASUREMENTS,
    measurement_rows,
)
from scanloom.io.crosswalk import case_folders
from scanloom.io.join import defused
from scanloom.io.outfolder import CASES
from scanloom.io.regular import open_regular

Cells = dict[str, str]
"""A row as it stands in the CSV."""
_EMPTY: Cells = dict.fromkeys(MEASUREMENT_COLUMNS, "")
"""A row of measurements; an earlier version wrote fewer columns."""
Group = tuple[str, list[Cells]]
"""A case, and its rows."""


class TableUnreadableError(Exception):
    """A table can't be read; `file` is its name in OUT."""

    def __init__(self, file: str) -> None:
        super().__init__(file)
        self.file = file


def known_cases(out: Path) -> set[str]:
    """Return the names of the cases that were published, by the tables, or else the crosswalk."""
    tables = _tables(out, MEASUREMENTS)
    names: set[str] = set()
    for file in tables:
        with suppress(TableUnreadableError):  # the other one may do
            names.update(row["case"] for row in _rows(out / file, ["case"]))
    if not tables:
        with suppress(ScanError, OSError):  # it is for its owner alone
            names.update(case_folders(out).values())
    return names


def missing_tables(out: Path) -> list[str]:
    """Return the tables that are not there, though a run has written them."""
    there = {*_tables(out, MANIFEST), *_tables(out, MEASUREMENTS)}
    if not there and not any((out / "runs").glob("*/totals.json")):
        return []
    return sorted({*_files(MANIFEST), *_files(MEASUREMENTS)} - there)


def altered_measurements(out: Path, sound: Container[str]) -> set[str]:
    """Return the tables of measurements that say something else than the cases do.

    Parameters
    ----------
    out : Path
        The output folder.
    sound : container of str
        Cases whose files are as they were published; what is said of others is not judged.

    Raises
    ------
    TableUnreadableError
    """
    altered: set[str] = set()
    groups = {file: _by_case(_rows(out / file)) for file in _tables(out, MEASUREMENTS)}
    heads = {file: next(those, None) for file, those in groups.items()}
    while names := [head[0] for head in heads.values() if head is not None]:
        case = min(names)  # both are in the order of names
        rows = measurement_rows(out / CASES / case) if case in sound else None
        truth = None if rows is None else [_cells(row) for row in rows]
        for file, head in heads.items():
            if head is None or head[0] != case:
                altered.add(file)
                continue
            following = next(groups[file], None)
            ordered = following is None or following[0] > case
            if not ordered or truth not in (None, [{**_EMPTY, **row} for row in head[1]]):
                altered.add(file)
            heads[file] = following if ordered else None
    return altered


def altered_manifest(out: Path) -> set[str]:
    """Return the CSV of the manifest if it says something else than the Parquet does.

    Raises
    ------
    TableUnreadableError
    """
    files = _tables(out, MANIFEST)
    if len(files) < 2:
        return set()
    pairs = itertools.zip_longest(*(_rows(out / file) for file in files))
    return set() if all(a == b for a, b in pairs) else {f"{MANIFEST}.csv"}


def _files(table: str) -> tuple[str, str]:
    return f"{table}.csv", f"{table}.parquet"


def _tables(out: Path, table: str) -> list[str]:
    return [file for file in _files(table) if (out / file).exists()]


def _by_case(rows: Iterator[Cells]) -> Iterator[Group]:
    for case, those in itertools.groupby(rows, itemgetter("case")):
        yield case, list(those)


def _rows(path: Path, columns: list[str] | None = None) -> Iterator[Cells]:
    """Give the rows of a table, CSV or Parquet, with the columns that are asked for."""
    from pyarrow import ArrowException, parquet

    try:
        if path.suffix == ".csv":
            with TextIOWrapper(open_regular(path), "utf-8", newline="") as text:
                yield from csv.DictReader(text, strict=True)
            return
        with open_regular(path) as plain, parquet.ParquetFile(plain) as file:
            for batch in file.iter_batches(BATCH, columns=columns):
                yield from map(_cells, batch.to_pylist())
    except (OSError, ValueError, KeyError, csv.Error, ArrowException) as exc:
        raise TableUnreadableError(path.name) from exc


def _cells(row: dict[str, Any]) -> Cells:
    """Return a row as it stands in the CSV."""
    return {name: _cell(value) for name, value in row.items()}


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return defused(value)
    return "" if value is None else str(value)
