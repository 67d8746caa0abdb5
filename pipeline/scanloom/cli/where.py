"""`scanloom where`: which source an id stands for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scanloom.cli.console import (
    DebugOption,
    JsonOption,
    Manner,
    console,
    print_json,
    say,
    speaking,
)
from scanloom.cli.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scanloom.io.crosswalk import Source

OutOption = Annotated[Path, typer.Option(help="The output folder that the ids are from.")]
KeyOption = Annotated[
    Path | None, typer.Option(help="File with the key that its ids were made with.")
]

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
    """Tell where cases come from: path, UIDs, patient.

    For those who have the key and may read OUT/private. What it prints identifies patients.
    """
    with speaking(Manner(json, debug)):
        from scanloom.core import Reason, ScanError
        from scanloom.io.crosswalk import find_sources

        check_holder(out, key)
        wanted = list(dict.fromkeys(text.strip().lower() for text in ids))
        found = find_sources(out, wanted)
        unknown = [text for text in wanted if text not in {source.id for source in found}]
        if not found:
            raise ScanError(Reason.ID_UNKNOWN, "its crosswalk has none of these ids")
        if json:
            sources = [asdict(source) for source in found]
            print_json({"schema": 1, "sources": sources, "unknown": unknown})
        else:
            _show(found)
        if unknown:
            say(f"scanloom: not in its crosswalk: {', '.join(unknown)}.", err=True)
            raise typer.Exit(Exit.SOME_FAILED)


def check_holder(out: Path, key: Path | None) -> None:
    """Refuse who does not hold the key that the ids of `out` were made with.

    Raises
    ------
    ScanError
        NOT_FOUND if no ids were given out there; KEY_MISMATCH.
    """
    from scanloom.core import Reason, ScanError
    from scanloom.io.identity import key_fingerprint, read_key
    from scanloom.io.private import check_key, known_fingerprint

    if known_fingerprint(out) is None:
        raise ScanError(Reason.NOT_FOUND, "this output folder has no crosswalk")
    check_key(out, key_fingerprint(read_key(key)))


def _show(sources: Sequence[Source]) -> None:
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
