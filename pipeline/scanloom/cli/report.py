"""`scanloom report`: the report of an output folder, made anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scanloom.cli.console import DebugOption, JsonOption, Manner, console, print_json, speaking


def report(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The output folder.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write the page to look through all results, the doubtful cases first."""
    with speaking(Manner(as_json, debug)):
        from scanloom.core import Reason, ScanError
        from scanloom.review.report.page import write_report

        if not (out / "cases").is_dir() and not (out / "failed").is_dir():
            raise ScanError(Reason.NOT_FOUND, "there are no results in this folder")
        page = write_report(out)
        if as_json:
            print_json({"schema": 1, "report": str(page)})
        else:
            console().print(f"Look at {page}")
