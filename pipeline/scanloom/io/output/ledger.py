"""The ledger `OUT/private/ledger.parquet`: what is published, so that folders need not be opened.

A row records a case by the name of its folder: its id, recipe, source hash and source stamp, and
the inode of its folder. The ledger alone may say that a result is current; for everything else, the
folder is read, and what it says is noted.

A row counts only while the folder of that name in `OUT/cases/` has that inode, which listing the
folders tells without opening one. A case is built in a folder that is renamed into place, and so
keeps its inode: its row is written before, and is void until the rename. Whenever a process dies,
the last row of a name describes the folder that is there, or none. A row may be lost, then its
folder is read: after a copy of OUT, all of them once.

Changes inside a folder do not change its inode. Some folders, chosen at random, are therefore read
each time; if one differs from its row, all are. `verify` reads all.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from scanloom.core import Case, ScanError
from scanloom.io.output.file_names import CASE, TIMING
from scanloom.io.output.growing_table import (
    append_lines,
    file_size,
    file_state,
    parse_line,
    read_both,
    write_groups,
)
from scanloom.io.output.json_file import read_json
from scanloom.io.output.layout import case_entries, case_folder
from scanloom.io.output.lookup import Lookup
from scanloom.io.output.parquet_file import open_parquet
from scanloom.io.output.private import (
    LEDGER,
    LEDGER_LINES,
    PRIVATE,
    locked_folder,
    write_private,
)
from scanloom.io.output.published import SOURCE_STAMP, check_files, read_provenance
from scanloom.io.system.regular_files import open_regular_file

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray
    from pyarrow import parquet

CHECKED = 5000
"""Folders that are read each time, and so all of a smaller OUT: some seconds."""
MIN_LINES_BYTES = 1 << 16
"""Size up to which lines are not made part of the table, whatever its size."""
_NOTED_AT_ONCE = 5000
"""Rows that are noted in memory before they are appended."""
_ROWS_AT_ONCE = 20_000
"""Lines, or names, that are Python objects at a time."""


@dataclass(frozen=True)
class PublishedCase:
    """A row: what is in a case folder.

    Parameters
    ----------
    name : str
        Name of the folder in `OUT/cases/`.
    case : str
        The case id.
    recipe, source, stamp : str
        As `scanloom.io.output.published.ResultProvenance`.
    inode : int
        Inode of the folder; 0 if nothing may be said of it.
    """

    name: str
    case: str
    recipe: str
    source: str
    stamp: str
    inode: int

    @classmethod
    def read(cls, folder: Path, name: str, inode: int) -> PublishedCase:
        """Return the row of a folder, whose files are not checked.

        Raises
        ------
        OSError, ValueError, LookupError, TypeError, ScanError
            If its documents can't be read.
        """
        document, timing = read_json(folder / CASE), read_json(folder / TIMING)
        return cls(
            name=name,
            case=str(document.get("case", name)),
            recipe=str(document["recipe"]),
            source=str(document["source"]["hash"]),
            stamp=str(timing.get(SOURCE_STAMP, "")),
            inode=inode,
        )


_DAMAGE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, ScanError),
    NotImplementedError,  # one of Arrow's, the others are of the above
)
"""Exceptions when reading a folder that was changed, or a damaged ledger."""


def add_published(private: Path, name: str, built: Path) -> None:
    """Append the row of a case that is about to be renamed to its place.

    If that fails, as on a full disk, the case has no row: it is published all the same.

    Parameters
    ----------
    private : Path
        The private folder, locked.
    name : str
        Name that the folder will have.
    built : Path
        The folder.
    """
    with suppress(*_DAMAGE):
        row = PublishedCase.read(built, name, built.stat().st_ino)
        _append(private, [row])


def _append(private: Path, rows: Sequence[PublishedCase]) -> None:
    append_lines(private / LEDGER_LINES, map(asdict, rows))
    if file_size(private / LEDGER_LINES) > max(MIN_LINES_BYTES, file_size(private / LEDGER)):
        gather_published(private)


def gather_published(private: Path) -> None:
    """Make the lines of a locked private folder part of the table, a group of rows at a time.

    Of a table that can't be read, nothing is kept.

    Raises
    ------
    OSError
        If the table can't be written.
    """
    from pyarrow import compute

    table, lines = private / LEDGER, private / LEDGER_LINES
    try:
        with open_regular_file(lines) as file:
            added = _last_rows(file)
    except FileNotFoundError:
        return

    def write(draft: Path) -> None:
        with _open_table(table) as older:
            rows = (
                each.filter(compute.not_equal(each["inode"], 0)) for each in _merged(older, added)
            )
            write_groups(draft, _schema(), rows)

    try:
        write_private(table, write)
    except _DAMAGE as exc:
        if isinstance(exc, OSError) and exc.errno is not None:
            raise
        table.unlink()
        write_private(table, write)
    lines.unlink(missing_ok=True)  # after the table has them


class Ledger:
    """The ledger of an output folder as it is now, compared with the names in `OUT/cases/`.

    In memory are a name, a source hash and two numbers for each published case.

    Parameters
    ----------
    out : Path
        The output folder.

    Attributes
    ----------
    is_damaged : bool
        Whether the table can't be read. Then it holds nothing, and the next notes replace it.
    """

    def __init__(self, out: Path) -> None:
        self._out, self.is_damaged = out, False
        self._noted: list[tuple[PublishedCase, int]] = []  # with the inodes that were looked at
        self._listed = list_folders(out)
        self._lookup = Lookup(self._listed["name"])
        self._names = self._lookup.column
        rows = self._listed_rows()
        self._columns = {name: rows[name].combine_chunks() for name in _PROVENANCE}
        recipes = self._columns.pop("recipe")
        self._recipes: list[str | None] = [*recipes.dictionary.to_pylist(), None]
        self._recipe_numbers = recipes.indices.fill_null(len(self._recipes) - 1).to_numpy()
        self._is_right = self._is_sample_right()

    def holds(self, case: Case) -> bool:
        """Return whether the result of a case is there, of its recipe and its source as it is.

        False means that nothing is known: then the folder says it.
        """
        column: Literal["stamp", "source"] = "source" if case.source_hash else "stamp"
        value = case.source_hash or case.stamp
        return self.hold([case.folder_name], case.recipe, [value], column)[0]

    def hold(
        self,
        names: Sequence[str],
        recipe: str,
        values: Sequence[str],
        column: Literal["stamp", "source"] = "stamp",
    ) -> list[bool]:
        """Return as `holds` for many cases of one recipe.

        Parameters
        ----------
        names : sequence of str
            Names of their folders.
        recipe : str
        values : sequence of str
            The stamp or the hash of the source of each; if empty, nothing is known.
        column : {"stamp", "source"}
        """
        import pyarrow as pa
        from pyarrow import compute

        if not self._is_right or recipe not in self._recipes:
            return [False] * len(names)
        rows = self._lookup.first_rows(names)
        positions, requested = pa.array(rows, mask=rows < 0), pa.array(values, pa.string())
        numbers = pa.array(self._recipe_numbers).take(positions)
        is_current = compute.and_(
            compute.equal(self._columns[column].take(positions), requested),
            compute.equal(numbers, self._recipes.index(recipe)),
        )
        is_known = compute.and_(is_current.fill_null(False), compute.not_equal(requested, ""))
        current: list[bool] = is_known.to_pylist()
        return current

    def note(self, case: Case, *, whole: bool) -> None:
        """Note what the folder of a case says, if its result was found to be whole, or nothing.

        It may be a result of other files than those of the case, such as a copy of them. Notes are
        written some thousand at once, and by `gather`. A folder without a result needs none.
        """
        position = self._lookup.first_row(case.folder_name)
        if position is None:
            return
        name, inode = case.folder_name, self._listed["inode"][position].as_py()
        row = PublishedCase(name, case.id, "", "", "", 0)  # nothing may be said of it
        if whole:
            with suppress(*_DAMAGE):
                row = PublishedCase.read(case_folder(self._out, name), name, inode)
        said = (row.recipe, row.source, row.stamp) if row.inode else (None, None, None)
        if self._provenance(position) == said:
            return
        self._noted.append((row, inode))
        if len(self._noted) >= _NOTED_AT_ONCE:
            self._write_notes()

    def gather(self) -> None:
        """Write what was noted, and make all lines part of the table.

        Where it can't be written, as by another user, the ledger stays as it is.
        """
        self._write_notes()
        private = self._out / PRIVATE
        with suppress(OSError):
            if (private / LEDGER_LINES).exists():
                with locked_folder(private):
                    gather_published(private)

    def differences(self) -> Iterator[str]:
        """Yield the names of the cases whose folders hold something else than their rows say.

        A source whose stamp was stored since is the same source.
        """
        for position in self._known().tolist():
            name = self._names[position].as_py()
            with suppress(*_DAMAGE):  # what is damaged can't be compared
                row = PublishedCase.read(case_folder(self._out, name), name, 0)
                if (row.recipe, row.source) != self._provenance(position)[:2]:
                    yield name

    def rebuild(self) -> None:
        """Write the ledger anew from the folders, of which all are read.

        Raises
        ------
        OSError
            If it can't be written.
        """
        import pyarrow as pa

        private = self._out / PRIVATE
        if not private.is_dir():
            return

        def rows() -> Iterator[pa.Table]:
            for listed in self._listed.to_batches(max_chunksize=_ROWS_AT_ONCE):
                rows_of_batch = list[dict[str, object]]()
                for each in listed.to_pylist():
                    folder = case_folder(self._out, each["name"])
                    with suppress(*_DAMAGE):
                        check_files(folder)
                        rows_of_batch.append(
                            asdict(PublishedCase.read(folder, each["name"], each["inode"]))
                        )
                yield pa.Table.from_pylist(rows_of_batch, _schema())

        with locked_folder(private):
            write_private(private / LEDGER, lambda draft: write_groups(draft, _schema(), rows()))
            (private / LEDGER_LINES).unlink(missing_ok=True)

    def _write_notes(self) -> None:
        private, noted = self._out / PRIVATE, self._noted
        self._noted = []
        with suppress(OSError):
            if noted and private.is_dir():  # nothing is noted for an OUT that no key has claimed
                with locked_folder(private):
                    # Not of folders that another process has replaced since
                    rows = [row for row, inode in noted if self._inode(row.name) == inode]
                    if rows:
                        _append(private, rows)

    def _inode(self, name: str) -> int:
        state = file_state(case_folder(self._out, name))
        return 0 if state is None else state.st_ino

    def _known(self) -> NDArray[np.int64]:
        """Return the positions of the folders of which something is said."""
        import numpy as np

        return np.flatnonzero(self._recipe_numbers < len(self._recipes) - 1)

    def _provenance(self, position: int) -> tuple[str | None, ...]:
        recipe = self._recipes[int(self._recipe_numbers[position])]
        return (recipe, *(column[position].as_py() for column in self._columns.values()))

    def _listed_rows(self) -> pa.Table:
        """Return the provenance of each listed folder, null where its row is void or missing."""
        schema = _schema().empty_table().select(_PROVENANCE).schema

        def read(lines: BinaryIO | None) -> pa.Table:
            with _open_table(self._out / PRIVATE / LEDGER) as table:
                merged = _merged(table, _last_rows(lines))
                return rows_of_folders(self._listed, merged, schema)

        try:
            return read_both(self._out / PRIVATE / LEDGER_LINES, read)
        except PermissionError:
            pass  # it is readable for its owner alone
        except _DAMAGE:
            self.is_damaged = True
        return rows_of_folders(self._listed, (), schema)

    def _is_sample_right(self) -> bool:
        """Return whether folders say what their rows do: all, or CHECKED of them at random."""
        for position in sample(self._known()):
            try:
                made_by = read_provenance(case_folder(self._out, self._names[position].as_py()))
            except _DAMAGE:
                return False
            if (made_by.recipe, made_by.source, made_by.stamp) != self._provenance(position):
                return False
        return True


_PROVENANCE = ["recipe", "source", "stamp"]


def list_folders(out: Path) -> pa.Table:
    """Return name and inode of the folder of each published case, sorted by name; none is opened.

    Of a case that lies in `cases/` and in a subfolder, the former counts.
    """
    import pyarrow as pa

    types = (pa.string(), pa.uint64(), pa.bool_())
    schema = pa.schema(zip(("name", "inode", "fanned"), types, strict=True))
    listed = ((entry.name, entry.inode(), fanned) for entry, fanned in case_entries(out))
    tables = [schema.empty_table()]
    with suppress(FileNotFoundError, NotADirectoryError):
        while batch := list(itertools.islice(listed, _ROWS_AT_ONCE)):
            columns = zip(zip(*batch, strict=True), types, strict=True)
            tables.append(pa.table([pa.array(values, kind) for values, kind in columns], schema))
    folders = _sorted(pa.concat_tables(tables), ("fanned", "ascending")).drop_columns(["fanned"])
    return _first_of_name(folders).combine_chunks()


def rows_of_folders(listed: pa.Table, tables: Iterable[pa.Table], schema: pa.Schema) -> pa.Table:
    """Return the row of each listed folder from tables, null where name or inode differ.

    Parameters
    ----------
    listed : pyarrow.Table
        As of `list_folders`.
    tables : iterable of pyarrow.Table
        Rows with a name and an inode, in order of their names.
    schema : pyarrow.Schema
        The columns to be returned.
    """
    import pyarrow as pa
    from pyarrow import compute

    pieces, done = [schema.empty_table()], 0
    names = listed["name"].combine_chunks()
    for rows in tables:
        # Both are sorted: the list's part up to the last row has all folders of the rows
        end = position_of(names, rows["name"][-1].as_py(), behind=True)
        folders, done = listed.slice(done, end - done), end
        positions = compute.index_in(folders["name"], rows["name"])
        is_same = compute.equal(rows["inode"].take(positions), folders["inode"])
        pieces.append(rows.select(schema.names).take(compute.if_else(is_same, positions, None)))
    pieces.append(pieces[0].take(pa.nulls(len(names) - done, pa.int32())))
    return pa.concat_tables(pieces).unify_dictionaries().combine_chunks()


def sample(positions: NDArray[np.int64]) -> list[int]:
    """Return the folders to be read this time: CHECKED of the positions, at random, in order."""
    import numpy as np

    if len(positions) > CHECKED:
        positions = np.random.default_rng().choice(positions, CHECKED, replace=False)
    return [int(position) for position in np.sort(positions)]


def position_of(names: pa.Array, name: str, *, behind: bool = False) -> int:
    """Return where a name is in sorted names, or the position behind it."""
    search = bisect_right if behind else bisect_left
    return search(range(len(names)), name, key=lambda position: names[position].as_py())


def _schema() -> pa.Schema:
    import pyarrow as pa

    # Recipes are few, and long
    types = dict.fromkeys((field.name for field in fields(PublishedCase)), pa.string())
    few = pa.dictionary(pa.int32(), pa.string())
    return pa.schema((types | {"recipe": few, "inode": pa.uint64()}).items())


@contextmanager
def _open_table(path: Path) -> Iterator[parquet.ParquetFile | None]:
    """Open the table; None if it is missing."""
    try:
        file = open_regular_file(path)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    with file, open_parquet(file) as table:
        if table.schema_arrow != _schema():
            raise ValueError("the ledger has other columns")
        yield table


def _last_rows(lines: BinaryIO | None) -> pa.Table:
    """Return the last row of each name, sorted by name."""
    import pyarrow as pa

    schema = _schema()
    if lines is None:
        return schema.empty_table()
    tables, appended = [schema.empty_table()], filter(None, map(_parse, lines))
    while batch := list(itertools.islice(appended, _ROWS_AT_ONCE)):
        tables.append(pa.Table.from_pylist([asdict(row) for row in batch], schema))
    rows = pa.concat_tables(tables)
    order = pa.array(range(rows.num_rows), pa.int64())
    newest_first = _sorted(rows.append_column("line", order), ("line", "descending"))
    return _first_of_name(newest_first.drop_columns(["line"]))


def _first_of_name(table: pa.Table) -> pa.Table:
    """Return the first row of each name of a table that is sorted by name."""
    import pyarrow as pa
    from pyarrow import compute

    names = table["name"]
    is_first = compute.not_equal(names[1:], names[:-1]).combine_chunks()
    return table.filter(pa.concat_arrays([pa.array([True]), is_first])) if len(table) else table


def _sorted(table: pa.Table, *further: tuple[str, str]) -> pa.Table:
    """Return a table sorted by name, then by columns as given; by no thread but this one."""
    from pyarrow import compute

    return table.take(compute.sort_indices(table, [("name", "ascending"), *further]))


def _parse(line: bytes) -> PublishedCase | None:
    """Return the row of a line; None if it is half a line, or damaged: a lost row costs a look."""
    try:
        row = PublishedCase(**parse_line(line))
        texts = (row.name, row.case, row.recipe, row.source, row.stamp)
        is_whole = all(isinstance(text, str) for text in texts) and 0 <= row.inode < 1 << 64
    except _DAMAGE:
        return None
    return row if is_whole else None


def _merged(table: parquet.ParquetFile | None, added: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows of a table with those added, which replace others, in order of their names."""
    import pyarrow as pa
    from pyarrow import compute

    older: Iterable[pa.Table] = ()
    if table is not None:
        numbers = range(table.num_row_groups)
        older = (table.read_row_group(n, use_threads=False) for n in numbers)
    for rows in older:
        end = position_of(added["name"], rows["name"][-1].as_py(), behind=True)
        if end:
            newer, added = added.slice(0, end), added.slice(end)
            is_older = compute.is_in(rows["name"], newer["name"])
            rows = _sorted(pa.concat_tables([rows.filter(compute.invert(is_older)), newer]))
        yield rows
    if added.num_rows:
        yield added
