"""Write `reasons.md` from `scanloom.core.reasons`, so that page and code agree.

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

A scan without a result has one *reason*. A result carries *flags*: facts that its user must know.
Both lists are closed. Their codes are in messages, in `--json`, in tables and in `case.json`.

| outcome | |
|-|-|
| skipped | nothing is wrong: not a scan, or not a scan for this model |
| ambiguous | nothing is wrong: one of several volumes or series has to be chosen |
| failed | a result was expected |

*Again* says whether trying again without a change can help: a later run then does
([retries](retries.md)).
"""


def sections(kind: type[Enum]) -> list[tuple[str, list[str]]]:
    """Return the headings of an enumeration's source, each with the codes below it."""
    headings: list[tuple[str, list[str]]] = []
    for line in inspect.getsource(kind).splitlines():
        if heading := re.match(r"\s*# --- (.+?) -+$", line):
            headings.append((heading[1], []))
        elif (member := re.match(r"    ([A-Z][A-Z0-9_]+) = ", line)) and headings:
            headings[-1][1].append(member[1])
    return headings


def page() -> str:
    """Return the whole page."""
    lines = [INTRODUCTION, "## Reasons", ""]
    for heading, codes in sections(Reason):
        lines += [f"### {heading.capitalize()}", ""]
        lines += ["| code | outcome | again | what to do |", "|-|-|-|-|"]
        for reason in map(Reason.__getitem__, codes):
            again = "yes" if reason.retry else ""
            lines.append(f"| `{reason.code}` | {reason.outcome} | {again} | {reason.advice}. |")
        lines.append("")
    lines += ["## Flags", ""]
    for heading, codes in sections(Flag):
        lines += [f"### {heading.capitalize()}", "", "| code | meaning |", "|-|-|"]
        lines += [f"| `{flag.code}` | {flag.text}. |" for flag in map(Flag.__getitem__, codes)]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"{PAGE.name}: {len(Reason)} reasons, {len(Flag)} flags of {reasons.__name__}")
    PAGE.write_text(page(), encoding="utf-8")
