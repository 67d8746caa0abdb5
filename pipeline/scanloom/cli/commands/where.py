"""`scanloom where`: look up the source of a case id."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scanloom.cli.console import (
    DebugOption,
    JsonOption,
    OutputMode,
    console,
    error_boundary,
    print_json,
    say,
)
from scanloom.cli.exit_codes import Exit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scanloom.io.output.crosswalk import SourceRecord

OutOption = Annotated[Path, typer.Option(help="Output folder of the ids.")]
KeyOption = Annotated[Path | None, typer.Option(help="Key file that the ids were made with.")]

SHOWN = (
    ("path", "path"),
    ("patient_id", "patient"),
    ("patient_name", "name"),
    ("accession_number", "accession"),
    ("study_date", "study date"),
    ("study_uid", "study UID"),
    ("series_uid", "series UID"),
    ("series_number", "series"),
    ("series_description", "description"),
    ("folder", "case folder"),
)


def where(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Case ids.")],
    out: OutOption = Path("scanloom-out"),
    key: KeyOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show the source of cases: path, UIDs, patient.

    Requires the key and read access to OUT/private. The output identifies patients.
    """
    with error_boundary(OutputMode(json, debug)):
        from scanloom.core import Reason, ScanError
        from scanloom.io.output.crosswalk import find_sources

        check_holder(out, key)
        requested = list(dict.fromkeys(text.strip().lower() for text in ids))
        sources = find_sources(out, requested)
        unknown = [text for text in requested if text not in {source.id for source in sources}]
        if not sources:
            raise ScanError(Reason.ID_UNKNOWN, "the crosswalk has none of these ids")
        if json:
            rows = [asdict(source) for source in sources]
            print_json({"schema": 1, "sources": rows, "unknown": unknown})
        else:
            _show(sources)
        if unknown:
            say(f"scanloom: not in the crosswalk: {', '.join(unknown)}.", err=True)
            raise typer.Exit(Exit.SOME_FAILED)


def check_holder(out: Path, key: Path | None) -> None:
    """Check that the caller has the key of an output folder.

    Raises
    ------
    ScanError
        NOT_FOUND if the folder has no crosswalk; KEY_MISMATCH.
    """
    from scanloom.core import Reason, ScanError
    from scanloom.io.identity import key_fingerprint, read_key
    from scanloom.io.output.private import check_key, read_fingerprint

    if read_fingerprint(out) is None:
        raise ScanError(Reason.NOT_FOUND, "this output folder has no crosswalk")
    check_key(out, key_fingerprint(read_key(key)))


def _show(sources: Sequence[SourceRecord]) -> None:
    from rich.table import Table

    from scanloom.core import printable

    screen = console()
    for source in sources:
        table = Table.grid(padding=(0, 2))
        for field, title in SHOWN:
            if text := str(getattr(source, field)):
                table.add_row("", title, printable(text))
        screen.print(source.id)
        screen.print(table)
