"""`scanloom verify`: check that results are unchanged since they were published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from scanloom.cli.console import Exit, console, error_boundary, print_result, say
from scanloom.cli.options import KeyOptions, Reporting, ResultsOptions, takes_panels

if TYPE_CHECKING:
    from scanloom.engine.results.verify import Discrepancy


@takes_panels
def verify(results: ResultsOptions, keys: KeyOptions, general: Reporting) -> None:
    """List published files that were changed, removed or added.

    Also compares tables with cases, CSV with Parquet, and results with the audit trail.
    """
    with error_boundary(general.mode):
        from scanloom.engine.results.verify import unchecked_trail
        from scanloom.engine.results.verify import verify as find_faults

        findings = list(find_faults(results.path, keys.key))
        plain = {"schema": 1, "findings": [asdict(finding) for finding in findings]}
        print_result(general.mode, lambda: plain, lambda: _show(findings))
        if unchecked_trail(results.path, keys.key):
            say(
                "scanloom: the audit trail was not checked: it takes the key of this folder.",
                err=True,
            )
    raise typer.Exit(Exit.SOME_FAILED if findings else Exit.OK)


def _show(findings: Sequence[Discrepancy]) -> None:
    for finding in findings:
        console().print(f"{finding.fault}: {finding.file}")
    if not findings:
        console().print("All files are as published.")
