"""`scanloom index`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scanloom.cli.console import (
    DebugOption,
    JsonOption,
    OutputMode,
    console,
    error_boundary,
    print_json,
)
from scanloom.cli.exit_codes import Exit
from scanloom.cli.shared_options import ArchivesOption, report_new_key

if TYPE_CHECKING:
    from scanloom.io.index.build import Index
    from scanloom.io.index.listing import SeriesLine
    from scanloom.io.index.storage import IndexedSeries


def index(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="Folders, files, zip and tar archives, DICOMDIRs, BIDS datasets, glob patterns.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Keep the index in OUT/private; by default, in the user's cache folder."),
    ] = None,
    archives: ArchivesOption = False,
    key: Annotated[Path | None, typer.Option(help="Key file for the ids.")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Show the case ids too.")] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the studies and series of an archive, and account for every file.

    Only headers are read. Files that have not changed since the last time are not opened.

    For example: scanloom index archive/ --out results
    """
    with error_boundary(OutputMode(json, debug)):
        from scanloom.io.identity import load_key
        from scanloom.io.index.build import build_index
        from scanloom.io.output.private import load_key_of
        from scanloom.io.session import read_session

        with report_new_key(key), read_session():
            secret = load_key(key) if out is None else load_key_of(out, key)
            listed = build_index(paths, secret, out, archives=archives)
            if out is not None:
                record_all(listed, out, secret)
        if json:
            print_json(document(listed))
        else:
            show(listed, ids=ids)
        raise typer.Exit(exit_of(listed))


def record_all(listed: Index, out: Path, secret: bytes) -> None:
    """Add all series to the crosswalk of OUT, so that `scanloom where` answers for their ids."""
    from scanloom.io.identity import key_fingerprint
    from scanloom.io.index.sources import record_series
    from scanloom.io.system.disk_errors import disk_errors_as_scan_errors

    with disk_errors_as_scan_errors():
        record_series(out, key_fingerprint(secret), listed, (series.id for series in listed.series))


def document(listed: Index) -> dict[str, Any]:
    """Return the document for `--json`: only ids, codes from closed lists and numbers."""
    reasons = Counter(reason for _, reason in listed.outcomes() if reason)
    return {
        "schema": 1,
        "series": [_series(number, series) for number, series in enumerate(listed.series, 1)],
        "files": listed.counts(),
        "reasons": dict(sorted(reasons.items())),
        "opened": listed.opened,
    }


def _series(number: int, series: IndexedSeries) -> dict[str, Any]:
    info = series.info
    return {
        "number": number if series.slices else None,
        "id": series.id or None,
        "study": series.study or None,
        "kind": series.kind,
        "modality": info.modality or None,
        "body_part": info.body_part or None,
        "plane": info.plane or None,
        "shape": list(info.shape) or None,
        "spacing": list(info.spacing) or None,
        "n_files": len(series.files),
        "status": series.status,
        "reason": info.reason or None,
        "detail": info.detail or None,
    }


def show(listed: Index, *, ids: bool = False) -> None:
    """Print a table of the series and the counts of files."""
    from scanloom.core import Reason, counted
    from scanloom.io.index.listing import format_series

    screen = console()
    for line in format_series(_lines(listed, ids=ids), screen.width):
        screen.print(line, no_wrap=True, crop=False)
    studies = {series.study for series in listed.series if series.study}
    counts = listed.counts()
    series = counted(len(listed.series), "series", "series")
    screen.print(
        f"{counted(len(studies), 'study', 'studies')}, {series}. {counted(counts['found'], 'file')}: "
        f"{counts['used']} used, {counts['skipped']} skipped, {counts['ambiguous']} ambiguous, "
        f"{counts['failed']} failed."
    )
    reasons = Counter(reason for _, reason in listed.outcomes() if reason)
    for code, count in reasons.most_common():
        screen.print(f"{count:7} {code}: {Reason[code].advice}.", soft_wrap=True)


def _lines(listed: Index, *, ids: bool) -> list[SeriesLine]:
    from scanloom.io.index.listing import SeriesLine

    return [
        SeriesLine(
            number if series.slices else None,
            series.kind,
            listed.path_of(series),
            len(series.files),
            series.info,
            series.id if ids else "",
        )
        for number, series in enumerate(listed.series, 1)
    ]


def exit_of(listed: Index) -> Exit:
    """Return 0 if no file failed, 1 if some did, 65 if no file can be used or chosen."""
    counts = listed.counts()
    if not counts["used"] and not counts["ambiguous"]:
        return Exit.UNUSABLE
    return Exit.SOME_FAILED if counts["failed"] else Exit.OK
