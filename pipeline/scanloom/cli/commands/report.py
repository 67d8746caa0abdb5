"""`scanloom report`: rebuild the report of an output folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from scanloom.cli.commands.where import check_holder
from scanloom.cli.console import (
    Exit,
    console,
    error_boundary,
    print_result,
    say,
    warn_of_damaged,
)
from scanloom.cli.options import KeyOptions, Reporting, ResultsOptions, takes_panels
from scanloom.version import __version__

BEHIND = (
    "the manifest is missing or lacks the latest run: give the key; with it, let the run end, or "
    "repeat it if it has died"
)


@dataclass(frozen=True)
class ReportOptions:
    """Form of the report."""

    panel: ClassVar[str] = "Output"

    private: Annotated[
        bool,
        typer.Option(
            "--private", help="Also write private/report.html with names and paths; needs the key."
        ),
    ] = False


@takes_panels
def report(
    results: ResultsOptions, key: KeyOptions, form: ReportOptions, general: Reporting
) -> None:
    """Write the report page: all results, doubtful cases first.

    Results of `segment` get a table of all measurements. Tables of shards are merged first. Tables
    that are missing, damaged, or that an interrupted run did not write are rebuilt from the
    results; the manifest requires the key. An existing BIDS derivative is rewritten. Damaged cases
    are listed and excluded.
    """
    out = results.path
    with error_boundary(general.mode):
        from scanloom.engine.results.rebuild_tables import lacks_tables, rewrite_tables
        from scanloom.engine.results.tables import merge_shard_tables, write_case_tables
        from scanloom.engine.run_files import run_folders
        from scanloom.io.identity import key_fingerprint
        from scanloom.io.output.layout import no_results
        from scanloom.io.system.disk_errors import output_error
        from scanloom.io.write.bids import has_bids, write_bids
        from scanloom.review.report.data import damaged_totals
        from scanloom.review.report.page import write_private_report, write_report

        if not any((out / name).is_dir() for name in ("cases", "failed", "runs")):
            raise no_results(out)
        damaged: set[str] = set()
        behind = lacks_tables(out)
        try:
            # Merged before the tables are judged: those of the last shard alone lack the other ones
            if merge_shard_tables(out, damaged):
                behind = lacks_tables(out)
            elif behind:
                behind = not rewrite_tables(out, _key_of(out, key.key), damaged)
            elif not run_folders(out):  # results of `segment` alone
                write_case_tables(out, damaged)
            if has_bids(out):
                write_bids(out, __version__, damaged)
            verdicts_damaged = not _write_review(out)
            pages = {"report": str(write_report(out, damaged))}
            if form.private:
                fingerprint = key_fingerprint(check_holder(out, key.key))
                pages["private_report"] = str(write_private_report(out, fingerprint, damaged))
        except OSError as exc:
            raise output_error(exc) from exc
        plain = {"schema": 1, **pages, "damaged": sorted(damaged)}
        print_result(general.mode, lambda: plain, lambda: _show(pages))
        if behind:
            say(f"scanloom: {BEHIND}.", err=True)
        warn_of_damaged(out, sorted(damaged))
        for file in damaged_totals(out):
            say(f"scanloom: {file} is damaged and was ignored: delete it.", err=True)
    incomplete = damaged or verdicts_damaged or behind
    raise typer.Exit(Exit.SOME_FAILED if incomplete else Exit.OK)


def _write_review(out: Path) -> bool:
    """Write the tables of reviews; return False if the verdicts are damaged, which is told."""
    from scanloom.core import ScanError
    from scanloom.review.verdicts.tables import write_review_tables

    try:
        write_review_tables(out)
    except ScanError as error:
        say(f"scanloom: {error.detail}; the report lacks the verdicts.", err=True)
        return False
    return True


def _show(pages: dict[str, str]) -> None:
    console().print(f"Report: {pages['report']}")
    if "private_report" in pages:
        console().print(f"Report with names and paths: {pages['private_report']}")


def _key_of(out: Path, file: Path | None) -> bytes | None:
    """Return the key of an output folder's ids; None if it is not available."""
    from scanloom.core import ScanError
    from scanloom.io.output.private import read_key_of

    try:
        return read_key_of(out, file)
    except ScanError:
        if file is not None:
            raise
        return None
