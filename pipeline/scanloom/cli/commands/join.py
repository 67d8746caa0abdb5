"""`scanloom join`: add source columns to a table of case ids."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from scanloom.cli.commands.where import CrosswalkOptions, check_holder, find_files_of
from scanloom.cli.console import Exit, error_boundary, say
from scanloom.cli.options import General, takes_panels

if TYPE_CHECKING:
    import pyarrow as pa

    from scanloom.io.output.join_sources import FindSources


@dataclass(frozen=True)
class JoinOptions:
    """The joined table."""

    panel: ClassVar[str] = "Output"

    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="SCANLOOM_JOIN_TO",
            help="File for the joined table: .csv or .parquet; default stdout.",
        ),
    ] = None
    column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Column of the ids, if not case, case_id or id."),
    ] = None


@takes_panels
def join(
    table: Annotated[
        Path,
        typer.Argument(metavar="TABLE", help="CSV or Parquet with a column of ids."),
    ],
    crosswalk: CrosswalkOptions,
    joined: JoinOptions,
    general: General,
) -> None:
    """Add patient, UIDs and path to a table of case or file ids.

    Requires the key and read access to OUT/private. The output identifies patients: the file is
    readable by you only (mode 0600) and must lie outside OUT.
    """
    out, to, column = crosswalk.out, joined.to, joined.column
    with error_boundary(general.mode):
        from scanloom.io.output.join_sources import join_csv, read_ids
        from scanloom.io.system.atomic_write import check_replaceable
        from scanloom.io.system.disk_errors import output_error

        _check_target(out, to)
        # Before the ids are looked up: a long search must not end with a file that can't be written
        if to is not None:
            check_replaceable(to, "the joined table")
            try:
                to.parent.stat()
            except OSError as exc:
                raise output_error(exc, "the joined table") from exc
        key = check_holder(out, crosswalk.key)
        ids = read_ids(table, column)
        find_sources = _finder(out, ids, key)
        if to is None:
            text = io.StringIO()
            unknown = join_csv(table, find_sources, text, column)
            shown = say if sys.stdout.isatty() else typer.echo  # a pipe gets the text unchanged
            shown(text.getvalue(), nl=False)
        else:
            unknown = _write(table, find_sources, to, column)
        if unknown:
            say(f"scanloom: rows with ids that are not in the crosswalk: {unknown}.", err=True)
            raise typer.Exit(Exit.SOME_FAILED)


def _finder(out: Path, ids: pa.Array, key: bytes) -> FindSources:
    """Return a function that finds the sources of case ids and file ids (N,), many at a time.

    So it does of the names of case folders, which tables have where folders are named by source.

    The newest source of an id counts. A copy of a file that has none has that of the first.
    """
    import pyarrow as pa
    from pyarrow import compute

    from scanloom.io.output.crosswalk import source_rows
    from scanloom.io.output.join_sources import SOURCE_COLUMNS

    def keys(row_ids: pa.Array, copies: pa.Array) -> pa.Array:
        return compute.binary_join_element_wise(row_ids, copies.cast(pa.string()), " ")

    columns = ("id", *SOURCE_COLUMNS)
    cases = source_rows(out, ids, columns)
    rest = _without(ids, pa.chunked_array([*cases.column("id").chunks, [""]], pa.string()))
    named = source_rows(out, rest, ("folder", *SOURCE_COLUMNS))
    named = named.filter(compute.is_in(named.column("folder"), value_set=rest))
    of_files = find_files_of(out, _without(rest, named.column("folder")).to_pylist(), key)
    files = [{name: getattr(source, name) for name in columns} for _, source in of_files]
    cases = pa.concat_tables([cases, named.rename_columns(columns)])
    rows = pa.concat_tables([cases, pa.Table.from_pylist(files, cases.schema)]).combine_chunks()
    copies = pa.array([1] * len(cases) + [copy for copy, _ in of_files], pa.int64())
    last, sources = len(rows) - 1, rows.select(list(SOURCE_COLUMNS))
    # the newest first, of which the first one is found
    known = keys(rows.column("id"), copies).combine_chunks()[::-1]

    def positions(row_keys: pa.Array) -> pa.Array:
        # those of the table first: a small set to look each up in
        in_table = compute.is_in(known, value_set=compute.unique(row_keys))
        numbers = compute.indices_nonzero(in_table)
        from_end = numbers.take(compute.index_in(row_keys, value_set=known.filter(in_table)))
        return compute.subtract(last, from_end.cast(pa.int64()))

    def find(row_ids: pa.Array, copies: pa.Array) -> pa.Table:
        rows_of = positions(keys(row_ids, copies))
        if compute.any(compute.not_equal(copies, 1)).as_py():
            first = pa.repeat(pa.scalar(1, pa.int64()), len(copies))
            rows_of = compute.coalesce(rows_of, positions(keys(row_ids, first)))
        return sources.take(rows_of)

    return find


def _without(ids: pa.Array, known: pa.ChunkedArray) -> pa.Array:
    """Return the ids (N,) that are not known."""
    from pyarrow import compute

    return ids.filter(compute.invert(compute.is_in(ids, value_set=known)))


def _check_target(out: Path, to: Path | None) -> None:
    """Refuse a target with another suffix, or inside OUT."""
    if to is None:
        return
    if to.suffix.lower() not in (".csv", ".parquet"):
        raise typer.BadParameter("expected a .csv or .parquet file", param_hint="--to")
    target, results = to.resolve(), out.resolve()
    if target.is_relative_to(results) and not target.is_relative_to(results / "private"):
        raise typer.BadParameter(
            "expected a path outside OUT, or in OUT/private: results must not identify patients",
            param_hint="--to",
        )


def _write(table: Path, find_sources: FindSources, to: Path, column: str | None) -> int:
    from scanloom.io.output.join_sources import join_csv, join_parquet
    from scanloom.io.output.private import write_private
    from scanloom.io.system.disk_errors import output_error

    unknown = 0

    def fill(draft: Path) -> None:
        nonlocal unknown
        if to.suffix.lower() == ".parquet":
            unknown = join_parquet(table, find_sources, draft, column)
            return
        with draft.open("w", encoding="utf-8", newline="") as file:
            unknown = join_csv(table, find_sources, file, column)

    try:
        write_private(to, fill)
    except OSError as exc:
        raise output_error(exc, "the joined table") from exc
    return unknown
