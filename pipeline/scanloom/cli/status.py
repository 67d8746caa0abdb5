"""`scanloom status`: where the runs of an output folder stand; needs neither lock nor key."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from scanloom.cli.console import DebugOption, JsonOption, Manner, console, print_json, speaking
from scanloom.cli.exits import Exit


def status(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The output folder.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show where the newest run of an output folder stands; 1 if it failed or died."""
    with speaking(Manner(as_json, debug)):
        from scanloom.cli.run import status_table
        from scanloom.core import Reason, ScanError
        from scanloom.engine.run_folder import RUNS
        from scanloom.engine.status import Status
        from scanloom.io.living import DIED

        folders = sorted((out / RUNS).glob("*/")) if (out / RUNS).is_dir() else []
        damaged = []
        for folder in reversed(folders):
            try:
                now = Status.read(folder).seen()
            except FileNotFoundError:
                continue  # it has not said anything yet
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
        made = "; its results are of segment" if (out / "cases").is_dir() else ""
        raise ScanError(Reason.NOT_FOUND, f"no run has said anything in this folder{made}")


def _damage(run: str) -> str:
    """Return what is said of a run whose status can't be read."""
    return f"runs/{run}/status.json is damaged: take it away; `scanloom report` shows the results"
