"""`scanloom verify`: check that results are unchanged since they were published."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

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


def verify(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output folder.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List published files that were changed, removed or added.

    Also compares tables with cases, and CSV with Parquet.
    """
    with error_boundary(OutputMode(as_json, debug)):
        from scanloom.engine.results.verify import verify as find_faults

        findings = list(find_faults(out))
        if as_json:
            print_json({"schema": 1, "findings": [asdict(finding) for finding in findings]})
        else:
            for finding in findings:
                console().print(f"{finding.fault}: {finding.file}")
            if not findings:
                console().print("All files are as published.")
    raise typer.Exit(Exit.SOME_FAILED if findings else Exit.OK)
