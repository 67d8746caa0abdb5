"""`scanloom doctor`: check the installation and the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scanloom.cli.console import Exit, console, error_boundary, print_result
from scanloom.cli.options import Reporting, takes_panels
from scanloom.options import DEFAULT_OUT

if TYPE_CHECKING:
    from scanloom.cli.checks import CheckResult

STYLES = {"ok": "green", "warn": "yellow", "bad": "bold red"}


@takes_panels
def doctor(
    general: Reporting,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Output folder to check.")
    ] = DEFAULT_OUT,
) -> None:
    """Check libraries, decoders, devices, disk, key and models; exit with 1 on a problem."""
    with error_boundary(general.mode):
        findings: list[CheckResult] = []
        for finding in examine(out):
            if not (general.json or general.quiet):
                _print(finding, findings[-1].topic if findings else "")
            findings.append(finding)
        plain = {"schema": 1, "findings": [vars(finding) for finding in findings]}
        print_result(general.mode, lambda: plain, lambda: _summarize(findings))
        if any(finding.level == "bad" for finding in findings):
            raise typer.Exit(Exit.SOME_FAILED)


def examine(out: Path) -> Iterator[CheckResult]:
    """Yield the findings of all checks; a check that raises is a finding too."""
    from scanloom.cli.checks import (
        check_decoders,
        check_devices,
        check_extras,
        check_key,
        check_models,
        check_out,
        check_software,
    )

    # In the order of their imports: a library that is missing explains the findings after it
    for check in (check_software, check_extras, check_decoders, check_devices):
        yield from _guarded(check)
    yield from _guarded(lambda: check_out(out))
    for check in (check_key, check_models):
        yield from _guarded(check)


def _guarded(check: Callable[[], Iterator[CheckResult]]) -> Iterator[CheckResult]:
    from scanloom.cli.checks import CheckResult

    try:
        yield from check()
    except Exception as exc:  # noqa: BLE001 - a broken machine must not stop the other checks
        name = getattr(check, "__name__", "check")
        advice = "a bug in scanloom or a broken library: reinstall scanloom"
        yield CheckResult("doctor", name, "bad", f"raised {type(exc).__name__}", advice)


def _print(finding: CheckResult, topic_before: str) -> None:
    screen = console()
    if finding.topic != topic_before:
        between = "\n" if topic_before else ""
        screen.print(f"{between}{finding.topic}", style="bold")
    screen.print(f"  {finding.level:<5}", style=STYLES[finding.level], end="")
    screen.print(f"{finding.name}: {finding.seen}")
    if finding.advice:
        screen.print(f"       -> {finding.advice}")


def _summarize(findings: list[CheckResult]) -> None:
    bad = sum(f.level == "bad" for f in findings)
    warn = sum(f.level == "warn" for f in findings)
    text = f"{bad} bad, {warn} warnings, {len(findings) - bad - warn} ok"
    console().print(f"\n{text}", style=STYLES["bad" if bad else "warn" if warn else "ok"])
