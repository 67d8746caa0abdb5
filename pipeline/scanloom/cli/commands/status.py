"""`scanloom status`: show the status of the latest run; needs neither lock nor key."""

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


def status(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output folder.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show the status of the latest run in an output folder; exit with 1 if it failed or died."""
    with error_boundary(OutputMode(as_json, debug)):
        from scanloom.cli.commands.run import status_table
        from scanloom.core import Reason, ScanError
        from scanloom.engine.monitor.status import Status
        from scanloom.engine.run_folder import RUNS
        from scanloom.io.system.liveness import DIED

        folders = sorted((out / RUNS).glob("*/")) if (out / RUNS).is_dir() else []
        damaged = []
        for folder in reversed(folders):
            try:
                now = Status.read(folder).as_observed()
            except FileNotFoundError:
                continue  # it has not written a status yet
            except (OSError, ValueError):
                damaged.append(folder.name)
                continue
            for name in damaged:
                typer.echo(f"scanloom: {_damage(name)}.", err=True)
            if as_json:
                print_json({"schema": 1, "status": asdict(now)})
            else:
                console().print(status_table(now))
            raise typer.Exit(Exit.SOME_FAILED if now.state in ("failed", DIED) else Exit.OK)
        if damaged:
            raise ScanError(Reason.OUTPUT_UNWRITABLE, _damage(damaged[0]))
        segmented = (out / "cases").is_dir()
        hint = "; its results were written by `scanloom segment`" if segmented else ""
        raise ScanError(Reason.NOT_FOUND, f"no run status found in this folder{hint}")


def _damage(run: str) -> str:
    """Return the message for a run with a damaged status."""
    return f"runs/{run}/status.json is damaged: delete it; `scanloom report` shows the results"
