"""`scanloom send`: send results to a target of a site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scanloom.cli.console import Exit, console, error_boundary, print_result, say
from scanloom.cli.options import KeyOptions, Reporting, takes_panels

if TYPE_CHECKING:
    from scanloom.engine.listen.outbox import Line
    from scanloom.engine.listen.send import Sent

PROOFS = {
    "committed": "committed",
    "found": "found when asked",
    "acknowledged": "acknowledged; the target can't be asked",
}
"""How it is known that an object is at its target."""


@takes_panels
def send(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output folder.")],
    to: Annotated[str, typer.Option("--to", metavar="NAME", help="Target of the site.")],
    site: Annotated[
        Path, typer.Option("--site", metavar="SITE", help="YAML file with the target.")
    ],
    key: KeyOptions,
    general: Reporting,
    cases: Annotated[
        list[str] | None,
        typer.Argument(metavar="CASE", help="Ids of cases; all without.", show_default=False),
    ] = None,
    wait: Annotated[
        float, typer.Option("--wait", metavar="S", min=0, help="Longest wait, in seconds.")
    ] = 120.0,
) -> None:
    """Send the DICOM results of cases, and wait until the target has them.

    What is not there by then stays in the outbox: `scanloom listen` goes on, or the same command.
    Sending twice is harmless. Exit with 1 if not all are there.

    Example: scanloom send results --to pacs --site site.yaml
    """
    with error_boundary(general.mode):
        from scanloom.engine.listen.send import send as send_now
        from scanloom.engine.listen.site import read_site

        def tell(line: Line) -> None:
            if not general.json and not general.quiet:
                say(described(line))

        sent = send_now(read_site(site), out, to, cases or (), wait, tell, key.key)
        print_result(general.mode, lambda: _document(sent), lambda: _show(sent))
        raise typer.Exit(Exit.OK if sent.is_complete else Exit.SOME_FAILED)


def _show(sent: Sent) -> None:
    from scanloom.core import counted

    for line in sent.lines:
        if line.is_open:
            say(described(line, sent.trouble.reason))
    for case, reason in sent.refused.items():
        say(f"case {case}: {reason}: see `scanloom verify`")
    delivered = sum(line.state == "delivered" for line in sent.lines)
    console().print(f"{delivered} of {counted(len(sent.lines), 'object')} at the target.")


def _document(sent: Sent) -> dict[str, Any]:
    trouble = sent.trouble.reason or None
    return {
        "schema": 1,
        "objects": described_plainly(sent.lines),
        "refused": sent.refused,
        "trouble": trouble,
    }


def described_plainly(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return what may be shown of lines, for JSON: no UID."""
    names = ("target", "case", "file", "state", "refusals", "reason", "proof")
    return [{name: asdict(line)[name] for name in names} for line in lines]


def described(line: Line, trouble: str = "") -> str:
    """Return a line as a sentence without UIDs; `trouble` is that with its target."""
    subject = f"{line.target}: {line.file} of case {line.case}"
    if line.state == "delivered":
        return f"{subject}: delivered ({PROOFS[line.proof]})"
    if line.state == "failed":
        return f"{subject}: given up: {line.reason}"
    reasons = [reason for reason in (line.reason, trouble) if reason]
    return f"{subject}: waits{': ' if reasons else ''}{'; '.join(reasons)}"
