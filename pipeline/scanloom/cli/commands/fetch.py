"""`scanloom fetch`: get studies from a PACS."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from scanloom.cli import values
from scanloom.cli.console import (
    Exit,
    console,
    error_boundary,
    print_result,
    report_new_key,
    say,
)
from scanloom.cli.options import KeyOptions, OutOptions, Reporting, takes_panels

if TYPE_CHECKING:
    from scanloom.engine.listen.fetch import Fetched, StudyFetched


@dataclass(frozen=True)
class SourceOptions:
    """A source, and the studies that are fetched from it."""

    panel: ClassVar[str] = "Input"

    source: Annotated[
        str | None, typer.Option("--from", metavar="NAME", help="Fetch from a source of SITE.")
    ] = None
    site: Annotated[
        Path | None, typer.Option("--site", metavar="SITE", help="YAML file with the source.")
    ] = None
    table: Annotated[
        Path | None,
        typer.Option(
            "--table", metavar="FILE", help="CSV or Parquet: accession_number, study_uid ..."
        ),
    ] = None
    date: Annotated[
        values.Days | None,
        typer.Option(
            "--date",
            metavar="DAYS",
            parser=values.days,
            help="A day, or 2026-11-01..2026-11-30.",
        ),
    ] = None
    modality: Annotated[
        str | None,
        typer.Option(
            "--modality",
            metavar="M,M",
            envvar="SCANLOOM_FETCH_MODALITY",
            help="Series of these: CT,MR.",
        ),
    ] = None
    words: Annotated[
        str | None, typer.Option("--words", metavar="TEXT", help="Words of the description.")
    ] = None


@takes_panels
def fetch(
    options: SourceOptions,
    output: OutOptions,
    key: KeyOptions,
    general: Reporting,
) -> None:
    """Get studies from a PACS: those of a table, or all that match.

    They are kept in OUT/private/fetched. What is there is not asked for again: give the same
    command to go on. Exit with 1 if something is missing.

    Example: scanloom fetch --from pacs --site site.yaml --table wanted.csv -o results
    """
    with error_boundary(general.mode, resumable=True):
        quiet = general.json or general.quiet
        done = fetch_wanted(options, output.out, key.key, quiet=quiet)
        print_result(general.mode, lambda: _document(done), lambda: show(done))
        raise typer.Exit(Exit.SOME_FAILED if done.failed else Exit.OK)


def fetch_wanted(options: SourceOptions, out: Path, key: Path | None, *, quiet: bool) -> Fetched:
    """Fetch what options say, and tell of what fails meanwhile.

    Raises
    ------
    BadParameter
        If an option is missing.
    ScanError
        As of `scanloom.engine.listen.fetch.fetch`.
    """
    from scanloom.engine.listen.fetch import fetch as fetch_now
    from scanloom.engine.listen.rows import Question, read_rows
    from scanloom.engine.listen.site import find_node, read_site

    if options.source is None:
        raise typer.BadParameter("missing: name a source of SITE", param_hint="'--from'")
    if options.site is None:
        raise typer.BadParameter("missing: name the page of the site", param_hint="'--site'")
    modalities = values.names(options.modality.upper()) if options.modality else ()
    words = tuple((options.words or "").split())
    question = Question(options.date or ("", ""), modalities, words)
    if options.table is None and question == Question():
        problem = "missing: a table, or --date, --modality or --words; not all that the source has"
        raise typer.BadParameter(problem, param_hint="'--table'")
    site = read_site(options.site)
    source = find_node(site.sources, options.source, "source")
    rows = None if options.table is None else read_rows(options.table, question)

    def tell(text: str) -> None:
        if not quiet:
            say(text, err=True)

    with report_new_key(key):
        return fetch_now(site, source, out, rows, question, key, tell)


def show(done: Fetched) -> None:
    """Print what was fetched, by counts."""
    from scanloom.core import counted

    whole = sum(each.reason is None for each in done.studies)
    new = sum(each.new for each in done.studies)
    studies, objects = counted(whole, "study", "studies"), counted(new, "new object")
    console().print(f"{studies} whole, {objects}.")
    for code, count in reasons(done.failed).items():
        console().print(f"{counted(count, 'row')}: {code}.")
    console().print(f"Studies: {done.folder / 'studies'}")
    console().print(f"Rows: {done.folder / 'fetched.csv'}")


def reasons(failed: Sequence[StudyFetched]) -> dict[str, int]:
    """Return how often each reason was given."""
    codes = Counter(each.reason.code for each in failed if each.reason is not None)
    return dict(sorted(codes.items()))


def _document(done: Fetched) -> dict[str, Any]:
    return {
        "schema": 1,
        "rows": done.rows,
        "series": len(done.series),
        "objects": sum(each.instances for each in done.studies),
        "new": sum(each.new for each in done.studies),
        "failed": [
            {"row": each.row.number, "reason": each.reason.code, "detail": each.detail}
            for each in done.failed
            if each.reason is not None
        ],
    }
