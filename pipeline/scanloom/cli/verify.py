"""`scanloom verify`: whether results are still what was published."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from scanloom.cli.console import DebugOption, JsonOption, Manner, console, print_json, speaking
from scanloom.cli.exits import Exit


def verify(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The output folder.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Name every published file that was changed, is missing, or was added.

    Tables are compared with the cases, and CSV with Parquet.
    """
    with speaking(Manner(as_json, debug)):
        from scanloom.engine.verify import verify as find_faults

        found = list(find_faults(out))
        if as_json:
            print_json({"schema": 1, "findings": [asdict(finding) for finding in found]})
        else:
            for finding in found:
                console().print(f"{finding.fault}: {finding.file}")
            if not found:
                console().print("All files are as they were published.")
    raise typer.Exit(Exit.SOME_FAILED if found else Exit.OK)
