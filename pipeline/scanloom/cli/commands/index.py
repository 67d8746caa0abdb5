"""`scanloom index`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from scanloom.cli.console import console, error_boundary, print_result
from scanloom.cli.exit_codes import Exit
from scanloom.cli.new_key import report_new_key
from scanloom.cli.options.general import KeyOption, Reporting
from scanloom.cli.options.panels import takes_panels
from scanloom.cli.options.scans import ArchiveOptions, StrictOption

if TYPE_CHECKING:
    from scanloom.io.index.build import Index
    from scanloom.io.index.storage import IndexedSeries

STUDY_LETTERS = 6
"""Characters of a study's id in the table, enough to recognise series of one study."""
NUMBERS = ("#", "files", "shape", "spacing mm")


@dataclass(frozen=True)
class IndexOptions:
    """Where the index is kept."""

    panel: ClassVar[str] = "Output"

    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Keep the index in DIR/private; by default, in the user's cache folder.",
        ),
    ] = None
    key: KeyOption = None
    strict: StrictOption = False


@takes_panels
def index(scans: ArchiveOptions, output: IndexOptions, general: Reporting) -> None:
    """List the studies and series of an archive, and account for every file.

    Only headers are read. Files that have not changed since the last time are not opened.

    For example: scanloom index archive/ -o results
    """
    with error_boundary(general.mode):
        from scanloom.io.identity import load_key
        from scanloom.io.index.build import build_index
        from scanloom.io.session import read_session

        paths = [str(path) for path in scans.given]
        with report_new_key(output.key), read_session():
            key = load_key(output.key)
            listed = build_index(paths, key, output.out, archives=scans.archives)
        print_result(general.mode, lambda: document(listed), lambda: show(listed))
        raise typer.Exit(exit_of(listed, strict=output.strict))


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


def show(listed: Index) -> None:
    """Print a table of the series and the counts of files."""
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
    for number, series in enumerate(listed.series, 1):
        table.add_row(*_row(number, series))
    screen = console()
    screen.print(table)
    studies = {series.study for series in listed.series if series.study}
    counts = listed.counts()
    screen.print(
        f"{len(studies)} studies, {len(listed.series)} series. {counts['found']} files: "
        f"{counts['used']} used, {counts['skipped']} skipped, {counts['ambiguous']} ambiguous, "
        f"{counts['failed']} failed."
    )
    reasons = Counter(reason for _, reason in listed.outcomes() if reason)
    for code, count in reasons.most_common():
        screen.print(f"{count:7} {code}: {Reason[code].advice}.", soft_wrap=True)


def _row(number: int, series: IndexedSeries) -> list[str]:
    info = series.info
    return [
        str(number) if series.slices else "",
        series.study[:STUDY_LETTERS],
        series.id,
        info.modality or series.kind,
        info.body_part,
        "x".join(map(str, info.shape)),
        "x".join(f"{mm:.3g}" for mm in info.spacing),
        str(len(series.files)),
        info.reason or series.status,
    ]


def exit_of(listed: Index, *, strict: bool = False) -> Exit:
    """Return 65 if no file can be used or chosen; 1 if `strict` and a series has no volume."""
    counts = listed.counts()
    if not counts["used"] and not counts["ambiguous"]:
        return Exit.UNUSABLE
    incomplete = counts["failed"] or any(series.info.reason for series in listed.series)
    return Exit.SOME_FAILED if strict and incomplete else Exit.OK
