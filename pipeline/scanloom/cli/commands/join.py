"""`scanloom join`: add source columns to a table of case ids."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from scanloom.cli.commands.where import CrosswalkOptions, check_holder, find_all
from scanloom.cli.console import Exit, error_boundary, say
from scanloom.cli.options import General, takes_panels

if TYPE_CHECKING:
    from scanloom.io.output.crosswalk import SourceRecord
    from scanloom.io.output.join_sources import FindSource


@dataclass(frozen=True)
class JoinOptions:
    """The joined table."""

    panel: ClassVar[str] = "Output"

    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File for the joined table: .csv or .parquet; default stdout."
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

        _check_target(out, to)
        # Before the ids are looked up: a long search must not end with a file that can't be written
        if to is not None:
            check_replaceable(to, "the joined table")
        key = check_holder(out, crosswalk.key)
        ids = read_ids(table, column)
        sources = {(source.id, copy): source for copy, source in find_all(out, ids, key)}

        def find_source(row_id: str, copy: int) -> SourceRecord | None:
            return sources.get((row_id, copy)) or sources.get((row_id, 1))

        if to is None:
            text = io.StringIO()
            unknown = join_csv(table, find_source, text, column)
            shown = say if sys.stdout.isatty() else typer.echo  # a pipe gets the text unchanged
            shown(text.getvalue(), nl=False)
        else:
            unknown = _write(table, find_source, to, column)
        if unknown:
            say(f"scanloom: rows with ids that are not in the crosswalk: {unknown}.", err=True)
            raise typer.Exit(Exit.SOME_FAILED)


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


def _write(table: Path, find_source: FindSource, to: Path, column: str | None) -> int:
    from scanloom.io.output.join_sources import join_csv, join_parquet
    from scanloom.io.output.private import write_private
    from scanloom.io.system.disk_errors import output_error

    unknown = 0

    def fill(draft: Path) -> None:
        nonlocal unknown
        if to.suffix.lower() == ".parquet":
            unknown = join_parquet(table, find_source, draft, column)
            return
        with draft.open("w", encoding="utf-8", newline="") as file:
            unknown = join_csv(table, find_source, file, column)

    try:
        write_private(to, fill)
    except OSError as exc:
        raise output_error(exc, "the joined table") from exc
    return unknown
