"""Write `reasons.md` from `scanloom.core.reasons`: the page can't say anything else than the code.

python docs/write_reasons.py
"""

from __future__ import annotations

import inspect
import re
from enum import Enum
from pathlib import Path

from scanloom.core import Flag, Reason, reasons

PAGE = Path(__file__).with_name("reasons.md")

INTRODUCTION = """\
# Reasons and flags

<!-- Written by docs/write_reasons.py from pipeline/scanloom/core/reasons.py: change it there. -->

Both lists are closed: a scan that gave no result has one of these reasons, and what must be known
of a result is one of these flags. Their codes stand in messages, in `--json` and in `case.json`,
and do not change their meaning from one version to the next.

A scan is *skipped* where it is not for us and all is well, *ambiguous* where all is well but one of
several volumes or series has to be chosen, *failed* where it should have worked.
*Again* says whether trying the same again can help.
"""


def sections(kind: type[Enum]) -> list[tuple[str, list[str]]]:
    """Return the headings of a list, as its source has them, each with the codes below it."""
    found: list[tuple[str, list[str]]] = []
    for line in inspect.getsource(kind).splitlines():
        if heading := re.match(r"\s*# --- (.+?) -+$", line):
            found.append((heading[1], []))
        elif (member := re.match(r"    ([A-Z][A-Z0-9_]+) = ", line)) and found:
            found[-1][1].append(member[1])
    return found


def page() -> str:
    """Return the whole page."""
    lines = [INTRODUCTION, "## Reasons", ""]
    for heading, codes in sections(Reason):
        lines += [f"### {heading.capitalize()}", "", "| code | | again | what to do |", "|-|-|-|-|"]
        for reason in map(Reason.__getitem__, codes):
            again = "yes" if reason.retry else ""
            lines.append(f"| `{reason.code}` | {reason.outcome} | {again} | {reason.advice}. |")
        lines.append("")
    lines += ["## Flags", ""]
    for heading, codes in sections(Flag):
        lines += [f"### {heading.capitalize()}", "", "| code | what it says |", "|-|-|"]
        lines += [f"| `{flag.code}` | {flag.text}. |" for flag in map(Flag.__getitem__, codes)]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"{PAGE.name}: {len(Reason)} reasons, {len(Flag)} flags of {reasons.__name__}")
    PAGE.write_text(page(), encoding="utf-8")
