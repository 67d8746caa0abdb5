"""`scanloom report`: the report of an output folder, made anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scanloom.cli.console import (
    DebugOption,
    JsonOption,
    Manner,
    console,
    print_json,
    speaking,
    warn_of_damaged,
)
from scanloom.cli.exits import Exit
from scanloom.cli.where import KeyOption

BEHIND = "the manifest does not know the newest run: give the key, or the same run again"


def report(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The output folder.")],
    as_json: JsonOption = False,
    key: KeyOption = None,
    debug: DebugOption = False,
) -> None:
    """Write the page to look through all results, the doubtful cases first.

    Where shards worked on parts of an archive, the tables are put together first; those of a run
    that did not come to write them are made of what it left, the manifest by who has the key. A
    BIDS derivative that is there is written anew. Damaged cases are named and left out.
    """
    with speaking(Manner(as_json, debug)):
        from importlib import metadata

        from scanloom.core import Reason, ScanError
        from scanloom.engine.collect import collect_shards
        from scanloom.engine.recollect import is_behind, recollect
        from scanloom.io.bids import has_bids, write_bids
        from scanloom.io.disk_errors import output_error
        from scanloom.review.report.page import write_report
        from scanloom.review.report.runs import damaged_totals

        if not any((out / name).is_dir() for name in ("cases", "failed", "runs")):
            raise ScanError(Reason.NOT_FOUND, "there are no results in this folder")
        damaged: set[str] = set()
        behind = is_behind(out)
        try:
            if not collect_shards(out, damaged) and behind:
                behind = not recollect(out, _key_of(out, key), damaged)
            if has_bids(out):
                write_bids(out, metadata.version("scanloom"), damaged)
            page = write_report(out, damaged)
        except OSError as exc:
            raise output_error(exc) from exc
        if as_json:
            print_json({"schema": 1, "report": str(page), "damaged": sorted(damaged)})
        else:
            console().print(f"Look at {page}")
        if behind:
            typer.echo(f"scanloom: {BEHIND}.", err=True)
        warn_of_damaged(out, sorted(damaged))
        for file in damaged_totals(out):
            typer.echo(f"scanloom: {file} is damaged and left out: take it away.", err=True)
    raise typer.Exit(Exit.SOME_FAILED if damaged else Exit.OK)


def _key_of(out: Path, file: Path | None) -> bytes | None:
    """Return the key of an output folder's ids; None for who does not have it."""
    from scanloom.core import ScanError
    from scanloom.io.identity import key_fingerprint, read_key
    from scanloom.io.private import check_key

    try:
        key = read_key(file)
        check_key(out, key_fingerprint(key))
    except ScanError:
        if file is not None:
            raise
        return None
    return key
