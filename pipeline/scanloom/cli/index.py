"""`scanloom index`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scanloom.cli.asked import ArchivesOption, telling_new_key
from scanloom.cli.console import DebugOption, JsonOption, Manner, console, print_json, speaking
from scanloom.cli.exits import Exit

if TYPE_CHECKING:
    from scanloom.io.index import Index
    from scanloom.io.index_file import IndexedSeries

STUDY_LETTERS = 6
"""Of a study's id in the table: enough to see which series belong together."""
NUMBERS = ("#", "files", "shape", "spacing mm")


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
        typer.Option(help="Keep the index in OUT/private; default the user's cache folder."),
    ] = None,
    archives: ArchivesOption = False,
    key: Annotated[Path | None, typer.Option(help="File with the key of the ids.")] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the studies and series of an archive, and account for every file.

    Only headers are read, and files that did not change since the last time are not opened.

    For example: scanloom index archive/ --out results
    """
    with speaking(Manner(json, debug)):
        from scanloom.io.identity import load_key
        from scanloom.io.index import build_index
        from scanloom.io.session import read_session

        with telling_new_key(key), read_session():
            found = build_index(paths, load_key(key), out, archives=archives)
        if json:
            print_json(document(found))
        else:
            show(found)
        raise typer.Exit(exit_of(found))


def document(found: Index) -> dict[str, Any]:
    """Return what `--json` prints: ids, words of closed lists and numbers, nothing else."""
    reasons = Counter(reason for _, reason in found.outcomes() if reason)
    return {
        "schema": 1,
        "series": [_series(number, one) for number, one in enumerate(found.series, 1)],
        "files": found.counts(),
        "reasons": dict(sorted(reasons.items())),
        "opened": found.opened,
    }


def _series(number: int, one: IndexedSeries) -> dict[str, Any]:
    what = one.what
    return {
        "number": number if one.slices else None,
        "id": one.id or None,
        "study": one.study or None,
        "kind": one.kind,
        "modality": what.modality or None,
        "body_part": what.body_part or None,
        "plane": what.plane or None,
        "shape": list(what.shape) or None,
        "spacing": list(what.spacing) or None,
        "n_files": len(one.files),
        "status": one.status,
        "reason": what.reason or None,
        "detail": what.detail or None,
    }


def show(found: Index) -> None:
    """Print a table of the series, and what became of the files."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from scanloom.core import Reason

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    columns = ("#", "study", "id", "kind", "body part", "shape", "spacing mm", "files", "status")
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in NUMBERS else "left",
            no_wrap=name in ("id", "study", "shape", "spacing mm", "status"),
        )
    for number, one in enumerate(found.series, 1):
        table.add_row(*_row(number, one))
    screen = console()
    screen.print(table)
    studies = {one.study for one in found.series if one.study}
    counts = found.counts()
    screen.print(
        f"{len(studies)} studies, {len(found.series)} series. {counts['found']} files: "
        f"{counts['used']} used, {counts['skipped']} skipped, {counts['ambiguous']} ambiguous, "
        f"{counts['failed']} failed."
    )
    reasons = Counter(reason for _, reason in found.outcomes() if reason)
    for code, count in reasons.most_common():
        screen.print(f"{count:7} {code}: {Reason[code].advice}.", soft_wrap=True)


def _row(number: int, one: IndexedSeries) -> list[str]:
    what = one.what
    return [
        str(number) if one.slices else "",
        one.study[:STUDY_LETTERS],
        one.id,
        what.modality or one.kind,
        what.body_part,
        "x".join(map(str, what.shape)),
        "x".join(f"{mm:.3g}" for mm in what.spacing),
        str(len(one.files)),
        what.reason or one.status,
    ]


def exit_of(found: Index) -> Exit:
    """Return 0 if nothing failed, 1 if some did, 65 if no file can be used, whatever is chosen."""
    counts = found.counts()
    if not counts["used"] and not counts["ambiguous"]:
        return Exit.UNUSABLE
    return Exit.SOME_FAILED if counts["failed"] else Exit.OK
