"""`scanloom status`: show the status of the latest run; needs neither lock nor key."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from scanloom.cli.console import Exit, OutputMode, console, error_boundary, print_result
from scanloom.cli.options.common import Reporting, ResultsOptions
from scanloom.cli.options.panels import takes_panels

if TYPE_CHECKING:
    from scanloom.engine.monitor import Status


@takes_panels
def status(results: ResultsOptions, general: Reporting) -> None:
    """Show the status of the latest run in an output folder; exit with 1 if it failed or died."""
    with error_boundary(general.mode):
        from scanloom.core import Reason, ScanError
        from scanloom.engine.monitor import Status
        from scanloom.engine.run_folder import RUNS
        from scanloom.io.output.layout import no_results, published_cases
        from scanloom.io.system.scratch_folders import DIED

        out = results.path
        if not out.is_dir():
            raise no_results(out)
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
            _print(now, _reviewed(out), general.mode)
            raise typer.Exit(Exit.SOME_FAILED if now.state in ("failed", DIED) else Exit.OK)
        if damaged:
            raise ScanError(Reason.OUTPUT_UNWRITABLE, _damage(damaged[0]))
        cases, reviewed = len(published_cases(out)), _reviewed(out)
        if not cases and not reviewed:
            raise no_results(out, "runs")
        plain = {"schema": 1, "status": None, "cases": cases, "reviewed": reviewed}
        print_result(general.mode, lambda: plain, lambda: _print_segmented(out, cases, reviewed))


def _print_segmented(out: Path, cases: int, reviewed: dict[str, int]) -> None:
    """Print the content of a folder without a run: results of `segment`, which writes no status."""
    from scanloom.core import counted

    if cases:
        made = f"{counted(cases, 'result')} of `scanloom segment`, and no run."
        console().print(f"{made} To look at the results: scanloom report {out}", soft_wrap=True)
    if reviewed:
        console().print(_totals(reviewed))


def _print(now: Status, reviewed: dict[str, int], mode: OutputMode) -> None:
    from scanloom.cli.tables import status_table

    def show() -> None:
        console().print(status_table(now))
        if reviewed:
            console().print(_totals(reviewed))

    plain = {"schema": 1, "status": asdict(now), "reviewed": reviewed}
    print_result(mode, lambda: plain, show)


def _reviewed(out: Path) -> dict[str, int]:
    """Return the number of reviewed cases by what was decided; none if the log is damaged."""
    from scanloom.core import ScanError
    from scanloom.review.verdicts.tables import review_states

    try:
        return dict(Counter(review_states(out).values()).most_common())
    except ScanError as error:
        typer.echo(f"scanloom: {error.detail}; the verdicts were not counted.", err=True)
        return {}


def _totals(reviewed: dict[str, int]) -> str:
    """Return the numbers of reviewed cases as a sentence."""
    from scanloom.review.verdicts.verdict import STATES

    return f"Reviewed: {', '.join(f'{n:,} {STATES[state]}' for state, n in reviewed.items())}."


def _damage(run: str) -> str:
    """Return the message for a run with a damaged status."""
    return f"runs/{run}/status.json is damaged: delete it; `scanloom report` shows the results"
